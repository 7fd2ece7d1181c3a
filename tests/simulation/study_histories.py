"""Histories of a study: processes on several hosts, with clocks of their own, that die, freeze and come back.

The client of the study, its leases and Optuna are the real ones, on Optuna's storage in memory. One seed decides whose
turn it is, for how long, and who dies.

    python tests/simulation/study_histories.py SEED
"""

from __future__ import annotations

import logging
import random
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import optuna
from optuna.storages import BaseStorage, InMemoryStorage
from optuna.trial import TrialState
from pydantic import TypeAdapter

from narrowcast.tuning import client
from narrowcast.tuning.client import ProposedTrial, StudyClient
from narrowcast.tuning.settings import StudySettings
from narrowcast.tuning.space import Dimension, Space

_DIMENSIONS = {"rank": [1, 2, 4, 8], "bits": [2, 4, 8]}
_ROUNDS = 4
_STALE_SECONDS = 60.0
_MOST_TURNS = 4000
_SETTINGS = {"objectives": {"validation.accuracy": "maximize"}, "sampler": "grid", "stale_seconds": _STALE_SECONDS}


def quality(params: dict[str, Any], round_index: int) -> float:
    return float(params["rank"] * params["bits"] * round_index)


@dataclass
class _Process:
    """A process of the study on its host, whose clock runs from a moment and at a pace of its own."""

    host: str
    pid: int
    starts_at: float
    pace: float
    skew: float
    client: StudyClient | None = None
    trial: ProposedTrial | None = None
    rounds: int = 0
    last_turn: float = 0.0
    finished: bool = False

    @property
    def identity(self) -> str:
        return f"{self.host}:{self.pid}:1.00"


@dataclass
class StudyHistory:
    """The log of a study, and the promises that were broken."""

    seed: int
    log: list[str] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)
    deaths: int = 0
    frozen: int = 0

    def __str__(self) -> str:
        return "\n".join([f"seed {self.seed}", *self.log, *self.broken])


