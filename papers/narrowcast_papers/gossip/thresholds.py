"""Dynamic averaging by its threshold, beside FedAvg that averages every so many steps: loss against bits both ways."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from narrowcast.algorithms.codecs.messages import dense_wire_bits
from narrowcast.platform.tracking.figures import BLUE, GREEN, VERMILLION, new_figure
from narrowcast.runs.significance import compare_paired, mean_interval
from narrowcast.studies.results import Line, Lines
from narrowcast.studies.tables import MeasuredTable, Measurements
from narrowcast.studies.tuning import tuning_verdict
from narrowcast.studies.verdicts import PaperVerdict, bounds_of, corrected
from narrowcast_papers.gossip.digits import REACHED, measured, outcomes
from narrowcast_papers.gossip.methods import Method, last, of_method, planned

CLIENTS, STEPS = 16, 200
MODEL_BITS = dense_wire_bits(64 * 10 + 10)
PERIODS = {f"FedAvg, {steps} step{'s' * (steps > 1)}": steps for steps in (1, 2, 5, 10, 20, 50, 100, STEPS)}
"""Local steps of a round; the other methods have one."""
THRESHOLDS = {f"threshold {threshold:g}": threshold for threshold in (1.0, 4.0, 16.0, 64.0, 256.0)}
LOCAL = "local"
METHODS: Mapping[str, Method] = {
    LOCAL: Method({"kind": "local"}, (0.4,)),
    **{name: Method({"kind": "fedavg", "weights": "equal"}, (6.4,), "mean_loss") for name in PERIODS},
    **{
        name: Method({"kind": "dynamic_averaging", "threshold": threshold, "weights": "equal"}, (6.4,), "mean_loss")
        for name, threshold in THRESHOLDS.items()
    },
}
"""Rates are those of the least loss of the models' mean, which clients that send nothing do not have."""
BITS = ("megabits", "megabits_down", "megabits_last")
"""Of a client: up, down, and up for those models that a mean at the end still lacks."""


@dataclass(frozen=True)
class Dealt:
    """The clients' images: all classes alike, or two classes at most."""

    name: str
    classes: int

    @property
    def measurements(self) -> Measurements:
        """The runs on these clients, in a file of their own."""
        key = ("seed", "method", "rate", "gamma")
        of_methods = partial(planned, methods=METHODS)
        return Measurements(f"dynamic-averaging-{self.name}.csv", key, (*BITS, *REACHED), of_methods, self.measure)

    def measure(self, seed: int, method: str, rate: float, gamma: float) -> Iterator[Line]:
        """Yield the evaluation at the end of a run of `STEPS` local steps."""
        del gamma
        steps = PERIODS.get(method, 1)
        n_rounds, training = STEPS // steps, {"learning_rate": rate, "batch_size": "all", "epochs": steps}
        algorithm = METHODS[method].algorithm((rate,))
        fields = {"classes": self.classes, "training": training}
        for outcome in outcomes(seed, CLIENTS, algorithm, rate, n_rounds, n_rounds, **fields):
            if outcome.metrics:
                absent = CLIENTS - outcome.record.metrics.get("averaged_clients", CLIENTS)
                yield {
                    **measured(outcome, seed, CLIENTS),
                    "megabits_last": absent / CLIENTS * MODEL_BITS / 1e6,
                }

    def judge(self, lines: Lines) -> list[PaperVerdict]:
        """Compare each threshold with the FedAvg of the next fewer bits, and of the next more, seed by seed."""
        found = {name: losses for name, method in METHODS.items() if (losses := last(lines, name, method.judged))}
        pairs = [(name, rival) for name in found for rival in rivals(lines, name)]
        tests = corrected([compare_paired(found[name], found[rival]) for name, rival in pairs])
        compared = {
            pair: f"{test.interval.mean:+.3f} {bounds_of(test, 3)} from {pair[1]}, p = {p_zero:.2g}"
            for pair, (test, _, p_zero) in zip(pairs, tests, strict=True)
        }
        verdicts = []
        for name, losses in found.items():
            accuracy = "accuracy" if name == LOCAL else "mean_accuracy"
            words = [f"{spent(lines, name):.3g} Mbit", f"accuracy {100 * np.mean(last(lines, name, accuracy)):.1f} %"]
            words += [f"own models {np.mean(last(lines, name, 'loss')):.3f}"]
            words += [choice.words for choice in METHODS[name].choices(of_method(lines, name), name)]
            interval = mean_interval(losses)
            ours = f"{interval.mean:.3f} ({interval.low:.3f} to {interval.high:.3f})"
            difference = "; ".join(text for (ours_is, _), text in compared.items() if ours_is == name)
            verdicts.append(PaperVerdict(f"{self.name}: {name}", "", ours, "; ".join(words), difference, losses))
        return verdicts


