"""`narrowcast run`."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from narrowcast.cli.terminal import FOLDER, console
from narrowcast.platform.errors import RunFailed, UserError
from narrowcast.runs.progress import ProgressDisplay

if TYPE_CHECKING:
    from narrowcast.runs.recorder import Prepared


@click.command()
@click.argument("experiment", required=False)
@click.argument("overrides", nargs=-1, metavar="[A.B=VALUE]...")
@click.option("--backend", type=click.Choice(["local", "ray"]), help="Play in this process, or on Ray actors.")
@click.option("--address", metavar="HOST:PORT", help="A running Ray cluster to join (or auto); implies --backend ray.")
@click.option(
    "--resume", multiple=True, metavar="RUN", help="Go on with a run of the output folder; several play together."
)
@click.option("--continue", "go_on", is_flag=True, help="Go on with the run of this name where there is one already.")
@click.option("--output", type=FOLDER, default=Path("runs"), show_default=True, help="Folder of all runs.")
def run(
    experiment: str | None,
    overrides: tuple[str, ...],
    backend: str | None,
    address: str | None,
    resume: tuple[str, ...],
    go_on: bool,
    output: Path,
) -> None:
    """Play EXPERIMENT: a YAML file, or the name of a packaged one (see `narrowcast show`).

    Any value of the file can be set on the command line by its dotted path, such as algorithm.rank=8 or
    rounds=200. A section can be replaced by its kind: fleet=lognormal. With --resume, EXPERIMENT may be left
    out; results are the same as those of a run that was never interrupted.

    Several seeds, learning rates or ranks can be played together, as one program where shapes allow:
    narrowcast run fedavg-digits replicas.seed=[0,1,2,3,4]. Each is a run of its own, as if played alone.

    With --continue the same command starts the run and, after a crash, goes on with it: for schedulers that restart.
    """
    from narrowcast.experiment import load_experiment, load_replicas
    from narrowcast.runs import session

    # A word with a = is an override even where the experiment is left out.
    if experiment is not None and "=" in experiment and resume:
        overrides, experiment = (experiment, *overrides), None
    if backend is not None:
        # first, for another kind forgets the fields of the former
        overrides = (f"backend.kind={backend}", *overrides)
    if address is not None:
        overrides = ("backend.kind=ray", *overrides, f'backend.address="{address}"')
    if experiment is None and not resume:
        raise UserError("no experiment given; name a packaged one (narrowcast show lists them) or a YAML file")
    runs = []
    for name in resume:
        folder = output / name
        config = folder / "config.yaml"
        changed = None
        if experiment is not None or (overrides and config.is_file()):
            changed = load_experiment(experiment or str(config), overrides)
        runs.append(session.prepare_resume(folder, changed))
    if not resume:
        replicas = load_replicas(str(experiment), overrides)
        if go_on and len(replicas) == 1 and session.is_begun(output / replicas[0].name):
            runs = [session.prepare_resume(output / replicas[0].name, replicas[0])]
        else:
            loaded = replicas[0].data.load()
            runs = [session.prepare(each, output, loaded) for each in replicas]
    if len(runs) > 1:
        runs = session.share_data(runs)
    with _progress_of(runs, output) as progress:
        alone, show = len(runs) == 1, progress.show
        results: Sequence[dict[str, Any] | RunFailed] = (
            [session.run(runs[0], show)] if alone else session.run_together(runs, show)
        )
    _report(runs, results)


@contextmanager
def _progress_of(runs: Sequence[Prepared], output: Path) -> Iterator[ProgressDisplay]:
    """Show the progress of runs, and say how to go on with them where they end early."""
    names = [each.folder.name for each in runs]
    resumes = (word for name in names for word in ("--resume", name))
    again = shlex.join(["narrowcast", "run", *resumes, "--output", str(output)])
    done = sum(each.state.round_index for each in runs)
    title = names[0] if len(runs) == 1 else f"{len(runs)} replicas"
    with ProgressDisplay(title, done, sum(each.experiment.rounds for each in runs)) as progress:
        try:
            yield progress
        except RunFailed as error:
            raise RunFailed(f"{error} [{again}]") from error
        except KeyboardInterrupt:
            raise RunFailed(f"interrupted; go on with: {again}") from None


def _report(runs: Sequence[Prepared], results: Sequence[dict[str, Any] | RunFailed]) -> None:
    from narrowcast.platform.tracking.comparison import load_run, result_table
    from narrowcast.platform.tracking.spread import spread_table
    from narrowcast.platform.tracking.store_address import hide_password

    terminal, folder = console(), runs[0].folder
    finished = [(run, result) for run, result in zip(runs, results, strict=True) if isinstance(result, dict)]
    failed = [
        f"{run.folder.name}: {error}" for run, error in zip(runs, results, strict=True) if isinstance(error, RunFailed)
    ]
    if finished:
        lines = [
            f"MLflow  {hide_password(runs[0].uri)}",
            f"        look at it with: narrowcast ui --output {folder.parent}",
        ]
        if len(runs) == 1:
            terminal.print(result_table(load_run(folder)))
            lines[0] += f"  run {finished[0][1]['mlflow_run_id']}"
            lines.insert(0, f"plots   {folder / 'plots'}")
        else:
            terminal.print(spread_table([(run.experiment.identity(), result) for run, result in finished]))
            lines.insert(0, f"runs    {', '.join(str(run.folder) for run, _ in finished)}")
        for line in lines:
            terminal.print(line, highlight=False, soft_wrap=True)
    if failed:
        raise RunFailed("; ".join(failed))
