"""Verdicts as a terminal table, Markdown and CSV."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from io import StringIO

from rich import box
from rich.table import Table
from rich.text import Text

from narrowcast.reproduce.verdict import PaperVerdict

_COLUMNS = ("", "paper", "ours", "difference", "verdict")


def verdict_table(title: str, verdicts: Sequence[PaperVerdict]) -> Table:
    """Return a terminal table with one row per verdict; empty columns are omitted."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title=title, title_justify="left")
    rows = [_COLUMNS, *map(_cells, verdicts)]
    shown = [place for place in range(len(_COLUMNS)) if any(row[place] for row in rows[1:])]
    for place in shown:
        table.add_column(_COLUMNS[place], justify="right" if 0 < place < 4 else "left", overflow="fold")
    for row in rows[1:]:
        table.add_row(*(Text(row[place]) for place in shown))
    return table


def as_markdown(title: str, verdicts: Sequence[PaperVerdict], notes: Sequence[str]) -> str:
    """Return a heading, the notes and the table as Markdown."""
    rows = [_COLUMNS, ("---", "--:", "--:", "--:", "---"), *map(_cells, verdicts)]
    lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    return "\n".join([f"# {title}", "", *notes, "", *lines, ""])


def as_csv(verdicts: Sequence[PaperVerdict]) -> str:
    """Return the table as CSV, with the value of each seed."""
    stream = StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(["what", *_COLUMNS[1:], "by_seed"])
    for verdict in verdicts:
        writer.writerow([*_cells(verdict), " ".join(f"{value:.6g}" for value in verdict.by_seed)])
    return stream.getvalue()


def _cells(verdict: PaperVerdict) -> tuple[str, ...]:
    return verdict.what, verdict.paper, verdict.ours, verdict.difference, verdict.verdict
