"""Options and output that several commands share."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from narrowcast.platform.redaction import redact
from narrowcast.runs.terminal_output import PlainConsole, plain

FOLDER = click.Path(file_okay=True, path_type=Path)
TRUST = click.option("--trust", is_flag=True, help="Let code run that a file names, though it is only looked at.")
"""Of commands that only look at a file or a run."""
_PLAIN_WIDTH = 120  # columns of a table that does not go to a terminal


def console() -> PlainConsole:
    """Return the terminal, or a page of fixed width if the output goes elsewhere."""
    return PlainConsole(width=None if sys.stdout.isatty() else _PLAIN_WIDTH)


def complain(text: str) -> None:
    """Print a line to stderr, without secrets and commands to the terminal."""
    click.echo(f"narrowcast: {plain(redact(text))}", err=True)


def _take_as_backend(context: click.Context, parameter: click.Parameter, value: Any) -> None:
    del parameter
    if value is not None:
        complain("--executor is now called --backend")
        context.default_map = {**(context.default_map or {}), "backend": value}


EXECUTOR = click.option("--executor", hidden=True, is_eager=True, expose_value=False, callback=_take_as_backend)
"""The name that version 0.1 had for --backend."""
