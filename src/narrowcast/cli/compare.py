"""`narrowcast compare`."""

from __future__ import annotations

from pathlib import Path

import click

from narrowcast.cli.terminal import FOLDER, console
from narrowcast.platform.errors import UserError


@click.command()
@click.argument("runs", nargs=-1, required=True, metavar="RUN...")
@click.option("--output", type=FOLDER, default=Path("runs"), show_default=True, help="Folder of all runs.")
@click.option("--plot", type=FOLDER, help="File of the figure; compare.png in the output folder by default.")
@click.option("--csv", type=FOLDER, help="Write the table, with the settings that differ, to this CSV file too.")
def compare(runs: tuple[str, ...], output: Path, plot: Path | None, csv: Path | None) -> None:
    """Compare finished runs by accuracy, bits and time: a table, and a plot.

    RUN is the name of a run in the output folder, or the path of a run's folder.
    """
    from narrowcast.api.functions import compare as compare_runs
    from narrowcast.cli.run_tables import comparison_table, targets_table, traffic_table

    comparison = compare_runs(runs, output=output)
    terminal = console()
    terminal.print(comparison_table(comparison))
    terminal.print(traffic_table(comparison))
    if (targets := targets_table(comparison)) is not None:
        terminal.print(targets)
    path = plot or output / "compare.png"
    try:
        comparison.plot(path)
    except OSError as error:
        raise UserError(f"cannot write {path} ({error.strerror}); give another file with --plot") from error
    click.echo(f"plot    {path}")
    if csv is not None:
        try:
            comparison.table.to_csv(csv, index_label="run")
        except OSError as error:
            raise UserError(f"cannot write {csv} ({error.strerror}); give another file with --csv") from error
        click.echo(f"table   {csv}")
