"""From an experiment or a solve to finished runs: prepare, then record every step until the outputs are written.

A step goes to the journal, to checkpoints and to MLflow. What MLflow missed while its store was down is sent later, by
`sync_run`.
"""

from __future__ import annotations

import logging
import shlex
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, replace
from glob import escape
from os.path import commonprefix
from pathlib import Path
from typing import Any, TypeVar

from narrowcast.cluster.decisions import check_address_of
from narrowcast.experiment import Experiment, load_experiment, load_replicas
from narrowcast.platform.config.files import command, flatten, validate
from narrowcast.platform.config.redaction import has_hidden
from narrowcast.platform.config.run_fields import StoreAddress, Tracking, host_of, local_path
from narrowcast.platform.config.trust import is_trusted, own_file
from narrowcast.platform.config.yaml import read_limited, read_yaml
from narrowcast.platform.data.dataset import Dataset
from narrowcast.platform.errors import NoLearningError, RunFailed, UnresumableFailure, UserError, remedy
from narrowcast.platform.rounds.loop import Rounds, lockstep
from narrowcast.platform.rounds.outcome import Outcome
from narrowcast.platform.rounds.state import Interrupted
from narrowcast.platform.storage.checkpoint import prune_checkpoints, remove_checkpoints, save_checkpoint
from narrowcast.platform.storage.disk import disk, remove_parts, remove_tree, writing
from narrowcast.platform.storage.host import defer_signals, host_clock
from narrowcast.platform.storage.journal import Journal, locked
from narrowcast.platform.tracking.cursor import Cursor
from narrowcast.platform.tracking.metrics import RunTargetCost, SolveTargetCost
from narrowcast.platform.tracking.sender import (
    Sender,
    check_store,
    close_run,
    monitor_system,
    open_run,
    reopen_run,
    why_lost,
)
from narrowcast.platform.types import KeptState, Step
from narrowcast.runs.folder import (
    CONFIG,
    RESULT,
    checkpoint_place,
    find_run,
    has_run,
    remove_local_checkpoints,
    write_config,
)
from narrowcast.runs.learning import ineffective_settings
from narrowcast.runs.prepared import (
    PreparedExperiment,
    PreparedSolve,
    are_solves,
    load_data,
    prepare,
    prepare_lockstep,
    prepare_resume,
    prepare_solves,
)
from narrowcast.runs.recordable import PreparedRun, WriteOutputs
from narrowcast.runs.result import kind_of
from narrowcast.solve_run import Solve


def closing_entries(result: Mapping[str, Any]) -> tuple[dict[str, str], dict[str, float]]:
    """Return the tags and metrics that a finished run is closed with in MLflow, from the content of `result.json`.

    These are the sha256 of the model or answer, and the costs of the targets.
    """
    name, kind = ("answer_sha256", SolveTargetCost) if "answer_sha256" in result else ("model_sha256", RunTargetCost)
    metrics = [kind.model_validate(target).metrics() for target in result["targets"]]
    return {name: result[name]}, {key: cost for costs in metrics for key, cost in costs.items()}


logger = logging.getLogger(__name__)
_TIMEOUT_SECONDS = 3600.0


def sync_run(folder: Path, uri: str | None) -> int:
    """Send the rounds and files that the MLflow store lacks of a run; return the number of rounds sent.

    `uri` overrides the store that the run started with. A store that does not have the run gets a new one, with all
    rounds. Raise `UserError` if a password is needed and not given, `RunFailed` if the store stops answering.
    """
    store = StoreAddress(uri, "user") if uri else _store(folder)
    if has_hidden(store.uri):
        raise UserError(f"{folder} was tracked at {store.uri}, whose password is not kept; give it with --tracking-uri")
    if store.named_by == "folder":
        _check_place(folder, store)
    with locked(folder):
        check_store(store, f"give --tracking-uri {store.shown}")
        cursor = _cursor(folder, store)
        journal = Journal.open(folder)
        sender = Sender(folder, store, cursor, journal)
        finished = (folder / RESULT).is_file()
        status = "FINISHED" if finished else cursor.status
        tags, costs = closing_entries(kind_of(folder).read_file(folder).model_dump()) if finished else ({}, {})
        if not (sender.close(_TIMEOUT_SECONDS, status) and close_run(folder, store, sender.cursor, tags, costs)):
            raise RunFailed(f"the store at {store.shown} went down again; later run: {command('sync', folder)}")
    return len(journal.rounds) - cursor.sent_rounds


