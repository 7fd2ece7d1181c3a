"""A history: one small run, begun and resumed through accidents drawn from a seed until it has ended.

It runs the real program: preparation, rounds, journal, checkpoints, MLflow client, the Ray backend's driver, hosts and
failure policy. Disk, clocks, store and Ray are simulated.

    python tests/simulation/histories.py SEED          # the log of one history
    python tests/simulation/histories.py FIRST LAST    # the table of many
"""

from __future__ import annotations

import ast
import io
import json
import logging
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import simulated_ray
import simulated_store
from simulated_disk import Accident, SimulatedDisk
from simulated_host import KilledError, PowerCutError, SimulatedHost, SimulatedTime
from simulated_ray import SimulatedRay
from simulated_store import SimulatedStore
from workloads import WORKLOADS, experiment_of

from narrowcast import packaged
from narrowcast.platform.config.yaml import read_yaml, write_yaml
from narrowcast.platform.errors import RunFailed, UserError
from narrowcast.platform.storage.disk import use_disk
from narrowcast.platform.storage.host import use_clock
from narrowcast.platform.storage.journal import Journal
from narrowcast.platform.tracking.store import metric_name
from narrowcast.runs import folder, outputs, session
from narrowcast.runs.session import sync_run

_MOST_PROCESSES = 12
_FAILURES = 0.03  # of each call to the store and to a host


@dataclass
class History:
    """What a history came to: its log, its outcome, and the promises that were broken."""

    seed: int
    workload: str
    log: list[str]
    processes: int = 0
    outcome: str = ""
    broken: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return "\n".join([f"seed {self.seed}: {self.workload}, {self.outcome}", *self.log, *self.broken])


@dataclass(frozen=True)
class _Reference:
    sha256: str
    rounds: list[dict[str, Any]]
    operations: int


_read = cache(read_yaml)


@cache
def _written(values: str) -> str:
    write_yaml(ast.literal_eval(values), text := io.StringIO())
    return text.getvalue()


@cache
def reference(workload: str) -> _Reference:
    """The run without any accident."""
    with _machine(SimulatedHost(0), failures=0.0) as machine:
        prepared = session.prepare_runs(experiment_of(workload), (), machine.output)[0]
        result = session.run(prepared, lambda _: None)
        return _Reference(result["model_sha256"], Journal.open(prepared.folder).rounds, machine.disk.count)


@dataclass
class _Machine:
    host: SimulatedHost
    time: SimulatedTime
    disk: SimulatedDisk
    store: SimulatedStore
    output: Path

    def restart(self) -> None:
        if self.host.death is not None:
            self.disk.restart()
        self.host.start_process()
        self.time.restart()


@contextmanager
def _machine(host: SimulatedHost, failures: float) -> Iterator[_Machine]:
    """A simulated machine with its own folder, which is removed at the end."""
    shared_memory = Path("/dev/shm")
    with ExitStack() as stack:
        parent = shared_memory if shared_memory.is_dir() else None
        root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="narrowcast-history-", dir=parent)), "disk")
        root.mkdir()
        machine = _Machine(
            host,
            SimulatedTime(host, failures),
            SimulatedDisk(host, root, lambda: machine.time.now),
            SimulatedStore(host, failures),
            root / "output",
        )
        stack.enter_context(use_disk(machine.disk))
        stack.enter_context(use_clock(machine.time))
        stack.enter_context(simulated_store.in_force(machine.store))
        stack.enter_context(simulated_ray.in_force(SimulatedRay(host, failures)))
        # Reading and writing the same YAML takes a third of the time.
        stack.enter_context(patch.object(packaged, "read_yaml", lambda text, origin: deepcopy(_read(text, origin))))
        stack.enter_context(patch.object(folder, "write_yaml", lambda values, to: to.write(_written(repr(values)))))
        # Figures take most of a second, and a subprocess reads the commit.
        stack.enter_context(patch.object(outputs, "write_plots", lambda *_: []))
        stack.enter_context(patch.object(outputs, "write_partition", lambda *_: []))
        stack.enter_context(patch.object(outputs, "git_commit", lambda: "simulated"))
        level = logging.getLogger("narrowcast").level
        logging.getLogger("narrowcast").setLevel(logging.CRITICAL)
        stack.callback(logging.getLogger("narrowcast").setLevel, level)
        yield machine


def simulate(seed: int, variant: Callable[[], AbstractContextManager[Any]] = nullcontext) -> History:
    """Simulate the history of a seed, of the program or of a variant."""
    host = SimulatedHost(seed)
    chances = host.chances("history")
    workload = chances.choice(list(WORKLOADS))
    history = History(seed, workload, host.log)
    expected = reference(workload)
    with _machine(host, _FAILURES) as machine, variant():
        _Simulation(machine, history, expected).simulate()
    return history


