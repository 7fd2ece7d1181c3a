"""The public API: the functions of `nc`, and the classes that experiments are made of, by their names.

The functions raise `UserError` for bad input and `RunFailed` for a run that could not be finished. All of them may be
called from a script, a notebook, a thread, or a coroutine (`await asyncio.to_thread(nc.run, ...)` keeps its loop
responsive).
"""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Literal

from narrowcast.cluster.decisions import check_address_of
from narrowcast.packaged import read_benchmark, read_experiment, read_study
from narrowcast.platform.config import plugins
from narrowcast.platform.config.fields import check_name
from narrowcast.platform.config.files import suggest
from narrowcast.platform.config.kinds import plain_values
from narrowcast.platform.config.plugins import check_installed
from narrowcast.platform.config.run_fields import Identified
from narrowcast.platform.config.yaml import write_yaml
from narrowcast.platform.errors import RunFailed, UnresumableFailure, UserError, shown
from narrowcast.runs.finished_run import FinishedRun
from narrowcast.runs.folder import CONFIG, RESULT, find_run, find_runs
from narrowcast.runs.result import Result, load_any

if TYPE_CHECKING:
    from narrowcast.benchmarking.result import BenchmarkResult
    from narrowcast.cluster.job import ClusterJob
    from narrowcast.experiment import Experiment
    from narrowcast.platform.rounds.outcome import Outcome
    from narrowcast.platform.solving import Iteration
    from narrowcast.runs.comparison import Comparison
    from narrowcast.runs.result import SolveResult
    from narrowcast.runs.session import Prepared
    from narrowcast.solve_run import Solve
    from narrowcast.tuning.result import StudyResult


REGISTRY_NAMES = {
    "aggregators": "aggregator",
    "algorithms": "algorithm",
    "allocations": "allocation",
    "attacks": "attack",
    "availabilities": "availability",
    "backends": "backend",
    "channels": "channel",
    "codecs": "codec",
    "data": "data",
    "downlinks": "downlink",
    "fleets": "fleet",
    "learning_rate_schedules": "learning_rate_schedule",
    "server_optimizers": "server_optimizer",
    "losses": "loss",
    "metrics": "metric",
    "models": "model",
    "partitions": "partition",
    "problems": "problem",
    "rank_policies": "rank_policy",
    "samplings": "sampling",
    "schedules": "schedule",
    "secure": "secure",
    "solvers": "solver",
    "topologies": "topology",
    "training": "training",
}


