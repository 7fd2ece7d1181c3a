"""A solver that is a program in any language, and the files through which it solves a problem.

Arrays are CSV files, in folders for the problem, the state and what the program writes.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import uuid
import warnings
from collections.abc import Mapping
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, cast, get_args

import numpy as np
import psutil
from pydantic import Field

from narrowcast.platform.config.files import Section
from narrowcast.platform.config.trust import check_may_run
from narrowcast.platform.errors import RunFailed, UserError
from narrowcast.platform.solving import Solver, Status, StepResult, name_of
from narrowcast.platform.types import Arrays, FloatArray


def write_arrays(arrays: Mapping[str, Any], folder: Path) -> None:
    """Write arrays [m, k] as NAME.csv, m lines of k numbers each with 17 digits, which give the same float64 again.

    An array of one dimension is a column, a single number a file of one number.
    """
    folder.mkdir(parents=True)
    for name, values in arrays.items():
        table = np.asarray(values)
        table = table.reshape(len(table), -1) if table.ndim else table.reshape(1, 1)
        np.savetxt(folder / f"{name}.csv", table, delimiter=",", fmt="%d" if table.dtype.kind in "biu" else "%.17g")


def read_arrays(folder: Path, program: str) -> dict[str, FloatArray]:
    """Return the arrays [m, k] in a folder by name; raise `RunFailed` if a file is not a table of finite numbers."""
    arrays = {}
    for path in sorted(folder.glob("*.csv")):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # of an empty file, which is refused below
                arrays[path.stem] = np.loadtxt(path, delimiter=",", ndmin=2)
        except (ValueError, OSError) as error:
            first = str(error).splitlines()[0]
            raise RunFailed(f"{program} wrote {path.name}, which is not a table of numbers ({first})") from error
        if not arrays[path.stem].size or not np.isfinite(arrays[path.stem]).all():
            what = "a value that is not a finite number" if arrays[path.stem].size else "no number"
            raise RunFailed(f"{program} wrote {path.name}, which has {what}")
    return arrays


def folder_of(problem: Any) -> Path:
    """Return a folder of this process with the problem's files, kept until those of another problem are written."""
    scratch = Path(_scratch(os.getpid()).name)
    folder = scratch / str(problem.digest)[:32]
    if not folder.is_dir():
        for entry in scratch.iterdir():
            shutil.rmtree(entry)
        arrays: Arrays = problem.exported()
        unfinished = folder.with_suffix(".part")
        write_arrays(arrays, unfinished)
        unfinished.rename(folder)
    return folder


@lru_cache(maxsize=1)
def _scratch(process: int) -> TemporaryDirectory[str]:
    """Return the folder of this process, removed at its end; `process` gives a forked process its own."""
    del process
    return TemporaryDirectory(prefix="narrowcast-problem-")


_MARK = "NARROWCAST_PROGRAM"
"""The variable by which a program and all that it started are known: a new session or parent does not change it."""
_REPORT, _SEED = "report", "program_seed"
_STATUSES = get_args(Status)
_LONGEST = 300


