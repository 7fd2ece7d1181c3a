"""Workloads that are interrupted: how each starts and continues, how far it is, and what its end is compared by."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "fixtures"))

from ray_nodes import RayNodes

DEADLINE_SECONDS = 400.0
_LEFT_SECONDS = 120.0  # agents of Ray look for their killed head for a while
_MARK = "NARROWCAST_INTERRUPTED"
_QUIET = ["tracking.system_metrics=false", "checkpoint_seconds=1"]
_FOLDER, _NAME = "FOLDER", "NAME"  # in a command: the path of the workload's folder, and its last part
FILES = {
    "study.yaml": """
experiment: {base: fedavg-digits, rounds: 40, evaluate_every: 5, tracking: {system_metrics: false}}
study:
  {objectives: {validation.accuracy: maximize}, sampler: grid, backend: local, holdout: {trials: 0}, stale_seconds: 5}
space:
  training.learning_rate: [0.01, 0.1, 0.5]
  training.batch_size: [5, 10]
""",
    "solve.yaml": """
problem: {kind: synthetic_completion, rows: 600, rank: 4, fraction: 0.2, condition: 1e6}
solver: {kind: scaled_asd}
iterations: 6000
tolerance: 1e-30
evaluate_every: 50
record_every: 5
""",
    "benchmark.yaml": """
problems:
  well: {kind: synthetic_completion, rows: 400, rank: 3, fraction: 0.2, condition: 1e6}
  ill: {kind: synthetic_completion, rows: 400, rank: 3, fraction: 0.15, condition: 1e8}
