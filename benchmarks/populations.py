"""Seconds per round and bytes per idle client, from a thousand to a million clients.

Every client has eight samples of scikit-learn's digits (ranges of indices that overlap) and a round trains a thousand
clients, so that a round is the same work in every population. Each measurement runs in a fresh process.

    python benchmarks/populations.py [--populations 1000 ...] [--rounds 30] [--repeats 5] [--json FILE]
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import resource
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import psutil
from rich.console import Console
from rich.table import Table
from sklearn.datasets import load_digits

from narrowcast.algorithms.federated.fedavg import FedAvg
from narrowcast.algorithms.local_training.sgd import SGD
from narrowcast.platform.contracts import Task
from narrowcast.platform.data.samples import Labelled, Samples
from narrowcast.platform.models.networks import MLP
from narrowcast.platform.rounds.fleet import LogNormalFleet
from narrowcast.platform.rounds.loop import LocalBackend
from narrowcast.platform.rounds.plan import Plan
from narrowcast.platform.rounds.state import Run, start
from narrowcast.platform.seeds import PrivateSeed

SAMPLES_EACH, COHORT, WARM_UP_ROUNDS = 8, 1000, 3
SLOWDOWN, BYTES_PER_CLIENT = 1.2, 200.0
"""Targets: the largest population's round over the smallest's, and memory of an idle client beside its data."""


def main() -> None:
    arguments = _arguments()
    runs: dict[int, list[dict[str, float]]] = {size: [] for size in arguments.populations}
    for _ in range(arguments.repeats):
        for size, done in runs.items():
            with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as fresh:
                done.append(fresh.submit(measure, size, arguments.rounds).result())
            print(
                f"{size} clients: {1e3 * done[-1]['seconds_per_round']:.1f} ms, load {os.getloadavg()[0]:.1f}",
                flush=True,
            )
    rows = [{"clients": n} | {name: median(run[name] for run in done) for name in done[0]} for n, done in runs.items()]
    small, large = rows[0], rows[-1]
    report = {
        "rows": rows,
        "bytes_per_client": {name: per_client(small, large, name) for name in STAGES},
        "slowdown": large["seconds_per_round"] / small["seconds_per_round"],
        "rounds": arguments.rounds,
        "repeats": arguments.repeats,
        "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores",
        "load_average": os.getloadavg(),
    }
    _print(report)
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=2))


STAGES = ("data", "profiles", "run", "peak")
"""Resident memory grows by the samples' index, the profiles, and what a run keeps; the peak is over everything."""


def measure(n_clients: int, n_rounds: int) -> dict[str, float]:
    """Measure one run in this process; memory in bytes, each stage relative to the previous one."""
    task = make_task(1000)  # loads whatever is loaded once
    run_rounds(task, 1)
    del task
    before = resident()
    data = make_data(n_clients)
    with_data = resident()
    task = make_task(n_clients, data)
    with_profiles = resident()
    seconds, kept = run_rounds(task, n_rounds)
    return {
        "seconds_per_round": median(seconds[WARM_UP_ROUNDS:-1]),
        "data": with_data - before,
        "profiles": with_profiles - with_data,
        "run": kept - with_profiles,
        "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before,
    }


def make_data(n_clients: int) -> Samples:
    """Return clients that share the digits: client u has eight of them from index 8 u on, modulo their number."""
    bunch = load_digits()
    features, labels = (bunch.data / 16).astype(np.float32), bunch.target.astype(np.int64)
    return Samples(
        name="digits",
        source="scikit-learn",
        n_classes=10,
        train=Labelled(features, labels),
        validation=Labelled(features[:0], labels[:0]),
        test=Labelled(features[:0], labels[:0]),
        order=np.resize(np.arange(len(labels)), n_clients * SAMPLES_EACH),
        indptr=np.arange(n_clients + 1) * SAMPLES_EACH,
    )


def make_task(n_clients: int, data: Samples | None = None) -> Task:
    """Return the task: an MLP, with two steps per client and round."""
    data = data or make_data(n_clients)
    training = SGD(learning_rate=0.1, batch_size=SAMPLES_EACH // 2)
    profiles = LogNormalFleet().profiles(data.examples, 0)
    return Task(data, profiles, MLP(hidden=(16,)), training, 0, PrivateSeed.derived(0))


def run_rounds(task: Task, n_rounds: int) -> tuple[list[float], int]:
    """Return the seconds of every round, and the memory in use while the run is alive."""
    plan = Plan(
        rounds=n_rounds + 1,
        clients_per_round=COHORT,
        sampling="uniform",
        chunk_size=100,
        evaluate_every=10**6,
        checkpoint_seconds=10**6,
    )
    run = Run(plan, FedAvg(), task)
    outcomes = LocalBackend().run(run, start(run))
    seconds = [next(outcomes).wall_seconds for _ in range(n_rounds)]
    kept = resident()
    outcomes.close()
    return seconds, kept


def resident() -> int:
    gc.collect()
    return psutil.Process().memory_info().rss


def per_client(small: dict[str, Any], large: dict[str, Any], name: str) -> float:
    """Return the bytes per additional client, from the smallest and the largest population."""
    return (large[name] - small[name]) / max(1, large["clients"] - small["clients"])


def _print(report: dict[str, Any]) -> None:
    table = Table(
        "clients", "ms/round", *(f"{name} MiB" for name in STAGES), title=f"{COHORT} clients a round, medians"
    )
    for row in report["rows"]:
        sizes = (f"{row[name] / 2**20:.1f}" for name in STAGES)
        table.add_row(f"{row['clients']:,}", f"{1e3 * row['seconds_per_round']:.1f}", *sizes)
    each = report["bytes_per_client"]
    table.add_row("bytes a client", "", *(f"{each[name]:.0f}" for name in STAGES))
    Console(width=100).print(table)
    idle = each["profiles"] + each["run"]
    met = "met" if report["slowdown"] <= SLOWDOWN else "missed"
    print(f"largest over smallest: {report['slowdown']:.2f} x (wanted at most {SLOWDOWN}): {met}")
    met = "met" if idle <= BYTES_PER_CLIENT else "missed"
    print(f"idle client beside its data: {idle:.0f} bytes (wanted at most {BYTES_PER_CLIENT:.0f}): {met}")
    print(f"{report['machine']}; load average {report['load_average'][0]:.2f}")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--populations", type=int, nargs="+", default=[10**3, 10**4, 10**5, 10**6])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
