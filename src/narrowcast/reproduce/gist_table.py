"""GIST's tables on citation graphs: our accuracies beside the report's, and the settings beside one another."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from narrowcast.reproduce.gist_runs import CITESEER, CORA, SEEDS, Cell, Rows, read, run_missing
from narrowcast.reproduce.measured_target import MeasuredTarget
from narrowcast.reproduce.verdict import PaperVerdict, mean_and_spread

MARGIN = 2.0
"""Points within which a mean counts as reproduced."""
_MEASURES = {"last": "last epoch", "best": "best epoch by test", "at_best_validation": "at the best validation"}


def judge_gist(cells: Sequence[Cell], rows: Rows) -> list[PaperVerdict]:
    """Return a verdict for each setting and measure: a published mean is reproduced if ours is within `MARGIN`."""
    verdicts = []
    for cell in cells:
        of_seeds = rows.get((cell.data, cell.name), [])
        for place, (measure, words) in enumerate(_MEASURES.items() if of_seeds else ()):
            ours = [float(row[measure]) for row in of_seeds]
            published = cell.published[place] if cell.published and place < len(cell.published) else None
            verdict, difference = "no published number", ""
            if published is not None:
                gap = float(np.mean(ours)) - published
                agrees = abs(gap) <= MARGIN
                verdict = f"reproduced, within {MARGIN:g}" if agrees else f"differs by more than {MARGIN:g}"
                difference = f"{gap:+.2f}"
            what = f"{cell.name}: {words}, {len(ours)} seeds"
            paper = "" if published is None else f"{published:.2f}"
            verdicts.append(PaperVerdict(what, paper, mean_and_spread(ours), verdict, difference, tuple(ours)))
    return verdicts


def plot_gist(title: str, cells: Sequence[Cell], rows: Rows, path: Path) -> None:
    """Draw the measures of each setting, with the seeds' standard deviations, and the published numbers."""
    from matplotlib.figure import Figure  # takes half a second

    shown = [cell for cell in cells if (cell.data, cell.name) in rows]
    figure = Figure(figsize=(9, 1.2 + 0.42 * len(shown)), layout="constrained")
    axes = figure.subplots()
    for offset, (measure, words) in zip((0.22, 0.0, -0.22), _MEASURES.items(), strict=True):
        values = [[float(row[measure]) for row in rows[cell.data, cell.name]] for cell in shown]
        places = np.arange(len(shown))[::-1] + offset
        spread = [float(np.std(each, ddof=1)) if len(each) > 1 else 0.0 for each in values]
        axes.errorbar([float(np.mean(each)) for each in values], places, xerr=spread, fmt="o", label=words)
        if measure == "at_best_validation":
            continue
        index = list(_MEASURES).index(measure)
        known = [(cell.published[index], place) for cell, place in zip(shown, places, strict=True) if cell.published]
        label = "published" if index == 0 else None
        axes.plot([each for each, _ in known], [place for _, place in known], "kx", label=label)
    axes.set_yticks(np.arange(len(shown))[::-1], [cell.name for cell in shown])
    axes.set_xlabel("test accuracy, %")
    axes.set_title(title)
    axes.grid(axis="x", alpha=0.3)
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=110)


_NOTES = (
    "Test at its best epoch selects on the test set, as the report does; beside it stand the last epoch and the epoch "
    "of the best validation. The report takes the best learning rate of a table; here each has the one that is named.",
)


def _target(what: str, name: str, cells: tuple[Cell, ...], notes: tuple[str, ...]) -> MeasuredTarget:
    return MeasuredTarget(
        what,
        f"{len(cells)} settings of {SEEDS} seeds, 20 min",
        f"{name}.csv",
        lambda paths: read(*paths),
        lambda path, done: run_missing(path, cells, done),
        lambda rows: judge_gist(cells, rows),
        lambda rows, path: plot_gist(what, cells, rows, path),
        notes,
        "Distributed Graph Convolutional Networks with Independent Subnet Training, tables 2 and 3",
    )


GIST_CORA = _target("GIST on Cora: sub-networks of a GCN", "gist-cora", CORA, _NOTES)
GIST_CITESEER = _target(
    "GIST on CiteSeer: the trend alone",
    "gist-citeseer",
    CITESEER,
    (*_NOTES, "The report's means are no multiples of a 5000th, so that its split or number of runs is another."),
)