def _store(folder: Path) -> StoreAddress:
    """Return the address of the environment, else that of the folder, which may be another person's.

    What the folder says of credentials counts where the user trusts it.
    """
    if (of_environment := Tracking().resolve(folder.parent)).named_by == "user":
        return of_environment
    has_config, trusted = (folder / CONFIG).is_file(), is_trusted(folder)
    known = Cursor.find(folder) if has_config else Cursor.load(folder)
    saved = _tracking(folder)[0] if known is None or (trusted and has_config) else Tracking()
    store = saved.model_copy(update={"uri": known.uri if known else saved.uri}).resolve(folder.parent)
    if store.named_by == "user" and trusted:
        return store
    return replace(store, named_by="folder")


def _check_place(folder: Path, store: StoreAddress) -> None:
    """Raise `UserError` for a store that a folder may not name.

    That is a database that would be made outside the folder's own place, and one whose driver would be called with
    options of the folder's choice: some of these read files, or load libraries.
    """
    path = local_path(store.uri)
    if path is None and host_of(store.uri) is None:
        raise UserError(
            f"{folder} was tracked at {store.shown}, a database, which is not opened by the word of a folder; give the "
            "address with --tracking-uri"
        )
    if path is not None and not path.exists() and not path.is_relative_to(folder.parent.resolve()):
        raise UserError(f"{folder} was tracked at {store.shown}, which is not there; give a store with --tracking-uri")


def _cursor(folder: Path, store: StoreAddress) -> Cursor:
    """Return the position in the run of the store, which is created if the store does not have it."""
    cursor = Cursor.find(folder)
    lost = why_lost(folder, store, cursor)
    if cursor is not None and not lost:
        return cursor
    tracking, params = _tracking(folder)
    tags, data = ({}, {}) if cursor is None else (cursor.tags, cursor.data)
    new = open_run(folder, tracking, params, tags, data, store)
    new = replace(new, status=cursor.status if cursor else new.status)
    new.save(folder)
    logger.warning("%s; its rounds go to a new run, %s", lost, new.run_id)
    return new


def _tracking(folder: Path) -> tuple[Tracking, dict[str, object]]:
    """Return the settings of the store, and all settings of the run by dotted path, without importing its classes."""
    path = own_file(folder, CONFIG)
    if not path.is_file():
        raise UserError(f"{folder} has no {CONFIG}, which its MLflow run is made from; give a run's folder")
    values = read_yaml(read_limited(path), str(path))
    return validate(Tracking, values.get("tracking") or {}, f"{path}: tracking"), flatten(values)


OnRound = Callable[[Mapping[str, Any]], None]
"""Called with the journal's row of each round or iteration, and the name of its `run`, once that is on disk."""


@dataclass
class Recorder:
    """Writes the steps of one run, and its outputs at the end."""

    prepared: PreparedRun
    journal: Journal
    sender: Sender
    on_round: OnRound
    watch: Callable[[Any], None]
    write_outputs: WriteOutputs
    """Has begun to draw what does not depend on the run, so it is made before the first step."""
    state: KeptState
    result: dict[str, Any] | None = None
    log_seconds: float = 0.0

    def write(self, outcome: Step) -> None:
        """Write a step to the journal, its state to a checkpoint if one is due, then report the step."""
        began = time.perf_counter()
        if self.journal.append(outcome, int(host_clock().wall() * 1000), self.log_seconds):
            self.sender.notify()
        if outcome.state is not None:
            self.checkpoint(outcome.state)
        self.on_round({"run": self.prepared.folder.name, **self.journal.row_of(outcome.step)})
        self.watch(outcome)
        self.log_seconds = time.perf_counter() - began

    def checkpoint(self, state: KeptState) -> None:
        """Write a checkpoint; raise `RunFailed` if it cannot be written, or if somebody has changed the journal."""
        self.state, config = state, self.prepared.config
        self.journal.check_file()
        self.journal.sync()  # a resume from the checkpoint needs the steps before it
        self._keep_config()
        address = checkpoint_place(config, self.prepared.folder)
        try:
            save_checkpoint(
                address, state, config.digest(), config.checkpoints_kept, data_sha256=self.prepared.input.digest
            )
        except OSError as error:
            raise RunFailed(
                f"cannot write a checkpoint to {address} ({error}); {remedy(error)}, then resume the run"
            ) from error

    def _keep_config(self) -> None:
        """Write `config.yaml` again if somebody has removed it: without it there is no run to resume or to read."""
        config, folder = self.prepared.config, self.prepared.folder
        if not (folder / CONFIG).is_file():
            logger.warning("%s was removed, and is written again", folder / CONFIG)
            write_config(config, folder)

    def finish(self, *, keep_checkpoints: bool = True) -> dict[str, Any]:
        """Write the outputs, `result.json` last, without interruption; remove the checkpoints unless they are kept.

        Raise `NoLearningError` if the run has no result.
        """
        config, folder = self.prepared.config, self.prepared.folder
        with defer_signals():
            self._keep_config()
            self.result = self.write_outputs(self.journal, self.state, self.sender.cursor.run_id)
            if keep_checkpoints:
                with suppress(OSError):  # the run has its result
                    prune_checkpoints(checkpoint_place(config, folder), self.state, config.checkpoints_kept)
            else:
                remove_local_checkpoints(config, folder)
        return self.result


