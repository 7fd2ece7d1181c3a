"""A study as one of the processes that work on it sees it: asking for trials, reporting, telling, taking over."""

from __future__ import annotations

import math
import os
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import optuna
import psutil
from optuna.exceptions import DuplicatedStudyError, UpdateFinishedTrialError
from optuna.pruners import NopPruner
from optuna.storages import BaseStorage
from optuna.trial import FrozenTrial, Trial, TrialState, create_trial

from narrowcast.platform.errors import UserError
from narrowcast.platform.interruption import uninterrupted
from narrowcast.tuning.pruning import Curve, ScalarPruning
from narrowcast.tuning.samplers import Keyed
from narrowcast.tuning.space import Space
from narrowcast.tuning.study_settings import StudySettings, amounts
from narrowcast.tuning.trial_attributes import AMOUNTS, CURVE, LOSSES, OWNER, REASON, RETRY_OF, VOID, counts

_BEAT_SECONDS = 5.0
_DIGEST, _BEAT = "digest", "alive:"


@dataclass(frozen=True)
class Asked:
    """A trial to be played."""

    number: int
    drawn: dict[str, Any]
    """By path, as it is stored; `Space.values` makes the experiment's values of it."""
    retry_of: int | None


@dataclass(frozen=True)
class Told:
    """What a trial came to."""

    state: str
    """complete, pruned or failed; lost where it belongs to another process by now."""
    values: Mapping[str, float]


