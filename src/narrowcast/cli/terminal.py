"""Options and output that several commands share."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

import click
from rich.table import Table

from narrowcast.platform.redaction import redact
from narrowcast.runs.terminal_output import PlainConsole, plain

FOLDER = click.Path(file_okay=True, path_type=Path)
TRUST = click.option("--trust", is_flag=True, help="Let code run that a file names, though it is only looked at.")
"""Of commands that only look at a file or a run."""
_PLAIN_WIDTH = 120  # columns of a table that does not go to a terminal


def console() -> PlainConsole:
    """Return the terminal, or a page of fixed width if the output goes elsewhere."""
    return PlainConsole(width=None if sys.stdout.isatty() else _PLAIN_WIDTH)


def print_summaries(what: str, summaries: Mapping[str, str]) -> None:
    """Print a table of names, such as those of packaged experiments, with a line on each."""
    table = Table(what, "description", box=None, pad_edge=False)
    for name, summary in summaries.items():
        table.add_row(name, summary)
    console().print(table)


def complain(text: str) -> None:
    """Print a line to stderr, without secrets and commands to the terminal."""
    click.echo(f"narrowcast: {plain(redact(text))}", err=True)
