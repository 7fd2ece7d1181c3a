"""A cohort in two bands: the sum rate by the rule of its split, at three densities, on the same drops for all rules."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from itertools import product
from pathlib import Path

import numpy as np

from narrowcast.algorithms.channel.regions import InterferenceRegion
from narrowcast.algorithms.channel.two_bands import Split, TwoBands, lost_rates, split_cohort, within
from narrowcast.platform.compiled import one_thread
from narrowcast.platform.tracking.figures import COLOURS, new_figure
from narrowcast.platform.types import Profiles
from narrowcast.runs.significance import compare_paired, holm, mean_interval
from narrowcast.studies.comparison import draw_seed_means
from narrowcast.studies.results import Line, Lines
from narrowcast.studies.tables import MeasuredTable, Measurements
from narrowcast.studies.verdicts import PaperVerdict, describe_order

CLIENTS = (10, 25, 75)
"""Cohorts in a square of 25 access points."""
DROPS = 20
"""Draws of places and fades for each cohort, with one seed each."""
RULES: Mapping[str, tuple[Split, int]] = {
    "max_cut, 100 hyperplanes": ("max_cut", 100),
    "local search, 100 starts": ("local_search", 100),
    "local search, 10 starts": ("local_search", 10),
    "local search, 1 start": ("local_search", 1),
    "greedy": ("greedy", 1),
    "random, best of 100": ("random", 100),
    "random": ("random", 1),
}
"""Rules and their tries; the first is compared with all others. The best split is that with the least lost rates."""


def measure_drop(clients: int, drop: int) -> Iterator[Line]:
    """Yield the sum rate in bits per second and hertz of both bands, the weight within them, and the seconds."""
    every, ones = np.arange(clients), np.ones(clients)
    profiles = Profiles(every, every + 1, ones, ones, ones)
    with one_thread():
        gains = TwoBands().gains(profiles, drop, 1)
        weights = lost_rates(gains)
        for name, (rule, tries) in RULES.items():
            split_cohort(weights, rule, drop, 1)  # compiles
            began = time.process_time()
            if rule == "random":
                seeds = range(1000 * drop, 1000 * drop + tries)
                bands = min(
                    (split_cohort(weights, rule, seed, 1) for seed in seeds), key=lambda each: within(weights, each)
                )
            else:
                bands = split_cohort(weights, rule, drop, tries)
            seconds = time.process_time() - began
            rate = float(InterferenceRegion(gains, bands, 0.5).rates.sum())
            yield {"rule": name, "sum_rate": rate, "within": within(weights, bands), "cpu_seconds": seconds}


def _values(rows: Lines, clients: int, rule: str, column: str) -> list[float]:
    chosen = [row for row in rows if row["clients"] == str(clients) and row["rule"] == rule]
    return [float(row[column]) for row in sorted(chosen, key=lambda row: int(row["drop"]))]


def judge_splits(rows: Lines) -> list[PaperVerdict]:
    """Return the sum rate of every rule and its difference to the first one's, paired by drop."""
    first, *others = RULES
    cells = [
        (clients, rule) for clients in CLIENTS if len(_values(rows, clients, first, "drop")) > 1 for rule in others
    ]
    tests = [
        compare_paired(_values(rows, clients, rule, "sum_rate"), _values(rows, clients, first, "sum_rate"), margin=0.0)
        for clients, rule in cells
    ]
    corrected = dict(zip(cells, zip(tests, holm([test.p_zero for test in tests]), strict=True), strict=True))
    verdicts = []
    for clients in dict.fromkeys(clients for clients, _ in cells):
        for rule in RULES:
            rates = _values(rows, clients, rule, "sum_rate")
            mean, seconds = mean_interval(rates), float(np.mean(_values(rows, clients, rule, "cpu_seconds")))
            difference, verdict = "", ""
            if rule != first:
                test, p_zero = corrected[clients, rule]
                interval = test.interval
                difference = f"{interval.mean:+.3f} ({interval.low:+.3f} to {interval.high:+.3f})"
                verdict = describe_order(test, p_zero, f"below {first}", f"above {first}") + "; "
            verdicts.append(
                PaperVerdict(
                    f"{clients} clients, {rule}",
                    "",
                    f"{mean.mean:.2f} ± {mean.half_width:.2f}",
                    f"{verdict}{1000 * seconds:.2g} ms",
                    difference,
                    tuple(rates),
                )
            )
    return verdicts


def plot_splits(rows: Lines, path: Path) -> None:
    """Plot the sum rate of each rule over that of coins, by drop, against the number of clients."""
    figure, (axes,) = new_figure("A cohort in two bands: sum rate over that of a random split", panels=1)
    for place, rule in enumerate(list(RULES)[:-1]):
        at, gains = [], []
        for clients in CLIENTS:
            coins = np.array(_values(rows, clients, "random", "sum_rate"))
            if len(coins) > 1:
                at.append(clients * 1.03 ** (place - 2.5))
                gains.append(np.array(_values(rows, clients, rule, "sum_rate")) / coins)
        draw_seed_means(
            axes, at, gains, color=COLOURS[place], marker="osD^v<"[place], capsize=2, linestyle="", label=rule
        )
    axes.set_xscale("log")
    axes.set_xticks(CLIENTS, [str(each) for each in CLIENTS])
    axes.minorticks_off()
    axes.set(xlabel="clients of a cohort, 25 access points", ylabel="sum rate over a random split's")
    axes.legend(fontsize=8, frameon=False)
    figure.savefig(path, dpi=100)


COHORT_SPLIT = MeasuredTable(
    (
        Measurements(
            "sdp-cohort-split.csv",
            ("clients", "drop"),
            ("rule", "sum_rate", "within", "cpu_seconds"),
            lambda _: product(CLIENTS, range(DROPS)),
            measure_drop,
            digits=8,
        ),
    ),
    judge_splits,
    plot_splits,
)