class Ledger:
    """What this process asked for and has not told yet; everything else stands in the storage.

    Of trials whose worker or process died, each is ended and queued again by whoever notices first, unless that has
    happened to it too often. Which of two notices first is decided by the storage, in which only one can end a trial.
    """

    def __init__(self, name: str, storage: BaseStorage, settings: StudySettings, space: Space, digest: str) -> None:
        """Begin the study or join it; raises `UserError` where it was begun with something else to look for."""
        self._settings, self._space = settings, space
        directions = list(settings.objectives.values())
        pruner, several = settings.pruner.make(), len(directions) > 1
        sampler = Keyed(settings.sampler, settings.seed, space, settings.costs)
        options: dict[str, Any] = {"storage": storage, "sampler": sampler}
        options["pruner"] = NopPruner() if several else pruner
        try:
            self.study = optuna.create_study(study_name=name, directions=directions, **options)
            self.began = True
        except DuplicatedStudyError:
            self.study = optuna.load_study(study_name=name, **options)
            self.began = False
        if self.study.user_attrs.get(_DIGEST, digest) != digest:
            raise UserError(
                f"the study {name} was begun with another experiment, space or objectives; "
                "give this one another name (name: or --name), or go on with that one"
            )
        self.study.set_user_attr(_DIGEST, digest)
        self._owner = _identity_of_this_process()
        self._running: dict[int, Trial] = {}
        self._curves: dict[int, Curve] = {}
        self._beaten = 0.0
        self.n_trials = settings.n_trials(space)
        on = settings.pruned_on
        self._scalar = ScalarPruning(pruner, settings.objectives[on]) if several and on is not None else None

    def trials(self) -> list[FrozenTrial]:
        """All of them, in the order of their numbers."""
        return self.study.get_trials(deepcopy=False)

    def ask(self) -> Asked | None:
        """The next trial: one to be tried again, or a new one; None where there are enough."""
        while True:
            trials = self.trials()
            waiting = any(trial.state == TrialState.WAITING for trial in trials)
            if not waiting and sum(map(counts, trials)) >= self.n_trials:
                return None
            self.beat()
            if self._scalar:
                done = (trial for trial in trials if trial.state in (TrialState.COMPLETE, TrialState.PRUNED))
                self._scalar.learn((trial.number, trial.user_attrs.get(CURVE, ())) for trial in done)
            with uninterrupted():  # so that what was asked for is known to `release`
                trial = self.study.ask()
                trial.set_user_attr(OWNER, self._owner)
                self._running[trial.number] = trial
            place = sum(counts(each) for each in self.trials() if each.number < trial.number)
            if place < self.n_trials:
                break
            # Another process asked for the last one at the same moment.
            del self._running[trial.number]
            trial.set_user_attr(VOID, "one more than the study asks for")
            self.study.tell(trial, state=TrialState.FAIL)
        drawn = self._space.draw(trial)
        on = self._settings.pruner
        self._curves[trial.number] = Curve(getattr(on, "axis", "rounds"), getattr(on, "every", None))
        if self._scalar:
            self._scalar.begin(trial.number)
        return Asked(trial.number, drawn, trial.user_attrs.get(RETRY_OF))

    def report(self, number: int, row: Mapping[str, Any]) -> bool:
        """Take an evaluation; whether the trial is to be stopped here, since it is pruned or not ours any more."""
        on, trial = self._settings.pruned_on or next(iter(self._settings.objectives)), self._running[number]
        points = self._curves[number].extend(row, amounts(row)[on])
        try:
            if self._scalar:
                return self._scalar.stop(number, points)
            if len(self._settings.objectives) > 1:
                return False
            for step, value in points:
                trial.report(value, step)
            return bool(points) and trial.should_prune()
        except UpdateFinishedTrialError:
            return True

    def tell(self, number: int, row: Mapping[str, Any] | None, *, pruned: bool = False, reason: str = "") -> Told:
        """End a trial with the row of its last evaluation, or without one and the reason for which it failed."""
        trial, points = self._running.pop(number), self._curves.pop(number).points
        values = amounts(row) if row is not None else {}
        wanted = [values.get(name, float("nan")) for name in self._settings.objectives]
        failed = row is None or any(map(math.isnan, wanted))
        if failed and not reason:
            reason = "an objective is not a number"
        state = TrialState.FAIL if failed else TrialState.PRUNED if pruned else TrialState.COMPLETE
        if self._scalar:
            self._scalar.end(number, [] if failed else points)
        try:
            if row is not None:
                trial.set_user_attr(AMOUNTS, {"rounds": row["round"], **values})
            if self._scalar:
                trial.set_user_attr(CURVE, points)
            if reason:
                trial.set_user_attr(REASON, reason)
            if not failed:
                for name, bound in self._settings.constraints.items():
                    trial.set_constraint(name, bound.excess(values[name]))
            self.study.tell(trial, wanted if state == TrialState.COMPLETE else None, state)
        except (UpdateFinishedTrialError, ValueError):
            # Either the storage had taken our word before it went down, or another process took the trial over.
            stored = self.trials()[number]
            if stored.state != state or VOID in stored.user_attrs:
                return Told("lost", {})
        return Told({TrialState.FAIL: "failed"}.get(state, state.name.lower()), values)

    def lose(self, number: int, reason: str) -> None:
        """Give up a trial whose worker died, and queue it again if that is the first time."""
        self._running.pop(number)
        self._curves.pop(number)
        if self._scalar:
            self._scalar.end(number, [])
        self._take_over(self.trials()[number], reason, "worker")

    def release(self) -> None:
        """Hand back what is being played, since this process was asked to end; that does not count as a loss."""
        for number in list(self._running):
            self._running.pop(number)
            self._take_over(self.trials()[number], "interrupted", "signal")

    def beat(self) -> None:
        """Say that this process is alive, unless it just did."""
        if time.monotonic() - self._beaten > _BEAT_SECONDS:
            self.study.set_user_attr(_BEAT + self._owner, time.time())
            self._beaten = time.monotonic()

    def take_over_lost(self) -> list[int]:
        """End the trials of processes that are gone, and queue them again; their numbers."""
        attributes = self.study.user_attrs
        lost = [trial for trial in self._others() if not self._lives(trial, attributes)]
        return [trial.number for trial in lost if self._take_over(trial, "its process was killed", "process")]

    def played_elsewhere(self) -> tuple[int, int]:
        """How many trials other processes are at work on, and how many nobody has taken yet."""
        owned = [OWNER in trial.user_attrs for trial in self._others()]
        return sum(owned), len(owned) - sum(owned)

    def answered_for(self, trial: FrozenTrial) -> bool:
        """Whether another process that is still alive has played this trial, and so says what came of it."""
        owner = trial.user_attrs.get(OWNER)
        return owner is not None and owner != self._owner and self._lives(trial, self.study.user_attrs)

    def _others(self) -> list[FrozenTrial]:
        return [
            trial for trial in self.trials() if trial.state == TrialState.RUNNING and trial.number not in self._running
        ]

    def _lives(self, trial: FrozenTrial, attributes: Mapping[str, Any]) -> bool:
        owner = trial.user_attrs.get(OWNER)
        if owner is None:  # asked for a moment ago, or the answer to whoever asked was lost
            began = trial.datetime_start.timestamp() if trial.datetime_start else 0.0
            return time.time() - began < self._settings.stale_seconds
        if owner == self._owner:
            return False
        host, pid, started = owner.rsplit(":", 2)
        if host == socket.gethostname():
            return _is_running(int(pid), started)
        return time.time() - attributes.get(_BEAT + owner, 0.0) < self._settings.stale_seconds

    def _take_over(self, trial: FrozenTrial, reason: str, cause: str) -> bool:
        storage, losses = self.study._storage, dict(trial.user_attrs.get(LOSSES, {}))
        retry = losses.get(cause, 0) < RETRIES.get(cause, math.inf)
        losses[cause] = losses.get(cause, 0) + 1
        try:
            # Of a process killed while it drew, the rest is drawn here, with the trial's own seed.
            self._space.draw(Trial(self.study, trial._trial_id))
            if retry:
                storage.set_trial_user_attr(trial._trial_id, VOID, f"{reason}; tried again")
            storage.set_trial_user_attr(trial._trial_id, REASON, reason)
            storage.set_trial_state_values(trial._trial_id, TrialState.FAIL)
        except UpdateFinishedTrialError:  # its process lived, or another one was quicker
            return False
        if retry:
            attributes = {RETRY_OF: trial.number, LOSSES: losses}
            queued = {"fixed_params": self.trials()[trial.number].params}
            self.study.add_trial(create_trial(state=TrialState.WAITING, user_attrs=attributes, system_attrs=queued))
        return True


RETRIES = {"worker": 1, "process": 3}
"""How often a trial is begun again after its worker died, of which it may be the cause, or its whole process."""


def _identity_of_this_process() -> str:
    return f"{socket.gethostname()}:{os.getpid()}:{psutil.Process().create_time():.2f}"


def _is_running(pid: int, started: str) -> bool:
    try:
        process = psutil.Process(pid)
        return f"{process.create_time():.2f}" == started and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def draw_some(settings: StudySettings, space: Space, count: int) -> list[dict[str, Any]]:
    """What trials may have, without beginning a study: the first trial's values, and others from all over the space."""
    directions = list(settings.objectives.values())
    study = optuna.create_study(
        directions=directions, sampler=Keyed(settings.sampler, settings.seed, space, settings.costs)
    )
    if settings.sampler.kind == "grid":
        combinations = space.grid()
        return [combinations[place * len(combinations) // count] for place in range(count)]
    return [space.draw(study.ask()) for _ in range(count)]