@contextmanager
def recorded(prepared: PreparedRun, on_round: OnRound, *, monitored: bool = True) -> Iterator[Recorder]:
    """Open the run's folder and its MLflow run, new or resumed, and close both however the block ends.

    Raise `RunFailed` if the disk is full, or fails.
    """
    with writing(prepared.folder, "resume the run"):
        yield from _recorded(prepared, on_round, monitored)


def _recorded(prepared: PreparedRun, on_round: OnRound, monitored: bool) -> Iterator[Recorder]:
    folder = prepared.folder
    if prepared.resuming:
        with locked(folder):
            yield from _recording(prepared, _reopened(prepared), on_round, monitored)
        return
    try:
        disk().make_folder(folder)
        disk().sync(folder.parent)
    except FileExistsError:
        raise UserError(f"another run has just taken {folder}; start this one again") from None
    try:
        cursor = _opened(prepared)
    except BaseException:
        disk().remove_folder(folder)
        raise
    with locked(folder):
        yield from _recording(prepared, cursor, on_round, monitored)


def _opened(prepared: PreparedRun) -> Cursor:
    """Create the MLflow run."""
    config = prepared.config
    params = flatten(config.plain())
    return open_run(prepared.folder, config.tracking, params, prepared.tags(), prepared.input, prepared.store)


def _reopened(prepared: PreparedRun) -> Cursor:
    """Continue the MLflow run; if the store does not have it any more, create one that gets the rounds so far too."""
    folder, store = prepared.folder, prepared.store
    cursor = Cursor.find(folder)
    lost = why_lost(folder, store, cursor)
    if cursor is not None and not lost:
        reopen_run(store, cursor.run_id)
        return replace(cursor, closed=False)
    cursor = _opened(prepared)
    logger.warning("%s; its rounds go to a new run, %s", lost, cursor.run_id)
    return cursor


def _recording(prepared: PreparedRun, cursor: Cursor, on_round: OnRound, monitored: bool) -> Iterator[Recorder]:
    """Record a run whose MLflow run is open, and close that whatever is raised.

    A new run leaves no folder if it fails before its first checkpoint, or before its first step by what a resume would
    repeat.
    """
    config, folder, store = prepared.config, prepared.folder, prepared.store
    recorder: Recorder | None = None
    sender: Sender | None = None
    stop_monitor: Callable[[], None] | None = None
    resumable, interrupted, refused = prepared.resuming, False, True
    try:
        remove_parts(folder)
        cursor.save(folder)
        prepared.keep_inputs()
        write_config(config, folder)
        journal = Journal.open(folder, prepared.state.step)
        watch, write_outputs = prepared.watch(journal), prepared.begin_outputs()
        sender = Sender(folder, store, cursor, journal)
        measured = monitored and config.tracking.system_metrics
        stop_monitor = monitor_system(store, cursor.run_id, enabled=measured, resume=prepared.resuming)
        recorder = Recorder(prepared, journal, sender, on_round, watch, write_outputs, prepared.state)
        if not prepared.state.step:
            recorder.checkpoint(prepared.state)
        resumable = True
        yield recorder
    except BaseException as error:
        interrupted = isinstance(error, KeyboardInterrupt)
        refused = isinstance(error, UserError | UnresumableFailure)
        raise
    finally:
        result = None if recorder is None else recorder.result
        status = "FINISHED" if result else "KILLED" if interrupted else "FAILED"
        last_tags, costs = closing_entries(result) if result else ({}, {})
        closed = False
        try:
            if stop_monitor is not None:
                stop_monitor()
            sent = sender is None or sender.close(config.tracking.flush_seconds, status)
            last = replace(cursor, status=status) if sender is None else sender.cursor
            closed = sent and close_run(folder, store, last, {**prepared.tags(), **last_tags}, costs)
        finally:  # also if this is interrupted
            if refused and not prepared.resuming and not (recorder is not None and recorder.journal.rounds):
                resumable = False
                with suppress(OSError, UserError):
                    remove_checkpoints(checkpoint_place(config, folder))
            if not resumable:
                remove_tree(folder)
            elif not closed:
                logger.warning("not all of this run is in MLflow yet: narrowcast sync %s", folder)


