"""`narrowcast site`."""

from __future__ import annotations

from pathlib import Path

import click

from narrowcast.cli.completion import names_of_runs
from narrowcast.cli.terminal import FOLDER


@click.command()
@click.argument("runs", nargs=-1, metavar="[RUN]...", shell_complete=names_of_runs)
@click.option("--output", type=FOLDER, default=Path("runs"), show_default=True, help="Folder of all runs.")
@click.option("--folder", type=FOLDER, default=Path("site"), show_default=True, help="Folder of the site's pages.")
@click.option(
    "--metric",
    "metrics",
    multiple=True,
    metavar="NAME",
    help="Error to go by, such as test.unseen_error; repeat it for problems that measure others. The first error on "
    "test data by default.",
)
@click.option(
    "--tolerance",
    "tolerances",
    multiple=True,
    type=float,
    help="Error that is a goal; repeat it for several. 1e-4, 1e-2 and 1e-8 by default.",
)
@click.option(
    "--within",
    multiple=True,
    type=float,
    help="Goal relative to the least error of any run on a problem, such as 0.01 for 1 % above it, the default.",
)
def site(
    runs: tuple[str, ...],
    output: Path,
    folder: Path,
    metrics: tuple[str, ...],
    tolerances: tuple[float, ...],
    within: tuple[float, ...],
) -> None:
    """Write the site of a benchmark: performance profiles, curves and tables of solves, in static pages.

    RUN is the name of a solve in the output folder, or the path of its folder, or of a folder of several; all solves of
    the output folder by default. The pages need neither a server nor a network.

    \b
    narrowcast benchmark completion-65
    narrowcast site runs/completion-65 --tolerance 1e-4 --tolerance 1e-8
    """  # noqa: D301 - click wants the character
    from narrowcast.api.functions import site as write_site

    page = write_site(
        runs or None, folder, output=output, metrics=metrics, tolerances=tolerances or None, within=within or None
    )
    click.echo(f"site    {page}")
