"""`narrowcast sync`."""

from __future__ import annotations

from pathlib import Path

import click

from narrowcast.cli.completion import names_of_runs
from narrowcast.cli.terminal import FOLDER
from narrowcast.platform.errors import UserError


@click.command()
@click.argument("names", metavar="RUN...", nargs=-1, required=True, shell_complete=names_of_runs)
@click.option("--output", type=FOLDER, default=Path("runs"), show_default=True, help="Folder of all runs.")
@click.option("--tracking-uri", help="The MLflow store, if it is not the one that the run started with.")
def sync(names: tuple[str, ...], output: Path, tracking_uri: str | None) -> None:
    """Send the metrics of RUN that MLflow does not have, because its store was unavailable.

    RUN is a run's name, a pattern of names such as 'fedavg-*', or a folder of several, such as that of a benchmark.
    """
    from narrowcast.runs.late_delivery import send_missing
    from narrowcast.runs.run_folder import find_runs

    folders, refused = find_runs(names, output, "tracking.json"), []
    for folder in folders:
        try:
            sent = send_missing(folder, tracking_uri)
        except UserError as error:  # of this run; those after it may be sent
            refused.append(error)
            continue
        click.echo(f"{folder.name}: {sent} rounds sent, MLflow is up to date")
    if refused:
        others = f" ({len(refused) - 1} more of {len(folders)} runs were not sent)" if len(refused) > 1 else ""
        raise UserError(f"{refused[0]}{others}")
