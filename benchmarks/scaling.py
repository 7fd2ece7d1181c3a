"""A model of round time for larger clusters, fitted on measured rounds and validated on held-out ones.

Hosts on a real Ray train cohorts, chunks and models of several sizes. The driver's work in a round is serial, and is
modelled as

    a + b H + c C + d K + e K M + s (f + g H)

seconds for H hosts, C clients in K chunks and a model of M bytes; s is 1 if the model is sent through the object store
(above 64 KiB) and 0 if it is sent in the calls. The coefficients, none negative, are fitted to the CPU seconds of the
driver's process with fewer hosts, since wall time depends on other load; the rounds with the most hosts are held out.
Training adds the time of ceil(K / p) chunks, with p = min(H, K, cores) hosts in parallel, where the time per client is
the remainder of the round with one host. Between machines, the transfers over the driver's link are added: a broadcast
of M per node, and a partial sum of M per chunk. The measured wall time is shown with the prediction.

    python benchmarks/scaling.py [--rounds 10] [--json FILE] [--measured FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Sequence
from itertools import product
from operator import itemgetter
from pathlib import Path
from statistics import median
from threading import Event
from typing import Any

from narrowcast.platform.seeds import PrivateSeed

os.environ["RAY_AUTH_MODE"] = "token"

import numpy as np
import ray
from rich.console import Console
from rich.table import Table
from scipy.optimize import nnls

from narrowcast.algorithms.federated.fedavg import FedAvg
from narrowcast.algorithms.local_training.sgd import SGD
from narrowcast.cluster.decisions import FailurePolicy
from narrowcast.cluster.executor import RayExecutor
from narrowcast.cluster.hosts import Host, Hosts, PlacementRequest
from narrowcast.platform.contracts import Executor, Task
from narrowcast.platform.models.networks import MLP
from narrowcast.platform.rounds.evaluation import model_sha256
from narrowcast.platform.rounds.loop import LocalExecutor, rounds
from narrowcast.platform.rounds.plan import Plan
from narrowcast.platform.rounds.sampling import RoundRobin
from narrowcast.platform.rounds.state import Run
from populations import make_data, make_task

MODELS = {(16,): "5 KB", (512,): "150 KB", (1024, 256): "1.3 MB"}
HOSTS, HELD_OUT_HOSTS = (1, 2, 4), (8,)
COHORTS, CHUNKS = (40, 120, 320), (10, 40)
CORES = os.cpu_count() or 1
BYTES_IN_A_CALL = 64 * 1024
LINK_BYTES_PER_SECOND, HOSTS_PER_NODE = 10e9 / 8, 16
TERMS = ("round", "host", "client", "chunk", "byte of a chunk", "stored round", "stored host")
WARM_UP_ROUNDS = 2


class FirstFew:
    """The first of the started hosts, as if there were no others."""

    def __init__(self, hosts: Hosts, count: int) -> None:
        self._hosts, self._count = hosts, count
        self.problems: list[str] = []

    def look(self) -> None:
        return

    def ready(self) -> list[Host]:
        return self._hosts.ready()[: self._count]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--measured", type=Path, help="fit what an earlier --json FILE has, and measure nothing")
    arguments = parser.parse_args()
    earlier = json.loads(arguments.measured.read_text()) if arguments.measured else {}
    cases = with_training(earlier.get("cases") or measure_all(arguments.rounds))
    fitted = [case for case in cases if case["hosts"] in HOSTS]
    held_out = [case for case in cases if case["hosts"] in HELD_OUT_HOSTS]
    factors = fit(fitted)
    report = {
        "factors": dict(zip(TERMS, factors.tolist(), strict=True)),
        "driver_fitted": errors([(driver(case, factors), case["driver"]) for case in fitted]),
        "driver_held_out": errors([(driver(case, factors), case["driver"]) for case in held_out]),
        "wall_held_out": errors([(driver(case, factors) + training(case), case["seconds"]) for case in held_out]),
        "population": population(),
        "cases": cases,
        "load_average": os.getloadavg(),
    }
    show(report, factors, cases)
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=2))


def measure_all(n_rounds: int) -> list[dict[str, Any]]:
    """Measure every case: the fastest round in wall time, and the median of the CPU seconds of this process."""
    cases = []
    data = make_data(max(COHORTS))
    most = max((*HOSTS, *HELD_OUT_HOSTS))
    for hidden in MODELS:
        small = make_task(max(COHORTS), data)
        training = SGD(learning_rate=0.1, batch_size=4)
        task = Task(data, small.profiles, MLP(hidden=hidden), training, 0, PrivateSeed.derived(0))
        algorithm = FedAvg()
        size = sum(values.nbytes for values in algorithm.init(task).values())
        alone = {
            each: measured(task, LocalExecutor(Run(Plan(), algorithm, task)), *each, n_rounds)
            for each in product(COHORTS, CHUNKS)
        }
        with tempfile.TemporaryDirectory(prefix="ray-") as folder:
            ray.init(address="local", num_cpus=most, include_dashboard=False, log_to_driver=False, _temp_dir=folder)
            try:
                hosts = Hosts(PlacementRequest(most, {"CPU": 1}, "spread", 300), ray.put(algorithm), ray.put(task))
                hosts.wait(300)
                for count, cohort, chunk in product((*HOSTS, *HELD_OUT_HOSTS), COHORTS, CHUNKS):
                    pool = RayExecutor(FirstFew(hosts, count), FailurePolicy("redo", 0, 600), Event())  # type: ignore[arg-type]
                    seconds, cpu, digest = measured(task, pool, cohort, chunk, n_rounds)
                    assert digest == alone[cohort, chunk][2], "results must not depend on the hosts"
                    case = {"hosts": count, "clients": cohort, "chunk": chunk, "bytes": size}
                    cases.append(case | {"seconds": seconds, "driver": cpu})
                    print(f"{case}: {1e3 * seconds:.1f} ms, {1e3 * cpu:.1f} ms of the driver's CPU", flush=True)
            finally:
                ray.shutdown()
    return cases


def measured(task: Task, executor: Executor, cohort: int, chunk: int, n_rounds: int) -> tuple[float, float, str]:
    never = 10**9
    plan = Plan(
        rounds=WARM_UP_ROUNDS + n_rounds + 1,
        clients_per_round=cohort,
        chunk_size=chunk,
        evaluate_every=never,
        checkpoint_seconds=never,
    )
    algorithm, walls, cpus = FedAvg(), [], []
    before, state = time.process_time(), None
    for outcome in rounds(Run(plan, algorithm, task), executor):
        now = time.process_time()
        walls.append(outcome.wall_seconds)
        cpus.append(now - before)
        before, state = now, outcome.state
    assert state is not None
    return min(walls[WARM_UP_ROUNDS:-1]), median(cpus[WARM_UP_ROUNDS:-1]), model_sha256(algorithm, state)


def with_training(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the cases with the training seconds per client, from the same round with one host."""
    key = itemgetter("bytes", "clients", "chunk")
    alone = {key(case): (case["seconds"] - case["driver"]) / case["clients"] for case in cases if case["hosts"] == 1}
    return [case | {"training": alone[key(case)]} for case in cases]


