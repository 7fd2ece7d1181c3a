"""A study from its file to its result: trials asked for, played by workers, pruned, told, tracked and tested."""

from __future__ import annotations

import hashlib
import math
import os
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from narrowcast import __version__
from narrowcast.cluster.ray_backend import RayBackend
from narrowcast.cluster.ray_worker_pool import StepHosts
from narrowcast.cluster.worker_pool import Here, Lost, Over, Places
from narrowcast.experiment import Experiment
from narrowcast.platform.config import flatten
from narrowcast.platform.errors import RunFailed, UserError
from narrowcast.platform.interruption import STOPPING
from narrowcast.platform.run import Run
from narrowcast.platform.tracking.mlflow_run import check_store, open_run
from narrowcast.platform.tracking.store_address import hide_password
from narrowcast.platform.tracking.study_run import StudyStore, TrialRun
from narrowcast.runs.run_result import git_commit
from narrowcast.runs.session import writable
from narrowcast.tuning.holdout import Retested, retest
from narrowcast.tuning.storage import open_storage
from narrowcast.tuning.study_client import Asked, Ledger
from narrowcast.tuning.study_file import StudyFile
from narrowcast.tuning.study_plots import draw_study
from narrowcast.tuning.study_result import StudyResult, in_words, why_none, write_result
from narrowcast.tuning.study_settings import COSTS
from narrowcast.tuning.summary import TrialRow, best_trials, pareto_front, trial_row, write_table
from narrowcast.tuning.trial_folder import read_rounds, write_plain_yaml, write_trial
from narrowcast.tuning.trial_runner import Job, Jobs, Shared, Step, play_jobs

_WAIT_SECONDS = 5.0
_JOURNAL = "study.journal"


class Watch(Protocol):
    """Who looks on while a study goes."""

    def begun(self, number: int, values: Mapping[str, Any], rounds: int) -> None:
        """A trial starts."""
        ...

    def evaluated(self, number: int, row: Mapping[str, Any]) -> None:
        """A trial was evaluated."""
        ...

    def ended(self, row: TrialRow) -> None:
        """A trial is over."""
        ...

    def say(self, line: str) -> None:
        """Something else happened."""
        ...


@dataclass(frozen=True)
class PreparedStudy:
    """A study that has passed every check; the storage holds it and its folder is there."""

    file: StudyFile
    ledger: Ledger
    shared: Shared
    folder: Path
    uri: str
    storage: str


def check_study(file: StudyFile) -> Shared:
    """Check everything that a study needs beside its storage, and read its data."""
    base = file.build({})
    shared = Shared(base.data, base.data.load())
    file.check(shared.data)
    chosen = backend(file) if file.settings.backend == "ray" else base.backend
    chosen.check(Run(base, base.algorithm, base.task(shared.data)))
    return shared


def backend(file: StudyFile) -> RayBackend:
    """Where the workers are."""
    settings = file.settings
    return RayBackend(
        actors=settings.parallel,
        cpus_per_actor=settings.cpus_per_worker,
        gpus_per_actor=settings.gpus_per_worker,
        address=settings.address,
    )


def prepare_study(file: StudyFile, output: Path) -> PreparedStudy:
    """Check all, begin the study or join it, and take over what processes that are gone have left."""
    shared = check_study(file)
    writable(output)
    folder = output / file.name
    if (folder / "config.yaml").is_file():
        raise UserError(f"{folder} is a run's folder; give the study another name")
    uri = file.build({}).tracking.resolve(output)
    check_store(uri)
    storage = file.settings.storage or str(folder / _JOURNAL)
    opened = open_storage(storage, file.settings.patience_seconds)
    ledger = Ledger(file.name, opened, file.settings, file.space, file.digest())
    folder.mkdir(exist_ok=True)
    plain = {**file.plain, "study": {**file.plain["study"]}}
    if file.settings.storage:
        plain["study"]["storage"] = hide_password(file.settings.storage)
    write_plain_yaml(plain, folder / "study.yaml")
    return PreparedStudy(file, ledger, shared, folder, uri, storage)


