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
@click.option(
    "--against", metavar="RUN", help="Group of runs from which the differences of the others are shown, seed by seed."
)
def report(runs: tuple[str, ...], output: Path, file: Path | None, each: bool, against: str | None) -> None:
    """Write the report of a run, or the comparison of several, as one HTML file.

    The file includes the figures, needs no network and runs no script. RUN is the name of a run in the output folder,
    a pattern of names such as 'fedavg-*', the path of a run's folder, or that of a folder of runs.
    """
    from narrowcast.api.functions import compare
    from narrowcast.runs.any_result import load_any
    from narrowcast.runs.run_folder import find_runs

    folders = find_runs(runs, output)
    if len(folders) == 1:
        path = load_any(folders[0]).report(file or folders[0] / "report.html")
    else:
        compared = compare(folders, output=output, by_seed=not each, against=against)
        path = compared.report(file or output / "report.html")
    click.echo(f"report  {path}")
