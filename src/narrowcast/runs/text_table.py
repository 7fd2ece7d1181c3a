"""A table of formatted cells, for a terminal, a page or a paper."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Literal

from rich import box
from rich.cells import cell_len
from rich.table import Table
from rich.text import Text

from narrowcast.platform.tracking import units
from narrowcast.platform.tracking.metric_direction import Declared
from narrowcast.platform.tracking.metric_labels import format_metric, is_share

_GAP = 2  # columns of a terminal between two of a table
_LATEX = {
    "\\": r"\textbackslash{}",
    **{each: f"\\{each}" for each in "&%$#_{}"},
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "±": r"$\pm$",
    "≥": r"$\ge$",
    "≤": r"$\le$",
}


@dataclass(frozen=True)
class TextTable:
    """Rows of text under their heads. The first `words` columns are words, the rest numbers; `bold` has (row, column).

    A line break in a head is a proposal.
    """

    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    words: int = 1
    bold: frozenset[tuple[int, int]] = field(default_factory=frozenset)
    caption: str = ""

    def fitting(self, width: int) -> Iterator[Table]:
        """Yield tables for a terminal of so many columns, side by side cut into some that fit below each other.

        Each begins with the first column, the names of the rows. No cell is cut; one that is wider alone is folded.
        """
        widths = [
            max(map(_width, (head, *(row[column] for row in self.rows)))) for column, head in enumerate(self.heads)
        ]
        parts: list[list[int]] = [[]]
        for column in range(1, len(self.heads)):
            taken = sum(widths[each] + _GAP for each in (0, *parts[-1], column))
            if parts[-1] and taken - _GAP > width:
                parts.append([])
            parts[-1].append(column)
        for part in parts:
            yield self._terminal_table([0, *part], caption=self.caption if part is parts[-1] else "")

    def _terminal_table(self, columns: Sequence[int], caption: str) -> Table:
        table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0), caption_justify="left")
        for column in columns:
            justify: Literal["left", "right"] = "left" if column < self.words else "right"
            table.add_column(self.heads[column], justify=justify, overflow="fold")
        for row, cells in enumerate(self.rows):
            shown = (Text(cells[each], style="bold" if (row, each) in self.bold else "") for each in columns)
            table.add_row(*shown)
        table.caption = Text(caption) if caption else None
        return table

    def html(self) -> str:
        """Return an HTML table, all text escaped."""
        kinds = ["word" if column < self.words else "number" for column in range(len(self.heads))]
        heads = "".join(f"<th class='{kind}'>{escape(head)}</th>" for kind, head in zip(kinds, self.heads, strict=True))
        rows = []
        for row, cells in enumerate(self.rows):
            shown = [
                f"<td class='{kinds[column]}'>"
                + (f"<b>{escape(cell)}</b>" if (row, column) in self.bold else escape(cell))
                + "</td>"
                for column, cell in enumerate(cells)
            ]
            rows.append(f"<tr>{''.join(shown)}</tr>")
        caption = f"<caption>{escape(self.caption)}</caption>" if self.caption else ""
        return f"<table>{caption}<thead><tr>{heads}</tr></thead><tbody>{''.join(rows)}</tbody></table>"

    def latex(self) -> str:
        """Return a LaTeX tabular for the package booktabs."""
        columns = "l" * self.words + "r" * (len(self.heads) - self.words)
        body = [
            [
                rf"\textbf{{{_latex(cell)}}}" if (row, column) in self.bold else _latex(cell)
                for column, cell in enumerate(cells)
            ]
            for row, cells in enumerate(self.rows)
        ]
        lines = [" & ".join(cells) + r" \\" for cells in (list(map(_latex, self.heads)), *body)]
        head = [rf"\begin{{tabular}}{{{columns}}}", r"\toprule", lines[0], r"\midrule"]
        return "\n".join([*head, *lines[1:], r"\bottomrule", r"\end{tabular}", ""])


@dataclass(frozen=True)
class Column:
    """A column of a table of runs: its head, a cell for each row, and the rows in which it is bold.

    One that is not `usual` is shown only if it is asked for.
    """

    head: str
    cells: Sequence[str]
    word: bool = False
    bold: frozenset[int] = frozenset()
    usual: bool = True


def table_of(columns: Sequence[Column], caption: str = "") -> TextTable:
    """Return a table of these columns, words before numbers."""
    ordered = [*(each for each in columns if each.word), *(each for each in columns if not each.word)]
    bold = frozenset((row, place) for place, each in enumerate(ordered) for row in each.bold)
    rows = list(zip(*(each.cells for each in ordered), strict=True))
    return TextTable([each.head for each in ordered], rows, sum(each.word for each in ordered), bold, caption)


def with_spread(name: str, mean: float, spread: float, shares: Declared = None) -> str:
    """Return a metric's mean with its standard deviation, if that is known: `68.41 ± 0.30 %`."""
    if not math.isfinite(spread) or not math.isfinite(mean):
        return format_metric(name, mean, shares)
    if is_share(name, shares) and 0 <= mean <= 1:
        return f"{100 * mean:.2f} ± {units.format_percent(spread)}"
    return f"{format_metric(name, mean, shares)} ± " + (f"{spread:.2g}" if spread < 99.5 else f"{spread:,.0f}")


def _width(text: str) -> int:
    return max(map(cell_len, text.split("\n")))


def _latex(text: str) -> str:
    return "".join(_LATEX.get(each, each) for each in text.replace("\n", " "))