class _Simulation:
    """Starts the run, follows the advice of each line that ends it, and checks what was promised."""

    def __init__(self, machine: _Machine, history: History, expected: _Reference) -> None:
        self.machine, self.history, self.expected = machine, history, expected
        self.chances = machine.host.chances("player")
        self.folder = machine.output / "run"
        self.starts = True
        self.if_begun = self.chances.random() < 0.25
        self.result: dict[str, Any] | None = None

    def simulate(self) -> None:
        while not (self.result and self._is_sent()) and self.history.processes < _MOST_PROCESSES:
            self.history.processes += 1
            self.machine.disk.start_process(self._accidents())
            try:
                self._sync() if self.result else self._process()
            except (PowerCutError, KilledError):
                self.starts = False
            except KeyboardInterrupt:
                self.machine.host.tell("stopped by a signal")
                self.starts = False
            except (UserError, RunFailed) as error:
                self._follow(error)
            except Exception as error:
                self._break(f"an error without a line: {error!r}".replace(str(self.machine.output.parent), ""))
                self.starts = False
            self.machine.restart()
        if self.result is None or not self._is_sent():
            self._break("it did not end")
            self.history.outcome = "did not end"
            return
        self.history.outcome = f"ended after {self.history.processes} processes"
        self._check_end(self.result)

    def _accidents(self) -> list[Accident]:
        if self.history.processes > _MOST_PROCESSES // 2:
            self.machine.store.go_up(for_good=True)
            return []
        kind = self.chances.choices(("power cut", "kill", "full", "no sync", "signal", ""), (30, 12, 10, 4, 14, 30))[0]
        last = self.expected.operations + 5
        at = self.chances.choice(
            (self.chances.randint(1, last), self.chances.randint(1, last), self.chances.randint(1, 30))
        )
        stage = self.chances.choice(("before", "inside", "after"))
        return [Accident(at, kind, stage, self.chances.randint(1, 8))] if kind else []

    def _process(self) -> None:
        machine = self.machine
        begins = self.starts or self.if_begun
        machine.host.tell(f"process {self.history.processes}: {'start' if self.starts else 'resume'}")
        if begins:
            source = experiment_of(self.history.workload)
            [prepared] = session.prepare_runs(source, (), machine.output, resume_if_begun=self.if_begun)
        else:
            [prepared] = session.prepare_runs(None, (), machine.output, (self.folder.name,))
        if prepared.folder != self.folder:
            self.folder, machine.disk.durable_round = prepared.folder, -1
        machine.host.tell(f"from round {prepared.state.round_index}, journal to {prepared.state.settled_round}")
        if prepared.state.round_index < machine.disk.durable_round:
            self._break(f"round {machine.disk.durable_round} was kept, and is gone")
        stop_at = [each.at % len(self.expected.rounds) for each in machine.disk.accidents if each.kind == "signal"]
        in_process = "on ray" not in self.history.workload
        ended_at: list[float] = []

        def on_round(row: Mapping[str, Any]) -> None:
            if in_process and ended_at and machine.disk.durable_round < row["round"]:
                seconds = ended_at[-1] - max(ended_at[0], machine.disk.durable_at)
                if seconds > prepared.experiment.checkpoint_seconds:
                    self._break(f"no checkpoint at round {row['round']}, {seconds:.0f} s after the last one")
            ended_at.append(machine.time.now)
            if row["round"] in stop_at:
                machine.host.interrupt()

        result = session.run(prepared, on_round)
        self._check_remains()
        self.result = result

    def _check_remains(self) -> None:
        left = [each.name for each in self.folder.rglob("*") if each.suffix == ".part" or each.name.startswith(".")]
        checkpoints = list((self.folder / "checkpoint").iterdir())
        if left or len(checkpoints) > 2:
            self._break(f"left behind: {left}, {len(checkpoints)} checkpoints")

    def _is_sent(self) -> bool:
        try:
            return bool(json.loads((self.folder / "tracking.json").read_text())["closed"])
        except ValueError:
            self._break("tracking.json is cut")
            return True

    def _sync(self) -> None:
        self.machine.host.tell(f"process {self.history.processes}: sync")
        sync_run(self.folder, None)

    def _follow(self, error: Exception) -> None:
        """Do what the line says; every line has to say something that helps."""
        line = str(error).replace(str(self.machine.output.parent), "")
        self.machine.host.tell(f"{type(error).__name__}: {line}")
        if "start the run again" in line or "start it again" in line or "no run at" in line:
            if self.machine.disk.durable_round >= 0:
                self._break(f"round {self.machine.disk.durable_round} was kept, and the run has to be started again")
            self.starts = True
        elif "MLflow" in line or "narrowcast sync" in line:
            self.machine.store.go_up()
        elif "then resume" in line:
            self.starts = False
        elif "cannot write" in line or "another folder" in line:
            pass
        else:
            self._break("this line is not documented")

    def _check_end(self, result: Mapping[str, Any]) -> None:
        if result["model_sha256"] != self.expected.sha256:
            self._break("the model is another")
        try:
            rounds = Journal.open(self.folder).rounds
        except UserError as error:
            self._break(f"the journal of a finished run cannot be read: {error}".replace(str(self.folder.parent), ""))
            return
        if [_results(row) for row in rounds] != [_results(row) for row in self.expected.rounds]:
            self._break("the journal is another")
        self._check_store(result, rounds)
        if around := self.machine.disk.written_around():
            self._break(f"written around the disk: {around}")
        written = (self.folder / "result.json").read_bytes()
        try:
            self.machine.host.die(PowerCutError, "after the end")
        except PowerCutError:
            self.machine.restart()
        if not (left := self.folder / "result.json").is_file() or left.read_bytes() != written:
            self._break("the result was reported, and is gone")

    def _check_store(self, result: Mapping[str, Any], rounds: list[dict[str, Any]]) -> None:
        stored = self.machine.store.runs[result["mlflow_run_id"]]
        sent: dict[str, set[tuple[int, str, int]]] = {}
        for row in rounds:
            for name, value in row.items():
                if name not in ("round", "logged_at_ms") and value is not None:
                    entry = (row["round"], repr(float(value)), row["logged_at_ms"])
                    sent.setdefault(metric_name(name), set()).add(entry)
        there = {name: {(step, repr(value), at) for step, value, at in each} for name, each in stored.metrics.items()}
        if there != sent:
            odd = {name: sorted(sent.get(name, set()) ^ there.get(name, set())) for name in sent.keys() | there.keys()}
            self._break(
                f"MLflow and the journal differ: { ({name: each for name, each in odd.items() if each}) }"[:600]
            )
        if stored.status != "FINISHED" or stored.tags.get("model_sha256") != result["model_sha256"]:
            self._break(f"MLflow has the status {stored.status}")

    def _break(self, promise: str) -> None:
        self.history.broken.append(f"BROKEN: {promise}")


