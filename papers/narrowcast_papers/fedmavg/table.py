"""The tables and plots of FedMAvg: errors against the uplink, and clusters against classes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from narrowcast.platform.models.rating_baselines import USER_MEAN
from narrowcast.platform.tracking.figures import BLACK, BLUE, GREEN, ORANGE, VERMILLION, new_figure
from narrowcast.platform.tracking.units import format_bits, format_seconds
from narrowcast.runs.significance import compare_paired, paired_interval
from narrowcast.studies.results import Rows
from narrowcast.studies.tables import StudyTable
from narrowcast.studies.tuning import cells_plan, finished, finished_cells, in_turn, untuned_plan
from narrowcast.studies.verdicts import PaperVerdict, corrected, describe, mean_and_spread
from narrowcast_papers.fedmavg import central, items
from narrowcast_papers.fedmavg.items import CELLS, LINKS, SENDERS, STEPS, TEST_SEEDS, UPLOADS, USERS, ItemCell

MARGIN = 0.005
"""Errors of held-out ratings within this are level, in stars."""
_PAIRS = (
    *((name, "m = 610") for name in ("m = 100", "m = 50", "m = 10", "m = 10, quantised")),
    ("m = 610, rated rows, quantised", "m = 610"),
    ("m = 10, rated rows, quantised", "m = 610"),
    ("m = 10, unequal links, 10 s", "m = 610, unequal links, 10 s"),
    ("1 user a client, Q = 20, 5 rounds", "1 user a client, Q = 0, 5 rounds"),
    ("1 user a client, Q = 20, 50 rounds", "m = 610"),
    ("30 users a client, Q = 20, 5 rounds", "30 users a client, Q = 0, 5 rounds"),
    ("30 users a client, Q = 20, 50 rounds", "30 users a client, Q = 0, 50 rounds"),
)
"""Cells that are compared, the reference last."""
_COLOURS = {SENDERS: BLACK, UPLOADS: BLUE, LINKS: ORANGE, STEPS: GREEN}


@dataclass(frozen=True)
class ItemRuns:
    """A finished cell: the weight decay chosen, and its test runs by seed."""

    decay: float
    runs: Sequence[Mapping[str, Any]]

    @property
    def errors(self) -> tuple[float, ...]:
        """The root mean squared error of each seed."""
        return tuple(run["final"]["test.rmse"] for run in self.runs)

    def mean(self, name: str) -> float:
        """Return the mean of a number of the runs."""
        return float(np.mean([run[name] for run in self.runs]))


def item_runs(rows: Rows) -> dict[ItemCell, ItemRuns]:
    """Return the cells whose runs are all finished."""
    return {cell: ItemRuns(cell.best(results), runs) for cell, results, runs in finished_cells(rows, CELLS, TEST_SEEDS)}


def central_runs(rows: Rows) -> dict[str, ItemRuns]:
    """Return the central solves by name, of those that are all finished."""
    return {
        cell.name: ItemRuns(cell.best(results), runs)
        for cell, results, runs in finished_cells(rows, central.CENTRAL, TEST_SEEDS)
    }


def baseline_errors(rows: Rows) -> dict[str, tuple[float, ...]]:
    """Return the root mean squared errors by seed of what takes no factors, by name."""
    runs_of = {cell.name: finished(rows, cell.run, TEST_SEEDS) for cell in central.BASELINES}
    return {name: tuple(run["final"]["test.rmse"] for run in runs) for name, runs in runs_of.items() if runs}


def judge_items(rows: Rows) -> list[PaperVerdict]:
    """Give the error and the traffic of every cell, and the differences of `_PAIRS`, seed by seed.

    What takes no factors comes first, then central solves. Every error is compared with the mean of each user, for
    which nothing is sent.
    """
    federated, baselines = item_runs(rows), baseline_errors(rows)
    verdicts = [
        PaperVerdict(name, "", mean_and_spread(errors, 4), _above(errors, baselines), by_seed=errors)
        for name, errors in baselines.items()
    ]
    for name, tuned in central_runs(rows).items():
        said = ", ".join(filter(None, (_above(tuned.errors, baselines), f"best value {tuned.decay:g}")))
        verdicts.append(PaperVerdict(name, "", mean_and_spread(tuned.errors, 4), said, by_seed=tuned.errors))
    for cell, tuned in federated.items():
        said = (
            f"uplink {format_bits(tuned.mean('uplink_bits'))}, downlink {format_bits(tuned.mean('downlink_bits'))}, "
            f"{format_seconds(tuned.mean('simulated_seconds'))} on the clock, decay {tuned.decay:g}"
        )
        said = ", ".join(filter(None, (_above(tuned.errors, baselines), said)))
        verdicts.append(PaperVerdict(cell.name, "", mean_and_spread(tuned.errors, 4), said, by_seed=tuned.errors))
    by_name = {cell.name: tuned for cell, tuned in federated.items()}
    pairs = [
        (by_name[one], by_name[other], f"{one} less {other}") for one, other in _PAIRS if {one, other} <= {*by_name}
    ]
    tests = [compare_paired(one.errors, other.errors, margin=MARGIN) for one, other, _ in pairs]
    for (one, other, what), (test, p_level, p_zero) in zip(pairs, corrected(tests), strict=True):
        share = other.mean("uplink_bits") / one.mean("uplink_bits")
        interval = f"({test.interval.low:+.4f} to {test.interval.high:+.4f})"
        verdict = describe(test, p_level, p_zero, TEST_SEEDS).partition(" (")[0].partition(" by")[0]
        said = f"{verdict} {interval}, at 1/{share:.3g} of its uplink"
        verdicts.append(PaperVerdict(what, "", "", said, f"{test.interval.mean:+.4f}"))
    return verdicts


def _above(errors: Sequence[float], baselines: Mapping[str, Sequence[float]]) -> str:
    """Return how far errors are from those of the mean of each user, seed by seed; empty for these and without them."""
    reference = baselines.get(USER_MEAN)
    if reference is None or list(errors) == list(reference):
        return ""
    interval = paired_interval(errors, reference)
    return f"{interval.mean:+.4f} ({interval.low:+.4f} to {interval.high:+.4f}) from the mean of each user"


def plot_items(rows: Rows, path: Path) -> None:
    """Plot each cell's error beside its uplink and its time on the clock, the cells one below the other."""
    found = {cell: each for cell, each in item_runs(rows).items() if cell.part != STEPS or cell.clients != USERS}
    figure, (left, right) = new_figure("FedMAvg on MovieLens latest-small", panels=2)
    for place, (cell, each) in enumerate(found.items()):
        colour, spread = _COLOURS[cell.part], float(np.std(each.errors, ddof=1))
        left.errorbar([float(np.mean(each.errors))], [-place], xerr=spread, color=colour, marker="o", capsize=3)
        right.plot([each.mean("uplink_bits") / 8e6], [-place], "o", color=colour)
        right.plot([each.mean("simulated_seconds")], [-place], "x", color=colour)
    lines = [(name, errors, ":") for name, errors in baseline_errors(rows).items()]
    lines += [(name, each.errors, "--") for name, each in central_runs(rows).items()]
    for (name, errors, style), colour in zip(lines, (BLACK, BLUE, ORANGE, VERMILLION), strict=False):
        mean, spread = float(np.mean(errors)), float(np.std(errors, ddof=1))
        left.axvspan(mean - spread, mean + spread, color=colour, alpha=0.2, linewidth=0)
        left.axvline(mean, color=colour, linestyle=style, label=name)
    left.legend(fontsize=7, frameon=False, loc="lower left")
    left.set_yticks([-place for place in range(len(found))], [cell.name for cell in found], fontsize=7)
    right.set_yticks([-place for place in range(len(found))], [""] * len(found))
    left.set(xlabel="RMSE of held-out ratings")
    right.set(xlabel="dots: uplink (MB); crosses: time on the virtual clock (s)", xscale="log")
    figure.savefig(path, dpi=150)


ITEMS = StudyTable(
    {
        items.STUDY: in_turn(
            [
                untuned_plan(items.STUDY, [cell.run for cell in central.BASELINES], TEST_SEEDS),
                *(cells_plan(items.STUDY, (cell,), TEST_SEEDS) for cell in central.CENTRAL),
                cells_plan(items.STUDY, CELLS, TEST_SEEDS),
            ]
        )
    },
    judge_items,
    plot_items,
)
