"""Gossip beside FedAvg with a server over the same unequal links: seconds and bits to the same accuracy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import colormaps

from narrowcast.platform.tracking.figures import new_figure
from narrowcast.runs.significance import mean_interval
from narrowcast.studies.results import Line, Lines
from narrowcast.studies.tables import MeasuredTable, Measurements
from narrowcast.studies.tuning import tuning_verdict
from narrowcast.studies.verdicts import PaperVerdict
from narrowcast_papers.gossip.choco import EVERY, EXACT, OF_16, ONE_BIT, ROUNDS, TARGET
from narrowcast_papers.gossip.digits import REACHED, TUNING_SEEDS, measured, outcomes
from narrowcast_papers.gossip.methods import Method, first_at, last, of_method, planned, tests

CLIENTS = 16
FEDAVG, CODED = "FedAvg", "FedAvg, coded"
_PLAIN: Mapping[str, Any] = {"kind": "fedavg", "weights": "equal"}
_CODED: Mapping[str, Any] = {
    **_PLAIN,
    "codec": ["error_feedback", ONE_BIT],
    "download": {"step": 0.1, "rounding": "nearest", "history": 40},
}
SERVED: Mapping[str, tuple[Method, Mapping[str, Any]]] = {
    FEDAVG: (Method(_PLAIN, (6.4,)), {}),
    CODED: (Method(_CODED, (6.4,)), {}),
    "FedAvg, 4 clients a round": (Method(_PLAIN, (3.2,)), {"clients_per_round": 4, "sampling": "uniform"}),
    "FedAvg, uploads in turns": (Method(_PLAIN, (6.4,)), {"clock": {"uploads": "sequential"}}),
}
"""Methods with a server, with their fields besides the algorithm."""
WITHOUT = (EXACT, "CHOCO, 4 bits", "CHOCO, 1 bit", "CHOCO, top 5 %")
SHARES = (1.0, 0.25, 0.0625)
"""The rates of links to the server, as shares of those to neighbours."""


def measure_served(seed: int, method: str, rate: float, gamma: float) -> Iterator[Line]:
    """Yield the evaluations of a run with a server, of one with a tuning seed the last alone."""
    del gamma
    of, fields = SERVED[method]
    every = ROUNDS if seed in TUNING_SEEDS else EVERY
    runs = outcomes(seed, CLIENTS, of.algorithm((rate,)), rate, ROUNDS, every, fleet="lognormal", **fields)
    for outcome in runs:
        if outcome.metrics:
            yield measured(outcome, seed, CLIENTS)


def _needed(lines: Lines, method: str, wanted: str) -> tuple[float, ...]:
    """Return what each test run had spent at the first evaluation that reaches the target; megabits both ways."""
    columns = ("megabits", "megabits_down") if wanted == "megabits" else (wanted,)
    # Every client of FedAvg has the model of the server, so that its accuracy is that of the clients' own.
    return tuple(
        sum(first_at(of_seed, "accuracy", TARGET, column) for column in columns)
        for of_seed in tests(lines, method).values()
    )


def _cells(served: Lines, *networks: Lines) -> dict[str, tuple[Lines, str, Method]]:
    """Return the lines of each method that has been measured, its name there and itself."""
    cells = {name: (served, name, method) for name, (method, _) in SERVED.items()}
    for network, lines in zip(OF_16, networks, strict=False):
        cells |= {f"{name}, {network.topology}": (lines, name, network.methods[name]) for name in WITHOUT}
    return {name: cell for name, cell in cells.items() if tests(*cell[:2])}


def judge_links(served: Lines, *networks: Lines) -> list[PaperVerdict]:
    """Compare the seconds and the bits to the target with those of FedAvg on the same links, seed by seed."""
    verdicts, choices = [], []
    cells = _cells(served, *networks)
    for name, (lines, own, method) in cells.items():
        seconds, megabits = (_needed(lines, own, wanted) for wanted in ("seconds", "megabits"))
        words = [_spent(megabits, "Mbit"), f"accuracy {100 * np.mean(last(lines, own, 'accuracy')):.1f} %"]
        times = ""
        if name != FEDAVG and {FEDAVG, CODED} <= set(cells):
            times = _times(seconds, _needed(served, FEDAVG, "seconds"))
            words.append(f"of {CODED}'s seconds {_times(seconds, _needed(served, CODED, 'seconds'))}")
            words.append(f"Mbit x {_times(megabits, _needed(served, FEDAVG, 'megabits'))}")
        words += [choice.words for choice in method.choices(of_method(lines, own), own)]
        verdicts.append(PaperVerdict(name, "", _spent(seconds, "s"), "; ".join(words), times, seconds))
        choices += method.choices(of_method(lines, own), name)
    return [*verdicts, tuning_verdict(choices)] if verdicts else []


def _spent(needed: tuple[float, ...], unit: str) -> str:
    """Return the mean over the seeds, if all reach the target."""
    return f"{np.mean(needed):.3g} {unit}" if np.isfinite(needed).all() else "never"


def _times(ours: tuple[float, ...], theirs: tuple[float, ...]) -> str:
    """Return the geometric mean of a ratio over the seeds, with its interval."""
    if not np.isfinite([ours, theirs]).all():
        return "not reached"
    interval = mean_interval(np.log(ours) - np.log(theirs))
    mean, low, high = (f"{np.exp(value):.3g}" for value in (interval.mean, interval.low, interval.high))
    return f"{mean} ({low} to {high})"


def plot_links(*lines_and_path: Any) -> None:
    """Draw the accuracy against seconds, with links to the server of three rates, and against bits of both ways."""
    *parts, path = lines_and_path
    assert isinstance(path, Path)
    figure, (by_time, by_bits) = new_figure("Accuracy of clients' own models over the same unequal links", 2)
    cells = _cells(*parts)
    colours, order = colormaps["tab10"], [*SERVED, *WITHOUT]
    for name, (lines, own, _) in cells.items():
        of_seeds = list(tests(lines, own).values())
        colour, style = colours(order.index(own)), "--" if own in SERVED else ":" if name.endswith("torus") else "-"
        accuracy, seconds, up, down = (
            np.mean([[float(line[column]) for line in of_seed] for of_seed in of_seeds], axis=0)
            for column in ("accuracy", "seconds", "megabits", "megabits_down")
        )
        for share in SHARES if own == FEDAVG else SHARES[:1]:
            label = name if share == 1 else f"{name}, links of 1/{1 / share:.0f}"
            by_time.plot(seconds / share, 100 * accuracy, style, color=colour, label=label, alpha=share**0.25)
        by_bits.plot(up + down, 100 * accuracy, style, color=colour, label=name)
    by_time.set(xscale="log", xlabel="simulated seconds", ylabel="test accuracy (%)", ylim=(40, 100))
    by_bits.set(xscale="log", xlabel="megabits of a client, both ways", ylim=(40, 100))
    by_time.legend(fontsize=7, frameon=False)
    figure.savefig(path, dpi=110)


_SERVED = Measurements(
    "gossip-links.csv",
    ("seed", "method", "rate", "gamma"),
    ("round", "megabits", "megabits_down", "seconds", *REACHED),
    partial(planned, methods={name: method for name, (method, _) in SERVED.items()}),
    measure_served,
)
LINKS = MeasuredTable((_SERVED, *(network.measurements for network in OF_16)), judge_links, plot_links)
