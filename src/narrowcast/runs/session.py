"""From an experiment or a solve to finished runs: prepare, then record every step until the outputs are written."""

from __future__ import annotations

import logging
import shlex
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack, closing
from glob import escape
from os.path import commonprefix
from pathlib import Path
from typing import Any, TypeVar

from narrowcast.cluster.resources import check_address_of
from narrowcast.experiment import Experiment, load_experiment, load_replicas
from narrowcast.platform.contracts import Dataset
from narrowcast.platform.errors import LearnedNothing, RunFailed, UserError
from narrowcast.platform.interruption import uninterrupted
from narrowcast.platform.outcome import Outcome
from narrowcast.platform.rounds import Rounds, lockstep
from narrowcast.platform.state import Interrupted
from narrowcast.runs.prepare import PreparedExperiment, load_data, prepare, prepare_lockstep, prepare_resume
from narrowcast.runs.prepare_solve import PreparedSolve, are_solves, prepare_solves
from narrowcast.runs.recordable import PreparedRun
from narrowcast.runs.recorder import OnRound, recorded
from narrowcast.runs.remarks import remarks
from narrowcast.runs.run_folder import CONFIG, find_run, has_run
from narrowcast.solve_run import Solve

logger = logging.getLogger(__name__)
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
        runs = [prepare(each, output, data) for each, data in zip(experiments, _load(experiments), strict=True)]
        for remark in remarks(first, runs[0].task, runs[0].state):
            logger.warning("%s", remark)
    return prepare_lockstep(runs) if len(runs) > 1 else runs


def _to_resume(name: str, output: Path) -> list[Path]:
    """Return the folder of a run, or those of a pattern such as `digits-seed-*`."""
    folder = find_run(name, output)
    if folder.is_dir() or "*" not in name:
        return [folder]
    return sorted(each.parent for each in output.glob(f"{name}/{CONFIG}")) or [folder]


def _load(experiments: Sequence[Experiment]) -> list[Dataset]:
    """Return the data of each experiment, one object for all that have the same."""
    by_source: dict[str, Dataset] = {}
    by_digest: dict[str, Dataset] = {}
    for each in experiments:
        source = repr(each.data_source)
        if source not in by_source:
            data = load_data(each)
            by_source[source] = by_digest.setdefault(data.digest, data) if len(experiments) > 1 else data
    return [by_source[repr(each.data_source)] for each in experiments]


def _prepare_named(folder: Path, source: Source | None, overrides: Sequence[str]) -> PreparedExperiment:
    config = folder / CONFIG
    changes = source is not None or (overrides and config.is_file())
    changed = load_experiment(str(config) if source is None else source, overrides) if changes else None
    return prepare_resume(folder, changed)


def begun(runs: Sequence[PreparedRun]) -> Sequence[PreparedRun]:
    """Return the runs that have a folder, which can be resumed."""
    return [each for each in runs if each.folder.is_dir()]


def resume_command(runs: Sequence[PreparedRun]) -> str:
    """Return the command that resumes those of these runs that have begun, many of them by a pattern of their names."""
    output, names = runs[0].folder.parent, [each.folder.name for each in begun(runs)]
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
    experiments = [each for each in runs if isinstance(each, PreparedExperiment)]
    if len(experiments) == len(runs):
        return run_replicas(experiments, on_round)
    return [_result_or_failure(each, on_round) for each in runs]


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
        with closing(outcomes), uninterrupted():
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
            stack.enter_context(recorded(each, on_round, monitored=place == 0)) for place, each in enumerate(runs)
        ]
        with closing(lockstep([each.run for each in runs], [each.state for each in runs])) as rounds, uninterrupted():
            try:
                while outcomes := _next_round(rounds, results.keys()):
                    for place, outcome in outcomes.items():
                        if isinstance(outcome, RunFailed):
                            results[place] = outcome
                        elif place not in results:
                            _try(results, place, recorders[place].write, outcome)
            except Interrupted as stop:
                for recorder, state in zip(recorders, stop.states, strict=True):
                    recorder.checkpoint(state)
                raise
        for place, recorder in enumerate(recorders):
            if place not in results and (result := _try(results, place, recorder.finish)) is not None:
                results[place] = result
    return [results[place] for place in range(len(runs))]


def _next_round(rounds: Rounds, ended: Collection[int]) -> dict[int, Outcome | RunFailed]:
    """Return the outcomes of the next round without the replicas that have ended; empty after the last one."""
    try:
        return rounds.send(ended or None)
    except StopIteration:
        return {}


def _try(results: dict[int, Any], place: int, step: Callable[..., ResultT], *arguments: Any) -> ResultT | None:
    """Call a step of a replica; if it learned nothing, keep that as its result and return None."""
    try:
        return step(*arguments)
    except LearnedNothing as error:
        results[place] = error
        return None


def failures(runs: Sequence[PreparedRun], results: Sequence[dict[str, Any] | RunFailed]) -> str:
    """Return which replicas failed and why, empty if none did."""
    pairs = zip(runs, results, strict=True)
    return "; ".join(f"{each.folder.name}: {error}" for each, error in pairs if isinstance(error, RunFailed))