solvers: {scaled_asd: scaled_asd, asd: asd, niht: niht}
solve: {iterations: 500, tolerance: 1e-30, evaluate_every: 50, record_every: 5, checkpoint_seconds: 0.5}
""",
}
"""The files in the folder of a workload."""


@dataclass(frozen=True)
class Workload:
    """A command to start, one to continue, the rounds, trials or lines that are there, and the end in letters.

    `on_cluster` are words of the command by which a cluster works for it: that one is killed, not the one that waits.
    """

    start: list[str]
    resume: list[str]
    progress: Callable[[Path], int]
    fingerprint: Callable[[Path], str]
    on_cluster: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Reference:
    """What a workload ends with when nothing happens, in how many seconds and rounds, trials or lines."""

    fingerprint: str
    seconds: float
    steps: int


def _lines(folder: Path) -> int:
    return sum(journal.read_bytes().count(b"\n") for journal in folder.glob("*/journal.jsonl"))


def _result(name: str) -> Callable[[Path], str]:
    def value(folder: Path) -> str:
        return "".join(str(json.loads(result.read_text())[name]) for result in folder.glob("*/result.json"))

    return value


def _trials(folder: Path) -> int:
    return len(list((folder / "study" / "trials").glob("*/result.json")))


def _table(path: Path, names: tuple[str, ...], state: str, ended: str) -> str:
    """Return some columns of the rows of a table that have ended well."""
    if not path.exists():
        return ""
    with path.open(newline="") as lines:
        return json.dumps(sorted([row[name] for name in names] for row in csv.DictReader(lines) if row[state] == ended))


def _configurations(folder: Path) -> str:
    """Return the parameters and the objective of each complete trial; a lost trial is not among them."""
    if not (folder / "study" / "result.json").exists():
        return ""
    names = ("training.learning_rate", "training.batch_size", "validation.accuracy")
    return _table(folder / "study" / "trials.csv", names, "state", "complete")


def _instances(folder: Path) -> int:
    return sum(path.read_bytes().count(b"\n") for path in (folder / "benchmark").glob("*/journal.jsonl"))


def _answers(folder: Path) -> str:
    """Return the answers of all instances, once the table of the benchmark has six that finished."""
    results = sorted((folder / "benchmark").glob("*/result.json"))
    finished = _table(folder / "benchmark" / "instances.csv", ("problem", "solver"), "state", "finished")
    if not finished or len(json.loads(finished)) < 6:
        return ""
    return json.dumps([json.loads(each.read_text())["answer_sha256"] for each in results])


def _run(*words: str, compared_by: str = "model_sha256") -> Workload:
    resume = ["run", "--resume", "run", "--output", "."]
    return Workload(["run", *words, *_QUIET, "name=run", "--output", "."], resume, _lines, _result(compared_by))


_TUNE = ["tune", "study.yaml", "--output", "."]
_BENCHMARK = ["benchmark", "benchmark.yaml", "--output", "."]
IN_PROCESS = {
    "run": _run("fedavg-digits", "rounds=150", "training.epochs=10", "--backend", "local"),
    "buffered run": _run(
        *("fedavg-digits", "rounds=200", "training.epochs=10", "--backend", "local"),
        "schedule={kind: buffered, buffer_size: 5, concurrency: 15}",
    ),
    "solve": _run("solve.yaml", compared_by="answer_sha256"),
    "study": Workload(_TUNE, _TUNE, _trials, _configurations),
    "benchmark": Workload(_BENCHMARK, _BENCHMARK, _instances, _answers),
    "masked run": _run(
        *("fedavg-digits", "rounds=40", "secure={kind: masked, bits: 12, clip: 4}", "--backend", "local")
    ),
}
"""Those that have no process but their own; the masked one has that of its keys."""
_SUBMIT = [
    *("submit", "fedavg-digits", "rounds=150", "training.epochs=10", "backend={kind: ray, actors: 2}", *_QUIET),
    *("--id", _NAME, "--output", _FOLDER, "--env", _MARK),
]
WORKLOADS = {
    **IN_PROCESS,
    "masked run on Ray": _run("scolr-masked-ml1m", "rounds=30", "evaluate_every=30"),
    "job": Workload(_SUBMIT, _SUBMIT, _lines, _result("model_sha256"), frozenset(("run", "--continue"))),
}


@contextmanager
def cluster() -> Iterator[Mapping[str, str]]:
    """Start a Ray cluster of one node for jobs; yield the variables by which a command finds it."""
    nodes = RayNodes(1, cpus=3)
    try:
        yield {
            "RAY_API_SERVER_ADDRESS": nodes.address,
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": nodes.token,
        }
    finally:
        nodes.kill()


class Attempt:
    """One folder in which a workload is started, interrupted and continued; its streams go to `err`."""

    def __init__(self, workload: Workload, folder: Path, environment: Mapping[str, str] | None = None) -> None:
        self.workload, self.folder = workload, folder
        self.mark = f"{os.getpid()}-{folder.name}"
        self.environment = {**os.environ, **(environment or {}), _MARK: self.mark}
        self.process: subprocess.Popen[bytes] | None = None
        for name, content in FILES.items():
            (folder / name).write_text(content)

    def begin(self, words: list[str]) -> None:
        """Start a command in a session of its own."""
        values = {_FOLDER: str(self.folder), _NAME: self.folder.name}
        with (self.folder / "err").open("wb") as err:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "narrowcast", *(values.get(word, word) for word in words)],
                cwd=self.folder,
                env=self.environment,
                stdout=subprocess.DEVNULL,
                stderr=err,
                start_new_session=True,
            )

    def wait(self, seconds: float = DEADLINE_SECONDS) -> int | None:
        """Return the exit status, or None if the command still runs after so many seconds."""
        assert self.process is not None
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None

    def reach(self, steps: int) -> bool:
        """Wait for so many rounds, trials or lines; return False if the process ends before."""
        while self.workload.progress(self.folder) < steps:
            if self.wait(0.01) is not None:
                return False
        return True

    def kill(self) -> None:
        """Kill the command's own process, or that of its job if there is one yet, which the command then reports."""
        assert self.process is not None
        words = self.workload.on_cluster
        of_job = [each for each in self.processes() if words and words <= set(each.cmdline())]
        for each in of_job:
            each.kill()
        if not of_job:
            self.process.kill()
        self.process.wait()

    def processes(self) -> list[psutil.Process]:
        """Return the command's process and all that it started."""
        return [each for each in psutil.process_iter() if _marked(each, self.mark)]

    def last_line(self) -> str:
        """Return the last line that is no warning."""
        lines = [line for line in (self.folder / "err").read_text().splitlines() if not line.startswith("WARNING")]
        return lines[-1] if lines else ""

    def left_behind(self) -> list[str]:
        """Kill the processes that outlive the command, and return their names."""
        deadline = time.monotonic() + _LEFT_SECONDS
        while (left := self.processes()) and time.monotonic() < deadline:
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


def undisturbed(workload: Workload, folder: Path, environment: Mapping[str, str] | None = None) -> Reference:
    """Run a workload without an interruption."""
    attempt = Attempt(workload, folder, environment)
    began = time.monotonic()
    attempt.begin(workload.start)
    if attempt.wait() != 0:
        raise SystemExit(f"the undisturbed run failed: {attempt.last_line()}")
    seconds, fingerprint = time.monotonic() - began, workload.fingerprint(folder)
    if not fingerprint:
        raise SystemExit(f"{' '.join(workload.start)} ended without a result")
    return Reference(fingerprint, seconds, workload.progress(folder))
