"""A process's client of a study in its Optuna storage: ask, report, tell, and retry the trials of dead processes.

Processes know that others are alive by leases, which need no clock that agrees with another.
"""

from __future__ import annotations

import hashlib
import math
import os
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import optuna
import psutil
from optuna.exceptions import DuplicatedStudyError, UpdateFinishedTrialError
from optuna.pruners import NopPruner
from optuna.storages import BaseStorage
from optuna.trial import FrozenTrial, Trial, TrialState

from narrowcast.platform.errors import UserError
from narrowcast.platform.storage.host import defer_signals
from narrowcast.tuning.pruning import LearningCurve, OneObjectivePruning
from narrowcast.tuning.samplers import PerTrialSeededSampler
from narrowcast.tuning.settings import StudySettings, trial_metrics
from narrowcast.tuning.space import Space
from narrowcast.tuning.trials import (
    CURVE,
    DISCARDED,
    LOSSES,
    METRICS,
    OWNER,
    REASON,
    RETRY_OF,
    SURPLUS,
    counts_towards_total,
)

State = Literal["active", "unknown", "expired"]


class Leases:
    """Observes the heartbeats of other processes: a lease expires when its heartbeat has not changed for `seconds`.

    Only this process's own monotonic clock is read. A beat is any value that its process changes every few seconds.
    """

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds, self._clock = seconds, clock
        self._seen: dict[str, tuple[Any, float, bool]] = {}

    def state(self, holder: str, beat: Any) -> State:
        """Return `active` if the beat has changed within `seconds`, `unknown` if only its first value was seen."""
        now = self._clock()
        before, since, changed = self._seen.get(holder, (beat, now, False))
        if beat != before:
            since, changed = now, True
        self._seen[holder] = beat, since, changed
        if now - since >= self._seconds:
            return "expired"
        return "active" if changed else "unknown"


_HEARTBEAT_SECONDS = 5.0
DIGEST, _HEARTBEAT = "digest", "alive:"  # attributes of the study
_DATA = "data_sha256:"
_RETRIES = {"worker": 1, "process": 3}
"""Retries of a trial whose worker died, which the trial may have caused, or whose whole process died."""


@dataclass(frozen=True)
class ProposedTrial:
    """A trial to run. `params` are by path as Optuna stores them; `Space.values` turns them into experiment values."""

    number: int
    params: dict[str, Any]
    retry_of: int | None


