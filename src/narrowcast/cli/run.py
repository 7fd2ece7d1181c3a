"""Commands of one run: `run`, `show`, `verify`, `export`, `sync`, and `trust` of a folder."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING

import click

from narrowcast.cli.shared import (
    FOLDER,
    TRUST,
    console,
    experiments,
    gc_paused,
    names_of_runs,
    pairs_table,
    print_summaries,
)
from narrowcast.platform.config.trust import looking
from narrowcast.platform.errors import RunFailed, UnresumableFailure, UserError
from narrowcast.platform.tracking.second_process import second_process

if TYPE_CHECKING:
    from narrowcast.runs.checks import Budget, Check
    from narrowcast.runs.finished_run import ModelFormat
    from narrowcast.runs.result import Result


@click.command()
@click.argument("names", metavar="RUN...", nargs=-1, required=True, shell_complete=names_of_runs)
@click.option("--output", type=FOLDER, default=Path("runs"), show_default=True, help="Folder of all runs.")
@click.option("--tracking-uri", help="The MLflow store, if it is not the one that the run started with.")
def sync(names: tuple[str, ...], output: Path, tracking_uri: str | None) -> None:
    """Send the metrics of RUN that MLflow does not have, because its store was unavailable.

    RUN is a run's name, a pattern of names such as 'fedavg-*', or a folder of several, such as that of a benchmark.
    """
    from narrowcast.runs.folder import find_runs
    from narrowcast.runs.session import sync_run

    folders, refused = find_runs(names, output, "tracking.json"), []
    for folder in folders:
        try:
            sent = sync_run(folder, tracking_uri)
        except UserError as error:  # of this run; those after it may be sent
            refused.append(error)
            continue
        click.echo(f"{folder.name}: {sent} rounds sent, MLflow is up to date")
    if refused:
        more_refused = f" ({len(refused) - 1} more of {len(folders)} runs were not sent)" if len(refused) > 1 else ""
        raise UserError(f"{refused[0]}{more_refused}")


@click.command()
@click.argument("names", metavar="FOLDER...", nargs=-1, required=True, shell_complete=names_of_runs)
@click.option(
    "--rounds",
    type=click.IntRange(min=0),
    help="Rounds or iterations to repeat; by default as many as took the run 20 seconds, and at least 10.",
)
@click.option("--seed", type=click.IntRange(min=0), help="Seed of the draw of these rounds; by default another one.")
@click.option("--output", type=FOLDER, default=Path("runs"), show_default=True, help="Folder of all runs.")
@TRUST
def verify(names: tuple[str, ...], rounds: int | None, seed: int | None, output: Path, *, trust: bool) -> None:
    """Check that the files of a run agree and that its model has the metrics that they say; repeat some of its rounds.

    FOLDER is a run, a solve, a study or a benchmark: its name in the folder of all runs, its path, or a pattern.

    \b
    narrowcast verify scolr-ml100k                 a run in the folder runs
    narrowcast verify backup/scolr-ml100k          the folder of a run
    narrowcast verify 'fedavg-*'                   all runs whose names match
    narrowcast verify scolr-ml100k --rounds 0      repeat no rounds
    narrowcast verify my-study --rounds 1000       a study: its best trial is run again first

    \b
    checksums     of the journal, each of which covers all lines before it, and of each checkpoint
    sums          bits, times, clients and losses of rounds and of their clients
    tables        result.json and the tables against the journal; labels against config.yaml and the data
    measured      the trained model or answer, and each kept checkpoint, against the journal
    repeated      rounds from the start and from kept checkpoints: every number of the round and of its clients,
                  and the state at the next checkpoint; those repeated are drawn by chance (--seed)
    not checked   times by the wall clock, git commit, version, MLflow run, figures, and rounds that were not repeated

    Checksums detect damage. A forgery with valid checksums is found where it changes what can be computed again: the
    last line of the table says what cannot. Nothing is written. Repeat rounds on the same kind of processor as that of
    the run, since others may round sums differently. An unfinished run can be verified while no process works on it.
    The exit status is 1 if a check fails.

    Rounds are the work of the classes and programs that the run's configuration names. Those of its own run only in
    folders that you trust (`narrowcast trust FOLDER`), or with --trust; without, only the files are checked.
    """  # noqa: D301 - click wants the character
    from narrowcast.runs.checks import Budget

    budget = Budget(rounds) if seed is None else Budget(rounds, seed=seed)
    failures = [failure for folder in _folders(names, output) if (failure := _verify(folder, budget, trust))]
    if failures:
        raise RunFailed("; ".join(failures))


def _folders(names: tuple[str, ...], output: Path) -> list[Path]:
    """Return the folders of studies and benchmarks as they are, and those of runs."""
    from narrowcast.runs.folder import CONFIG, find_run, find_runs

    folders: dict[Path, None] = {}
    for name in names:
        folder = find_run(name, output)
        folders |= dict.fromkeys([folder] if _kind(folder) else find_runs([name], output, CONFIG))
    return list(folders)


def _kind(folder: Path) -> str:
    return next((name for name in ("study", "benchmark") if (folder / f"{name}.yaml").is_file()), "")


def _checks_of(folder: Path, budget: Budget) -> Iterator[Check]:
    if _kind(folder) == "study":
        from narrowcast.tuning.verification import verify_study

        return verify_study(folder, budget)
    if _kind(folder) == "benchmark":
        from narrowcast.benchmarking.verification import verify_benchmark

        return verify_benchmark(folder, budget)
    from narrowcast.runs.verification import verify_folder

    return verify_folder(folder, budget)


def _verify(folder: Path, budget: Budget, trust: bool) -> str | None:
    """Print the checks of a run; return what failed, None if nothing did."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, title=f"{folder.name}: what was checked", title_justify="left")
    for header in ("", "compared", "verdict"):
        table.add_column(header, overflow="fold")
    with looking(folder, trust=trust):  # so that all checks are made before it ends
        checks = list(_checks_of(folder, budget))
    for check in checks:
        verdict = Text(f"failed: {check.problem}", style="red") if check.problem else Text("ok")
        if check.skipped:
            verdict = Text(f"not checked: {check.skipped}", style="dim")
        table.add_row(Text(check.subject), Text(check.compared), verdict)
    console().print(table)
    if failed := [check for check in checks if check.problem]:
        first = f"{failed[0].subject}: {failed[0].problem}"
        count = sum(not check.skipped for check in checks)
        return f"{folder.name}: {len(failed)} of {count} checks failed; the first is {first}"
    return None