class _Study:
    def __init__(self, seed: int) -> None:
        self.history = StudyHistory(seed)
        self.chances = random.Random(f"study {seed}")
        self.storage: BaseStorage = InMemoryStorage()
        self.now = 0.0
        self.pids = iter(range(1, 10**6))
        self.alive: list[_Process] = []
        self.deaths_left = self.chances.randint(0, 4)
        self.space = Space(TypeAdapter(dict[str, Dimension]).validate_python(_DIMENSIONS))
        self.settings = StudySettings(**_SETTINGS)

    def start(self, host: str) -> None:
        chances = self.chances
        skew = chances.choice((0.0, 3600.0, -3600.0))
        process = _Process(host, next(self.pids), chances.uniform(0, 1e6), chances.uniform(0.99, 1.01), skew)
        process.last_turn = self.now
        with self.turn_of(process):
            process.client = StudyClient(
                "s", self.storage, self.settings, self.space, "digest", lambda: self.clock_of(process)
            )
        self.alive.append(process)
        self.history.log.append(f"{self.now:.0f} s: {process.identity} starts, its wall clock {skew:+.0f} s off")

    def clock_of(self, process: _Process) -> float:
        return process.starts_at + process.pace * self.now

    @contextmanager
    def turn_of(self, process: _Process) -> Iterator[None]:
        running = {each.pid for each in self.alive if each.host == process.host}
        with (
            patch.object(client, "_process_identity", lambda: process.identity),
            patch.object(client.socket, "gethostname", lambda: process.host),
            patch.object(client, "_is_running", lambda pid, _: pid in running),
            patch.object(client.time, "time", lambda: 1.7e9 + self.now + process.skew),
        ):
            yield

    def simulate(self) -> StudyHistory:
        hosts = ["one", "two", self.chances.choice(("one", "three"))]
        for host in hosts:
            self.start(host)
        for _ in range(_MOST_TURNS):
            self.now += self.chances.choice((0.1, 1.0, 4.0))
            going = [each for each in self.alive if not each.finished]
            if not going:
                break
            process = self.chances.choice(going)
            # A process that trains sends a heartbeat every few seconds; one that is frozen sends none.
            late = [each for each in going if self.now - each.last_turn > 15]
            process = late[0] if late else process
            drawn = self.chances.random()
            if drawn < 0.03 and self.deaths_left:
                self.die(process)
            elif drawn < 0.05:
                self.history.frozen += 1
                self.history.log.append(f"{self.now:.0f} s: {process.identity} is frozen")
                self.now_frozen(process)
            else:
                self.step(process)
        else:
            self.history.broken.append("BROKEN: the study did not end")
        self.check()
        return self.history

    def now_frozen(self, process: _Process) -> None:
        """Let the others go on for minutes, then this one."""
        for _ in range(self.chances.choice((5, 60))):
            self.now += 4.0
            for each in [each for each in self.alive if each is not process and not each.finished]:
                self.step(each)
        process.last_turn = -1e9  # it may have lost its trials
        self.step(process)

    def die(self, process: _Process) -> None:
        self.deaths_left -= 1
        self.history.deaths += 1
        self.history.log.append(f"{self.now:.0f} s: {process.identity} is killed, with {process.trial}")
        self.alive.remove(process)
        self.start(process.host)

    def step(self, process: _Process) -> None:
        client = process.client
        assert client is not None
        with self.turn_of(process):
            client.heartbeat()
            for number in client.take_over_lost():
                self.taken(process, number)
            if process.trial is None:
                process.trial, process.rounds = client.ask(), 0
                if process.trial is None:
                    process.finished = not client.elsewhere()[1] and not sum(client.elsewhere())
            else:
                self.train(process, client, process.trial)
        process.last_turn = self.now

    def train(self, process: _Process, client: StudyClient, trial: ProposedTrial) -> None:
        process.rounds += 1
        row = {"round": process.rounds, "validation.accuracy": quality(trial.params, process.rounds)}
        row |= {"total_uplink_bits": 1, "total_downlink_bits": 1, "total_bits": 2, "simulated_seconds": 1.0}
        if client.report(trial.number, row) or process.rounds == _ROUNDS:
            state = client.tell(trial.number, row)
            self.history.log.append(f"{self.now:.0f} s: trial {trial.number} by {process.identity}: {state}")
            process.trial = None

    def taken(self, by: _Process, number: int) -> None:
        self.history.log.append(f"{self.now:.0f} s: {by.identity} takes over trial {number}")
        for each in self.alive:
            if (
                each.trial is not None
                and each.trial.number == number
                and self.now - each.last_turn < _STALE_SECONDS / 2
            ):
                self.history.broken.append(f"BROKEN: trial {number} of {each.identity}, alive, was taken over")

    def check(self) -> None:
        study = optuna.load_study(study_name="s", storage=self.storage)
        complete = [trial for trial in study.trials if trial.state == TrialState.COMPLETE]
        found = Counter((trial.params["rank"], trial.params["bits"]) for trial in complete)
        wanted = {(rank, bits) for rank in _DIMENSIONS["rank"] for bits in _DIMENSIONS["bits"]}
        # A configuration is given up once its processes were killed four times.
        if set(found) != wanted or set(found.values()) != {1}:
            self.history.broken.append(f"BROKEN: complete are {dict(found)}")
        for trial in complete:
            if trial.value != quality(trial.params, _ROUNDS):
                self.history.broken.append(f"BROKEN: trial {trial.number} has another result")
        if any(not trial.state.is_finished() for trial in study.trials):
            self.history.broken.append("BROKEN: a trial is left running or waiting")


def simulate_study(seed: int) -> StudyHistory:
    optuna.logging.set_verbosity(logging.ERROR)
    return _Study(seed).simulate()


if __name__ == "__main__":
    for word in sys.argv[1:]:
        print(simulate_study(int(word)))
