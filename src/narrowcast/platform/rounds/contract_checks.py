"""Checks of what the classes of an experiment return, so that a wrong value is named where it comes from.

A class from outside the package is called by the round loop as those of the package are. What it returns is compared
here with what its contract asks for: one line names the class, the method and the difference.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np

from narrowcast.platform.config.plugins import is_own, line_of
from narrowcast.platform.contracts import Algorithm, Broadcast, Task
from narrowcast.platform.errors import RunFailed, UserError, described
from narrowcast.platform.models.model import ITEM_FACTORS
from narrowcast.platform.rounds.adversary import Attack
from narrowcast.platform.rounds.ledger import METRIC_NAME, ROUND_COLUMNS, ChunkResult, ClientLedger, Weighted
from narrowcast.platform.traits import Traits
from narrowcast.platform.types import Arrays, Chunk, LocalUpdates, Payload

_SHOWN = 3


def method_of(value: Any, method: str) -> str:
    """Return the name of a method as errors give it, such as my_methods:FedAvgM.step."""
    cls = type(value)
    return f"{'' if is_own(value) else f'{cls.__module__}:'}{cls.__qualname__}.{method}"


@contextmanager
def naming(value: object, method: str, when: str = "") -> Iterator[None]:
    """Raise `UserError` that names the method, and the line in a file of others, for whatever it raises."""
    try:
        yield
    except (UserError, RunFailed, MemoryError):
        raise
    except (Exception, SystemExit) as error:
        line = f" {line_of(error)}".rstrip()
        raise UserError(f"{method_of(value, method)} raised {described(error)}{line}{when}") from error


def check_arrays(arrays: Any, method: str) -> Arrays:
    """Return the arrays; raise `UserError` unless they are a mapping of names to NumPy arrays.

    NumPy's scalars count: its arithmetic returns them for arrays without axes.
    """
    if not isinstance(arrays, Mapping):
        raise UserError(f"{method} returned {noun(arrays)}; return a mapping of names to NumPy arrays")
    for name, values in arrays.items():
        if not isinstance(name, str) or not isinstance(values, np.ndarray | np.generic):
            raise UserError(f"{method} returned {noun(values)} for {name!r}; return a NumPy array")
    return arrays


def check_like(arrays: Any, wanted: Arrays, method: str, of: str, *, any_shape: bool = False) -> None:
    """Raise `UserError` unless arrays have the names, types and shapes of the wanted ones, which `of` returned.

    More names are allowed.
    """
    checked = check_arrays(arrays, method)
    if missing := [name for name in wanted if name not in checked]:
        raise UserError(f"{method} returned no {_listed(missing)}, which {of} did; return all of them")
    for name, values in wanted.items():
        if checked[name].dtype != values.dtype:
            raise UserError(
                f"{method} returned {checked[name].dtype} for {name}, {of} {values.dtype}; convert it by "
                f".astype({str(values.dtype)!r})"
            )
        if checked[name].shape != values.shape and not any_shape:
            raise UserError(
                f"{method} returned the shape {list(checked[name].shape)} for {name}, {of} {list(values.shape)}"
            )


def check_traits(algorithm: Algorithm) -> None:
    """Raise `UserError` unless what a property `traits` returns are `Traits`."""
    if not isinstance(traits := algorithm.traits, Traits):
        raise UserError(f"{method_of(algorithm, 'traits')} returned {noun(traits)}; return Traits of narrowcast.extend")


def check_step(algorithm: Algorithm, before: Arrays, after: Any, *, grows: bool) -> Arrays:
    """Return the global parameters after a step; raise `UserError` unless they are like those before it.

    Their shapes may change if the model `grows`. What else the state has may change, as it does with algorithms that
    have phases.
    """
    method = method_of(algorithm, "step")
    final, wanted = algorithm.final(check_arrays(after, method)), algorithm.final(before)
    check_like(final, wanted, method, "init", any_shape=grows)
    return final


def check_final(algorithm: Algorithm, task: Task, server: Arrays) -> Arrays:
    """Return the global parameters of a server state; raise `UserError` unless they have the names of the model's own.

    Tensors that the model does not train may be among them. An algorithm without a global model may return anything.
    """
    method = method_of(algorithm, "final")
    final = check_arrays(algorithm.final(server), method)
    if not algorithm.traits.global_model:
        return final
    parameters = task.initial_parameters()
    more = [name for name in final if name not in parameters]
    if more and (more := [name for name in more if name not in task.model.fixed_names(task.data)]):
        raise UserError(
            f"{method} returned {_listed(more)}, which the model does not have; return its parameters alone (those of "
            "Averaging leave out what download and server_optimizer keep)"
        )
    if missing := [name for name in parameters if name not in final]:
        raise UserError(f"{method} returned no {_listed(missing)}, which the model has; return all of them")
    return final


def check_broadcast(broadcast: Any, method: str) -> None:
    """Raise `UserError` unless this is a `Broadcast` whose sizes can be told."""
    if not isinstance(broadcast, Broadcast):
        raise UserError(f"{method} returned {noun(broadcast)}; return a Broadcast of narrowcast.extend")
    check_arrays(broadcast.arrays, f"the arrays of {method}")
    for part in ("full", "update"):
        payload = getattr(broadcast, part)
        if not isinstance(payload, Payload) and not (part == "update" and payload is None):
            raise UserError(
                f"{method} returned {noun(payload)} as {part}; give a payload, which extends Payload of "
                "narrowcast.extend"
            )


def check_updates(updates: Any, server: Arrays, n_clients: int, method: str) -> None:
    """Raise `UserError` unless these are `LocalUpdates` of so many clients, for parameters of the server."""
    if not isinstance(updates, LocalUpdates):
        raise UserError(f"{method} returned {noun(updates)}; return LocalUpdates of narrowcast.extend")
    for name, values in check_arrays(updates.changes, f"the changes of {method}").items():
        if name not in server:
            raise UserError(f"{method} returned a change of {name}; the global parameters are {_listed(server)}")
        if values.dtype != server[name].dtype:
            raise UserError(f"{method} returned {values.dtype} for {name}, which is {server[name].dtype}")
    columns = {name: getattr(updates, name) for name in ("loss", "examples", "steps")} | dict(updates.changes)
    _check_rows(columns, n_clients, method)


def check_result(result: Any, chunk: Chunk, method: str) -> None:
    """Raise `UserError` unless this is the `ChunkResult` of the chunk: its clients' ledger, states and partial sum."""
    if not isinstance(result, ChunkResult):
        raise UserError(f"{method} returned {noun(result)}; return a ChunkResult of narrowcast.extend")
    check_arrays(result.partial, f"the partial sum of {method}")
    if not isinstance(result.ledger, ClientLedger):
        raise UserError(f"{method} returned {noun(result.ledger)} as ledger; return a ClientLedger")
    columns = {f"ledger.{name}": values for name, values in vars(result.ledger).items()}
    for name, metric in result.metrics.items():
        if not isinstance(metric, Weighted):
            raise UserError(f"{method} returned {noun(metric)} as the metric {name!r}; return Weighted(values, weight)")
        columns |= {f"metrics.{name}.{part}": values for part, values in vars(metric).items()}
    check_round_metrics(dict.fromkeys(result.metrics, 0.0), method)
    _check_rows(columns, len(chunk.clients), method)
    if not np.array_equal(result.ledger.client, chunk.clients):
        raise UserError(f"{method} returned a ledger of the clients {result.ledger.client}, not of {chunk.clients}")
    check_like(result.state, chunk.state, f"the state of {method}", "init_clients")


