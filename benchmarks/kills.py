"""SIGKILL at random moments: runs on Ray with masks, in process, buffered, and studies, each continued to its end.

Each one must end with the `model_sha256` of an undisturbed run, or a study with the same configurations and results.
Three of four moments are uniform over the rounds or trials, the others over the time that the undisturbed one took,
imports included; every third one is killed again when it has been resumed. Finished records are in FILE, a CSV, and
are not repeated.

    python benchmarks/kills.py FILE [--kills 40] [--only WORKLOAD]
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

_COLUMNS = (
    *("workload", "number", "kills", "killed_at_seconds", "rounds_or_trials_then", "same", "started_again", "said"),
    *("left", "seconds", "load"),
)
_DEADLINE_SECONDS = 400.0
_LEFT_SECONDS = 120.0  # agents of Ray look for their killed head for a while
_MARK = "NARROWCAST_KILLS"
_QUIET = ["tracking.system_metrics=false", "checkpoint_seconds=1"]
_STUDY = """
experiment: {base: fedavg-digits, rounds: 40, evaluate_every: 5, tracking: {system_metrics: false}}
study:
  {objectives: {validation.accuracy: maximize}, sampler: grid, backend: local, holdout: {trials: 0}, stale_seconds: 5}
space:
  training.learning_rate: [0.01, 0.1, 0.5]
  training.batch_size: [5, 10]
"""


@dataclass(frozen=True)
class Reference:
    """What a workload ends with when nothing happens, in how many seconds and rounds or trials."""

    fingerprint: str
    seconds: float
    steps: int


@dataclass(frozen=True)
class Workload:
    """A command to start, one to continue, and what its end is compared by."""

    start: list[str]
    resume: list[str]
    progress: Callable[[Path], int]
    fingerprint: Callable[[Path], str]


def _rounds(folder: Path) -> int:
    journal = folder / "run" / "journal.jsonl"
    return journal.read_bytes().count(b"\n") if journal.exists() else 0


def _sha256(folder: Path) -> str:
    result = folder / "run" / "result.json"
    return str(json.loads(result.read_text())["model_sha256"]) if result.exists() else ""


def _trials(folder: Path) -> int:
    return len(list((folder / "study" / "trials").glob("*/result.json")))


def _configurations(folder: Path) -> str:
    """The parameters and the objective of each complete trial; a lost trial is not among them."""
    table = folder / "study" / "trials.csv"
    if not (folder / "study" / "result.json").exists() or not table.exists():
        return ""
    with table.open(newline="") as lines:
        rows = [row for row in csv.DictReader(lines) if row["state"] == "complete"]
    names = ("training.learning_rate", "training.batch_size", "validation.accuracy")
    return json.dumps(sorted([row[name] for name in names] for row in rows))


def _run(*words: str) -> Workload:
    resume = ["run", "--resume", "run", "--output", "."]
    return Workload(["run", *words, *_QUIET, "name=run", "--output", "."], resume, _rounds, _sha256)


_TUNE = ["tune", "study.yaml", "--output", "."]
WORKLOADS = {
    "fedavg-digits": _run("fedavg-digits", "rounds=150", "training.epochs=10", "--backend", "local"),
    "masked on Ray": _run("scolr-masked-ml1m", "rounds=30", "evaluate_every=30"),
    "buffered": _run(
        *("fedavg-digits", "rounds=200", "training.epochs=10", "--backend", "local"),
        "schedule={kind: buffered, buffer_size: 5, concurrency: 15}",
    ),
    "study": Workload(_TUNE, _TUNE, _trials, _configurations),
}


class Attempt:
    """One folder in which a workload is started, killed and continued."""

    def __init__(self, workload: Workload, folder: Path) -> None:
        self.workload, self.folder = workload, folder
        self.mark = f"{os.getpid()}-{folder.name}"
        self.process: subprocess.Popen[bytes] | None = None
        (folder / "study.yaml").write_text(_STUDY)

    def begin(self, words: list[str]) -> None:
        with (self.folder / "err").open("wb") as err:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "narrowcast", *words],
                cwd=self.folder,
                env={**os.environ, _MARK: self.mark},
                stdout=subprocess.DEVNULL,
                stderr=err,
                start_new_session=True,
            )

    def wait(self, seconds: float) -> int | None:
        assert self.process is not None
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None

    def reach(self, steps: int) -> bool:
        """Wait for so many rounds or trials; return False if the process ends before."""
        while self.workload.progress(self.folder) < steps:
            if self.wait(0.01) is not None:
                return False
        return True

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def last_line(self) -> str:
        lines = [line for line in (self.folder / "err").read_text().splitlines() if not line.startswith("WARNING")]
        return lines[-1] if lines else ""

    def left_behind(self) -> list[str]:
        """The processes that the workload started and that outlive it; they are killed."""
        deadline = time.monotonic() + _LEFT_SECONDS
        while (left := [each for each in psutil.process_iter() if _marked(each, self.mark)]) and (
            time.monotonic() < deadline
        ):
            time.sleep(1)
        names = [each.name() for each in left]
        for each in left:
            with suppress(psutil.NoSuchProcess):
                each.kill()
        return names


def _marked(process: psutil.Process, mark: str) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE and process.environ().get(_MARK) == mark
    except psutil.Error:
        return False


def undisturbed(workload: Workload, parent: Path) -> Reference:
    """Run a workload without a kill."""
    attempt = Attempt(workload, Path(tempfile.mkdtemp(dir=parent)))
    began = time.monotonic()
    attempt.begin(workload.start)
    if attempt.wait(_DEADLINE_SECONDS) != 0:
        raise SystemExit(f"the undisturbed run failed: {attempt.last_line()}")
    seconds = time.monotonic() - began
    return Reference(workload.fingerprint(attempt.folder), seconds, workload.progress(attempt.folder))


def kill_and_continue(name: str, number: int, reference: Reference, parent: Path) -> dict[str, Any]:
    """Kill the workload once or twice, continue it, and return the record."""
    workload, chances = WORKLOADS[name], random.Random(f"{name} {number}")
    attempt = Attempt(workload, Path(tempfile.mkdtemp(dir=parent)))
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
        status = attempt.wait(_DEADLINE_SECONDS)
        if status == 0 or status is None or time.monotonic() - began > 2 * _DEADLINE_SECONDS:
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
        "rounds_or_trials_then": " ".join(map(str, progress)),
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
    with tempfile.TemporaryDirectory(prefix="narrowcast-kills-") as parent:
        for name, number in todo:
            if (name, number) in done:
                continue
            if name not in references:
                references[name] = undisturbed(WORKLOADS[name], Path(parent))
                print(f"{name}: {references[name].seconds:.1f} s undisturbed", flush=True)
            record = kill_and_continue(name, number, references[name], Path(parent))
            _append(arguments.file, record)
            verdict = "same" if record["same"] else "DIFFERENT"
            then = record["rounds_or_trials_then"]
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
