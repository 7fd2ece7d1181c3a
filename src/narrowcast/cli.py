"""The command line: run, show, compare, reproduce, data, ui and sync."""

from __future__ import annotations

import logging
import os
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click
from rich.console import Console
from rich.table import Table

from narrowcast import __version__
from narrowcast.platform.config import write_yaml
from narrowcast.platform.data import fetch
from narrowcast.platform.errors import RunFailed, UserError
from narrowcast.progress import STOPPING, Progress

if TYPE_CHECKING:
    from narrowcast.session import Prepared

OUTPUT = click.Path(file_okay=True, path_type=Path)
_PLAIN_WIDTH = 120  # columns of a table that does not go to a terminal


class _Commands(click.Group):
    """Commands in the order in which a newcomer needs them."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        return list(self.commands)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__)
def cli() -> None:
    """Federated learning over narrow links: accuracy against bits and time.

    \b
    narrowcast run scolr-ml100k                       the demo, a packaged experiment
    narrowcast run scolr-ml100k algorithm.rank=16     with another rank
    narrowcast run my.yaml --executor local           your own file, without Ray
    narrowcast compare runs/a runs/b                  a table and a plot of several runs
    narrowcast reproduce colr-table4                  a paper's table, its numbers beside ours
    narrowcast ui                                     all runs in the MLflow UI
    """  # noqa: D301 - click wants the character


@cli.command()
@click.argument("experiment", required=False)
@click.argument("overrides", nargs=-1, metavar="[A.B=VALUE]...")
@click.option("--executor", type=click.Choice(["local", "ray"]), help="Play in this process, or on Ray actors.")
@click.option("--address", metavar="HOST:PORT", help="A running Ray cluster to join (or auto); implies --executor ray.")
@click.option(
    "--resume", multiple=True, metavar="RUN", help="Go on with a run of the output folder; several play together."
)
@click.option("--output", type=OUTPUT, default=Path("runs"), show_default=True, help="Folder of all runs.")
def run(
    experiment: str | None,
    overrides: tuple[str, ...],
    executor: str | None,
    address: str | None,
    resume: tuple[str, ...],
    output: Path,
) -> None:
    """Play EXPERIMENT: a YAML file, or the name of a packaged one (see `narrowcast show`).

    Any value of the file can be set on the command line by its dotted path, such as algorithm.rank=8 or
    rounds=200. A section can be replaced by its kind: fleet=lognormal. With --resume, EXPERIMENT may be left
    out; results are the same as those of a run that was never interrupted.

    Several seeds, learning rates or ranks can be played together, as one program where shapes allow:
    narrowcast run fedavg-digits replicas.seed=[0,1,2,3,4]. Each is a run of its own, as if played alone.
    """
    from narrowcast import session
    from narrowcast.experiment import load_experiment, load_replicas

    # A word with a = is an override even where the experiment is left out.
    if experiment is not None and "=" in experiment and resume:
        overrides, experiment = (experiment, *overrides), None
    if executor is not None:
        overrides = (*overrides, f"executor.kind={executor}")
    if address is not None:
        overrides = (*overrides, "executor.kind=ray", f'executor.address="{address}"')
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
def _progress_of(runs: Sequence[Prepared], output: Path) -> Iterator[Progress]:
    """Show the progress of runs, and say how to go on with them where they end early."""
    names = [each.folder.name for each in runs]
    resumes = (word for name in names for word in ("--resume", name))
    again = shlex.join(["narrowcast", "run", *resumes, "--output", str(output)])
    done = sum(each.state.round_index for each in runs)
    title = names[0] if len(runs) == 1 else f"{len(runs)} replicas"
    with Progress(title, done, sum(each.experiment.rounds for each in runs)) as progress:
        try:
            yield progress
        except RunFailed as error:
            raise RunFailed(f"{error} [{again}]") from error
        except KeyboardInterrupt:
            raise RunFailed(f"interrupted; go on with: {again}") from None


def _console() -> Console:
    return Console(width=None if sys.stdout.isatty() else _PLAIN_WIDTH)


def _report(runs: Sequence[Prepared], results: Sequence[dict[str, Any] | RunFailed]) -> None:
    from narrowcast.platform.tracking.compare import load_run, result_table
    from narrowcast.platform.tracking.mlflow_run import hide_password
    from narrowcast.platform.tracking.spread import spread_table

    console, folder = _console(), runs[0].folder
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
            console.print(result_table(load_run(folder)))
            lines[0] += f"  run {finished[0][1]['mlflow_run_id']}"
            lines.insert(0, f"plots   {folder / 'plots'}")
        else:
            console.print(spread_table([(run.experiment.identity(), result) for run, result in finished]))
            lines.insert(0, f"runs    {', '.join(str(run.folder) for run, _ in finished)}")
        for line in lines:
            console.print(line, highlight=False, soft_wrap=True)
    if failed:
        raise RunFailed("; ".join(failed))


@cli.command()
@click.argument("experiment", required=False)
@click.argument("overrides", nargs=-1, metavar="[A.B=VALUE]...")
def show(experiment: str | None, overrides: tuple[str, ...]) -> None:
    """List the packaged experiments, or print EXPERIMENT as it would run, every default filled in."""
    from narrowcast.experiment import load_experiment, packaged_experiments

    if experiment is None:
        table = Table("experiment", "what it is", box=None, pad_edge=False)
        for name, summary in packaged_experiments().items():
            table.add_row(name, summary)
        _console().print(table)
        return
    write_yaml(load_experiment(experiment, overrides).plain(), sys.stdout)


@cli.command()
@click.argument("runs", nargs=-1, required=True, metavar="RUN...")
@click.option("--output", type=OUTPUT, default=Path("runs"), show_default=True, help="Folder of all runs.")
@click.option("--plot", type=OUTPUT, help="Where to draw; compare.png in the output folder by default.")
def compare(runs: tuple[str, ...], output: Path, plot: Path | None) -> None:
    """Compare finished runs by accuracy, bits and time: a table, and a plot.

    RUN is the name of a run in the output folder, or the path of a run's folder.
    """
    from narrowcast.platform.tracking.compare import compare as compare_runs

    comparison = compare_runs([_run_folder(name, output) for name in runs])
    console = _console()
    console.print(comparison.table())
    if (targets := comparison.targets_table()) is not None:
        console.print(targets)
    target = plot or output / "compare.png"
    try:
        comparison.draw(target)
    except OSError as error:
        raise UserError(f"cannot write {target} ({error.strerror}); give another place with --plot") from error
    click.echo(f"plot    {target}")


@cli.command()
@click.argument("name", required=False)
@click.option("--list", "listing", is_flag=True, help="What can be reproduced, and how long it takes.")
@click.option("--seeds", type=click.IntRange(min=1), default=3, show_default=True, help="Seeds 0, 1, ... of each run.")
@click.option("--rounds", type=click.IntRange(min=1), help="Cut every run short, for a quick look.")
@click.option("--jobs", type=click.IntRange(min=1), help="Runs at a time, one core each; all cores by default.")
@click.option("--output", type=OUTPUT, default=Path("runs/reproduce"), show_default=True, help="Folder of it all.")
def reproduce(
    name: str | None, *, listing: bool, seeds: int, rounds: int | None, jobs: int | None, output: Path
) -> None:
    """Reproduce NAME, a table or figure of a paper, and set its numbers beside ours.

    Plays the runs that it needs, several at a time, and ends in a table: the paper's number, ours as mean and standard
    deviation over the seeds, the difference, and whether that counts as reproduced. The same goes to OUTPUT/NAME.csv
    and NAME.md, with a plot in NAME.png. The runs stand in OUTPUT/runs and are ordinary ones (narrowcast compare, ui).

    Interrupt it when you like: the same command goes on. What is finished is not run again, and targets share runs.

    \b
    narrowcast reproduce --list                           what there is
    narrowcast reproduce wireless-table1                  seconds, no training
    narrowcast reproduce colr-fig3 --rounds 50 --seeds 1  a quick look at the machinery
    narrowcast reproduce colr-table4                      the real thing, on all cores

    The exit status is 0 whatever the verdicts, 1 where a run failed.
    """  # noqa: D301 - click wants the character
    from narrowcast.reproduce.report import verdict_table
    from narrowcast.reproduce.targets import TARGETS

    if listing:
        table = Table("name", "what it is", "3 seeds on 2 cores", "source", box=None, pad_edge=False)
        for each, target in TARGETS.items():
            table.add_row(each, target.what, target.takes, target.source)
        _console().print(table)
        return
    if name is None:
        raise UserError(f"nothing to reproduce; name one of {', '.join(TARGETS)} (narrowcast reproduce --list)")
    from narrowcast import reproduction

    words = ["narrowcast", "reproduce", name, "--seeds", str(seeds), "--output", str(output)]
    again = shlex.join(
        [*words, *(["--rounds", str(rounds)] if rounds else []), *(["--jobs", str(jobs)] if jobs else [])]
    )
    try:
        done = reproduction.reproduce(
            name, seeds=seeds, rounds=rounds, at_once=jobs or os.cpu_count() or 1, output=output, say=_say
        )
    except RunFailed as error:
        raise RunFailed(f"{error} [{again}]") from error
    except KeyboardInterrupt:
        raise RunFailed(f"interrupted; go on with: {again}") from None
    _console().print(verdict_table(done.title, done.verdicts))
    for line in (*done.notes, *map(str, done.files)):
        click.echo(line)


def _say(line: str) -> None:
    print(line, flush=True)


def _run_folder(name: str, output: Path) -> Path:
    return output / name if (output / name).is_dir() or not Path(name).is_dir() else Path(name)


@cli.group()
def data() -> None:
    """The data sets: which are here, and how to get them."""


@data.command("list")
def list_data() -> None:
    """List the data sets, their licences and where they were found."""
    table = Table("name", "what it is", "licence", "found", box=None, pad_edge=False)
    for row in fetch.status():
        table.add_row(row.name, row.description, row.licence, str(row.found or f"no: narrowcast data fetch {row.name}"))
    _console().print(table)
    click.echo("looked in " + ", then ".join(str(root) for root in fetch.roots()))


@data.command("fetch")
@click.argument("name")
def fetch_data(name: str) -> None:
    """Download the data set NAME, check it and unpack it."""
    click.echo(f"{name} is in {fetch.fetch(name, progress=sys.stderr.isatty())}")


@cli.command()
@click.option("--output", type=OUTPUT, default=Path("runs"), show_default=True, help="Folder of all runs.")
@click.option("--port", type=click.IntRange(1, 65535), default=5000, show_default=True)
def ui(output: Path, port: int) -> None:
    """Open the MLflow UI on the runs of the output folder, for this machine only (127.0.0.1)."""
    from narrowcast.platform.tracking.mlflow_run import Tracking

    uri = Tracking().resolve(output)
    if uri.startswith(("http://", "https://")):
        raise UserError(f"the runs are tracked at {uri}; open that address in a browser")
    if uri.startswith("sqlite:///") and not Path(uri.removeprefix("sqlite:///")).is_file():
        raise UserError(f"no runs in {output}; make some with narrowcast run, or give their folder with --output")
    with socket.socket() as free:
        free.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            free.bind(("127.0.0.1", port))
        except OSError as error:
            raise UserError(f"port {port} is taken ({error.strerror}); give another with --port") from error
    click.echo(f"MLflow UI on http://127.0.0.1:{port} (stop with Ctrl-C)")
    command = [
        "mlflow",
        "ui",
        "--backend-store-uri",
        uri,
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--workers",
        "1",
    ]
    try:
        subprocess.run([sys.executable, "-m", *command], check=True)
    except subprocess.CalledProcessError as error:
        raise RunFailed(f"the MLflow UI stopped with status {error.returncode}") from error
    except KeyboardInterrupt:
        click.echo()


@cli.command()
@click.argument("run_name", metavar="RUN")
@click.option("--output", type=OUTPUT, default=Path("runs"), show_default=True, help="Folder of all runs.")
@click.option("--tracking-uri", help="The store, where it is not the one the run started with.")
def sync(run_name: str, output: Path, tracking_uri: str | None) -> None:
    """Send to MLflow what it missed of RUN while its store was down."""
    from narrowcast import session

    sent = session.sync(_run_folder(run_name, output), tracking_uri)
    click.echo(f"{run_name}: {sent} rounds sent, MLflow is up to date")


def main() -> NoReturn:
    """Run the command line: status 0, 1 for a failed run, 2 for bad input, always without a traceback."""
    logging.basicConfig(format="%(levelname)s: %(message)s", level=logging.WARNING)
    STOPPING.clear()
    signal.signal(signal.SIGTERM, _stop)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _stop)
    try:
        status = cli(prog_name="narrowcast", standalone_mode=False)
    except UserError as error:
        _fail(str(error), 2)
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        sys.exit(2)
    except click.ClickException as error:
        _fail(error.format_message(), 2)
    except RunFailed as error:
        _fail(str(error), 1)
    except (KeyboardInterrupt, click.Abort):
        _fail("interrupted", 1)
    sys.exit(status or 0)


def _stop(*_: object) -> NoReturn:
    STOPPING.set()
    signal.alarm(0)  # Ray's own handler may have armed one that aborts the process
    raise KeyboardInterrupt


def _fail(message: str, status: int) -> NoReturn:
    click.echo(f"narrowcast: {message}", err=True)
    sys.exit(status)


if __name__ == "__main__":
    main()
