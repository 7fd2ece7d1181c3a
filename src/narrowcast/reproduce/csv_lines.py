"""Measurements as lines of CSV files, which a later call goes on with."""

from __future__ import annotations

import csv
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Line = Mapping[str, Any]
Lines = list[Line]
"""A line is a mapping from column to text."""


def read_lines(*paths: Path) -> Lines:
    """Return the lines of these files one after the other; a file that does not exist has none."""
    found: Lines = []
    for path in paths:
        if path.exists():
            with path.open(newline="") as file:
                found += csv.DictReader(file)
    return found


def append_lines(path: Path, columns: Sequence[str], lines: Sequence[Line], digits: int = 6) -> None:
    """Append lines and sync them, with the header if the file is new; floats have so many significant digits."""
    new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        if new:
            writer.writeheader()
        writer.writerows(
            {name: f"{value:.{digits}g}" if isinstance(value, float) else value for name, value in line.items()}
            for line in lines
        )
        file.flush()
        os.fsync(file.fileno())
