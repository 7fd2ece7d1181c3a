"""`narrowcast report`."""

from __future__ import annotations

from pathlib import Path

import click

from narrowcast.cli.terminal import FOLDER


@click.command()
@click.argument("runs", nargs=-1, required=True, metavar="RUN...")
@click.option("--output", type=FOLDER, default=Path("runs"), show_default=True, help="Folder of all runs.")
@click.option(
    "--file", type=FOLDER, help="File of the report; report.html in the run's folder, or in OUTPUT, by default."
)
@click.option("--each", is_flag=True, help="Show runs that differ only in their seeds separately.")
def report(runs: tuple[str, ...], output: Path, file: Path | None, each: bool) -> None:
    """Write the report of a run, or the comparison of several, as one HTML file.

    The file includes the figures, needs no network and runs no script. RUN is the name of a run in the output folder,
    or the path of a run's folder.
    """
    from narrowcast.api.functions import compare, load_run

    if len(runs) == 1:
        result = load_run(runs[0], output=output)
        path = result.report(file or result.folder / "report.html")
    else:
        path = compare(runs, output=output, by_seed=not each).report(file or output / "report.html")
    click.echo(f"report  {path}")
