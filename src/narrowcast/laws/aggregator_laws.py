"""Laws of aggregators, on the changes of several clients."""

from __future__ import annotations

import pickle
from contextlib import suppress
from typing import Any

import numpy as np

from narrowcast.algorithms.federated.aggregator import AggregationContext, Aggregator
from narrowcast.laws.law import require
from narrowcast.laws.small_tasks import digest
from narrowcast.platform.errors import UserError
from narrowcast.platform.types import Arrays, FloatArray

_CLIENTS = (1, 2, 7, 10)
_SHAPES = {"weight": (3, 5), "bias": (3,)}


def _changes(clients: int) -> tuple[Arrays, FloatArray]:
    """Return random changes and weights, read-only, as in a run."""
    draw = np.random.default_rng(clients)
    changes = {name: draw.normal(size=(clients, *shape)).astype(np.float32) for name, shape in _SHAPES.items()}
    weights = draw.uniform(1, 9, size=clients)
    weights.flags.writeable = False
    for values in changes.values():
        values.flags.writeable = False
    return changes, weights


def _cohorts(aggregator: Aggregator) -> list[int]:
    """Return the numbers of clients to try that the rule does not refuse."""
    allowed = []
    for clients in _CLIENTS:
        with suppress(UserError):
            aggregator.check(clients)
            allowed.append(clients)
    require(allowed, f"it refuses {', '.join(map(str, _CLIENTS))} clients; try it with fields that take one of them")
    return allowed


def _aggregate(aggregator: Aggregator, changes: Arrays, weights: FloatArray, last: float = 0.0) -> Arrays:
    """Return the aggregate of round 3, after one that had `last` everywhere; the server's own change is the mean."""
    before = {name: np.full_like(values[0], last) for name, values in changes.items()}
    reference = {name: values.mean(axis=0) for name, values in changes.items()}
    traits = aggregator.traits
    context = AggregationContext(5, 3, before if traits.remembers else {}, reference if traits.reference else {})
    return aggregator.aggregate(changes, weights, context)


def _far_apart(before: Arrays, changed: Arrays) -> bool:
    return not all(np.allclose(before[name], changed[name], rtol=1e-4, atol=1e-5) for name in _SHAPES)


def an_aggregate_has_the_shape_of_one_change(aggregator: Aggregator) -> None:
    """Aggregate one, two, seven and ten changes, if the rule takes so many."""
    for clients in _cohorts(aggregator):
        got = _aggregate(aggregator, *_changes(clients))
        shapes = {name: (values.shape, str(values.dtype)) for name, values in got.items()}
        wanted = {name: (shape, "float32") for name, shape in _SHAPES.items()}
        require(shapes == wanted, f"the aggregate of {clients} changes {wanted} is {shapes}")
        require(all(np.isfinite(values).all() for values in got.values()), f"of {clients} changes it is not finite")


def an_aggregate_depends_on_its_arguments_alone(aggregator: Aggregator) -> None:
    """Aggregate twice, the second time through pickle."""
    again: Any = pickle.loads(pickle.dumps(aggregator))
    first, second = (_aggregate(instance, *_changes(7)) for instance in (aggregator, again))
    require(digest(first) == digest(second), "the same changes have another aggregate")


def equal_changes_have_themselves_as_aggregate(aggregator: Aggregator) -> None:
    """Aggregate a change that one, two, seven and ten clients send; rules that clip or vote are exempt."""
    if not aggregator.traits.keeps_equal:
        return
    for clients in _cohorts(aggregator):
        changes, weights = _changes(clients)
        equal = {name: np.repeat(values[:1], clients, axis=0) for name, values in changes.items()}
        got = _aggregate(aggregator, equal, weights)
        far = _far_apart(got, {name: values[0] for name, values in equal.items()})
        require(not far, f"{clients} equal changes have another aggregate")


def the_order_of_the_clients_does_not_matter(aggregator: Aggregator) -> None:
    """Aggregate seven changes in the opposite order."""
    changes, weights = _changes(7)
    opposite = {name: values[::-1] for name, values in changes.items()}
    far = _far_apart(_aggregate(aggregator, changes, weights), _aggregate(aggregator, opposite, weights[::-1]))
    require(not far, "clients in another order have another aggregate")


def an_aggregate_moves_with_the_changes(aggregator: Aggregator) -> None:
    """Add a vector to seven changes, and to the last aggregate; rules that clip around 0 are exempt by their traits."""
    if not aggregator.traits.shifts:
        return
    changes, weights = _changes(7)
    moved = {name: values + np.float32(0.75) for name, values in changes.items()}
    wanted = {name: values + 0.75 for name, values in _aggregate(aggregator, changes, weights).items()}
    far = _far_apart(_aggregate(aggregator, moved, weights, 0.75), wanted)
    require(not far, "changes moved by 0.75 have an aggregate that is not")


def an_aggregate_scales_with_the_changes(aggregator: Aggregator) -> None:
    """Multiply seven changes by 4; rules with a size of their own are exempt by their traits."""
    if not aggregator.traits.scales:
        return
    changes, weights = _changes(7)
    larger = {name: 4 * values for name, values in changes.items()}
    wanted = {name: 4 * values for name, values in _aggregate(aggregator, changes, weights).items()}
    require(not _far_apart(_aggregate(aggregator, larger, weights), wanted), "changes times 4 have another aggregate")


def a_chain_of_sums_gives_the_aggregate(aggregator: Aggregator) -> None:
    """Take weighted means by the pulls, as many as the rule says; rules that are no chain of sums are exempt."""
    sums = aggregator.traits.sums
    if not sums:
        return
    changes, weights = _changes(7)
    vectors = np.concatenate([changes[name].reshape(7, -1).astype(np.float64) for name in _SHAPES], axis=1)
    distances = np.zeros(7)
    for _ in range(sums):
        pulls = aggregator.pulls(weights, distances)
        mean = pulls @ vectors / pulls.sum()
        distances = np.linalg.norm(vectors - mean, axis=1)
    ends = np.cumsum([int(np.prod(shape)) for shape in _SHAPES.values()])[:-1]
    chained = {name: part.reshape(_SHAPES[name]) for name, part in zip(_SHAPES, np.split(mean, ends), strict=True)}
    far = _far_apart(_aggregate(aggregator, changes, weights), chained)
    require(not far, f"{sums} weighted means by its pulls are another aggregate")


def a_pull_falls_with_the_distance(aggregator: Aggregator) -> None:
    """Ask for the pulls of a client at growing distances, and of one of three times the weight."""
    distances = np.array([0.0, 1e-9, 1e-3, 1.0, 50.0, 1e4])
    pulls = aggregator.pulls(np.ones(6), distances)
    require(bool((pulls > 0).all() and (np.diff(pulls) <= 0).all()), f"pulls at growing distances are {pulls.tolist()}")
    heavier = aggregator.pulls(np.full(6, 3.0), distances)
    require(np.allclose(heavier, 3 * pulls), "a client of three times the weight has another pull than three times it")


def digest_of(aggregator: Aggregator) -> str:
    """Return the sha256 of the aggregate of seven changes."""
    return digest(_aggregate(aggregator, *_changes(7)))


LAWS = (
    an_aggregate_has_the_shape_of_one_change,
    an_aggregate_depends_on_its_arguments_alone,
    equal_changes_have_themselves_as_aggregate,
    the_order_of_the_clients_does_not_matter,
    an_aggregate_moves_with_the_changes,
    an_aggregate_scales_with_the_changes,
    a_chain_of_sums_gives_the_aggregate,
    a_pull_falls_with_the_distance,
)