_NAMES_SHOWN = 3
Prepared = Sequence[PreparedExperiment] | Sequence[PreparedSolve]
"""The runs of one command, of one kind."""
Source = str | Mapping[str, Any] | Experiment
"""An experiment: its name, the path of its file, its values, or itself."""
ResultT = TypeVar("ResultT")


def with_backend(overrides: Sequence[str], backend: str | None, address: str | None) -> list[str]:
    """Return the overrides with those of `--backend` and `--address`; an address implies Ray."""
    check_address_of(backend, address)
    # The kind comes first, since another kind discards the fields of the one before.
    kind = "ray" if address is not None else backend
    first = [f"backend.kind={kind}"] if kind is not None else []
    return [*first, *overrides, *([f'backend.address="{address}"'] if address is not None else [])]


def prepare_runs(
    source: Source | Solve | None,
    overrides: Sequence[str],
    output: Path,
    resume: Sequence[str] = (),
    *,
    resume_if_begun: bool = False,
) -> Prepared:
    """Prepare the runs of an experiment or of a solve, one for each replica, or those named by `resume`.

    With `resume_if_begun` a run of the same name that is in the output folder already is resumed.
    """
    if source is None and not resume:
        raise UserError("no experiment given; name a packaged one (narrowcast show lists them) or a YAML file")
    folders = [folder for name in resume for folder in _to_resume(name, output)]
    if are_solves(source, folders):
        return prepare_solves(source, overrides, output, folders, resume_if_begun=resume_if_begun)
    assert not isinstance(source, Solve)
    if folders:
        runs = [_prepare_named(folder, source, overrides) for folder in folders]
    else:
        assert source is not None
        experiments = load_replicas(source, overrides)
        first = experiments[0]
        if resume_if_begun and len(experiments) == 1 and has_run(output / first.name):
            return [prepare_resume(output / first.name, first)]
        runs = [
            prepare(experiment, output, data) for experiment, data in zip(experiments, _load(experiments), strict=True)
        ]
        for remark in ineffective_settings(first, runs[0].task, runs[0].state):
            logger.warning("%s", remark)
    return prepare_lockstep(runs) if len(runs) > 1 else runs


def _to_resume(name: str, output: Path) -> list[Path]:
    """Return the folder of a run, or those of a pattern such as `digits-seed-*`."""
    folder = find_run(name, output)
    if folder.is_dir() or "*" not in name:
        return [folder]
    return sorted(file.parent for file in output.glob(f"{name}/{CONFIG}")) or [folder]


def _load(experiments: Sequence[Experiment]) -> list[Dataset]:
    """Return the data of each experiment, one object for all that have the same."""
    by_source: dict[str, Dataset] = {}
    by_digest: dict[str, Dataset] = {}
    for experiment in experiments:
        source = repr(experiment.data_source)
        if source not in by_source:
            data = load_data(experiment)
            by_source[source] = by_digest.setdefault(data.digest, data) if len(experiments) > 1 else data
    return [by_source[repr(experiment.data_source)] for experiment in experiments]


def _prepare_named(folder: Path, source: Source | None, overrides: Sequence[str]) -> PreparedExperiment:
    config = folder / CONFIG
    changes = source is not None or (overrides and config.is_file())
    changed = load_experiment(str(config) if source is None else source, overrides) if changes else None
    return prepare_resume(folder, changed)


def begun(runs: Sequence[PreparedRun]) -> Sequence[PreparedRun]:
    """Return the runs that have a folder, which can be resumed."""
    return [prepared for prepared in runs if prepared.folder.is_dir()]


