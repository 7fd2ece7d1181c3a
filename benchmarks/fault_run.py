"""A run of the fault-injection benchmark: its process, its files and the processes that it leaves behind."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from ray_cluster import RayCluster

ROUNDS = 30
DEADLINE_SECONDS = 240.0
"""For a run including its resume; a run without fault takes about 30 s, mostly imports and start-up."""
WORKLOADS = {
    "scolr": ["scolr-ml100k", "training.epochs=20", "chunk_size=10"],
    "scaffold": ["fedavg-digits", "algorithm=scaffold", "training.epochs=20", "chunk_size=5"],
}
SHARED = [f"rounds={ROUNDS}", "evaluate_every=20", "checkpoint_every=5", "tracking.system_metrics=false"]
_MARK = "NARROWCAST_FAULTS"


class EndedEarlyError(Exception):
    """The run ended before its fault was injected."""


@dataclass
class FaultRun:
    """A `narrowcast run` on the cluster, and the folder that it writes to."""

    cluster: RayCluster
    folder: Path
    workload: str
    random: random.Random
    settings: list[str]
    store: str
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)
    process: subprocess.Popen[bytes] | None = None
    resumes: int = 0
    said: list[str] = field(default_factory=list)

    def start(self, *words: str) -> None:
        self._run("run", *WORKLOADS[self.workload], *SHARED, "name=run", *self.settings, *words)

    def resume(self, *words: str) -> None:
        self.resumes += 1
        self._run("run", "--resume", "run", *words)

    def _run(self, *words: str) -> None:
        with (self.folder / "out").open("ab") as out, (self.folder / "err").open("wb") as err:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "narrowcast", *words, "--address", self.cluster.address, "--output", "."],
                cwd=self.folder,
                env={**os.environ, _MARK: self.mark, "RAY_AUTH_MODE": "token", "MLFLOW_TRACKING_URI": self.store},
                stdout=out,
                stderr=err,
                start_new_session=True,
            )

    def rounds(self) -> int:
        journal = self.folder / "run" / "journal.jsonl"
        return journal.read_bytes().count(b"\n") if journal.exists() else 0

    def reach(self, round_index: int) -> None:
        """Wait until this round is recorded."""
        while self.rounds() < round_index:
            assert self.process is not None
            if self.process.poll() is not None:
                raise EndedEarlyError
            time.sleep(0.01)

    def midway(self) -> None:
        """Wait until a random round in the middle is recorded, and a random time into the next."""
        self.reach(self.random.randint(4, ROUNDS - 10))
        time.sleep(self.random.uniform(0, 0.1))

    def actors(self, name: str) -> list[psutil.Process]:
        """Wait for processes of this actor class, and return them."""
        while not (found := self.cluster.workers(name)):
            if self.process is None or self.process.poll() is not None:
                raise EndedEarlyError
        return found

    def wait(self, until: float) -> int | None:
        """Return the exit status, or None if the run does not end in time."""
        assert self.process is not None
        try:
            return self.process.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            return None

    def err(self) -> str:
        return (self.folder / "err").read_text().strip()

    def sha256(self) -> str:
        result = self.folder / "run" / "result.json"
        return str(json.loads(result.read_text())["model_sha256"]) if result.exists() else ""

    def left_behind(self) -> list[str]:
        """Return the names of processes that the run started and that outlive it."""
        deadline = time.monotonic() + 30
        while True:
            mine = [each for each in psutil.process_iter() if _environment(each).get(_MARK) == self.mark]
            actors = [*self.cluster.workers("ClientHost"), *self.cluster.workers("Driver")]
            names = [each.name() for each in {*mine, *actors} if each.is_running()]
            if not names or time.monotonic() > deadline:
                return names
            time.sleep(0.5)


def _environment(process: psutil.Process) -> dict[str, str]:
    try:
        return process.environ() if process.status() != psutil.STATUS_ZOMBIE else {}
    except psutil.Error:
        return {}
