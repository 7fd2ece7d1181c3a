"""Runs on digits as their server sees them, and what the attacks of `narrowcast.algorithms.attacks` make of them.

Letters: u clients, n images of each.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

from narrowcast.algorithms.attacks.gradient_inversion import GradientInversion
from narrowcast.algorithms.attacks.inversion import cosines, matched, rows_over_bias, share_identified, single_input
from narrowcast.algorithms.attacks.membership import Separation, scores_of_change, scores_of_model
from narrowcast.algorithms.attacks.network_transcript import NetworkRound, ObservedChange
from narrowcast.experiment import Experiment, build_experiment
from narrowcast.platform.contracts import Task
from narrowcast.platform.data.samples import Samples, one_array
from narrowcast.platform.seeds import generator
from narrowcast.platform.types import Arrays, FloatArray, IntArray
from narrowcast.runs.attack_trial import record_network
from narrowcast.studies.results import Line


def _quantised(levels: int) -> dict[str, Any]:
    return {"kind": "fedavg", "codec": {"kind": "quantise", "levels": levels, "scale": "max"}}


@dataclass(frozen=True, eq=False)
class Encoding:
    """An algorithm with its codec; with `masked`, under pairwise masks, and `of_sum` attacks what they open."""

    algorithm: Mapping[str, Any]
    masked: bool = False
    of_sum: bool = False
    clients: int = 10


_MEAN: Mapping[str, Any] = {"kind": "fedavg", "weights": "equal"}
FLOAT32, SUM = "float32", "masked, sum of 10"
ENCODINGS: Mapping[str, Encoding] = {
    FLOAT32: Encoding({"kind": "fedavg"}),
    "8 bits": Encoding(_quantised(127)),
    "4 bits": Encoding(_quantised(7)),
    "2 bits": Encoding(_quantised(1)),
    "Top-K 1 %": Encoding({"kind": "fedavg", "codec": {"kind": "top_k", "fraction": 0.01}}),
    "SVD, rank 1": Encoding({"kind": "fedavg", "codec": {"kind": "svd", "rank": 1}}),
    "CoLR, rank 1": Encoding({"kind": "colr", "rank": 1}),
    "SCoLR, rank 4": Encoding({"kind": "scolr", "rank": 4}),
    "masked, one upload": Encoding(_MEAN, masked=True),
    SUM: Encoding(_MEAN, masked=True, of_sum=True),
    "masked, sum of 50": Encoding(_MEAN, masked=True, of_sum=True, clients=50),
}
"""2 bits are the three values -1, 0 and 1 times a norm, 4 and 8 bits are 15 and 255 values."""
NETWORKS: Mapping[str, Mapping[str, Any]] = {
    "MLP": {"kind": "mlp", "hidden": [64]},
    "softmax": {"kind": "softmax"},
}
FIRST_LAYER = "1"
"""The name of the layer that sees the images, in both networks."""
ATTACKED = 5
"""Clients whose gradients are inverted by optimisation."""
SETTINGS = GradientInversion(steps=150, total_variation=0.01, restarts=1, width=8)


def experiment(encoding: Encoding, network: str, seed: int, training: Mapping[str, Any], rounds: int) -> Experiment:
    """Return the experiment of an encoding, in which all clients take part in every round."""
    values: dict[str, Any] = {
        "name": "what-a-server-learns",
        "seed": seed,
        "data": {"kind": "digits", "clients": encoding.clients},
        "model": NETWORKS[network],
        "algorithm": encoding.algorithm,
        "training": {"kind": "sgd", **training},
        "rounds": rounds,
        "clients_per_round": encoding.clients,
        "evaluate_every": rounds,
        "backend": "local",
    }
    if encoding.masked:
        values["secure"] = {"kind": "masked", "bits": 16, "clip": 1.0}
    return build_experiment(values, "what-a-server-learns")


def dealt(planned: Experiment, images: int, seed: int) -> tuple[Samples, IntArray, IntArray]:
    """Return digits of which each client has so many images, their rows [u, n], and those of as many that none has."""
    data, clients = planned.data_source.load(), planned.clients_per_round
    assert isinstance(data, Samples)
    rows = generator(seed, "attacked images").permutation(len(data.train))[: 2 * clients * images]
    held, others = rows.reshape(2, clients, images)
    return replace(data, order=held.ravel(), indptr=np.arange(0, held.size + 1, images)), held, others


@dataclass(frozen=True)
class Observations:
    """The changes of a round that are attacked, with the rows of their images and of as many that no client has."""

    model: Arrays
    task: Task
    changes: Sequence[ObservedChange]
    rows: IntArray
    others: IntArray
    uplink_bits: float


@lru_cache(maxsize=1)
def _round(network: str, encoding: Encoding, images: int, seed: int) -> tuple[NetworkRound, Task, IntArray, IntArray]:
    planned = experiment(encoding, network, seed, {"learning_rate": 1.0, "batch_size": "all"}, rounds=1)
    data, rows, others = dealt(planned, images, seed)
    (seen,), task = record_network(planned, data)
    return seen, task, rows, others


def observations(network: str, encoding: str, images: int, seed: int) -> Observations:
    """Return the changes that a server observes in a round of one step on all images of each client."""
    chosen = ENCODINGS[encoding]
    seen, task, rows, others = _round(network, replace(chosen, of_sum=False), images, seed)
    bits = float(np.mean(list(seen.uplink_bits.values())))
    if chosen.of_sum:
        assert seen.mean is not None, "all clients arrive"
        return Observations(seen.model, task, [seen.mean], rows.reshape(1, -1), others.reshape(1, -1), bits)
    changes = [seen.uploads[client] for client in range(chosen.clients)]
    return Observations(seen.model, task, changes, rows, others, bits)


def by_layer(network: str, images: int, seed: int) -> Iterator[Line]:
    """Yield, for each encoding, what the change of the first layer says of the images; see `compared`."""
    for encoding in ENCODINGS:
        seen = observations(network, encoding, images, seed)
        single = seen.rows.shape[1] == 1
        estimates = [
            single_input(observed.change, FIRST_LAYER)[np.newaxis]
            if single
            else rows_over_bias(observed.change, FIRST_LAYER)
            for observed in seen.changes
        ]
        yield {"encoding": encoding, **compared(estimates, seen)}


def by_search(network: str, images: int, seed: int) -> Iterator[Line]:
    """Yield, for each encoding, what images whose gradient is like the change are like; see `compared`.

    Changes of equally many images are searched together, which takes a fraction of the time.
    """
    every = {name: _first(observations(network, name, images, seed), ATTACKED) for name in ENCODINGS}
    for images_of in sorted({seen.rows.shape[1] for seen in every.values()}):
        group = {name: seen for name, seen in every.items() if seen.rows.shape[1] == images_of}
        any_of = next(iter(group.values()))
        assert isinstance(any_of.task.data, Samples)
        labels = any_of.task.data.train.labels[np.concatenate([seen.rows for seen in group.values()])]
        changes = [change for seen in group.values() for change in seen.changes]
        images_found = iter(SETTINGS.images(any_of.task, any_of.model, changes, labels))
        for name, seen in group.items():
            yield {"encoding": name, **compared([next(images_found) for _ in seen.changes], seen)}


def _first(seen: Observations, count: int) -> Observations:
    return replace(seen, changes=seen.changes[:count], rows=seen.rows[:count], others=seen.others[:count])


def compared(estimates: Sequence[FloatArray], seen: Observations) -> Line:
    """Return the mean cosine of images with what is matched to them, the share identified, and that of two guesses."""
    assert isinstance(seen.task.data, Samples)
    pixels, tests = (one_array(part.features) for part in (seen.task.data.train, seen.task.data.test))
    pairs = [matched(of_change, pixels[held]) for of_change, held in zip(estimates, seen.rows, strict=True)]
    control = [matched(of_change, pixels[held])[1] for of_change, held in zip(estimates, seen.others, strict=True)]
    guess = cosines(tests.mean(axis=0, keepdims=True), pixels[seen.rows.ravel()])
    return {
        "uplink_bits": seen.uplink_bits,
        "mean_image": float(guess.mean()),
        "other_images": float(np.mean(control)),
        "identified": share_identified(np.concatenate([pair[0] for pair in pairs]), pixels, seen.rows.ravel()),
        "cosine": float(np.mean([pair[1] for pair in pairs])),
    }


CLIENTS, IMAGES = 10, 40
"""Clients, and images of each, of the runs that membership is inferred from."""


def infer_members(encoding: str, seed: int) -> Iterator[Line]:
    """Yield how far losses tell the images of a run from test images, and a client's from all others'.

    The controls are images that no client has, in place of the members.
    """
    chosen = replace(ENCODINGS[encoding], clients=CLIENTS)
    planned = experiment(chosen, "MLP", seed, {"learning_rate": 0.3, "batch_size": "all", "epochs": 20}, rounds=8)
    data, rows, others = dealt(planned, IMAGES, seed)
    seen, task = record_network(planned, data)
    last = seen[-1]
    assert last.mean is not None, "all clients arrive"
    final = {name: values + last.mean.change[name] for name, values in last.model.items()}
    members, control = data.train.take(rows.ravel()), data.train.take(others.ravel())
    outside = scores_of_model(task, final, data.test)
    of_model = Separation.of(scores_of_model(task, final, members), outside)
    model_control = Separation.of(scores_of_model(task, final, control), outside)
    of_change, owner, change_control = _of_changes(task, last, data, rows, others, of_sum=chosen.of_sum)
    yield {
        "uplink_bits": float(np.mean(list(last.uplink_bits.values()))),
        **_columns("model", of_model),
        **_columns("model_control", model_control),
        **_columns("change", of_change),
        **_columns("change_control", change_control),
        **_columns("owner", owner),
    }


def _columns(name: str, separation: Separation) -> Line:
    return {f"{name}_{measure}": value for measure, value in vars(separation).items()}


MEMBERSHIP_VALUES = (
    "uplink_bits",
    *(
        f"{name}_{measure}"
        for name in ("model", "model_control", "change", "change_control", "owner")
        for measure in ("advantage", "auc", "tpr_at_1_percent")
    ),
)


def _of_changes(
    task: Task, last: NetworkRound, data: Samples, rows: IntArray, others: IntArray, *, of_sum: bool
) -> tuple[Separation, Separation, Separation]:
    """Return how far a client's change tells its images from test images and from other clients'; and the control."""
    own, of_other_clients, outside, control = [], [], [], []
    for client in range(len(rows)):
        observed = last.mean if of_sum else last.uploads[client]
        assert observed is not None, "all clients arrive"
        scores, held_out, unused = (
            scores_of_change(task, last.model, observed.change, samples)
            for samples in (data.train.take(rows.ravel()), data.test, data.train.take(others[client]))
        )
        of_clients = scores.reshape(rows.shape)
        own.append(of_clients[client])
        of_other_clients.append(np.delete(of_clients, client, axis=0).ravel())
        outside.append(held_out)
        control.append(unused)
    members, tests = np.concatenate(own), np.concatenate(outside)
    return (
        Separation.of(members, tests),
        Separation.of(members, np.concatenate(of_other_clients)),
        Separation.of(np.concatenate(control), tests),
    )
