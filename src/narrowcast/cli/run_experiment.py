"""`narrowcast run`."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import click

from narrowcast.cli.completion import experiments, names_of_runs
from narrowcast.cli.terminal import FOLDER, TRUST, console
from narrowcast.cli.uncollected import uncollected
from narrowcast.platform.errors import RunFailed, UnresumableFailure, UserError
from narrowcast.platform.tracking.second_process import second_process
from narrowcast.platform.trust import looking


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
        with uncollected():
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
    ended = zip((each.folder for each in runs), results, strict=True)
    _report([folder for folder, result in ended if isinstance(result, dict)], runs[0].store.shown)
    if failed := session.failures(runs, results):
        raise RunFailed(failed)


def _announce(asked: _Asked) -> None:
    """Print what the run is, before torch is imported."""
    from narrowcast.packaged import announcement
    from narrowcast.runs.run_folder import CONFIG, find_run

    kind = "ray" if asked.address is not None else asked.backend
    given = [*asked.overrides, *([f"backend={kind}"] if kind else [])]
    source = asked.experiment or (str(find_run(asked.resume[0], asked.output) / CONFIG) if asked.resume else "")
    if source and (line := announcement(source, given)):
        click.echo(line)
        sys.stdout.flush()


def _print_plan(asked: _Asked) -> None:
    """Print what the run would be and cost."""
    from rich.table import Table

    from narrowcast.runs.dry_run import plan
    from narrowcast.runs.session import with_backend

    if asked.experiment is None or asked.resume:
        raise UserError("--dry-run is for new runs: name an experiment, and leave out --resume")
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    settings = with_backend(asked.overrides, asked.backend, asked.address)
    for label, value in plan(asked.experiment, settings, asked.output):
        table.add_row(label, value)
    console().print(table)


def _report(finished: Sequence[Path], store: str) -> None:
    """Print the results in these folders, and where plots and runs are; `store` is without secrets."""
    from narrowcast.cli.run_tables import replicas_table, result_table
    from narrowcast.platform.config import command
    from narrowcast.runs.any_result import load_any
    from narrowcast.runs.result import Result
    from narrowcast.runs.solve_comparison import SolveComparison
    from narrowcast.runs.solve_result import SolveResult

    if not finished:
        return
    terminal = console()
    results = [load_any(folder) for folder in finished]
    lines = [f"MLflow  {store}", f"        open it with: {command('ui', '--output', finished[0].parent)}"]
    if len(results) == 1:
        terminal.print(result_table(results[0]))
        lines[0] += f"  run {results[0].file.mlflow_run_id}"
        lines.insert(0, f"plots   {finished[0] / 'plots'}")
    else:
        experiments = [each for each in results if isinstance(each, Result)]
        solves = [each for each in results if isinstance(each, SolveResult)]
        table = replicas_table(experiments) if experiments else SolveComparison(tuple(solves)).results_table()
        for part in table.fitting(terminal.width):
            terminal.print(part)
        lines.insert(0, f"runs    {', '.join(map(str, finished))}")
    lines.insert(0, f"time    {_seconds_since_start():.1f} s since the command was started")
    for line in lines:
        terminal.print(line, highlight=False, soft_wrap=True)


def _seconds_since_start() -> float:
    """Return the seconds since this process was started."""
    import psutil

    started = psutil.Process().create_time()
    if sys.platform == "linux":  # there it is the moment of the boot, in whole seconds, plus the time since then
        return time.clock_gettime(time.CLOCK_BOOTTIME) - (started - psutil.boot_time())
    return time.time() - started
