"""Long runs on Ray: growth of memory and object store, and the cost of checkpoints.

`narrowcast run` runs on a cluster of one node while its processes are sampled; growth is the slope of a line fitted to
the second half of the rounds. The cost of a checkpoint is the time to save the last state (median of 9) over the
interval.

    python benchmarks/endurance.py [--only ml-1m] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

os.environ["RAY_AUTH_MODE"] = "token"

import numpy as np
import psutil
import ray

from narrowcast.platform.rounds.plan import Plan
from narrowcast.platform.rounds.state import RunState
from narrowcast.platform.storage.checkpoint import load_checkpoint, save_checkpoint
from ray_cluster import RayCluster

RUNS = {
    "ml-1m": ["scolr-ml1m", "rounds=200", "training.epochs=10"],
    "digits": ["fedavg-digits", "rounds=1000", "evaluate_every=50", "training.epochs=20"],
}
COST = 0.02
"""Target: what checkpoints may take of a run."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=list(RUNS))
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    reports = {}
    with tempfile.TemporaryDirectory(prefix="narrowcast-endurance-") as folder:
        cluster = RayCluster(Path(folder, "cluster.log"), head_cpus=2, isolated=False)
        try:
            cluster.start()
            ray.init(address=cluster.address, log_to_driver=False)
            for name in [arguments.only] if arguments.only else RUNS:
                reports[name] = {**watch(cluster, name, Path(folder)), "load_average": os.getloadavg()}
                print(name, json.dumps(reports[name], indent=2), flush=True)
        finally:
            ray.shutdown()
            cluster.stop()
    if arguments.json:
        arguments.json.write_text(json.dumps(reports, indent=2))


def watch(cluster: RayCluster, name: str, output: Path) -> dict[str, Any]:
    """Run an experiment and sample its processes five times a second."""
    words = [*RUNS[name], f"name={name}", "--address", cluster.address, "--output", str(output)]
    command = [sys.executable, "-m", "narrowcast", "run", *words, "tracking.system_metrics=false"]
    samples: dict[str, list[tuple[int, float]]] = {"run": [], "driver": [], "hosts": [], "object store": []}
    before = store_used()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    journal = output / name / "journal.jsonl"
    while process.poll() is None:
        time.sleep(0.2)
        reached = journal.read_bytes().count(b"\n") if journal.exists() else 0
        if reached:
            samples["run"].append((reached, own_memory([psutil.Process(process.pid)])))
            samples["driver"].append((reached, own_memory(cluster.workers("Driver"))))
            samples["hosts"].append((reached, own_memory(cluster.workers("ClientHost"))))
            samples["object store"].append((reached, store_used()))
    if process.returncode:
        raise SystemExit(f"{name} failed")
    time.sleep(2)
    result = json.loads((output / name / "result.json").read_text())
    last = result["rounds"]
    samples = {kind: [point for point in points if point[0] < last] for kind, points in samples.items()}
    saving = seconds_to_save(output / name / "checkpoint", output / "again")
    return {
        "bytes_per_round": {kind: slope(points, last) for kind, points in samples.items()},
        "MiB": {kind: median(used for _, used in points) / 2**20 for kind, points in samples.items()},
        "object_store_left_MiB": (store_used() - before) / 2**20,
        "rounds": last,
        "wall_seconds": result["wall_seconds"],
        "checkpoint_seconds": saving,
        "checkpoint_cost": saving / Plan().checkpoint_seconds,
        "wanted": COST,
    }


def own_memory(processes: list[psutil.Process]) -> float:
    """Return the bytes private to these processes, which excludes the object store."""
    total = 0.0
    for each in processes:
        try:
            total += each.memory_full_info().uss
        except psutil.Error:
            continue
    return total


def store_used() -> float:
    there, free = ray.cluster_resources(), ray.available_resources()
    return float(there["object_store_memory"] - free.get("object_store_memory", 0.0))


def slope(points: list[tuple[int, float]], last: int) -> float:
    """Return the growth in bytes per round over the second half of the rounds before the last."""
    late = np.array([point for point in points if point[0] >= last / 2])
    return float(np.polyfit(late[:, 0], late[:, 1], 1)[0]) if len(late) > 2 else float("nan")


def seconds_to_save(checkpoint: Path, scratch: Path) -> float:
    state, digest = load_checkpoint(checkpoint, RunState)
    seconds = []
    for _ in range(9):
        began = time.perf_counter()
        save_checkpoint(scratch, state, digest)
        seconds.append(time.perf_counter() - began)
    return median(seconds)


if __name__ == "__main__":
    main()
