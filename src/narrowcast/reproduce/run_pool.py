"""Runs and measurements side by side, each in a process of this machine, and taken up where they were left."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

from narrowcast.experiment import Experiment, load_experiment
from narrowcast.platform.atomic_files import write_atomically
from narrowcast.platform.errors import RunFailed, UserError
from narrowcast.reproduce.client_times import measure_times
from narrowcast.reproduce.colr_components import measure_components
from narrowcast.reproduce.run_spec import Wanted
from narrowcast.runs import session
from narrowcast.runs.recorder import forget_state, write_config

_MEASURES = {"times": measure_times, "components": measure_components}
_RESULT = "result.json"
_CLEANUP_SECONDS = 60.0  # more than a run waits for its tracking store
_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


@dataclass(frozen=True)
class Job:
    """A setting with its seed: a run of the output folder, or a measurement, which starts over when cut short."""

    wanted: Wanted
    seed: int
    rounds: int | None
    output: Path

    @property
    def name(self) -> str:
        """The folder's; other rounds have a folder of their own."""
        return f"{self.wanted.label}-seed-{self.seed}" + (f"-rounds-{self.rounds}" if self.rounds else "")

    @property
    def folder(self) -> Path:
        """Where it is, or will be."""
        return self.output / self.name

    @cached_property
    def experiment(self) -> Experiment:
        """What is played, on one core."""
        own = [f"seed={self.seed}", f"name={self.name}", "backend.kind=local", "tracking.system_metrics=false"]
        shorter = [f"rounds={self.rounds}"] if self.rounds else []
        return load_experiment(self.wanted.experiment, [*self.wanted.overrides, *own, *shorter])

    def finished(self) -> Mapping[str, Any] | None:
        """Its result where it is done; raises `UserError` where the folder holds something else of its name."""
        config = self.folder / "config.yaml"
        if not config.is_file():
            return None
        if load_experiment(str(config)).identity() != self.experiment.identity():
            raise UserError(
                f"{self.folder} was run with another configuration; remove it, or give another folder with --output"
            )
        path = self.folder / _RESULT
        if not path.is_file():
            return None
        result: dict[str, Any] = json.loads(path.read_text())
        return result if result.get("rounds") == self.experiment.rounds else None

    def tidy(self) -> None:
        """Remove what it, killed at its very end, has left beside its result."""
        forget_state(self.experiment, self.folder)

    def play(self) -> Mapping[str, Any]:
        """Begin it, or go on with it, and return its result."""
        if self.wanted.measure != "accuracy":
            return self._measure()
        if session.is_begun(self.folder):
            prepared = session.prepare_resume(self.folder, self.experiment)
        else:
            prepared = session.prepare(self.experiment, self.output)
        return session.run(prepared, _unseen, keep_state=False)

    def _measure(self) -> Mapping[str, Any]:
        experiment = self.experiment
        task = experiment.task(experiment.data.load())
        measured = _MEASURES[self.wanted.measure](experiment, experiment.algorithm, task)
        result = {"rounds": experiment.rounds, **measured}
        session.writable(self.folder)
        write_config(experiment, self.folder)
        write_atomically(self.folder / _RESULT, json.dumps(result).encode())
        return result


def _unseen(row: Mapping[str, Any]) -> None:
    """OnRound is told run by run."""


def play_all(
    jobs: Sequence[Job], at_once: int, show: Callable[[Job, Mapping[str, Any] | Exception], None]
) -> dict[str, Mapping[str, Any] | Exception]:
    """Play jobs, so many at a time, and show what comes of each; on Ctrl-C all stop where a resume can take them up."""
    for name in _THREADS:  # read by the libraries when a process starts; each job is to have one core
        os.environ.setdefault(name, "1")
    waiting, running = list(reversed(jobs)), dict[Future[Mapping[str, Any]], Job]()
    ended: dict[str, Mapping[str, Any] | Exception] = {}
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(at_once, len(jobs)), context, initializer=_follow_the_parent) as pool:
        try:
            while waiting or running:
                while waiting and len(running) < at_once:
                    job = waiting.pop()
                    running[pool.submit(_play, job)] = job
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    job = running.pop(future)
                    try:
                        ended[job.name] = future.result()
                    except (RunFailed, UserError) as error:
                        ended[job.name] = error
                    show(job, ended[job.name])
        except BrokenProcessPool as error:
            raise RunFailed("a run's process was killed, perhaps for want of memory; try fewer --jobs") from error
        except BaseException:
            for process in multiprocessing.active_children():
                process.terminate()
            raise
    return ended


def _play(job: Job) -> Mapping[str, Any]:
    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        return job.play()
    finally:
        signal.signal(signal.SIGTERM, before)


def _interrupt(*_: object) -> NoReturn:
    raise KeyboardInterrupt


def _follow_the_parent() -> None:
    """Leave Ctrl-C to the parent, and end where it is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_the_parent, daemon=True).start()


def _end_with_the_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None, "this is a process of the pool"
    parent.join()
    while True:  # the first one ends the run, the next the process
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(_CLEANUP_SECONDS)
