"""Speed-up of two Ray actors over one on compute-bound rounds, and the overhead of Ray on small rounds.

The speed-up is measured on the CNN of `peers/workload.py`, and compared with an upper bound: two processes that train
half a round each, in parallel and without Ray. The overhead is measured on the digits MLP, with the same chunks in this
process and on Ray.

    python benchmarks/actors.py [--repeats 5] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from narrowcast.algorithms.federated.fedavg import FedAvg
from narrowcast.cluster.backend import RayBackend
from narrowcast.platform.compiled import one_thread
from narrowcast.platform.contracts import Task
from narrowcast.platform.rounds.chunks import make_chunks
from narrowcast.platform.rounds.evaluation import model_sha256
from narrowcast.platform.rounds.loop import Backend, LocalBackend, LocalExecutor
from narrowcast.platform.rounds.plan import Plan
from narrowcast.platform.rounds.state import Population, Run, start
from peers.workload import WORKLOADS, Workload, make_task, partitioned, plan

SPEEDUP, OVERHEAD_MS = 1.6, 4.0
"""Targets: two actors over one, and what Ray may add to a round."""
BACKENDS: dict[str, Backend] = {
    "in process": LocalBackend(),
    "Ray, 1 actor": RayBackend(actors=1),
    "Ray, 2 actors": RayBackend(actors=2),
}


def main() -> None:
    arguments = _arguments()
    large, small = WORKLOADS["mnist"], WORKLOADS["digits"]
    rounds = {"mnist": 8, "digits": 100}
    figures: dict[str, dict[str, list[float]]] = {name: {} for name in rounds}
    for workload in (small, large):
        task, hashes = make_task(workload, partitioned(workload)), set()
        for _ in range(arguments.repeats):
            for kind, backend in BACKENDS.items():
                seconds, digest = seconds_per_round(backend, workload, task, rounds[workload.name])
                hashes.add(digest)
                figures[workload.name].setdefault(kind, []).append(seconds)
                print(f"{workload.name}: {kind} {1e3 * seconds:.2f} ms, load {os.getloadavg()[0]:.1f}", flush=True)
            if workload is large:
                for kind, seconds in ceiling().items():
                    figures["mnist"].setdefault(kind, []).append(seconds)
                    print(f"mnist: {kind} {1e3 * seconds:.2f} ms, load {os.getloadavg()[0]:.1f}", flush=True)
        if len(hashes) != 1:
            raise SystemExit(f"{workload.name}: the runtimes disagree on the model, {len(hashes)} different ones")
    medians = {name: {kind: median(values) for kind, values in kinds.items()} for name, kinds in figures.items()}
    report = {
        "seconds_per_round": medians,
        "runs": figures,
        "speedup": medians["mnist"]["Ray, 1 actor"] / medians["mnist"]["Ray, 2 actors"],
        "ceiling": medians["mnist"]["two halves in turn"] / medians["mnist"]["two halves at once"],
        "overhead_ms": {
            kind: 1e3 * (medians["digits"][kind] - medians["digits"]["in process"])
            for kind in ("Ray, 1 actor", "Ray, 2 actors")
        },
        "repeats": arguments.repeats,
        "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores",
        "load_average": os.getloadavg(),
    }
    _print(report)
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=2))


def seconds_per_round(backend: Backend, workload: Workload, task: Task, n_rounds: int) -> tuple[float, str]:
    """Return the median round after the warm-up, in two chunks, and the hash of the final model."""
    algorithm = FedAvg()
    settings = plan(workload, n_rounds, -(-workload.clients_per_round // 2))
    run = Run(settings, algorithm, task)
    outcomes = list(backend.run(run, start(run)))
    state = outcomes[-1].state
    assert state is not None, "the last round has a checkpoint"
    counted = [outcome.wall_seconds for outcome in outcomes[workload.warm_up : -1]]  # the last round is evaluated
    return median(counted), model_sha256(algorithm, state)


def ceiling() -> dict[str, float]:
    """Return the seconds of two half rounds of the CNN, in sequence and in two parallel processes."""
    context = get_context("spawn")
    with ProcessPoolExecutor(2, mp_context=context, initializer=_prepare, initargs=(context.Barrier(2),)) as pool:
        turns = [[pool.submit(_train_half, half, False).result() for half in (0, 1)] for _ in range(3)]
        pairs = [list(pool.map(_train_half, (0, 1), (True, True))) for _ in range(3)]
    return {
        "two halves in turn": median(sum(turn) for turn in turns),
        "two halves at once": median(max(pair) for pair in pairs),
    }


_HERE: dict[str, Any] = {}


def _prepare(barrier: Any) -> None:
    workload = WORKLOADS["mnist"]
    task, algorithm = make_task(workload, partitioned(workload)), FedAvg()
    population = Population.fresh(algorithm.init_clients(task), task.data.n_clients)
    chunks = make_chunks(
        np.arange(workload.clients_per_round), task.data.examples, workload.clients_per_round // 2, 1, population
    )
    _HERE.update(
        executor=LocalExecutor(Run(Plan(), algorithm, task)), start=algorithm.init(task), chunks=chunks, barrier=barrier
    )


def _train_half(half: int, together: bool) -> float:
    if together:
        _HERE["barrier"].wait()
    began = time.perf_counter()
    with one_thread():
        _HERE["executor"].train(_HERE["start"], [_HERE["chunks"][half]])
    return time.perf_counter() - began


def _print(report: dict[str, Any]) -> None:
    table = Table("workload", "where", "ms/round", "best", title=f"Median of {report['repeats']} runs, in two chunks")
    for name, kinds in report["seconds_per_round"].items():
        for kind, seconds in kinds.items():
            table.add_row(name, kind, f"{1e3 * seconds:.2f}", f"{1e3 * min(report['runs'][name][kind]):.2f}")
    Console(width=100).print(table)
    met = "met" if report["speedup"] >= SPEEDUP else "missed"
    print(f"two actors over one: {report['speedup']:.2f} x (wanted at least {SPEEDUP}): {met}; "
          f"two processes without Ray: {report['ceiling']:.2f} x")  # fmt: skip
    for kind, overhead in report["overhead_ms"].items():
        met = "met" if overhead <= OVERHEAD_MS else "missed"
        print(f"{kind} adds {overhead:.2f} ms to a round of the MLP (wanted at most {OVERHEAD_MS:g}): {met}")
    print(f"{report['machine']}; load average {report['load_average'][0]:.2f}; same models everywhere")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
