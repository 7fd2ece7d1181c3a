"""The evaluation of a run's global model, over all samples and over each client's own, and the digest of the model.

Clients are evaluated in chunks, by an executor, and without any effect on the run.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from narrowcast.platform.contracts import Algorithm, OwnModel, Task
from narrowcast.platform.models.model import Model, Split
from narrowcast.platform.rounds.chunks import naming_round
from narrowcast.platform.rounds.client_contracts import ClientSplit
from narrowcast.platform.rounds.ledger import ClientMeasures
from narrowcast.platform.rounds.outcome import Outcome
from narrowcast.platform.rounds.state import LiveState, Run, RunState
from narrowcast.platform.tracking.metrics import (
    BETTER,
    GLOBAL,
    NEW,
    SUCCESS,
    declared_by,
    fraction_metrics,
    share_better,
    statistics_over_clients,
)
from narrowcast.platform.types import Arrays, Chunk, FloatArray, hash_arrays

_CLIENTS_AT_ONCE = 100

Measure = Callable[[Arrays, Sequence[Chunk], Sequence[ClientSplit]], list[ClientMeasures] | None]
"""`Executor.measure`."""


def with_client_metrics(live: LiveState, outcome: Outcome, measure: Measure | None = None) -> Outcome:
    """Return the outcome of a round that was just committed with the metrics of its clients, if they are due."""
    plan = live.run.plan
    if not (plan.evaluate_clients and plan.evaluates(outcome.record.round)):
        return outcome
    began = time.perf_counter()
    metrics = measure_clients(live, measure)
    statistics = client_statistics(live.run, metrics)
    seconds = outcome.timing.evaluate + time.perf_counter() - began
    return replace(
        outcome,
        metrics={**outcome.metrics, **statistics},
        client_metrics=metrics,
        timing=replace(outcome.timing, evaluate=seconds),
    )


def measure_chunk(run: Run, broadcast: Arrays, chunk: Chunk, splits: Sequence[ClientSplit]) -> ClientMeasures:
    """Measure the clients of a chunk on their samples of each split.

    A client uses the global model, which `broadcast` is, or for an algorithm that personalises what that says the
    client would use; `broadcast` is then the algorithm's. New clients train before, and send nothing.
    """
    with naming_round(chunk.round_index, chunk.clients):
        chunk = _joined(run, broadcast, chunk)
        return _measured(run, run.algorithm.plain.own_models(broadcast, chunk, run.task), chunk, splits)


def _joined(run: Run, broadcast: Arrays, chunk: Chunk) -> Chunk:
    """Return the chunk with what new clients keep after the local training of a round; other chunks as they are."""
    algorithm, new = run.algorithm.plain, run.new_clients
    if new is None or not new[chunk.clients].all() or not (algorithm.personalises and chunk.state):
        return chunk
    chunk = replace(chunk, state=algorithm.joined(broadcast, chunk, run.task))
    return replace(chunk, state={**chunk.state, **algorithm.train(broadcast, chunk, run.task).state})


def _measured(run: Run, models: Sequence[OwnModel], chunk: Chunk, splits: Sequence[ClientSplit]) -> ClientMeasures:
    """Measure the clients of a chunk, each with its model."""
    metrics: dict[str, FloatArray] = {}
    for part in models:
        clients_of_part = chunk.take(part.places)
        for split in splits:
            measured = part.model.measure_clients(
                part.parameters, clients_of_part.state, run.task.data, split, clients_of_part.clients
            )
            for name, values in measured.items():
                of_all = metrics.setdefault(f"{split}.{name}", np.full(len(chunk.clients), np.nan))
                of_all[part.places] = values
    return ClientMeasures(chunk.index, metrics)


def measure_clients(live: LiveState, measure: Measure | None = None) -> dict[str, FloatArray]:
    """Return the metrics of all clients after the last round, by `split.metric`, [U] each; by default measured here.

    Those of new clients are named `new.split.metric`, and NaN in the others. Where clients have models of their own,
    `global.split.metric` are those of the global model. They are NaN in attackers: an attack is judged by what the
    honest clients have. Empty unless the plan asks for an evaluation of clients.
    """
    run, splits = live.run, live.run.plan.evaluate_clients
    if not splits:
        return {}
    broadcast, in_chunks = _in_chunks(live)
    chunks = list(in_chunks)
    parts = measure(broadcast, chunks, splits) if measure else None
    if parts is None:
        parts = [measure_chunk(run, broadcast, chunk, splits) for chunk in chunks]
    metrics = _of_all(run, chunks, parts)
    if (new := run.new_clients) is not None:
        of_new = {f"{NEW}{name}": np.where(new, values, np.nan) for name, values in metrics.items()}
        metrics = {name: np.where(new, np.nan, values) for name, values in metrics.items()} | of_new
    if run.algorithm.plain.personalises and run.traits.global_model:
        model = {name: values[np.newaxis] for name, values in run.algorithm.final(live.server).items()}
        parts = [
            _measured(run, [OwnModel(np.arange(len(chunk.clients)), run.task.model, model)], chunk, splits)
            for chunk in chunks
        ]
        metrics |= {f"{GLOBAL}{name}": values for name, values in _of_all(run, chunks, parts).items()}
    if (adversary := run.task.adversary) is not None:
        metrics = {name: np.where(adversary.clients, np.nan, values) for name, values in metrics.items()}
    return metrics


def _of_all(run: Run, chunks: Sequence[Chunk], parts: Sequence[ClientMeasures]) -> dict[str, FloatArray]:
    """Return the metrics of all clients, [U] each, from those of their chunks."""
    metrics = {name: np.full(run.task.data.n_clients, np.nan) for name in parts[0].metrics}
    for chunk, part in zip(chunks, parts, strict=True):
        for name, values in part.metrics.items():
            metrics[name][chunk.clients] = values
    return metrics


def model_of_client(live: LiveState, client: int) -> tuple[Model, Arrays, Arrays]:
    """Return the model that a client uses after the last round, its parameters, and the private ones that it keeps.

    They are those that `measure_clients` measures, to the bit: what a client adapts may depend on those of its chunk.
    """
    run = live.run
    broadcast, chunks = _in_chunks(live)
    chunk = next(chunk for chunk in chunks if client in chunk.clients)
    position = int(np.searchsorted(chunk.clients, client))
    with naming_round(chunk.round_index, chunk.clients):
        chunk = _joined(run, broadcast, chunk)
        models = run.algorithm.plain.own_models(broadcast, chunk, run.task)
        part = next(part for part in models if position in part.places)
    row = int(np.flatnonzero(part.places == position)[0])
    parameters = {name: values[row if len(values) > 1 else 0] for name, values in part.parameters.items()}
    private = run.task.model.client_parameters or ()
    return part.model, parameters, {name: chunk.state[name][position] for name in private}


def _in_chunks(live: LiveState) -> tuple[Arrays, Iterator[Chunk]]:
    """Return what clients are sent to be measured after the last round, and all of them in chunks, new ones apart."""
    run, round_index, population = live.run, live.round_index, live.population
    all_clients, new = np.arange(run.task.data.n_clients), run.new_clients
    groups = [all_clients] if new is None else [all_clients[~new], all_clients[new]]
    algorithm = run.algorithm.plain
    if algorithm.personalises:
        broadcast = algorithm.broadcast(live.server, run.task, round_index + 1).arrays
        size, names = min(run.plan.chunk_size, _CLIENTS_AT_ONCE), set(population.arrays)
    else:
        broadcast = run.algorithm.final(live.server)
        size, names = _CLIENTS_AT_ONCE, set(run.task.model.client_parameters or ())
    return broadcast, (
        Chunk(round_index, index, clients, {name: population.arrays[name][clients] for name in sorted(names)})
        for index, clients in enumerate(
            part for group in groups for part in np.split(group, range(size, len(group), size))
        )
    )


def client_statistics(run: Run, metrics: Mapping[str, FloatArray]) -> dict[str, float]:
    """Return the statistics over clients of each metric, named `split.metric.statistic`."""
    model = run.task.model
    lower, shares = declared_by(model) or (), fraction_metrics(model) or ()
    statistics: dict[str, float] = {}
    for name, values in metrics.items():
        metric = name.rpartition(".")[2]
        over_clients = statistics_over_clients(values, lower_is_better=metric in lower, share=metric in shares)
        with_global = metrics.get(f"{GLOBAL}{name.removeprefix(NEW)}")
        if with_global is not None:
            over_clients[BETTER] = share_better(values, with_global, lower_is_better=metric in lower)
        statistics |= {f"{name}.{statistic}": value for statistic, value in over_clients.items()}
    return statistics


def evaluate(live: LiveState) -> dict[str, float]:
    """Return the metrics of both held-out splits, named `validation.METRIC` and `test.METRIC`, of the global model."""
    task = live.run.task
    if not live.run.traits.global_model:
        return {}
    return metrics_of(task, live.run.algorithm.final(live.server), live.population.arrays)


def metrics_of(task: Task, model: Arrays, clients: Arrays) -> dict[str, float]:
    """Return the metrics of both held-out splits of a global model, with the private state of all clients."""
    splits: tuple[Split, Split] = ("validation", "test")
    metrics = {
        f"{split}.{name}": value
        for split in splits
        for name, value in task.model.evaluate(model, clients, task.data, split).items()
    }
    if task.adversary is not None and task.adversary.measured is not None:
        metrics[SUCCESS] = task.model.evaluate(model, clients, task.adversary.measured, "test")["accuracy"]
    return metrics


def measure(run: Run, state: RunState) -> dict[str, float]:
    """Return the metrics of a saved state, as the round loop gives them."""
    return measure_all(run, state)[0]


def measure_all(run: Run, state: RunState) -> tuple[dict[str, float], dict[str, FloatArray]]:
    """Return the metrics of a saved state, as the round loop gives them, and those of each client."""
    live = LiveState.of(run, state)
    of_clients = measure_clients(live)
    return evaluate(live) | client_statistics(run, of_clients), of_clients


def model_sha256(algorithm: Algorithm, state: RunState) -> str:
    """Return the sha256 of the global parameters and of the private state of all clients that took part."""
    return sha256_of(algorithm.final(state.server), state.clients)


def sha256_of(model: Arrays, clients: Arrays) -> str:
    """Return the sha256 of a global model and of the private state of the clients that took part, if they have one."""
    hasher = hashlib.sha256()
    for owner, arrays in (("server", model), ("clients", clients)):
        hash_arrays(hasher, arrays, f"{owner}\0")
    return hasher.hexdigest()