def terms(case: dict[str, Any]) -> list[float]:
    clients, size = case["clients"], case["bytes"]
    chunks = -(-clients // case["chunk"])
    busy = min(case["hosts"], chunks)
    stored = size > BYTES_IN_A_CALL
    return [1, busy, clients, chunks, chunks * size, stored, stored * busy]


def driver(case: dict[str, Any], factors: np.ndarray) -> float:
    """Return the seconds of a round in which the driver works."""
    return float(np.dot(terms(case), factors))


def training(case: dict[str, Any]) -> float:
    """Return the seconds of a round in which the hosts work."""
    chunks = -(-case["clients"] // case["chunk"])
    turns = -(-chunks // min(case["hosts"], chunks, case.get("cores", CORES)))
    return float(turns * min(case["chunk"], case["clients"]) * case["training"])


def fit(cases: Sequence[dict[str, Any]]) -> np.ndarray:
    """Fit the coefficients by least squares of the relative errors, none negative."""
    rows = np.array([terms(case) for case in cases])
    seconds = np.array([case["driver"] for case in cases])
    scale = rows.max(axis=0)
    solution, _ = nnls(rows / scale / seconds[:, None], np.ones(len(cases)))
    return np.asarray(solution / scale)


def errors(pairs: Sequence[tuple[float, float]]) -> dict[str, float]:
    off = [abs(predicted / found - 1) for predicted, found in pairs]
    return {"median": median(off), "worst": max(off), "cases": len(off)}


def population() -> dict[str, float]:
    """Measure the one-time seconds and bytes per client of a population, independent of participation."""
    n_clients = 10**7
    began = time.perf_counter()
    order = RoundRobin().order(0, n_clients)
    return {
        "rotation_seconds": (time.perf_counter() - began) / n_clients,
        "rotation_bytes": order.nbytes / n_clients,
    }


def show(report: dict[str, Any], factors: np.ndarray, cases: Sequence[dict[str, Any]]) -> None:
    for name, factor in report["factors"].items():
        print(f"per {name}: {factor:.3g} s")
    for name in ("driver_fitted", "driver_held_out", "wall_held_out"):
        off = report[name]
        print(f"{name}: median {100 * off['median']:.0f} %, worst {100 * off['worst']:.0f} % of {off['cases']} cases")
    table = Table("model", "hosts", "nodes", "clients", "chunk", "s/round", "training", "link", "driver")
    of_size = {case["bytes"]: case["training"] for case in cases if case["chunk"] == CHUNKS[-1]}
    for (size, each), (hosts, clients, chunk) in product(
        of_size.items(),
        [(16, 1_000, 40), (100, 10_000, 40), (1000, 10_000, 10), (1000, 100_000, 100), (1000, 1_000_000, 1000)],
    ):
        case = {"hosts": hosts, "clients": clients, "chunk": chunk, "bytes": size, "training": each, "cores": hosts}
        nodes, chunks = -(-hosts // HOSTS_PER_NODE), -(-clients // chunk)
        link = (nodes + chunks) * size / LINK_BYTES_PER_SECOND
        parts = (training(case), link, driver(case, factors))
        table.add_row(
            f"{size / 1e6:.3g} MB", str(hosts), str(nodes), f"{clients:,}", str(chunk), f"{sum(parts):.3g}",
            *(f"{part:.3g}" for part in parts),
        )  # fmt: skip
    Console(width=110).print(table)
    print(f"load average {os.getloadavg()[0]:.1f}; rotation of 10^8 clients: "
          f"{1e8 * report['population']['rotation_seconds']:.0f} s once")  # fmt: skip


if __name__ == "__main__":
    main()