def resume_command(runs: Sequence[PreparedRun]) -> str:
    """Return the command that resumes those of these runs that have begun, many of them by a pattern of their names."""
    output, names = runs[0].folder.parent, [prepared.folder.name for prepared in begun(runs)]
    pattern = f"{escape(commonprefix(names))}*"  # noqa: RUF071 - the beginnings of names, not paths
    if len(names) > _NAMES_SHOWN and {path.name for path in output.glob(pattern) if path.is_dir()} == set(names):
        names = [pattern]
    words = (word for name in names for word in ("--resume", name))
    return shlex.join(["narrowcast", "run", *words, "--output", str(output)])


def run_all(runs: Prepared, on_round: OnRound) -> list[dict[str, Any] | RunFailed]:
    """Run one run, several experiments in lockstep, or several solves in turn.

    Return their results or failures in the same order; the failure of a single run is raised.
    """
    if len(runs) == 1:
        return [run(runs[0], on_round)]
    experiments = [prepared for prepared in runs if isinstance(prepared, PreparedExperiment)]
    if len(experiments) == len(runs):
        return run_replicas(experiments, on_round)
    return [_result_or_failure(prepared, on_round) for prepared in runs]


def _result_or_failure(prepared: PreparedRun, on_round: OnRound) -> dict[str, Any] | RunFailed:
    try:
        return run(prepared, on_round)
    except RunFailed as error:
        return error


def run(
    prepared: PreparedRun, on_round: OnRound, *, keep_checkpoints: bool = True, monitored: bool = True
) -> dict[str, Any]:
    """Run to the end and return the content of `result.json`.

    If it fails or is interrupted, the last checkpoint stays for a resume. Without `keep_checkpoints`, those on this
    machine, which may be gigabytes, are removed once the result is written. `monitored` runs record the machine's load.
    """
    with recorded(prepared, on_round, monitored=monitored) as recorder:
        outcomes = prepared.steps()
        with closing(outcomes), defer_signals():
            try:
                for outcome in outcomes:
                    recorder.write(outcome)
            except Interrupted as stop:
                recorder.checkpoint(stop.states[0])
                raise
        return recorder.finish(keep_checkpoints=keep_checkpoints)


def run_replicas(runs: Sequence[PreparedExperiment], on_round: OnRound) -> list[dict[str, Any] | RunFailed]:
    """Run replicas that share their data in lockstep, in this process; return each one's result or failure."""
    results: dict[int, dict[str, Any] | RunFailed] = {}
    with ExitStack() as stack:
        # The load of the machine is that of all replicas, so only the first one measures it.
        recorders = [
            stack.enter_context(recorded(run, on_round, monitored=index == 0)) for index, run in enumerate(runs)
        ]
        with (
            closing(lockstep([prepared.run for prepared in runs], [prepared.state for prepared in runs])) as rounds,
            defer_signals(),
        ):
            try:
                while outcomes := _next_round(rounds, results.keys()):
                    for index, outcome in outcomes.items():
                        if isinstance(outcome, RunFailed):
                            results[index] = outcome
                        elif index not in results:
                            _try(results, index, recorders[index].write, outcome)
            except Interrupted as stop:
                for recorder, state in zip(recorders, stop.states, strict=True):
                    recorder.checkpoint(state)
                raise
        for index, recorder in enumerate(recorders):
            if index not in results and (result := _try(results, index, recorder.finish)) is not None:
                results[index] = result
    return [results[index] for index in range(len(runs))]


def _next_round(rounds: Rounds, ended: Collection[int]) -> dict[int, Outcome | RunFailed]:
    """Return the outcomes of the next round without the replicas that have ended; empty after the last one."""
    try:
        return rounds.send(ended or None)
    except StopIteration:
        return {}


def _try(results: dict[int, Any], index: int, step: Callable[..., ResultT], *arguments: Any) -> ResultT | None:
    """Call a step of a replica; if it learned nothing, keep that as its result and return None."""
    try:
        return step(*arguments)
    except NoLearningError as error:
        results[index] = error
        return None


def failures(runs: Sequence[PreparedRun], results: Sequence[dict[str, Any] | RunFailed]) -> str:
    """Return which replicas failed and why, empty if none did."""
    pairs = zip(runs, results, strict=True)
    return "; ".join(f"{run.folder.name}: {error}" for run, error in pairs if isinstance(error, RunFailed))