class Program(Solver, Section):
    """Runs a program for each iteration, or for several: it reads the problem and its last state, and writes a new one.

    The program is called as `COMMAND... FOLDER`, and finds there, as CSV without headings and with indices from 0:
    `problem/*.csv`, the arrays that the problem exports; `parameters.csv`, lines NAME,VALUE with `seed`, `iterations`
    (0 for the state before the first) and `parameters`; and `state/*.csv`, the arrays that it wrote in the last call,
    none in the first. It writes its state as arrays of numbers to `out/NAME.csv`, among them those of the answer, and
    except after 0 iterations `out/report.csv`, a line RESIDUAL,STATUS, the status 0 running, 1 converged or 2 stalled.
    All of its state is in these files, so that a solve is resumed exactly.

    The time of the solver has the start of the program and its files: choose `inner_iterations` so that these hardly
    count. The program has the rights of this process, as the classes that a file names have.
    """

    kind: Literal["program"] = "program"
    command: tuple[str, ...] = Field(min_length=1, description="program and its first arguments")
    script: Path | None = Field(None, description="file that is the next argument, such as that of an interpreter")
    parameters: dict[str, float] = Field({}, description="numbers that are given to the program by name")
    answer_arrays: tuple[str, ...] = Field(
        ("left", "right"), min_length=1, description="arrays of the state that are the answer, by name"
    )
    inner_iterations: int = Field(1, ge=1, description="iterations of the program in one of the solve")
    timeout_seconds: float = Field(600.0, gt=0, description="longest time for a call of the program")

    def check(self, problem: Any) -> None:
        """Raise `UserError` if the program may not be run or is not found, or if the problem exports no arrays."""
        check_may_run(f"solver.command = {' '.join(self.command)}")
        if shutil.which(self.command[0]) is None:
            raise UserError(f"solver.command: no program {self.command[0]} is installed; give its name or its path")
        if self.script is not None and not self.script.is_file():
            raise UserError(f"solver.script = {self.script}: there is no such file; give its path")
        if not problem.exports:
            raise UserError(
                f"{name_of(problem)} has no method exported(), which gives programs its arrays; choose another problem"
            )

    def init(self, problem: Any, seed: int) -> Arrays:
        """Return the state that the program writes after no iteration, and the seed."""
        self.check(problem)
        state, _ = self._called(problem, {}, seed, 0)
        return state

    def step(self, problem: Any, state: Arrays) -> tuple[Arrays, StepResult]:
        """Return the state and the report that the program writes."""
        self.check(problem)
        seed = int(state[_SEED])
        arrays = {name: values for name, values in state.items() if name != _SEED}
        new, report = self._called(problem, arrays, seed, self.inner_iterations)
        return new, self._read(report)

    def answer(self, state: Arrays) -> Arrays:
        """Return the arrays of the answer."""
        return {name: state[name] for name in self.answer_arrays}

    @property
    def _name(self) -> str:
        return Path(self.command[0]).name

    def _called(self, problem: Any, state: Arrays, seed: int, iterations: int) -> tuple[Arrays, Any]:
        """Call the program once; return its state with the seed, and the report."""
        with TemporaryDirectory(prefix="narrowcast-program-") as scratch:
            folder = Path(scratch)
            (folder / "problem").symlink_to(folder_of(problem), target_is_directory=True)
            write_arrays(state, folder / "state")
            (folder / "out").mkdir()
            values = {"seed": seed, "iterations": iterations, **self.parameters}
            (folder / "parameters.csv").write_text("".join(f"{name},{value:.17g}\n" for name, value in values.items()))
            self._run(folder)
            arrays = read_arrays(folder / "out", self._name)
        report = arrays.pop(_REPORT, None)
        if missing := [name for name in self.answer_arrays if name not in arrays]:
            listed = ", ".join(arrays) or "nothing"
            raise RunFailed(
                f"{self._name} wrote no out/{missing[0]}.csv, only {listed}; solver.answer_arrays names the answer's"
            )
        if iterations and report is None:
            raise RunFailed(f"{self._name} wrote no out/report.csv; it is one line RESIDUAL,STATUS")
        return {**arrays, _SEED: np.array(seed)}, report

    def _run(self, folder: Path) -> None:
        script = [] if self.script is None else [str(self.script.resolve())]
        mark = uuid.uuid4().hex
        process = subprocess.Popen(
            [*self.command, *script, str(folder)],
            cwd=folder,
            env={**os.environ, "OMP_NUM_THREADS": "1", _MARK: mark},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=(log := (folder / "stderr").open("w+b")),
            start_new_session=True,  # an interrupt of the solve waits for the end of an iteration
        )
        try:
            status = process.wait(self.timeout_seconds)
        except subprocess.TimeoutExpired:
            raise RunFailed(
                f"{self._name} did not end within {self.timeout_seconds:g} s; raise solver.timeout_seconds, or lower "
                "solver.inner_iterations"
            ) from None
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            _kill_marked(mark)  # what it started in sessions of their own
            with log:
                log.seek(0)
                lines = log.read().decode(errors="replace").split("\n")
        if status:
            last = next((line.strip() for line in reversed(lines) if line.strip()), "it said nothing")
            raise RunFailed(f"{self._name} ended with status {status}: {last[:_LONGEST]}")

    def _read(self, report: Any) -> StepResult:
        if report.shape != (1, 2) or report[0, 0] < 0 or report[0, 1] not in range(3):
            shown = ",".join(f"{value:g}" for value in report.ravel()[:4])
            raise RunFailed(
                f"{self._name} wrote the report {shown}; it is one line RESIDUAL,STATUS, a number of at least 0 and 0 "
                "running, 1 converged or 2 stalled"
            )
        return StepResult(float(report[0, 0]), cast(Status, _STATUSES[int(report[0, 1])]))


def _kill_marked(mark: str) -> None:
    """Kill the processes of this user with a mark in their environment, and those that they started meanwhile."""
    before, killed = -1, set[int]()
    while len(killed) > before:
        before = len(killed)
        for process in psutil.process_iter():
            with suppress(psutil.Error):  # gone, or of somebody else
                if process.environ().get(_MARK) == mark:
                    process.kill()
                    killed.add(process.pid)
