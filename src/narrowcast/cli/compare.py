"""`narrowcast compare`."""

from __future__ import annotations

from pathlib import Path

import click

from narrowcast.cli.terminal import FOLDER, console, run_folder
from narrowcast.platform.errors import UserError


@click.command()
@click.argument("runs", nargs=-1, required=True, metavar="RUN...")
@click.option("--output", type=FOLDER, default=Path("runs"), show_default=True, help="Folder of all runs.")
@click.option("--plot", type=FOLDER, help="Where to draw; compare.png in the output folder by default.")
def compare(runs: tuple[str, ...], output: Path, plot: Path | None) -> None:
    """Compare finished runs by accuracy, bits and time: a table, and a plot.

    RUN is the name of a run in the output folder, or the path of a run's folder.
    """
    from narrowcast.platform.tracking.comparison import compare as compare_runs

    comparison = compare_runs([run_folder(name, output) for name in runs])
    terminal = console()
    terminal.print(comparison.table())
    if (targets := comparison.targets_table()) is not None:
        terminal.print(targets)
    target = plot or output / "compare.png"
    try:
        comparison.draw(target)
    except OSError as error:
        raise UserError(f"cannot write {target} ({error.strerror}); give another place with --plot") from error
    click.echo(f"plot    {target}")