class Namespace:
    """The classes of one registry: those of the catalog, and those of installed packages by their entry points.

    They are attributes, such as `nc.data.Digits`, `nc.models.MLP` and `nc.codecs.Quantise`, and are imported when one
    of them is first used.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def _kinds(self) -> dict[str, str]:
        """Return the kind of each class by the name of the class."""
        from narrowcast.platform.config.catalog import REGISTRIES

        registry = REGISTRIES[REGISTRY_NAMES[self._name]]
        installed = {spec.rpartition(":")[2]: kind for kind, spec in plugins.entry_points(registry.name).items()}
        return installed | {name: kind for kind, name in registry.names().items()}

    def __getattr__(self, name: str) -> Any:
        if not name[:1].isupper():  # no class, but what Python and IPython look for in any object
            raise AttributeError(f"narrowcast.{self._name} has no {name}")
        from narrowcast.platform.config.catalog import REGISTRIES

        kinds = self._kinds()
        if name not in kinds:
            known = ", ".join(kinds)
            raise AttributeError(f"narrowcast.{self._name} has no {name}; it has {known}{suggest(name, kinds)}")
        return REGISTRIES[REGISTRY_NAMES[self._name]].resolve(kinds[name])

    def __dir__(self) -> list[str]:
        return list(self._kinds())

    def __repr__(self) -> str:
        return f"narrowcast.{self._name}: {', '.join(self._kinds())}"


def __getattr__(name: str) -> Namespace:
    if name not in REGISTRY_NAMES:
        raise AttributeError(name)
    return Namespace(name)


def check_source(source: str, overrides: Sequence[str]) -> None:
    """Raise `UserError` if there is nothing of this name to submit, or a study that would be refused on the cluster.

    What needs the data, which lie on the cluster, is checked there. An experiment is read when it is packed.
    """
    check_installed("aiohttp", "submit")
    if (benchmark := read_benchmark(source, overrides)) is not None:
        from narrowcast.benchmarking.file import load_benchmark

        load_benchmark(source, [*overrides, *["backend=ray"] * ("backend" not in benchmark)])  # as on the cluster
    elif read_study(source, ()) is None:
        read_experiment(source)
    elif find_spec("optuna") is not None:  # submitting a study does not need it
        from narrowcast.tuning.study_file import load_study

        file = load_study(source, overrides)
        file.build({})  # raises for the experiment of its trials
        file.settings.check_names(file.subject.section, file.subject.costs)


if TYPE_CHECKING:
    Source = str | Path | Mapping[str, Any] | Experiment
    _Runs = Result | SolveResult | str | Path | Iterable[Result | SolveResult | str | Path]
Overrides = Mapping[str, Any]
Backend = Literal["local", "ray"]
OnRound = Callable[[Mapping[str, Any]], None]
logger = logging.getLogger(__name__)
# Libraries that import tqdm for notebooks warn of missing widgets, which nothing here needs.
warnings.filterwarnings("ignore", message="IProgress not found")


def run(
    experiment: Source | Solve | None = None,
    overrides: Overrides | None = None,
    *,
    backend: Backend | None = None,
    address: str | None = None,
    output: str | Path = "runs",
    resume: bool | str | Sequence[str] = False,
    progress: bool | OnRound = True,
) -> Result | Any:
    """Run an experiment and return its result.

    Args:
        experiment: the name of a packaged experiment, the path of a YAML file, the values of such a file as a mapping,
            or an `Experiment`.
        overrides: values by dotted path, such as `{"algorithm.rank": 8, "rounds": 200}`; a nested mapping, such as
            `{"algorithm": {"rank": 8}}`, sets the same fields.
        backend: `local` for this process or `ray` for Ray actors; the experiment's own by default.
        address: a running Ray cluster to join, as `HOST:PORT` or `auto`; implies Ray.
        output: folder of all runs; the run writes `output/NAME`, or `NAME-2` and so on if that exists.
        resume: True to resume the run of the experiment's name if there is one in `output`; or the name of a run, or
            several, to resume, for which `experiment` may be left out.
        progress: False for no output, or a function that is called with the journal's row of each round
            and, as `run`, the name of its run.

    Returns:
        A `Result`, or a list of them if the experiment has several replicas.

    Raises:
        UserError: bad input; nothing was written.
        RunFailed: the run could not be finished.
        KeyboardInterrupt: it was interrupted; `resume` continues from the last finished round.

    """
    from narrowcast.runs import session

    settings = session.with_backend(_as_text(overrides), backend, address)
    names = _names(resume)
    source = None if experiment is None else _source(experiment)
    runs = session.prepare_runs(source, settings, _folder(output), names, resume_if_begun=resume is True)
    with _on_round(runs, progress) as on_round, _noting_resume(runs):
        outcomes = session.run_all(runs, on_round)
    if failed := session.failures(runs, outcomes):
        raise RunFailed(failed)
    results = [load_any(prepared.folder) for prepared in runs]
    return results[0] if len(results) == 1 else results


def solve(
    problem: str | Path | Mapping[str, Any] | Solve | None = None,
    overrides: Overrides | None = None,
    *,
    output: str | Path = "runs",
    resume: bool | str | Sequence[str] = False,
    progress: bool | OnRound = True,
) -> SolveResult | Any:
    """Solve a problem without clients and return the result, or a list of them if there are several replicas.

    Args:
        problem: the name of a packaged solve, the path of a YAML file, its values as a mapping, or a `Solve`.
        overrides: values by dotted path, such as `{"solver.rank": 8, "iterations": 200}`.
        output: folder of all runs, as for `run`.
        resume: True to resume the run of the same name if there is one in `output`; or the name of a run, or several.
        progress: False for no output, or a function that is called with the journal's row of each recorded iteration.

    Raises:
        UserError: bad input; nothing was written.
        RunFailed: the solver diverged, or the run could not be finished.

    """
    return run(problem, overrides, output=output, resume=resume, progress=progress)


def iterations(
    problem: str | Path | Mapping[str, Any] | Solve, overrides: Overrides | None = None
) -> Iterator[Iteration]:
    """Solve a problem without a folder and without MLflow, and yield each recorded iteration.

    An iteration has `step`, `residual`, `solver_seconds`, `metrics` (empty if the answer was not measured) and `state`
    (a checkpoint, if one is due; the last iteration always has one).
    """
    from narrowcast.platform.solving import begin, iterations, loaded_problem
    from narrowcast.solve_run import load_solve

    loaded = load_solve(_source(problem), _as_text(overrides))
    posed = loaded_problem(loaded.problem_source)
    loaded.solver.check(posed)
    yield from iterations(posed, loaded.solver, loaded, begin(posed, loaded.solver, loaded.seed))


def rounds(
    experiment: Source, overrides: Overrides | None = None, *, backend: Backend | None = None
) -> Iterator[Outcome]:
    """Run an experiment without a folder and without MLflow, and yield the outcome of each round.

    An outcome has `record` (bits, seconds and loss of the round), `ledger` (the same by client), `metrics` (empty if
    the round was not evaluated) and `state` (a checkpoint, if one is due; the last round always has one).
    """
    from narrowcast.experiment import load_experiment
    from narrowcast.platform.data.soundness import load_checked
    from narrowcast.platform.rounds.state import Run, start
    from narrowcast.runs import session
    from narrowcast.runs.learning import why_in_vain

    loaded = load_experiment(_source(experiment), session.with_backend(_as_text(overrides), backend, None))
    task = loaded.task(load_checked(loaded.data_source))
    run = Run(loaded, loaded.secured_algorithm, task)
    loaded.backend.check(run)
    warned = False
    for outcome in loaded.backend.run(run, start(run)):
        if outcome.record.clients and not outcome.record.delivered and not warned:
            warned = True
            cause = why_in_vain(loaded, vars(outcome.ledger))
            logger.warning("round %d: no upload was used: %s", outcome.record.round, cause)
        yield outcome


def load_run(run: str | Path, *, output: str | Path = "runs") -> Result | Any:
    """Return a finished run, given by its name in the output folder or by the path of its folder.

    That of an experiment is a `Result`, that of a solve a `SolveResult`.
    """
    return load_any(find_run(run, _folder(output)))


def compare(
    runs: _Runs,
    *,
    output: str | Path = "runs",
    by_seed: bool = True,
    against: str | None = None,
    columns: Sequence[str] | None = None,
) -> Comparison | Any:
    """Return a comparison of finished runs: `.table` is a DataFrame, `.plot()` a figure, `.latex()` a table.

    That of solves is a `SolveComparison`; solves and experiments have no common table. Beside runs whose clients have
    models of their own stand their controls, runs of `local` and `fine_tune` that differ in the algorithm alone: those
    in the same folder are added, and `.remarks` says which are missing, and which are better.

    Args:
        runs: results, names of runs in `output`, folders of runs, folders of several, such as a benchmark's, or
            patterns, such as `fedavg-*`; one of these or several. Of a pattern, unfinished runs are left out.
        output: folder of all runs.
        by_seed: group runs that differ only in their seeds, as means with standard deviations.
        against: the name of a group or of a run in it: the differences of the others from it are paired by seed, with
            intervals of 95 % and p values corrected by Holm.
        columns: columns of the results, in the names of `.table`: `test.accuracy`, `uplink_bits`, ..., any other metric
            that was recorded, and settings by dotted path; the usual ones by default.

    """
    from narrowcast.runs.comparison import Comparison, SolveComparison
    from narrowcast.runs.controls import controls_beside
    from narrowcast.runs.result import SolveResult

    results = [load_any(run) if isinstance(run, Path) else run for run in _found(runs, output)]
    solves = [result for result in results if isinstance(result, SolveResult)]
    experiments = [result for result in results if isinstance(result, Result)]
    if solves and experiments:
        raise UserError(
            f"{solves[0].name} is a solve and {experiments[0].name} is not, so that they have no common costs; "
            "compare runs of one kind"
        )
    chosen = None if columns is None else tuple(columns)
    if solves and against is not None:
        raise UserError("solves are not grouped by seed, so that they have no paired differences; leave out against")
    comparison: Comparison | SolveComparison
    if solves:
        comparison = SolveComparison(tuple(solves), chosen)
    else:
        controls = controls_beside(experiments)
        added = tuple(control.name for control in controls)
        comparison = Comparison((*experiments, *controls), chosen, by_seed, against, added)
    comparison.text_tables()  # refuses unknown names before anything is written
    return comparison


def site(
    runs: _Runs | None = None,
    folder: str | Path = "site",
    *,
    output: str | Path = "runs",
    metrics: Sequence[str] = (),
    tolerances: Sequence[float] | None = None,
    within: Sequence[float] | None = None,
) -> Path:
    """Write the site of a benchmark, static pages that compare solves, and return its first page.

    Args:
        runs: results, names of runs in `output`, folders of runs or of several, such as a benchmark's, or patterns;
            all solves in `output` by default.
        folder: folder of the pages.
        output: folder of all runs.
        metrics: errors to go by, of which each problem has the first that it measures; by default its first error on
            test data.
        tolerances: errors that are goals; the first one is shown at first. 1e-4, 1e-2 and 1e-8 by default.
        within: goals relative to the least error of any run on a problem; 0.01, 1 % above it, by default.

    """
    from narrowcast.benchmarking.benchmark_site import TOLERANCES, WITHIN, write_site
    from narrowcast.benchmarking.solve_grid import read_grid, solve_folders

    solves = _found(solve_folders(_folder(output)) if runs is None else runs, output, CONFIG)
    grid = read_grid([run if isinstance(run, Path) else run.folder for run in solves], metrics)
    goals = TOLERANCES if tolerances is None else tolerances, WITHIN if within is None else within
    return write_site(grid, Path(folder), *goals)


def _found(runs: Any, output: str | Path, file: str = RESULT) -> list[Any]:
    """Return results as they are, and the folders that names and patterns stand for, each of them once."""
    sources = [runs] if isinstance(runs, str | Path | FinishedRun) else runs
    if not isinstance(sources, Iterable):
        raise UserError(f"{shown(runs)} is not a run; give its name, its folder, a result, or a list of these")
    by_folder: dict[Path, Any] = {}
    for run in sources:
        if isinstance(run, str | Path):
            by_folder |= {folder.resolve(): folder for folder in find_runs([run], _folder(output), file)}
        elif isinstance(run, FinishedRun):
            by_folder[run.folder.resolve()] = run
        else:
            raise UserError(f"{shown(run)} is not a run; give its name, its folder, or a result")
    return list(by_folder.values())


def tune(
    study: str | Path | Mapping[str, Any],
    overrides: Overrides | None = None,
    *,
    backend: Backend | None = None,
    address: str | None = None,
    storage: str | None = None,
    output: str | Path = "runs",
) -> StudyResult:
    """Tune an experiment's hyperparameters and return the result of the study.

    Args:
        study: the name of a packaged study, the path of a YAML file, or its values as a mapping.
        overrides: values by dotted path, such as `{"study.trials": 20, "experiment.rounds": 50}`.
        backend: `local` for this process or `ray` for Ray workers.
        address: a running Ray cluster to join; implies Ray.
        storage: a database URL, or a journal file, that several machines can reach.
        output: folder of all runs and studies. Calling `tune` again resumes the study.

    """
    from narrowcast.runs.terminal_output import PlainConsole

    check_installed("optuna", "tune")
    from narrowcast.tuning.display import StudyDisplay
    from narrowcast.tuning.study import prepare_study, run_study
    from narrowcast.tuning.study_file import load_study

    check_address_of(backend, address)
    kind = "ray" if address is not None else backend
    fields = {"study.backend": kind, "study.address": address, "study.storage": storage}
    options = {path: value for path, value in fields.items() if value is not None}
    settings = [*_as_text(overrides), *_as_text(options)]
    prepared = prepare_study(load_study(_source(study, "study"), settings), _folder(output))
    file = prepared.file
    with StudyDisplay(file, prepared.client.n_trials, PlainConsole()) as display:
        return run_study(prepared, display)


def benchmark(
    benchmark: str | Path,
    overrides: Overrides | None = None,
    *,
    problems: Sequence[str] = (),
    solvers: Sequence[str] = (),
    backend: Backend | None = None,
    address: str | None = None,
    retry: bool = False,
    output: str | Path = "runs",
    progress: bool = True,
) -> BenchmarkResult:
    """Solve every problem of a benchmark with each of its solvers, and return the result.

    Args:
        benchmark: the name of a packaged benchmark, or the path of a YAML file.
        overrides: values by dotted path, such as `{"solve.solver_seconds": 5, "workers": 2}`.
        problems: patterns of the problems to solve, such as `n1000-*`; all by default.
        solvers: patterns of the solvers to use.
        backend: `local` for this process or `ray` for workers on Ray.
        address: a running Ray cluster to join; implies Ray.
        retry: restart instances that failed, or whose solver did not take the problem.
        output: folder of all runs and benchmarks. Calling `benchmark` again continues with those that have not ended.
        progress: False for no output.

    """
    from narrowcast.benchmarking.file import load_benchmark
    from narrowcast.benchmarking.run import BenchmarkDisplay, prepare_benchmark, run_benchmark
    from narrowcast.runs.terminal_output import PlainConsole

    check_address_of(backend, address)
    fields = {"backend": "ray" if address is not None else backend, "address": address}
    options = {name: value for name, value in fields.items() if value is not None}
    if not isinstance(benchmark, str | Path):
        raise UserError(f"{shown(benchmark)} is not a benchmark; give the name of a packaged one or the path of a file")
    chosen = load_benchmark(str(benchmark), [*_as_text(options), *_as_text(overrides)]).only(problems, solvers)
    prepared = prepare_benchmark(chosen, _folder(output), retry=retry)
    with BenchmarkDisplay(chosen.instances, prepared.left, PlainConsole(quiet=not progress)) as display:
        return run_benchmark(prepared, display)


def submit(
    source: Source,
    overrides: Overrides | None = None,
    *,
    address: str,
    name: str | None = None,
    output: str = "/runs",
    environment: Mapping[str, str] | None = None,
    send_package: bool = False,
) -> ClusterJob:
    """Submit a run, a study or a benchmark to a Ray cluster and return its job, without waiting for it.

    Submitting the same request again follows the job while it runs, and resumes it from its last checkpoint if it
    failed or was stopped.

    Args:
        source: an experiment, or the name or path of a solve, study or benchmark.
        overrides: values by dotted path.
        address: the dashboard of the cluster's head, as `http://HEAD:8265`.
        name: the name of the job and of its run; by default from the configuration.
        output: folder of all runs on the cluster.
        environment: variables for the job; everybody on the cluster can read them.
        send_package: upload this version of narrowcast, if the cluster has none or another one.

    Raises:
        UserError: bad input, or a cluster that cannot run it; nothing was submitted.
        RunFailed: the cluster refused the job, or does not answer.

    """
    check_installed("ray", "submit")
    from narrowcast.cluster.dashboard import reach
    from narrowcast.cluster.job import ClusterJob
    from narrowcast.runs import submission
    from narrowcast.runs.capacity import check_capacity

    settings = _as_text(overrides)
    with TemporaryDirectory(prefix="narrowcast-") as folder:
        path, settings = _written(_source(source), settings, Path(folder))
        check_source(path, settings)
        dashboard = reach(address)
        check_capacity(path, settings, dashboard)
        variables = [f"{key}={value}" for key, value in (environment or {}).items()]
        options: dict[str, Any] = {"name": name, "output": output, "environment": variables}
        sent = submission.prepare(path, settings, **options, of_caller=not isinstance(source, str | Path))
        job, _ = submission.submit(sent, dashboard, send_package=send_package, say=logger.warning)
    return ClusterJob(job.name, dashboard)


def _source(source: Source | Solve, what: str = "experiment") -> Any:
    """Return what `run` takes, paths as text; raise `UserError` for what it does not take."""
    if isinstance(source, Path):
        return str(source)
    if isinstance(source, str | Mapping) or (what == "experiment" and isinstance(source, Identified)):
        return source
    article, more = ("an", ", or an nc.Experiment") if what == "experiment" else ("a", "")
    raise UserError(
        f"{shown(source)} is not {article} {what}; give the name of a packaged one, the path of a YAML file, its "
        f"values as a mapping{more}"
    )


def _names(resume: bool | str | Sequence[str]) -> tuple[str, ...]:
    """Return the names of the runs to be resumed, none for True and False."""
    if isinstance(resume, bool):
        return ()
    if isinstance(resume, str | Path):
        return (str(resume),)
    if not isinstance(resume, Sequence):
        raise UserError(f"resume is {shown(resume)}; give True, the name of a run, or a list of names")
    return tuple(map(str, resume))


def _folder(output: str | Path) -> Path:
    if not isinstance(output, str | Path):
        raise UserError(f"output is {shown(output)}; give the path of a folder")
    return Path(output)


def _written(source: Any, settings: list[str], folder: Path) -> tuple[str, list[str]]:
    """Return the name or file of what is submitted, written to the folder if Python made it, and its settings."""
    if isinstance(source, str):
        return source, settings
    if isinstance(source, Mapping):
        path = folder / f"{check_name(str(source.get('name', 'experiment')), 'name')}.yaml"
        write_yaml(plain_values(source), path)
        return str(path), settings
    if "backend" not in source.model_fields_set:
        settings = [*settings, "backend=ray"]  # a saved experiment names its default
    return str(source.save(folder / f"{source.name}.yaml")), settings


def _as_text(overrides: Overrides | None) -> list[str]:
    """Return overrides as the command line takes them; JSON is YAML too."""
    if not isinstance(overrides, Mapping | None):
        raise UserError(
            f"overrides are {shown(overrides)}; give a mapping of values by dotted path, such as "
            '{"algorithm.rank": 8, "rounds": 200}'
        )
    return [f"{path}={json.dumps(plain_values(value))}" for path, value in (overrides or {}).items()]


@contextmanager
def _on_round(runs: Prepared, progress: bool | OnRound) -> Iterator[OnRound]:
    """Show the progress, call the user's function, or do nothing."""
    from narrowcast.runs.progress import ProgressDisplay

    if callable(progress):
        yield progress
        return
    with ProgressDisplay.of(runs) if progress else nullcontext() as display:
        yield (lambda _: None) if display is None else display.show


@contextmanager
def _noting_resume(runs: Prepared) -> Iterator[None]:
    """Add the call that resumes these runs to what ends them early."""
    try:
        yield
    except UnresumableFailure:
        raise
    except (RunFailed, KeyboardInterrupt) as error:
        from narrowcast.runs.session import begun

        if names := [prepared.folder.name for prepared in begun(runs)]:
            shown = repr(names[0] if len(names) == 1 else names)
            error.add_note(f"resume with nc.run(resume={shown}, output={str(runs[0].folder.parent)!r})")
        raise