def check_metrics(metrics: Any, method: str) -> Mapping[str, float]:
    """Return the metrics; raise `UserError` unless they are a mapping of names to numbers."""
    if not isinstance(metrics, Mapping):
        raise UserError(f"{method} returned {noun(metrics)}; return a mapping of metrics to numbers")
    for name, value in metrics.items():
        if not isinstance(value, int | float | np.number):
            raise UserError(f"{method} returned {noun(value)} for {name!r}; return a number")
    return metrics


def check_round_metrics(metrics: Any, method: str) -> Mapping[str, float]:
    """Return the metrics of a round; raise `UserError` unless each is a number with a name for a column of its own."""
    for name in check_metrics(metrics, method):
        if name in ROUND_COLUMNS:
            raise UserError(f"{method} returned the metric {name!r}, which is a column of every round; rename it")
        if re.fullmatch(METRIC_NAME, str(name)) is None:
            raise UserError(
                f"{method} returned the metric {name!r}; its name should have only letters, digits, '_', '-', '@', ':' "
                "and spaces"
            )
    return {name: float(value) for name, value in metrics.items()}


def _check_rows(columns: Mapping[str, Any], n_clients: int, method: str) -> None:
    for name, values in columns.items():
        if np.ndim(values) < 1 or len(values) != n_clients:
            raise UserError(
                f"{method} returned the shape {list(np.shape(values))} for {name}; its first axis is that of the "
                f"{n_clients} clients"
            )


def _listed(names: Collection[str]) -> str:
    shown = ", ".join(list(names)[:_SHOWN])
    return shown if len(names) <= _SHOWN else f"{shown} and {len(names) - _SHOWN} more"


def noun(value: Any) -> str:
    """Return the type of a value with its article, or None."""
    name = type(value).__name__
    return "None" if value is None else f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"


def check_attack(algorithm: Algorithm, task: Task, *, buffered: bool) -> None:
    """Raise `UserError` if the attackers of the task cannot do what their attack asks for."""
    if (adversary := task.adversary) is None:
        return
    attack, clients = adversary.attack, np.arange(1)
    if attack.serving == "alone" and algorithm.elected_server(task, clients, 1) is None:
        raise UserError(
            f"attack.serving = alone: algorithm.kind = {algorithm.kind} elects no client as its server; use "
            "algorithm.kind = server_free with exchange = elected, or serving = honest"
        )
    if attack.sees != "own" and buffered:
        raise UserError(
            f"attack.kind = {attack.kind}: attackers follow the changes of others, and on a buffered schedule clients "  # type: ignore[attr-defined]
            "do not train at one time; use schedule = synchronous, or an attack on own changes, such as sign_flip"
        )
    broadcast = algorithm.broadcast(algorithm.init(task), task, 1).arrays
    if attack.sees != "own" and ITEM_FACTORS in broadcast:
        raise UserError(
            f"attack.kind = {attack.kind}: attackers follow the changes of others, and here each client trains item "  # type: ignore[attr-defined]
            "rows of its own choice; use an attack on own changes, such as sign_flip"
        )
    state = {name: values[clients] for name, values in algorithm.init_clients(task).items()}
    own_program = algorithm.local_calls(broadcast, Chunk(1, 0, clients, state), task) is None
    if own_program and (adversary.data is not task.data or type(attack).terms is not Attack.terms):
        raise UserError(
            f"attack.kind = {attack.kind}: clients of algorithm.kind = {algorithm.kind} train by a program of their "  # type: ignore[attr-defined]
            "own, on data of their own; use an attack on changes, such as sign_flip"
        )
    if not np.array_equal(adversary.data.examples, task.data.examples):
        task.training.check(replace(task, data=adversary.data))