@contextmanager
def places(file: StudyFile, shared: Shared) -> Iterator[Places]:
    """The workers, on Ray or here."""
    settings = file.settings
    if settings.backend == "local":
        yield Here(play_jobs, shared)
        return
    cpus = max(os.cpu_count() or 1, math.ceil(settings.parallel * settings.cpus_per_worker))
    with backend(file).cluster(cpus):
        yield StepHosts(play_jobs, shared, settings.parallel, settings.cpus_per_worker, settings.gpus_per_worker)


def run_study(prepared: PreparedStudy, watch: Watch) -> StudyResult:
    """Play trials until there are enough, then the best ones on test; raises `RunFailed` where none came through."""
    began = time.monotonic()
    store = StudyStore(prepared.uri, _parent(prepared))
    sweep = _Sweep(prepared, store, watch)
    sweep.agree(store.open())
    status = "FAILED"
    result: StudyResult | None = None
    try:
        with places(prepared.file, prepared.shared) as workers:
            sweep.play(workers)
            result = sweep.conclude(workers)
        status = "RUNNING" if result.elsewhere else "FINISHED"
    except KeyboardInterrupt:
        status = "KILLED"
        prepared.ledger.release()
        raise
    finally:
        sweep.agree(store.states())
        sent = store.close(prepared.file.build({}).tracking.flush_seconds)
        rows = [trial_row(trial, prepared.file.space) for trial in prepared.ledger.trials()]
        objectives, storage = prepared.file.settings.objectives, hide_password(prepared.storage)
        metrics = write_result(prepared.folder, objectives, storage, rows, result, time.monotonic() - began)
        files = [path for path in sorted(prepared.folder.iterdir()) if path.name not in ("trials", _JOURNAL)]
        note = in_words(objectives, rows, result)
        if not (store.finish(status, metrics, {"state": status.lower()}, note, files) and sent):
            watch.say("not all of this study is in MLflow yet; the same command sends the rest")
    return result


def _parent(prepared: PreparedStudy) -> str:
    """The parent run in this store; made by whoever comes first, waited for by those that join at the same time."""
    file, study = prepared.file, prepared.ledger.study
    where = prepared.uri if "://" in prepared.uri and not prepared.uri.startswith("sqlite") else socket.gethostname()
    key = "mlflow:" + hashlib.sha256(f"{where} {prepared.uri}".encode()).hexdigest()[:16]
    deadline = time.monotonic() + (0 if prepared.ledger.began else 2 * _WAIT_SECONDS)
    while key not in study.user_attrs and time.monotonic() < deadline and not prepared.ledger.trials():
        time.sleep(0.2)
    if key not in study.user_attrs:
        base = file.build({})
        params = flatten(base.plain()) | {f"study.{name}": value for name, value in flatten(_public(file)).items()}
        tags = {"kind": "study", "git_commit": git_commit() or "unknown", "narrowcast_version": __version__}
        data = prepared.shared.data
        _, run_id = open_run(base.tracking, prepared.folder.parent, file.name, params, tags, data)
        study.set_user_attr(key, run_id)
    return str(study.user_attrs[key])


def _public(file: StudyFile) -> dict[str, Any]:
    values: dict[str, Any] = file.settings.model_dump(mode="json", exclude={"storage", "address"})
    return values | {"space": {path: each.model_dump_json() for path, each in file.space.dimensions.items()}}