_SUFFIXES = {"safetensors": "safetensors", "torch": "pt"}


@click.command()
@click.argument("names", metavar="RUN...", nargs=-1, required=True, shell_complete=names_of_runs)
@click.option(
    "--format",
    "model_format",
    type=click.Choice(list(_SUFFIXES)),
    default="safetensors",
    show_default=True,
    help="Arrays by name, or a torch state_dict.",
)
@click.option("--client", type=click.IntRange(min=0), help="Export the model that this client uses, by its number.")
@click.option("--merged", is_flag=True, help="Add adapters to the weights of their base, and export these.")
@click.option("--peft", is_flag=True, help="Write adapters as a folder that peft reads.")
@click.option("--output", type=FOLDER, help="The file to write; RUN.safetensors, RUN.pt or RUN-peft by default.")
@click.option("--runs", type=FOLDER, default=Path("runs"), show_default=True, help="Folder of all runs.")
@TRUST
def export(
    names: tuple[str, ...],
    model_format: str,
    client: int | None,
    output: Path | None,
    runs: Path,
    *,
    merged: bool,
    peft: bool,
    trust: bool,
) -> None:
    """Write the trained global model of RUN, a finished run, or the answer of a solve, to a file.

    RUN is a run's name, a pattern of names such as 'fedavg-*', or the path of a run's folder. The inputs that the model
    was trained on, with their range, are printed, and are metadata of a safetensors file.

    With --client it is the model that a client uses, if clients have models of their own: RUN-client-3.safetensors. It
    is made from the run's last checkpoint and its data. Where these are of the file's own classes, that is done only in
    folders that you trust (`narrowcast trust FOLDER`), or with --trust.

    Neither format executes code when it is loaded: safetensors.torch.load_file(FILE), or
    torch.load(FILE, weights_only=True) for the state_dict of the torch module.
    """
    from narrowcast.runs.folder import find_runs
    from narrowcast.runs.result import Result, load_any

    folders = find_runs(names, runs)
    if output is not None and len(folders) > 1:
        raise UserError(f"--output names one file, and {len(folders)} runs are exported; leave it out")
    if peft and (merged or model_format != "safetensors"):
        raise UserError("--peft writes factors as safetensors; leave out --merged and --format")
    for folder in folders:
        result = load_any(folder)
        named = f"{folder.name}{_of(client)}"
        path = output or Path(f"{named}{'-merged' if merged else ''}.{_SUFFIXES[model_format]}")
        kind: ModelFormat = "torch" if model_format == "torch" else "safetensors"
        if not isinstance(result, Result):
            if client is not None or merged or peft:
                raise UserError(
                    f"{folder.name} is a solve, without clients and adapters; give --format and --output only"
                )
            click.echo(f"model   {result.export(path, kind)}")
            continue
        with looking(folder, trust=trust):
            if peft:
                click.echo(f"adapter {result.export_peft(output or Path(f'{named}-peft'), client)}")
            else:
                click.echo(f"model   {result.export(path, kind, client=client, merged=merged)}")
        for name, text in result.inputs.items():
            click.echo(f"inputs  {name}: {text}")


