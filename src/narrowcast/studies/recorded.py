"""The runs and measurements of a reproduction: several at a time, each in its own process, resumed if interrupted."""

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
from narrowcast.platform.config.trust import read_json
from narrowcast.platform.errors import RunFailed, UserError
from narrowcast.platform.rounds.state import Run
from narrowcast.platform.storage.disk import write_atomically
from narrowcast.platform.storage.host import block_signals
from narrowcast.runs import session
from narrowcast.runs.folder import CONFIG, has_run, make_writable, remove_local_checkpoints, saved_config, write_config
from narrowcast.runs.prepared import prepare, prepare_resume
from narrowcast.runs.result import Result
from narrowcast.studies.execution import one_core_each
from narrowcast.studies.spec import CONVERGENCE, RunSpec

_RESULT = "result.json"
_CLEANUP_SECONDS = 60.0  # more than a run waits for its tracking store

Ended = Mapping[str, Any] | Exception
"""The result of a run, or the error that ended it."""


@dataclass(frozen=True)
class ReproductionRun:
    """A run specification with a seed, and the folder `output` that holds it.

    A recorded run that was interrupted is resumed; a measurement starts over. `rounds` replaces those of the
    experiment, and is then part of the folder's name.
    """

    spec: RunSpec
    seed: int
    rounds: int | None
    output: Path

    @property
    def name(self) -> str:
        """The name of the run and of its folder."""
        return f"{self.spec.label}-seed-{self.seed}" + (f"-rounds-{self.rounds}" if self.rounds else "")

    @property
    def folder(self) -> Path:
        """The folder of the run, which need not exist yet."""
        return self.output / self.name

    @cached_property
    def experiment(self) -> Experiment:
        """The experiment, on the local backend."""
        return self.spec.configured(self.seed, self.name, self.rounds)

    def finished(self) -> Mapping[str, Any] | None:
        """Return the result, None if the run is not finished; raise `UserError` if the folder holds another run."""
        if not (self.folder / CONFIG).is_file():
            return None
        if load_experiment(saved_config(self.folder)).identity() != self.experiment.identity():
            raise UserError(
                f"{self.folder} was run with another configuration; remove it, or give another folder with --output"
            )
        path = self.folder / _RESULT
        if not path.is_file():
            return None
        result = read_json(path, f"remove {self.folder}, and the run is repeated")
        return self._with_history(result) if result.get("rounds") == self.experiment.rounds else None

    def tidy(self) -> None:
        """Remove the checkpoints of a finished run that was killed before it removed them itself."""
        remove_local_checkpoints(self.experiment, self.folder)

    def run(self) -> Mapping[str, Any]:
        """Start or resume the run, and return its result."""
        if (measurement := self.spec.measurement) is not None:
            return self._measured(measurement)
        if has_run(self.folder):
            prepared = prepare_resume(self.folder, self.experiment)
        else:
            prepared = prepare(self.experiment, self.output)
        return self._with_history(session.run(prepared, _ignore_round, keep_checkpoints=False))

    def _with_history(self, result: Mapping[str, Any]) -> Mapping[str, Any]:
        if self.spec.measure != CONVERGENCE:
            return result
        table = Result.load(self.folder).rounds
        metrics = [name for name in table.columns if name.startswith("test.")]
        return {**result, "history": table[["round", *metrics]].dropna().to_dict("list")}

    def _measured(self, measurement: Callable[[Run], Mapping[str, Any]]) -> Mapping[str, Any]:
        experiment = self.experiment
        task = experiment.task(experiment.data_source.load())
        result = {"rounds": experiment.rounds, **measurement(Run(experiment, experiment.algorithm, task))}
        make_writable(self.folder)
        write_config(experiment, self.folder)
        write_atomically(self.folder / _RESULT, json.dumps(result).encode())
        return result


def _ignore_round(row: Mapping[str, Any]) -> None:
    """Progress is shown per run, not per round."""


def run_all(runs: Sequence[ReproductionRun], at_once: int, show: Callable[[ReproductionRun, Ended], None]) -> None:
    """Run all, at most `at_once` at a time, and call `show` with each as it ends.

    On Ctrl-C every run stops where it can be resumed. Raise `RunFailed` if a process was killed.
    """
    one_core_each()
    waiting, running = list(reversed(runs)), dict[Future[Mapping[str, Any]], ReproductionRun]()
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(at_once, len(runs)), context, initializer=_follow_the_parent) as pool:
        try:
            while waiting or running:
                while waiting and len(running) < at_once:
                    run = waiting.pop()
                    with block_signals(signal.SIGINT, signal.SIGHUP):  # which are for this process to handle
                        future = pool.submit(_run, run)
                    running[future] = run
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    run = running.pop(future)
                    try:
                        ended: Ended = future.result()
                    except (RunFailed, UserError) as error:
                        ended = error
                    show(run, ended)
        except BrokenProcessPool as error:
            raise RunFailed("a run's process was killed, perhaps for lack of memory; try fewer --jobs") from error
        except BaseException:
            for process in multiprocessing.active_children():
                process.terminate()
            raise


def _run(run: ReproductionRun) -> Mapping[str, Any]:
    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        return run.run()
    except KeyboardInterrupt:
        # Back in the pool it would wait for a lock that a worker killed while idle holds for ever.
        os._exit(1)
    finally:
        signal.signal(signal.SIGTERM, before)


def _interrupt(*_: object) -> NoReturn:
    raise KeyboardInterrupt


def _follow_the_parent() -> None:
    """End this process when the parent ends."""
    threading.Thread(target=_end_with_the_parent, daemon=True).start()


def _end_with_the_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None, "this is a process of the pool"
    parent.join()
    while True:  # the first signal ends the run, the next one the process
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(_CLEANUP_SECONDS)
