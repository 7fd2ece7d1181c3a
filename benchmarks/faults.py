"""Fault injection on a real Ray cluster of several nodes, compared with undisturbed runs in one process.

Every run must end with the `model_sha256` of the undisturbed run, or with one clear line after which
`narrowcast run --resume` produces it; within its deadline, and without leaving processes behind. Finished runs are
recorded in FILE and not repeated.

    python benchmarks/faults.py FILE [--seeds 3] [--only FAULT] [--table]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from fault_kinds import FAULTS, ROOT_ONLY
from fault_run import DEADLINE_SECONDS, SHARED, WORKLOADS, EndedEarlyError, FaultRun
from ray_cluster import RayCluster


def heal(cluster: RayCluster, nodes: int = 2) -> None:
    """Restore the cluster to a head and `nodes` worker nodes."""
    whole = [node for node in cluster.nodes if node.alive() and not node.given_up]
    for node in cluster.nodes:
        if node not in whole[:nodes]:
            node.kill()
    cluster.nodes = whole[:nodes]
    if cluster.head is None or not cluster.head.alive():
        for node in cluster.nodes:
            node.kill()
        cluster.nodes = []
        cluster.start()
    while len(cluster.nodes) < nodes:
        cluster.add_node()
    cluster.wait_for_nodes(1 + nodes)


def run_fault(cluster: RayCluster, fault: str, seed: int, reference: dict[str, str], store: str) -> dict[str, Any]:
    """Run once with a fault, resume if necessary, and return a record of the outcome."""
    workload = "scolr" if fault == "disk full at a checkpoint" else list(WORKLOADS)[seed % len(WORKLOADS)]
    with tempfile.TemporaryDirectory(prefix="narrowcast-faults-") as folder:
        choices = random.Random(f"{fault} {seed}")
        run = FaultRun(cluster, Path(folder), workload, choices, ["backend.kind=ray", "backend.actors=3"], store)
        began, until = time.monotonic(), time.monotonic() + DEADLINE_SECONDS
        try:
            FAULTS[fault](run)
        except EndedEarlyError:
            print(f"{fault}, {seed}: ended before its fault", flush=True)
        status = run.wait(until)
        if status not in (0, None) and not run.sha256():
            run.said.append((run.err().splitlines() or [f"status {status}"])[-1])
            paused = time.monotonic()
            heal(cluster)
            paused = time.monotonic() - paused  # not time of the run
            began, until = began + paused, until + paused
            run.resume()
            status = run.wait(until)
        seconds = time.monotonic() - began
        if status is None:
            assert run.process is not None
            run.process.kill()
        cluster.restore()
        warnings = [line for line in run.err().splitlines() if line.startswith("WARNING")]
        return {
            "fault": fault,
            "seed": seed,
            "workload": workload,
            "same": run.sha256() == reference[workload],
            "resumed": run.resumes,
            "hung": status is None,
            "traceback": "Traceback" in run.err() or any("Traceback" in line for line in run.said),
            "seconds": seconds,
            "left": run.left_behind(),
            "said": run.said,
            "warnings": warnings[:6],
            "load": os.getloadavg()[0],
        }


def references() -> dict[str, str]:
    """Return the model hashes of the same runs in one process."""
    found = {}
    for name, words in WORKLOADS.items():
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "narrowcast", "run", *words, *SHARED, "name=run", "--backend", "local"]
            subprocess.run([*command, "--output", folder], check=True, stdout=subprocess.DEVNULL)
            found[name] = str(json.loads(Path(folder, "run", "result.json").read_text())["model_sha256"])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", action="append", choices=list(FAULTS))
    parser.add_argument("--table", action="store_true", help="print the recorded runs only")
    arguments = parser.parse_args()
    records = [json.loads(line) for line in arguments.file.read_text().splitlines()] if arguments.file.exists() else []
    done = {(record["fault"], record["seed"]) for record in records}
    faults = [each for each in arguments.only or FAULTS if os.geteuid() == 0 or each not in ROOT_ONLY]
    todo = [(fault, seed) for seed in range(arguments.seeds) for fault in faults if (fault, seed) not in done]
    if todo and not arguments.table:
        reference, store = references(), f"sqlite:///{arguments.file.absolute()}.db"
        cluster = RayCluster(arguments.file.with_suffix(".cluster.log"))
        try:
            for fault, seed in todo:
                heal(cluster)
                record = run_fault(cluster, fault, seed, reference, store)
                records.append(record)
                with arguments.file.open("a") as stream:
                    stream.write(json.dumps(record) + "\n")
                verdict = "same" if record["same"] else "DIFFERENT"
                print(f"{fault}, {seed}: {verdict}, {record['seconds']:.0f} s, {record['said']}", flush=True)
        finally:
            cluster.stop()
    print_table(records)


def print_table(records: list[dict[str, Any]]) -> None:
    table = Table("fault", "runs", "same model", "resumed", "hung", "left", "median s", "longest s")
    for fault in FAULTS:
        mine = [record for record in records if record["fault"] == fault]
        if mine:
            seconds = [record["seconds"] for record in mine]
            table.add_row(
                fault,
                str(len(mine)),
                str(sum(record["same"] for record in mine)),
                str(sum(bool(record["resumed"]) for record in mine)),
                str(sum(record["hung"] for record in mine)),
                str(sum(bool(record["left"]) for record in mine)),
                f"{median(seconds):.0f}",
                f"{max(seconds):.0f}",
            )
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