def _of(client: int | None) -> str:
    return "" if client is None else f"-client-{client}"


@click.command()
@click.argument("experiment", required=False, shell_complete=experiments)
@click.argument("overrides", nargs=-1, metavar="[A.B=VALUE]...")
@TRUST
def show(experiment: str | None, overrides: tuple[str, ...], *, trust: bool) -> None:
    """List the packaged experiments and solves, or print EXPERIMENT, or a solve, with all defaults filled in.

    A pattern such as 'fedavg-*' lists those whose names match.

    A benchmark is printed as its file has it. Classes of the file's own are imported only in folders that you trust
    (`narrowcast trust FOLDER`), or with --trust.
    """
    from narrowcast.packaged import EXPERIMENTS, SOLVES, names_solve, read_benchmark, summaries

    pattern = experiment or "*"
    if "*" in pattern:
        known = {**summaries(EXPERIMENTS), **summaries(SOLVES)}
        if not (matching := [name for name in known if fnmatchcase(name, pattern)]):
            raise UserError(f"no packaged experiment matches {pattern}; packaged: {', '.join(known)}")
        print_summaries("experiment", {name: known[name] for name in matching})
        return
    assert experiment is not None
    from narrowcast.platform.config.yaml import write_yaml

    if (benchmark := read_benchmark(experiment, overrides)) is not None:
        write_yaml(benchmark, sys.stdout)
        return
    from narrowcast.experiment import load_experiment
    from narrowcast.solve_run import load_solve

    load = load_solve if names_solve(experiment) else load_experiment
    with looking(Path(experiment).parent, trust=trust):
        values = load(experiment, overrides).plain()
    write_yaml(values, sys.stdout)


@click.command()
@click.argument("folder", required=False, type=FOLDER)
@click.option("--remove", is_flag=True, help="Trust FOLDER no longer.")
def trust(folder: Path | None, *, remove: bool) -> None:
    """Trust FOLDER and all below it: commands that look at its files and runs may run the code that these name.

    `run`, `tune`, `benchmark`, `submit` and `check` run what a file names (classes and factories of modules, programs
    of solvers), as a script would. Commands that look, such as `show`, `data show`, `verify` and `tune --dry-run`, run
    none of it, unless the file lies in a trusted folder, or with --trust. Without FOLDER, trusted folders are listed.
    They are kept in narrowcast/trusted_folders in your own settings ($XDG_CONFIG_HOME, or ~/.config).
    """
    from narrowcast.platform.config.trust import forget_folder, trust_folder, trusted_folders

    if folder is None:
        if remove:
            raise UserError("--remove: name the folder that you trust no longer; narrowcast trust lists them")
        for path in trusted_folders():
            click.echo(path)
        return
    trusted = forget_folder(folder) if remove else trust_folder(folder)
    click.echo(f"{trusted} is {'not trusted any more' if remove else 'trusted'}")


