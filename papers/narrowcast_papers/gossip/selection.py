"""FedCS beside random cohorts, over-selection and deadlines, in as many simulated seconds: uploads take turns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from narrowcast.experiment import load_experiment
from narrowcast.platform.rounds.loop import LocalExecutor, rounds
from narrowcast.platform.rounds.state import Run
from narrowcast.platform.tracking.figures import COLOURS, new_figure
from narrowcast.runs.significance import compare_paired, paired_interval
from narrowcast.studies.results import Line, Lines
from narrowcast.studies.tables import MeasuredTable, Measurements
from narrowcast.studies.tuning import Choice, Point, climbed_on, tuning_verdict
from narrowcast.studies.verdicts import PaperVerdict, bounds_of, corrected, mean_and_spread
from narrowcast_papers.gossip.digits import TEST_SEEDS, TUNING_SEEDS, VALIDATION_SHARE, split_of

CLIENTS, CANDIDATES = 100, 50
SECONDS, EARLY, MARKS = 30.0, 10.0, 20
"""Simulated seconds of a run, those after which it is also compared, and into how many parts its curve is divided."""
FLEETS: Mapping[str, Any] = {
    "unequal": "lognormal",
    "equal": {
        "kind": "lognormal",
        "uplink_mbit_per_second": {"median": 2, "sigma": 0},
        "downlink_mbit_per_second": {"median": 6, "sigma": 0},
        "compute_speed": {"median": 1, "sigma": 0},
    },
}
RATES = tuple(0.1 * 2**step for step in range(9))
COHORTS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 50.0, 100.0)
DURATIONS = tuple(0.1 * 2 ** (step / 2) for step in range(13))
RANDOM, FEDCS = "random", "FedCS"


@dataclass(frozen=True)
class Choosing:
    """How clients are chosen by a number of its ladder, `own`; the search for a rate and it begins at `start`."""

    own: str
    ladder: tuple[float, ...]
    start: tuple[float, float]

    def fields(self, own: float) -> Mapping[str, Any]:
        """Return the fields of an experiment."""
        if self.own == "round seconds":
            return {"clients_per_round": CANDIDATES, "sampling": {"kind": "fedcs", "round_seconds": own}}
        if self.own == "deadline":
            return {"clients_per_round": CANDIDATES, "deadline_seconds": own}
        more = {"over_selection": 1.5} if self.own == "clients of 1.5 times as many" else {}
        return {"clients_per_round": int(own), **more}


METHODS: Mapping[str, Choosing] = {
    RANDOM: Choosing("clients", COHORTS, (0.8, 8.0)),
    "over-selection": Choosing("clients of 1.5 times as many", COHORTS, (0.8, 8.0)),
    "deadline": Choosing("deadline", DURATIONS, (0.8, DURATIONS[4])),
    FEDCS: Choosing("round seconds", DURATIONS, (0.8, DURATIONS[4])),
}


@lru_cache(maxsize=8)
def _data(seed: int) -> Any:
    return _experiment(seed, "equal", {}, 1.0).data_source.load()


def _experiment(seed: int, fleet: str, fields: Mapping[str, Any], rate: float) -> Any:
    return load_experiment(
        {
            "name": "fedcs",
            "seed": seed,
            "data": {
                "kind": "digits",
                "clients": CLIENTS,
                "partition": "shards",
                "validation_share": VALIDATION_SHARE,
                "seed": seed,
            },
            **{"model": "softmax", "algorithm": "fedavg", "fleet": FLEETS[fleet], "sampling": "uniform"},
            "training": {"learning_rate": rate, "batch_size": 10, "epochs": 2},
            "clock": {"uploads": "sequential", "seconds_per_example": 0.001},
            **{"rounds": 5000, "evaluate_every": 5, "evaluate_clients": [split_of(seed)], "backend": "local"},
            **{"chunk_size": CLIENTS, "checkpoint_seconds": 100000},
            **fields,
        }
    )


def measure_choice(seed: int, fleet: str, method: str, rate: float, own: float) -> Iterator[Line]:
    """Yield evaluations, of a run with a tuning seed the last before the end; accuracies are in percent.

    `slow` is the accuracy on the images of the quarter of the clients with the slowest uplinks.
    """
    of = _experiment(seed, fleet, METHODS[method].fields(own), rate)
    run, split = Run(of, of.algorithm, of.task(_data(seed))), split_of(seed)
    uplinks = of.fleet.profiles(run.task.data.examples, of.seed).uplink_bits_per_second
    slow, delivered, line, mark = np.argsort(uplinks)[: CLIENTS // 4], 0, dict[str, Any](), 0.0
    for outcome in rounds(run, LocalExecutor(run)):
        seconds = outcome.record.simulated_seconds
        if seconds > SECONDS:
            break
        delivered += outcome.record.delivered
        if outcome.metrics:
            if line and line["seconds"] >= mark and seed in TEST_SEEDS:
                yield line
                mark += SECONDS / MARKS
            line = {
                "round": outcome.step,
                "seconds": seconds,
                "clients": delivered / outcome.step,
                "megabytes": outcome.record.total_uplink_bits / 8e6,
                "loss": outcome.metrics[f"{split}.loss"],
                "slow": 100 * float(np.nanmean(outcome.client_metrics[f"{split}.accuracy"][slow])),
                "accuracy": 100 * outcome.metrics[f"{split}.accuracy"],
            }
    yield line or {"round": 0, "loss": float("inf"), "accuracy": 0.0}


def _of(lines: Lines, fleet: str, method: str) -> Lines:
    return [line for line in lines if (line["fleet"], line["method"]) == (fleet, method)]


def searched(lines: Lines, fleet: str, method: str) -> tuple[Point | None, list[Point]]:
    """Return the point of the least mean loss over the tuning seeds, None before all runs that tell; and all."""
    ladders = {"rate": RATES, "own": METHODS[method].ladder}
    return climbed_on(_of(lines, fleet, method), METHODS[method].start, ladders, "loss", TUNING_SEEDS, better=-1)


def planned(lines: Lines) -> Iterator[tuple[int, str, str, float, float]]:
    """Yield the runs that tune each method on each fleet, and then its tests."""
    for fleet in FLEETS:
        for method in METHODS:
            best: Point | None = None
            while best is None:
                best, tried = searched(lines, fleet, method)
                for rate, own in tried:
                    yield from ((seed, fleet, method, rate, own) for seed in TUNING_SEEDS)
            rate, own = best
            yield from ((seed, fleet, method, rate, own) for seed in TEST_SEEDS)


def _ends(lines: Lines, fleet: str, method: str, column: str) -> tuple[float, ...]:
    """Return a column at the end of each test run; empty unless all are there."""
    found = {int(line["seed"]): float(line[column]) for line in _of(lines, fleet, method) if line[column]}
    return tuple(found[seed] for seed in TEST_SEEDS) if set(TEST_SEEDS) <= set(found) else ()


def judge_choices(lines: Lines) -> list[PaperVerdict]:
    """Compare each method with random cohorts on the same fleet, seed by seed; p values are corrected by fleet."""
    verdicts, choices = [], []
    for fleet in FLEETS:
        found = {method: values for method in METHODS if (values := _ends(lines, fleet, method, "accuracy"))}
        others = [method for method in found if method != RANDOM and RANDOM in found]
        compared = corrected([compare_paired(found[method], found[RANDOM]) for method in others])
        said = {
            method: (f"{test.interval.mean:+.2f} {bounds_of(test)}", f"p = {p_zero:.2g}")
            for method, (test, _, p_zero) in zip(others, compared, strict=True)
        }
        for method, values in found.items():
            difference, p = said.get(method, ("", "reference"))
            means = {column: np.mean(_ends(lines, fleet, method, column)) for column in ("round", "clients", "slow")}
            words = [p, f"{means['clients']:.1f} clients a round, {means['round']:.0f} rounds"]
            words += [f"{np.mean(_ends(lines, fleet, method, 'megabytes')):.2f} MB up"]
            words += [f"after {EARLY:g} s {_early(lines, fleet, method)}"]
            words += [f"slowest quarter {mean_and_spread(_ends(lines, fleet, method, 'slow'), 1)}"]
            of_it = _choices(lines, fleet, method)
            words += [choice.words for choice in of_it]
            what = f"{fleet} links: {method}"
            verdicts.append(PaperVerdict(what, "", mean_and_spread(values, 1), "; ".join(words), difference, values))
            choices += of_it
    return [*verdicts, tuning_verdict(choices)] if verdicts else []


def _early(lines: Lines, fleet: str, method: str) -> str:
    """Return the accuracy at the last evaluation before `EARLY`, and how far it is from that of random cohorts."""
    ours, theirs = (
        [
            [float(line["accuracy"]) for line in of_seed if float(line["seconds"]) <= EARLY][-1]
            for seed in TEST_SEEDS
            if (of_seed := [line for line in _of(lines, fleet, name) if line["seed"] == str(seed)])
        ]
        for name in (method, RANDOM)
    )
    if method == RANDOM or len(theirs) < len(ours):
        return mean_and_spread(ours, 1)
    apart = paired_interval(ours, theirs)
    return f"{mean_and_spread(ours, 1)}, {apart.mean:+.1f} ({apart.low:+.1f} to {apart.high:+.1f})"


def _choices(lines: Lines, fleet: str, method: str) -> list[Choice]:
    best, tried = searched(lines, fleet, method)
    if best is None:
        return []
    grids = [tuple(sorted(set(values))) for values in zip(*tried, strict=True)]
    what, seeds = f"{fleet} links: {method}", len(TUNING_SEEDS)
    own = METHODS[method]
    return [
        Choice(what, "rate", best[0], grids[0], seeds),
        Choice(what, own.own, best[1], grids[1], seeds, least=own.ladder[0] if own.ladder is COHORTS else -np.inf),
    ]


def plot_choices(*lines_and_path: Any) -> None:
    """Draw the accuracy against simulated seconds, a panel for each fleet."""
    lines, path = lines_and_path
    assert isinstance(path, Path)
    figure, panels = new_figure("Test accuracy of cohorts whose uploads take turns", 2)
    for axes, fleet in zip(panels, FLEETS, strict=True):
        for colour, method in zip(COLOURS, METHODS, strict=False):
            there = [line for line in _of(lines, fleet, method) if int(line["seed"]) in TEST_SEEDS and line["seconds"]]
            curves = [
                np.array([(float(line["seconds"]), float(line["accuracy"])) for line in there if line["seed"] == seed])
                for seed in sorted({line["seed"] for line in there})
            ]
            if curves:
                x = np.linspace(SECONDS / MARKS, SECONDS, 2 * MARKS)
                mean = np.mean([np.interp(x, curve[:, 0], curve[:, 1], left=np.nan) for curve in curves], axis=0)
                axes.plot(x, mean, color=colour, label=method)
        axes.set(xlabel="simulated seconds", ylabel="test accuracy (%)", title=f"{fleet} links", ylim=(60, 100))
    panels[0].legend(fontsize=8, frameon=False)
    figure.savefig(path, dpi=110)


SELECTION = MeasuredTable(
    (
        Measurements(
            "fedcs.csv",
            ("seed", "fleet", "method", "rate", "own"),
            ("round", "seconds", "clients", "megabytes", "loss", "slow", "accuracy"),
            planned,
            measure_choice,
        ),
    ),
    judge_choices,
    plot_choices,
)
