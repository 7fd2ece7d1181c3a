"""The table and the plot of sums that nobody may open: sizes by scheme, and accuracy at equal bytes and equal time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from narrowcast.algorithms.federated.sum_layout import Group, Part, SumLayout
from narrowcast.algorithms.secure.ckks_scheme import CKKS
from narrowcast.algorithms.secure.messages import Messages
from narrowcast.algorithms.secure.protection import Masked, Plain, Protection
from narrowcast.algorithms.uploads.partial_sums import ROWS, WEIGHT
from narrowcast.platform.tracking.run_plots import new_figure
from narrowcast.reproduce.against_reference import accuracies
from narrowcast.reproduce.headline_secure import COST_ROUNDS, REFERENCE, UPLOADS, runs_of
from narrowcast.reproduce.headline_table import (
    Cost,
    Point,
    compared,
    draw_curve,
    save_contest,
    seconds,
    traffic,
    within,
)
from narrowcast.reproduce.long_studies import searched
from narrowcast.reproduce.results_csv import COUNTS, Rows
from narrowcast.reproduce.verdict import PaperVerdict

ITEMS, COHORT = 1682, 60
BUDGETS = ((50.0, 100.0, 200.0), (100.0, 200.0, 400.0), (20.0, 40.0, 80.0, 160.0))
"""MB of uplink, MB of uplink and downlink together, and simulated seconds."""
SCHEMES: Mapping[str, Protection] = {
    "plain": Plain(bits=8, clip=1),
    "masks": Masked(bits=8, clip=1),
    "CKKS": CKKS(bits=8, clip=1),
}


def upload_kilobytes(scheme: Protection, columns: int, sent: int, *, by_column: bool) -> float:
    """Return what a client of a cohort sends in a round, keys and shares included, if it sends so many columns.

    `by_column`: the columns of the sum are apart, each with its own counts, so that clients may send some of them.
    """
    groups = [Group((Part(ROWS, None, ITEMS * columns),), (Part(WEIGHT, None, ITEMS),))]
    if by_column:
        groups = [Group((Part(ROWS, each, ITEMS),), (Part(WEIGHT, each, ITEMS),)) for each in range(columns)]
    layout = SumLayout(tuple(groups), {}, COHORT, COHORT, max_rank=columns * by_column, rows=ITEMS)
    messages = Messages(scheme, layout, COHORT)
    own = np.arange(len(groups))[None] < (sent if by_column else 1)
    protocol = messages.protocol_bits(np.zeros(COHORT, dtype=np.int64))
    return float(messages.update_bits(own)[0] + protocol.max()) / 8e3


def summed_curves(rows: Rows) -> dict[str, list[list[dict[str, Any]]]]:
    """Return the curves of each upload by seed at the costs of rounds under masks, of those that are finished.

    Masks cost a round what the short run has beyond the plain run of its seed: keys and shares, up and down.
    """
    found = {}
    for name, upload in UPLOADS.items():
        rates, _ = searched(rows, upload.tuned)
        results = [rows.get(spec, seed) for spec, seed in runs_of(name, rates)] if rates is not None else []
        if not results or None in results:
            continue
        masked, *plain = (each for each in results if each is not None)
        begun = next(point for point in plain[0]["curve"] if point["rounds"] == COST_ROUNDS)
        extra = {each: (masked[each] - begun[each]) / COST_ROUNDS for each in (*COUNTS, "simulated_seconds")}
        found[name] = [
            [
                {**point, **{each: point[each] + more * point["rounds"] for each, more in extra.items()}}
                for point in run["curve"]
            ]
            for run in plain
        ]
    return found


def uplink(point: Point) -> float:
    """Return the uplink alone in MB."""
    return float(point["uplink_bits"]) / 8e6


def judge_sums(rows: Rows) -> list[PaperVerdict]:
    """Return the sizes of uploads by scheme, and the accuracy at every budget less that of the reference."""
    verdicts = [_sizes(name) for name in UPLOADS]
    curves = summed_curves(rows)
    costs: Sequence[tuple[str, Cost]] = (("MB up", uplink), ("MB", traffic), ("s", seconds))
    named = [
        (f"{budget:g} {unit}", cost, budget)
        for (unit, cost), budgets in zip(costs, BUDGETS, strict=True)
        for budget in budgets
    ]
    for place, cost, budget in named:
        verdicts += compared(f"masks, {place}", REFERENCE, within(curves, cost, budget), {})
    spent = {name: _spent(of_seeds) for name, of_seeds in curves.items()}
    last = within(curves, traffic, np.inf)
    return [*verdicts, *compared("masks, last round", REFERENCE, last, spent)]


def _sizes(name: str) -> PaperVerdict:
    upload = UPLOADS[name]
    by_column = any(upload.seconds)
    sizes = {
        scheme: upload_kilobytes(each, upload.columns, upload.columns, by_column=by_column)
        for scheme, each in SCHEMES.items()
    }
    said = ", ".join(f"{size:.3g} kB {scheme}" for scheme, size in sizes.items())
    kept = 8 * ITEMS * (upload.columns + (upload.columns if by_column else 1)) / 1e3
    columns = f"{upload.columns} column{'s' * (upload.columns > 1)}"
    return PaperVerdict(f"an upload of {name}, {columns}", "", "", f"{said}; the server keeps {kept:.3g} kB")


def _spent(curves: list[list[dict[str, Any]]]) -> str:
    last = curves[0][-1]
    up, down, time = (last[each] / last["rounds"] for each in (*COUNTS, "simulated_seconds"))
    return f"{last['rounds']} rounds of {up / 8e6:.3g} MB up, {down / 8e6:.3g} MB down, {time:.3g} s"


def plot_sums(rows: Rows, path: Path) -> None:
    """Plot the mean test HR@10 against uplink and time under masks, with the seeds' standard deviation."""
    figure, panels = new_figure("Test HR@10 of sums under masks, MovieLens-100K over unequal links", panels=2)
    labels = ("uplink (MB)", "simulated time (s)")
    for axes, cost, label in zip(panels, (uplink, seconds), labels, strict=True):
        for name, curves in summed_curves(rows).items():
            values = np.array([accuracies(curve, "hr@10") for curve in curves])
            draw_curve(axes, [cost(each) for each in curves[0]], values, name, UPLOADS)
        axes.set_xlabel(label)
    save_contest(figure, path, columns=3)