@dataclass(frozen=True)
class _Asked:
    """The words of the command."""

    experiment: str | None
    overrides: Sequence[str]
    backend: str | None
    address: str | None
    resume: Sequence[str]
    output: Path


@click.command()
@click.argument("experiment", required=False, shell_complete=experiments)
@click.argument("overrides", nargs=-1, metavar="[A.B=VALUE]...")
@click.option("--backend", type=click.Choice(["local", "ray"]), help="Run in this process, or on Ray actors.")
@click.option("--address", metavar="HOST:PORT", help="A running Ray cluster to join (or auto); implies --backend ray.")
@click.option(
    "--resume",
    multiple=True,
    metavar="RUN",
    shell_complete=names_of_runs,
    help="Resume a run of the output folder; several run in lockstep.",
)
@click.option("--continue", "resume_if_begun", is_flag=True, help="Resume the run of this name if there is one.")
@click.option(
    "--dry-run", is_flag=True, help="Check everything, print the plan and predicted costs, and write nothing."
)
@TRUST
@click.option("--output", type=FOLDER, default=Path("runs"), show_default=True, help="Folder of all runs.")
def run(
    experiment: str | None,
    overrides: tuple[str, ...],
    backend: str | None,
    address: str | None,
    resume: tuple[str, ...],
    resume_if_begun: bool,
    dry_run: bool,
    trust: bool,
    output: Path,
) -> None:
    """Run EXPERIMENT: a YAML file, or the name of a packaged one (see `narrowcast show`).

    Any value of the file can be set on the command line by its dotted path, such as algorithm.rank=8 or
    rounds=200. A section can be replaced by its kind: fleet=lognormal. With --resume, EXPERIMENT may be left
    out; the results are those of an uninterrupted run.

    Several seeds, learning rates or ranks can run in lockstep, as one program if their shapes are equal:
    narrowcast run fedavg-digits replicas.seed=[0,1,2,3,4]. Each has its own folder and the results of a single run.

    A file with the sections problem and solver is a solve: an iterative method on a problem without clients, such as
    completion-ill-conditioned, with iterations in place of rounds.

    A run does what its file names, as a script would: it imports classes, calls factories and starts programs. With
    --dry-run it does so only in folders that you trust (`narrowcast trust FOLDER`), or with --trust.

    With --continue the same command starts a run and resumes it after a crash, for schedulers that restart jobs.
    """
    # A word with a = is an override even if the experiment is left out.
    if experiment is not None and "=" in experiment and resume:
        overrides, experiment = (experiment, *overrides), None
    asked = _Asked(experiment, overrides, backend, address, resume, output)
    if dry_run:
        with looking(Path(experiment or ".").parent, trust=trust):
            _print_plan(asked)
        return
    _announce(asked)
    with second_process():  # begins to import MLflow at once
        with gc_paused():
            from narrowcast.experiment import Experiment
            from narrowcast.runs import session
            from narrowcast.runs.progress import ProgressDisplay

            settings = session.with_backend(overrides, backend, address)
            runs = session.prepare_runs(experiment, settings, output, resume, resume_if_begun=resume_if_begun)

        first = runs[0].config
        if isinstance(first, Experiment) and "backend" not in first.model_fields_set:
            on_ray = first.backend.kind == "ray"
            where = "on Ray, since RAY_ADDRESS is set" if on_ray else "in this process (--backend ray: on Ray)"
            click.echo(f"no backend set: training {where}")
        try:
            with ProgressDisplay.of(runs) as progress:
                results = session.run_all(runs, progress.show)
        except UnresumableFailure:
            raise
        except RunFailed as error:
            if not session.begun(runs):
                raise
            raise RunFailed(f"{error} [{session.resume_command(runs)}]") from error
        except KeyboardInterrupt:
            if not session.begun(runs):
                raise
            raise RunFailed(f"interrupted; resume with: {session.resume_command(runs)}") from None
    ended = zip((prepared.folder for prepared in runs), results, strict=True)
    _report([folder for folder, result in ended if isinstance(result, dict)], runs[0].store.shown)
    if failed := session.failures(runs, results):
        raise RunFailed(failed)


