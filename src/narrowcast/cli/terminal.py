"""What the commands share: how folders are named, and what is printed to."""

from __future__ import annotations

import sys
from pathlib import Path

import click
from rich.console import Console

FOLDER = click.Path(file_okay=True, path_type=Path)
_PLAIN_WIDTH = 120  # columns of a table that does not go to a terminal


def console() -> Console:
    """The terminal, or a page of fixed width."""
    return Console(width=None if sys.stdout.isatty() else _PLAIN_WIDTH)


def run_folder(name: str, output: Path) -> Path:
    """The folder of a run given by its name in the output folder, or by its own path."""
    return output / name if (output / name).is_dir() or not Path(name).is_dir() else Path(name)