def spent(lines: Lines, method: str) -> float:
    """Return the megabits of a client, both ways and those of a mean at the end, mean over the seeds."""
    return float(sum(np.mean(last(lines, method, column)) for column in BITS))


def rivals(lines: Lines, method: str) -> list[str]:
    """Return FedAvg with the most bits of those with no more than a threshold's, and the fewest of the others."""
    if method not in THRESHOLDS:
        return []
    bits = {name: spent(lines, name) for name in PERIODS if last(lines, name, "loss")}
    own = spent(lines, method)
    cheaper = [name for name, of_it in bits.items() if of_it <= own]
    dearer = [name for name in bits if name not in cheaper]
    return [*sorted(cheaper, key=bits.__getitem__)[-1:], *sorted(dearer, key=bits.__getitem__)[:1]]


CLIENTS_OF = (Dealt("alike", 10), Dealt("two-classes", 2))


def judge_thresholds(*parts: Lines) -> list[PaperVerdict]:
    """Compare the methods on each kind of clients, and say how they were tuned."""
    verdicts, choices = [], []
    for dealt, lines in zip(CLIENTS_OF, parts, strict=True):
        verdicts += dealt.judge(lines)
        for name, method in METHODS.items():
            choices += method.choices(of_method(lines, name), f"{dealt.name}: {name}")
    return [*verdicts, tuning_verdict(choices)] if verdicts else []


def plot_thresholds(*lines_and_path: Any) -> None:
    """Draw the loss of the models' mean, and of clients' own models, against bits, a panel for each kind of clients."""
    *parts, path = lines_and_path
    assert isinstance(path, Path)
    figure, panels = new_figure("200 local steps of 16 clients, digits: loss on all test images against bits", 2)
    for axes, dealt, lines in zip(panels, CLIENTS_OF, parts, strict=True):
        for names, column, colour, style, label in (
            (PERIODS, "mean_loss", BLUE, "o-", "FedAvg, every 1 to 200 steps"),
            (THRESHOLDS, "mean_loss", VERMILLION, "s-", "thresholds, mean of the models"),
            (THRESHOLDS, "loss", VERMILLION, "s:", "thresholds, clients' own models"),
        ):
            points = [(spent(lines, name), np.mean(values)) for name in names if (values := last(lines, name, column))]
            if points:
                axes.plot(*zip(*sorted(points), strict=True), style, color=colour, label=label, markersize=4)
        if own := last(lines, LOCAL, "loss"):
            axes.axhline(float(np.mean(own)), color=GREEN, linestyle="--", label="nothing sent")
        axes.set(xscale="log", yscale="log", xlabel="megabits of a client, both ways", title=f"classes: {dealt.name}")
    panels[0].set(ylabel="test loss")
    panels[0].legend(fontsize=8, frameon=False)
    figure.savefig(path, dpi=110)


DYNAMIC = MeasuredTable(tuple(dealt.measurements for dealt in CLIENTS_OF), judge_thresholds, plot_thresholds)