def _announce(asked: _Asked) -> None:
    """Print what the run is, before torch is imported."""
    from narrowcast.packaged import announcement
    from narrowcast.runs.folder import CONFIG, find_run

    kind = "ray" if asked.address is not None else asked.backend
    overrides = [*asked.overrides, *([f"backend={kind}"] if kind else [])]
    source = asked.experiment or (str(find_run(asked.resume[0], asked.output) / CONFIG) if asked.resume else "")
    if source and (line := announcement(source, overrides)):
        click.echo(line)
        sys.stdout.flush()


def _print_plan(asked: _Asked) -> None:
    """Print what the run would be and cost."""
    from narrowcast.runs.dry_run import plan
    from narrowcast.runs.session import with_backend

    if asked.experiment is None or asked.resume:
        raise UserError("--dry-run is for new runs: name an experiment, and leave out --resume")
    settings = with_backend(asked.overrides, asked.backend, asked.address)
    console().print(pairs_table(plan(asked.experiment, settings, asked.output)))


def _report(finished: Sequence[Path], store: str) -> None:
    """Print the results in these folders, and where plots and runs are; `store` is without secrets."""
    from narrowcast.platform.config.files import command
    from narrowcast.runs.comparison import Comparison, SolveComparison
    from narrowcast.runs.result import Result, SolveResult, load_any

    if not finished:
        return
    terminal = console()
    results = [load_any(folder) for folder in finished]
    lines = [f"MLflow  {store}", f"        open it with: {command('ui', '--output', finished[0].parent)}"]
    if len(results) == 1:
        terminal.print(pairs_table(results[0].summary()))
        lines[0] += f"  run {results[0].file.mlflow_run_id}"
        if (plots := finished[0] / "plots").is_dir():
            lines.insert(0, f"plots   {plots}")
    else:
        experiments = [result for result in results if isinstance(result, Result)]
        solves = [result for result in results if isinstance(result, SolveResult)]
        if experiments:
            table = Comparison(tuple(experiments)).replicas_table()
        else:
            table = SolveComparison(tuple(solves)).results_table()
        for part in table.fitting(terminal.width):
            terminal.print(part)
        lines.insert(0, f"runs    {', '.join(map(str, finished))}")
    if personal := [result for result in results if isinstance(result, Result) and result.file.personal]:
        _print_controls(personal)
    lines.insert(0, f"time    {_seconds_since_start():.1f} s since the command was started")
    for line in lines:
        terminal.print(line, highlight=False, soft_wrap=True)


def _print_controls(results: Sequence[Result]) -> None:
    """Print runs whose clients have models of their own beside their controls, and what is to be said of these."""
    from narrowcast.api import compare

    terminal, comparison = console(), compare(results)
    table = comparison.text_tables().get("Metrics over clients")
    if table is not None and comparison.added:
        for part in table.fitting(terminal.width):
            terminal.print(part)
    for line in comparison.remarks:
        terminal.print(line, highlight=False, soft_wrap=True)


def _seconds_since_start() -> float:
    """Return the seconds since this process was started."""
    import psutil

    started = psutil.Process().create_time()
    if sys.platform == "linux":  # there it is the moment of the boot, in whole seconds, plus the time since then
        return time.clock_gettime(time.CLOCK_BOOTTIME) - (started - psutil.boot_time())
    return time.time() - started