class StudyClient:
    """The trials that this process is running; everything else is in the storage.

    If a worker or a process dies, whichever process notices first ends its trials and queues them again, at most as
    often as `_RETRIES` allows. The storage lets only one process end a trial, which decides who was first.
    """

    def __init__(
        self,
        name: str,
        storage: BaseStorage,
        settings: StudySettings,
        space: Space,
        digest: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Create the study or join it; raise `UserError` if it was created with another `digest`."""
        self._storage, self._settings, self._space = storage, settings, space
        directions = list(settings.objectives.values())
        pruner, several = settings.pruner.make(), len(directions) > 1
        sampler = PerTrialSeededSampler(settings.sampler, settings.seed, space, settings.costs)
        options: dict[str, Any] = {"storage": storage, "sampler": sampler}
        options["pruner"] = NopPruner() if several else pruner
        try:
            self.study = optuna.create_study(study_name=name, directions=directions, **options)
            self.created = True
        except DuplicatedStudyError:
            self.study = optuna.load_study(study_name=name, **options)
            self.created = False
        if self.study.user_attrs.get(DIGEST, digest) != digest:
            raise UserError(
                f"the study {name} was begun with another experiment, space or objectives, or by an earlier version of "
                "narrowcast; give this one another name (name: or --name), or continue that one"
            )
        self.study.set_user_attr(DIGEST, digest)
        self._study_id = storage.get_study_id_from_name(name)
        self._owner = _process_identity()
        self._data: dict[str, str] = {}
        self._running: dict[int, Trial] = {}
        self._curves: dict[int, LearningCurve] = {}
        self._clock, self._last_heartbeat = clock, -math.inf
        self._leases = Leases(settings.stale_seconds, clock)
        self.n_trials = settings.n_trials(space)
        self._one_objective: OneObjectivePruning | None = None
        if several and (on := settings.pruned_on) is not None:
            self._one_objective = OneObjectivePruning(pruner, settings.objectives[on])

    def check_data(self, source: Any, sha256: str) -> None:
        """Raise `UserError` if the study has had other data from this source; versions before 0.3 kept no sha256."""
        key = data_key(source)
        if self._data.get(key) == sha256:
            return
        began_with = self.study.user_attrs.get(key)
        if began_with is None:
            self.study.set_user_attr(key, sha256)
        elif began_with != sha256:
            raise UserError(
                f"the study {self.study.study_name} was begun with other data from "
                f"{source.location or source.kind} (sha256 {began_with[:12]}, now {sha256[:12]}); put "
                "back the files as they were, or give this one another name (name: or --name)"
            )
        self._data[key] = sha256

    def trials(self) -> list[FrozenTrial]:
        """Return all trials in the order of their numbers."""
        return self.study.get_trials(deepcopy=False)

    def ask(self) -> ProposedTrial | None:
        """Return the next trial, a queued retry or a new one; None if there are enough."""
        while True:
            trials = self.trials()
            queued = any(trial.state == TrialState.WAITING for trial in trials)
            if not queued and sum(map(counts_towards_total, trials)) >= self.n_trials:
                return None
            self.heartbeat()
            if self._one_objective:
                done = (trial for trial in trials if trial.state in (TrialState.COMPLETE, TrialState.PRUNED))
                self._one_objective.add_finished((trial.number, trial.user_attrs.get(CURVE, ())) for trial in done)
            with defer_signals():  # so that `release` knows every trial that this process has asked for
                trial = self.study.ask()
                trial.set_user_attr(OWNER, self._owner)
                self._running[trial.number] = trial
            before = sum(counts_towards_total(earlier) for earlier in self.trials() if earlier.number < trial.number)
            if before < self.n_trials:
                break
            # Another process asked for the last trial at the same moment.
            del self._running[trial.number]
            trial.set_user_attr(DISCARDED, SURPLUS)
            self.study.tell(trial, state=TrialState.FAIL)
        params = self._space.draw(trial)
        steps = self._settings.pruner.steps
        curve = LearningCurve(steps.axis, steps.every)
        self._curves[trial.number] = curve
        if self._one_objective:
            self._one_objective.begin(trial.number)
        return ProposedTrial(trial.number, params, trial.user_attrs.get(RETRY_OF))

    def report(self, number: int, row: Mapping[str, Any]) -> bool:
        """Report an evaluation; return whether to stop the trial, because it is pruned or another process has it."""
        on, trial = self._settings.pruned_on or next(iter(self._settings.objectives)), self._running[number]
        points = self._curves[number].extend(row, trial_metrics(row)[on])
        try:
            if self._one_objective:
                return self._one_objective.report(number, points)
            if len(self._settings.objectives) > 1:
                return False
            for step, value in points:
                trial.report(value, step)
            return bool(points) and trial.should_prune()
        except UpdateFinishedTrialError:
            return True

    def tell(self, number: int, row: Mapping[str, Any] | None, *, pruned: bool = False, reason: str = "") -> str:
        """End a trial with its last evaluation, or with None and the reason why it failed.

        Return complete, pruned or failed; or lost, if another process has taken the trial over.
        """
        trial, points = self._running.pop(number), self._curves.pop(number).points
        metrics = trial_metrics(row) if row is not None else {}
        values = [metrics.get(name, float("nan")) for name in self._settings.objectives]
        failed = row is None or any(map(math.isnan, values))
        if failed and not reason:
            reason = "an objective is not a number"
        state = TrialState.FAIL if failed else TrialState.PRUNED if pruned else TrialState.COMPLETE
        if self._one_objective:
            self._one_objective.end(number, [] if failed else points)
        try:
            if row is not None:
                trial.set_user_attr(METRICS, {"rounds": row["round"], **metrics})
            if self._one_objective:
                trial.set_user_attr(CURVE, points)
            if reason:
                trial.set_user_attr(REASON, reason)
            if not failed:
                for name, bound in self._settings.constraints.items():
                    trial.set_constraint(name, bound.excess(metrics[name]))
            self.study.tell(trial, values if state == TrialState.COMPLETE else None, state)
        except (UpdateFinishedTrialError, ValueError):
            # The storage had stored this state before it went down, or another process took the trial over.
            stored = self.trials()[number]
            if stored.state != state or DISCARDED in stored.user_attrs:
                return "lost"
        return "failed" if state == TrialState.FAIL else state.name.lower()

    def worker_died(self, number: int, reason: str) -> None:
        """End a trial whose worker died, and queue it again the first time."""
        self._running.pop(number)
        self._curves.pop(number)
        if self._one_objective:
            self._one_objective.end(number, [])
        self._end_lost(self.trials()[number], reason, "worker")

    def release(self) -> None:
        """End and queue again all trials of this process, which was interrupted; it does not count as a loss."""
        for number in list(self._running):
            self._running.pop(number)
            self._end_lost(self.trials()[number], "interrupted", "signal")

    def heartbeat(self) -> None:
        """Record that this process is alive, unless it did so in the last seconds."""
        now = self._clock()
        if now - self._last_heartbeat > _HEARTBEAT_SECONDS:
            self.study.set_user_attr(_HEARTBEAT + self._owner, time.time())  # read for its changes alone
            self._last_heartbeat = now

    def take_over_lost(self) -> list[int]:
        """End and queue again the trials of dead processes; return their numbers."""
        attributes = self.study.user_attrs
        lost = [trial for trial in self._running_elsewhere() if self._lease(trial, attributes) == "expired"]
        return [trial.number for trial in lost if self._end_lost(trial, "its process was killed", "process")]

    def elsewhere(self) -> tuple[int, int]:
        """Return the numbers of trials that live processes are running, and of those that may have lost theirs."""
        attributes = self.study.user_attrs
        active = [self._lease(trial, attributes) == "active" for trial in self._running_elsewhere()]
        return sum(active), len(active) - sum(active)

    def is_owned_elsewhere(self, trial: FrozenTrial) -> bool:
        """Return whether the trial belongs to another live process, which reports its end."""
        owner = trial.user_attrs.get(OWNER)
        return owner is not None and owner != self._owner and self._lease(trial, self.study.user_attrs) != "expired"

    def _running_elsewhere(self) -> list[FrozenTrial]:
        running = (trial for trial in self.trials() if trial.state == TrialState.RUNNING)
        return [trial for trial in running if trial.number not in self._running]

    def _lease(self, trial: FrozenTrial, attributes: Mapping[str, Any]) -> State:
        owner = trial.user_attrs.get(OWNER)
        if owner is None:  # asked for a moment ago, or the answer to the process that asked was lost
            return self._leases.state(f"trial {trial.number}", None)
        if owner == self._owner:
            return "expired"
        host, pid, started = owner.rsplit(":", 2)
        if host == socket.gethostname():
            return "active" if _is_running(int(pid), started) else "expired"
        return self._leases.state(owner, attributes.get(_HEARTBEAT + owner))

    def _end_lost(self, trial: FrozenTrial, reason: str, cause: str) -> bool:
        """End a lost trial and queue it again if it may be retried; return False if another process was quicker."""
        losses = dict(trial.user_attrs.get(LOSSES, {}))
        retry = losses.get(cause, 0) < _RETRIES.get(cause, math.inf)
        losses[cause] = losses.get(cause, 0) + 1
        trial_id = self._storage.get_trial_id_from_study_id_trial_number(self._study_id, trial.number)
        try:
            # If the process was killed while it drew, the rest is drawn here, with the trial's own seed.
            self._space.draw(Trial(self.study, trial_id))
            if retry:
                self._storage.set_trial_user_attr(trial_id, DISCARDED, f"{reason}; tried again")
            self._storage.set_trial_user_attr(trial_id, REASON, reason)
            self._storage.set_trial_state_values(trial_id, TrialState.FAIL)
        except UpdateFinishedTrialError:
            return False
        if retry:
            self.study.enqueue_trial(self.trials()[trial.number].params, {RETRY_OF: trial.number, LOSSES: losses})
        return True


def data_key(source: Any) -> str:
    """Return the attribute of a study that has the sha256 of the data from a source."""
    return _DATA + hashlib.sha256(repr(source).encode()).hexdigest()[:16]


def _process_identity() -> str:
    return f"{socket.gethostname()}:{os.getpid()}:{psutil.Process().create_time():.2f}"


def _is_running(pid: int, started: str) -> bool:
    try:
        process = psutil.Process(pid)
        return f"{process.create_time():.2f}" == started and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def draw_without_study(settings: StudySettings, space: Space, count: int) -> list[dict[str, Any]]:
    """Draw parameters as trials get them, without a stored study: the first trial's, then more from the whole space."""
    if settings.sampler.kind == "grid":
        combinations = space.grid()
        return [combinations[index * len(combinations) // count] for index in range(count)]
    sampler = PerTrialSeededSampler(settings.sampler, settings.seed, space, settings.costs)
    study = optuna.create_study(directions=list(settings.objectives.values()), sampler=sampler)
    return [space.draw(study.ask()) for _ in range(count)]