@dataclass
class _Sweep:
    prepared: PreparedStudy
    store: StudyStore
    watch: Watch
    asked: dict[int, Asked] = field(default_factory=dict)
    rows: dict[int, list[dict[str, Any]]] = field(default_factory=dict)

    def play(self, workers: Places) -> None:
        """Keep every worker at work until there are no more trials to ask for."""
        settings, ledger = self.prepared.file.settings, self.prepared.ledger
        free, at = list(range(settings.parallel)), dict[int, list[int]]()
        ends_at = time.monotonic() + (settings.timeout_seconds or math.inf)
        self._say_lost(ledger.take_over_lost())
        while True:
            _stop_if_asked()
            while free and time.monotonic() < ends_at and (jobs := self._ask(settings.trials_together)):
                at[free[0]] = [job.key for job in jobs]
                workers.begin(free.pop(0), Jobs(tuple(jobs), self.budget()))
            if not at:
                if self._say_lost(ledger.take_over_lost()) and time.monotonic() < ends_at:
                    continue
                if not ledger.played_elsewhere()[1]:
                    return
                time.sleep(1)  # asked for by someone who has not said so yet, or never will
                continue
            found = workers.next(_WAIT_SECONDS)
            ledger.beat()
            if found is None:
                self._say_lost(ledger.take_over_lost())
                continue
            place, what = found
            if isinstance(what, Lost):
                for number in at.pop(place):
                    if number in self.asked:
                        self._lose(number, what.reason)
            elif isinstance(what, Over):
                del at[place]
            else:
                workers.answer(place, [step.key for step in what if self._hear(step)])
                continue
            free.append(place)

    def budget(self) -> dict[str, float]:
        """What a trial may spend, by the columns of its rounds."""
        return {COSTS[name]: limit for name, limit in self.prepared.file.settings.budget.items()}

    def _ask(self, at_most: int) -> list[Job]:
        jobs: list[Job] = []
        while len(jobs) < at_most and (asked := self.prepared.ledger.ask()) is not None:
            jobs.append(Job(asked.number, self._experiments(asked)))
            self.asked[asked.number], self.rows[asked.number] = asked, []
            self.watch.begun(asked.number, asked.drawn, jobs[-1].experiments[0].rounds)
            self.store.put(self._run(TrialRow(asked.number, "running", asked.drawn, retry_of=asked.retry_of)))
        return jobs

    def _experiments(self, asked: Asked) -> tuple[Experiment, ...]:
        file = self.prepared.file
        return tuple(file.build(asked.drawn, seed) for seed in range(file.settings.seeds))

    def _hear(self, step: Step) -> bool:
        """Take a trial's step; whether the trial ends here."""
        ledger, number = self.prepared.ledger, step.key
        if step.row is None:
            self._end(number, None, step, reason=step.failed)
            return True
        self.rows[number].append({**step.row, "logged_at_ms": int(time.time() * 1000)})
        self.watch.evaluated(number, step.row)
        stopped = ledger.report(number, step.row)
        if step.over or stopped:
            self._end(number, step.row, step, pruned=not step.over)
            return True
        return False

    def _end(
        self, number: int, row: dict[str, Any] | None, step: Step, *, pruned: bool = False, reason: str = ""
    ) -> None:
        asked = self.asked.pop(number)
        rows = self.rows.pop(number)
        told = self.prepared.ledger.tell(number, row, pruned=pruned, reason=reason)
        if told.state == "lost":  # another process took it over, and says what came of it
            return
        config = self._config(asked.drawn, int(rows[-1]["round"]) if step.over else None)
        ended = self._row(number)
        write_trial(self.prepared.folder, ended, config, rows, step.model_sha256)
        self.store.put(self._run(ended, tuple(rows)))
        self.watch.ended(ended)

    def _config(self, drawn: Mapping[str, Any], rounds: int | None = None) -> dict[str, Any]:
        """What `narrowcast run` takes to play a trial again."""
        more = {"rounds": rounds} if rounds else {}
        return self.prepared.file.whole(drawn, **more).plain()

    def _lose(self, number: int, reason: str) -> None:
        self.prepared.ledger.lose(number, reason)
        self.asked.pop(number)
        lost = self._row(number)
        self.store.put(self._run(lost, tuple(self.rows.pop(number))))
        self.watch.ended(lost)

    def _say_lost(self, numbers: Sequence[int]) -> bool:
        for number in numbers:
            row = self._row(number)
            self.store.put(self._run(row))
            self.watch.ended(row)
        return bool(numbers)

    def _row(self, number: int) -> TrialRow:
        return trial_row(self.prepared.ledger.trials()[number], self.prepared.file.space)

    def _run(self, row: TrialRow, rows: tuple[Mapping[str, Any], ...] = ()) -> TrialRun:
        tags = {"feasible": str(row.feasible).lower()}
        if row.reason:
            tags["reason"] = row.reason
        if row.retry_of is not None:
            tags["retry_of"] = str(row.retry_of)
        if row.state == "pruned":
            tags["pruned_at_round"] = str(row.rounds)
        spent = {**row.amounts, "rounds_played": row.rounds} if row.amounts else {}
        if spent and rows:
            spent = {**spent, "round": row.rounds, "logged_at_ms": rows[-1]["logged_at_ms"]}
            new = {name: value for name, value in spent.items() if name not in rows[-1]}
            rows = (*rows, {**new, "round": row.rounds, "logged_at_ms": rows[-1]["logged_at_ms"]})
        # The number first, since MLflow's table cuts long names.
        name = f"{row.number:03d}-{self.prepared.file.name}"
        return TrialRun(str(row.number), name, row.state, row.drawn, tags, rows)

    def agree(self, known: Mapping[str, str]) -> None:
        """Send what the store says otherwise than the storage, of all trials for which no other process answers."""
        ledger = self.prepared.ledger
        for trial in ledger.trials():
            row = trial_row(trial, self.prepared.file.space)
            if row.state in ("waiting", "running") or known.get(str(row.number)) == row.state:
                continue
            if not ledger.answered_for(trial):
                self.store.put(self._run(row, read_rounds(self.prepared.folder, row.number)))

    def conclude(self, workers: Places) -> StudyResult:
        """Look at all trials together: tables, plots, the best configuration, and the best trials on test."""
        file, ledger, folder = self.prepared.file, self.prepared.ledger, self.prepared.folder
        rows = [trial_row(trial, file.space) for trial in ledger.trials()]
        write_table(rows, file.space, folder / "trials.csv")
        elsewhere, _ = ledger.played_elsewhere()
        complete = [row for row in rows if row.state == "complete"]
        if not complete and not elsewhere:
            raise RunFailed(why_none(file.name, rows))
        best = best_trials(rows, file.settings, max(1, file.settings.retest.trials))
        if not best and not elsewhere:
            raise RunFailed(
                f"none of the {len(complete)} complete trials keeps the constraints; loosen study.constraints, or look "
                f"at {folder / 'trials.csv'}"
            )
        front = pareto_front(rows, file.settings.objectives) if len(file.settings.objectives) > 1 else []
        files = [folder / "trials.csv"]
        if elsewhere:
            return StudyResult(rows, best, front, [], elsewhere, files)
        chosen = best[0]
        ended_early = chosen.rounds if file.settings.budget else None
        write_plain_yaml(self._config(chosen.drawn, ended_early), folder / "best.yaml")
        draw_study(ledger.study, rows, file.settings, file.space, chosen, folder / "plots")
        tested: Sequence[Retested] = []
        if file.settings.retest.trials:
            self.watch.say(f"the best {len(best)} trials on test, {file.settings.retest.seeds} new seeds each")
            tested = retest(file, best, folder / "retest", workers, self.budget(), self.store)
        return StudyResult(rows, best, front, tested, 0, [folder / "best.yaml", *files, folder / "plots"])


def _stop_if_asked() -> None:
    if STOPPING.is_set():
        raise KeyboardInterrupt  # the one that was raised was lost in a callback
