"""SIGKILL at random moments: runs, solves, studies, benchmarks, masked runs and jobs, continued to their end.

Each one must end with the `model_sha256` or `answer_sha256` of an undisturbed one, or a study with the same
configurations and results. Three of four moments are uniform over the rounds, trials or lines, the others over the time
that the undisturbed one took, imports included; every third one is killed again when it has been resumed. A job runs on
a Ray cluster of one node, where its process is killed. Finished records are in FILE, a CSV, and are not repeated.

    python benchmarks/kills.py FILE [--kills 40] [--only WORKLOAD]
"""

from __future__ import annotations

import argparse
import csv
import os
import random
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from interrupted import DEADLINE_SECONDS, WORKLOADS, Attempt, Reference, cluster, undisturbed

_COLUMNS = (
    *("workload", "number", "kills", "killed_at_seconds", "steps_then", "same", "started_again", "said"),
    *("left", "seconds", "load"),
)


def kill_and_continue(
    name: str, number: int, reference: Reference, parent: Path, environment: Mapping[str, str]
) -> dict[str, Any]:
    """Kill the workload once or twice, continue it, and return the record."""
    workload, chances = WORKLOADS[name], random.Random(f"{name} {number}")
    attempt = Attempt(workload, Path(tempfile.mkdtemp(dir=parent)), environment)
    wanted, moments, progress, said, again = (2 if number % 3 == 2 else 1), [], [], [], 0
    began = time.monotonic()
    words = workload.start
    while True:
        attempt.begin(words)
        if len(moments) < wanted:
            since = time.monotonic()
            by_step, step, wait = chances.random() < 0.75, chances.randrange(reference.steps), chances.random()
            runs = not by_step or attempt.reach(step)
            longest = reference.seconds / reference.steps if by_step else reference.seconds
            if runs and attempt.wait(wait * longest) is None:
                progress.append(workload.progress(attempt.folder))
                attempt.kill()
                moments.append(time.monotonic() - since)
                words = workload.resume
                continue
        status = attempt.wait()
        if status == 0 or status is None or time.monotonic() - began > 2 * DEADLINE_SECONDS:
            break
        said.append(attempt.last_line())
        if "again" not in said[-1] and "no run at" not in said[-1]:
            break
        again += 1
        shutil.rmtree(attempt.folder / "run", ignore_errors=True)
        words = workload.start
    if status is None:
        attempt.kill()
    seconds = time.monotonic() - began
    return {
        "workload": name,
        "number": number,
        "kills": len(moments),
        "killed_at_seconds": " ".join(f"{moment:.2f}" for moment in moments),
        "steps_then": " ".join(map(str, progress)),
        "same": workload.fingerprint(attempt.folder) == reference.fingerprint != "",
        "started_again": again,
        "said": " | ".join(said),
        "left": " ".join(attempt.left_behind()),
        "seconds": f"{seconds:.1f}",
        "load": f"{os.getloadavg()[0]:.1f}",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--kills", type=int, default=40, help="records in all, spread over the workloads")
    parser.add_argument("--only", action="append", choices=list(WORKLOADS))
    arguments = parser.parse_args()
    records = _read(arguments.file)
    done = {(record["workload"], int(record["number"])) for record in records}
    names = arguments.only or list(WORKLOADS)
    todo = [(names[place % len(names)], place // len(names)) for place in range(arguments.kills)]
    references: dict[str, Reference] = {}
    environments: dict[str, Mapping[str, str]] = {}
    with tempfile.TemporaryDirectory(prefix="narrowcast-kills-") as parent, ExitStack() as stack:
        for name, number in todo:
            if (name, number) in done:
                continue
            if name not in references:
                environments[name] = stack.enter_context(cluster()) if WORKLOADS[name].on_cluster else {}
                folder = Path(tempfile.mkdtemp(dir=parent))
                references[name] = undisturbed(WORKLOADS[name], folder, environments[name])
                print(f"{name}: {references[name].seconds:.1f} s undisturbed", flush=True)
            record = kill_and_continue(name, number, references[name], Path(parent), environments[name])
            _append(arguments.file, record)
            verdict = "same" if record["same"] else "DIFFERENT"
            then = record["steps_then"]
            print(f"{name} {number}: {verdict}, at {then}, {record['seconds']} s, {record['said']}", flush=True)
    _print_table(_read(arguments.file))


def _read(file: Path) -> list[dict[str, str]]:
    if not file.exists():
        return []
    with file.open(newline="") as lines:
        return list(csv.DictReader(lines))


def _append(file: Path, record: dict[str, Any]) -> None:
    is_new = not file.exists()
    with file.open("a", newline="") as stream:
        writer = csv.DictWriter(stream, _COLUMNS)
        if is_new:
            writer.writeheader()
        writer.writerow(record)


def _print_table(records: list[dict[str, str]]) -> None:
    table = Table("workload", "records", "kills", "same", "started again", "processes left", "longest s")
    counts = Counter(record["workload"] for record in records)
    for name, count in counts.items():
        mine = [record for record in records if record["workload"] == name]
        table.add_row(
            name,
            str(count),
            str(sum(int(record["kills"]) for record in mine)),
            str(sum(record["same"] == "True" for record in mine)),
            str(sum(int(record["started_again"]) > 0 for record in mine)),
            str(sum(bool(record["left"]) for record in mine)),
            f"{max(float(record['seconds']) for record in mine):.0f}",
        )
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