def _results(row: Mapping[str, Any]) -> dict[str, str]:
    """The part of a journal's row that does not depend on the machine."""
    return {name: repr(value) for name, value in row.items() if not name.endswith(("wall_seconds", "logged_at_ms"))}


_ACCIDENTS = {
    "power cut": "PowerCut ",
    "SIGKILL": "Killed ",
    "disk full": "disk full",
    "sync fails": "sync fails",
    "SIGINT": "stopped by a signal",
    "the wall clock jumps an hour": "the wall clock",
    "MLflow down": "store: down",
    "MLflow applies, answers with an error": "store: applied",
    "client host dies or hangs": ("ray: host", "ray: hang", "ray: object"),
    "node dies": "ray: node",
    "driver dies": "ray: the driver",
}


def print_table(histories: Sequence[History]) -> None:
    """Print what happened how often, and how the histories came out that it happened in."""
    print("| accident | accidents | histories | same model | processes, median | most |")
    print("|---|---|---|---|---|---|")
    for name, starts in {**_ACCIDENTS, "all": ""}.items():
        counts = [
            sum(event.startswith(starts) for event in each.log if "after the end" not in event) for each in histories
        ]
        mine = [each for each, count in zip(histories, counts, strict=True) if count]
        if mine:
            numbers = [each.processes for each in mine]
            same = sum(not each.broken for each in mine)
            print(f"| {name} | {sum(counts)} | {len(mine)} | {same} | {median(numbers):.0f} | {max(numbers)} |")


def main() -> None:
    """Print the history of a seed, or the table of the seeds FIRST to LAST."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which the background job of a shell ignores
    seeds = [int(word) for word in sys.argv[1:]]
    if len(seeds) == 1:
        print(simulate(seeds[0]))
        return
    began, histories = time.perf_counter(), [simulate(seed) for seed in range(seeds[0], seeds[1] + 1)]
    print(*(each for each in histories if each.broken), sep="\n\n")
    print_table(histories)
    seconds, processor = time.perf_counter() - began, time.process_time()
    print(f"{len(histories)} histories, {seconds:.0f} s, {processor:.0f} s of processor, load {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
