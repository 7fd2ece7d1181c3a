"""Runs with faults injected, on a real Ray cluster of several nodes: what becomes of each, beside one left in peace.

Every run must end with the `model_sha256` of the run without a cluster, or with one clear line after which
`narrowcast run --resume` gets there; within its deadline, and leaving no process behind. What was played is kept in
FILE, and is not played again.

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
from fault_play import DEADLINE_SECONDS, SHARED, WORKLOADS, EndedEarlyError, Play
from ray_cluster import RayCluster


def heal(cluster: RayCluster, nodes: int = 2) -> None:
    """A head and two nodes, whatever the last run did to them."""
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


def play_one(cluster: RayCluster, fault: str, seed: int, reference: dict[str, str], store: str) -> dict[str, Any]:
    """One run, its fault, and if it comes to that its resume; what became of it."""
    workload = "scolr" if fault == "disk full at a checkpoint" else list(WORKLOADS)[seed % len(WORKLOADS)]
    with tempfile.TemporaryDirectory(prefix="narrowcast-faults-") as folder:
        choices = random.Random(f"{fault} {seed}")
        play = Play(cluster, Path(folder), workload, choices, ["backend.kind=ray", "backend.actors=3"], store)
        began, until = time.monotonic(), time.monotonic() + DEADLINE_SECONDS
        try:
            FAULTS[fault](play)
        except EndedEarlyError:
            print(f"{fault}, {seed}: over before its fault", flush=True)
        status = play.wait(until)
        if status not in (0, None) and not play.sha256():
            play.said.append((play.err().splitlines() or [f"status {status}"])[-1])
            paused = time.monotonic()
            heal(cluster)
            paused = time.monotonic() - paused  # which is not the run's doing
            began, until = began + paused, until + paused
            play.resume()
            status = play.wait(until)
        seconds = time.monotonic() - began
        if status is None:
            assert play.process is not None
            play.process.kill()
        cluster.restore()
        warnings = [line for line in play.err().splitlines() if line.startswith("WARNING")]
        return {
            "fault": fault,
            "seed": seed,
            "workload": workload,
            "same": play.sha256() == reference[workload],
            "resumed": play.resumes,
            "hung": status is None,
            "traceback": "Traceback" in play.err() or any("Traceback" in line for line in play.said),
            "seconds": seconds,
            "left": play.left_behind(),
            "said": play.said,
            "warnings": warnings[:6],
            "load": os.getloadavg()[0],
        }


def references() -> dict[str, str]:
    """The models of the same runs in one process."""
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
    parser.add_argument("--table", action="store_true", help="print what was played, and play nothing")
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
                record = play_one(cluster, fault, seed, reference, store)
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
