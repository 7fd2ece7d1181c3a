"""A table of formatted cells, for a terminal, a page or a paper."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

from narrowcast.platform.tracking import units
from narrowcast.platform.tracking.metric_direction import Declared
from narrowcast.platform.tracking.metric_labels import format_metric, is_share

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


def with_spread(name: str, mean: float, spread: float, shares: Declared = None) -> str:
    """Return a metric's mean with its standard deviation, if that is known: `68.41 ± 0.30 %`."""
    if not math.isfinite(spread) or not math.isfinite(mean):
        return format_metric(name, mean, shares)
    if is_share(name, shares) and 0 <= mean <= 1:
        return f"{100 * mean:.2f} ± {units.format_percent(spread)}"
    return f"{format_metric(name, mean, shares)} ± " + (f"{spread:.2g}" if spread < 99.5 else f"{spread:,.0f}")


def _latex(text: str) -> str:
    return "".join(_LATEX.get(each, each) for each in text.replace("\n", " "))
