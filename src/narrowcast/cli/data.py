"""`narrowcast data`."""

from __future__ import annotations

import sys

import click
from rich.table import Table

from narrowcast.cli.terminal import console


@click.group()
def data() -> None:
    """List and download data sets."""


@data.command("list")
def list_data() -> None:
    """List the data sets, their licences and where they were found."""
    from narrowcast.platform.data import fetch

    table = Table("name", "description", "licence", "found", box=None, pad_edge=False)
    for row in fetch.status():
        table.add_row(row.name, row.description, row.licence, str(row.found or f"no: narrowcast data fetch {row.name}"))
    console().print(table)
    click.echo("looked in " + ", then ".join(str(root) for root in fetch.roots()))


@data.command("fetch")
@click.argument("name")
def fetch_data(name: str) -> None:
    """Download the data set NAME, check it and unpack it."""
    from narrowcast.platform.data import fetch

    click.echo(f"{name} is in {fetch.fetch(name, progress=sys.stderr.isatty())}")
