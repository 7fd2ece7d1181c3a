"""Exact and coded gossip on rings and tori of 16 and 64 clients: consensus error and loss against bits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from narrowcast.platform.tracking.figures import add_panels, empty_figure
from narrowcast.runs.significance import compare_paired, mean_interval
from narrowcast.studies.results import Line, Lines
from narrowcast.studies.tables import MeasuredTable, Measurements
from narrowcast.studies.tuning import tuning_verdict
from narrowcast.studies.verdicts import PaperVerdict, bounds_of, corrected
from narrowcast_papers.gossip.digits import REACHED, TUNING_SEEDS, measured, outcomes
from narrowcast_papers.gossip.methods import Method, first_at, last, of_method, planned, tests

ROUNDS, EVERY = 200, 10
TARGET = 0.85
"""The accuracy of clients' own models for which bits are counted."""
FOUR_BITS: Mapping[str, Any] = {"kind": "quantise", "levels": 7, "scale": "max"}
ONE_BIT: Mapping[str, Any] = {"kind": "eden", "levels": 2, "scale": "min_mse"}
"""The sign of each rotated value, and a magnitude for all."""
FEW: Mapping[str, Any] = {"kind": "top_k", "fraction": 0.05}
EXACT = "D-PSGD"
METHODS: Mapping[str, Method] = {
    EXACT: Method({"kind": "d_psgd"}, (6.4,)),
    "CHOCO, 4 bits": Method({"kind": "choco_sgd", "codec": [FOUR_BITS]}, (6.4, 1.0)),
    "CHOCO, 1 bit": Method({"kind": "choco_sgd", "codec": [ONE_BIT]}, (6.4, 1.0)),
    "CHOCO, top 5 %": Method({"kind": "choco_sgd", "codec": [FEW]}, (3.2, 0.25)),
    "naive, 4 bits": Method({"kind": "d_psgd", "codec": [FOUR_BITS]}, (6.4,)),
    "naive, 1 bit": Method({"kind": "d_psgd", "codec": [ONE_BIT]}, (0.2,)),
    "DCD, 1 bit": Method({"kind": "dcd_psgd", "codec": [{**ONE_BIT, "scale": "unbiased"}]}, (3.2,)),
}
"""DCD's theory asks for a codec whose expectation is the value."""


@dataclass(frozen=True)
class Network:
    """Clients on a topology, and the methods that are measured there."""

    topology: str
    clients: int
    methods: Mapping[str, Method]

    @property
    def name(self) -> str:
        """The topology and the number of clients."""
        return f"{self.topology} of {self.clients}"

    @property
    def measurements(self) -> Measurements:
        """The runs of the network, in a file of their own."""
        key = ("seed", "method", "rate", "gamma")
        values = ("round", "megabits", "megabits_down", "seconds", *REACHED, "consensus")
        file = f"choco-{self.topology}-{self.clients}.csv"
        return Measurements(file, key, values, partial(planned, methods=self.methods), self.measure)

    def measure(self, seed: int, method: str, rate: float, gamma: float) -> Iterator[Line]:
        """Yield the evaluations of a run, of one with a tuning seed the last alone; megabits are those of a client."""
        algorithm = self.methods[method].algorithm((rate, gamma) if gamma else (rate,), topology=self.topology)
        every = ROUNDS if seed in TUNING_SEEDS else EVERY
        for outcome in outcomes(seed, self.clients, algorithm, rate, ROUNDS, every, fleet="lognormal"):
            if outcome.metrics:
                yield {**measured(outcome, seed, self.clients), "consensus": outcome.record.metrics["consensus_error"]}

    def judge(self, lines: Lines) -> list[PaperVerdict]:
        """Compare the loss of each method with that of exact mixing after as many rounds, seed by seed."""
        found = {name: losses for name in self.methods if (losses := last(lines, name, "loss"))}
        others = [name for name in found if name != EXACT and EXACT in found]
        compared = corrected([compare_paired(found[name], found[EXACT]) for name in others])
        differences = {
            name: (f"{test.interval.mean:+.3f} {bounds_of(test, 3)}", f"p = {p_zero:.2g}")
            for name, (test, _, p_zero) in zip(others, compared, strict=True)
        }
        verdicts = []
        for name, losses in found.items():
            difference, p = differences.get(name, ("", "reference"))
            words = [p, f"accuracy {100 * np.mean(last(lines, name, 'accuracy')):.1f} %"]
            words += [f"mean of the models {100 * np.mean(last(lines, name, 'mean_accuracy')):.1f} %"]
            words += [f"consensus error {np.mean(last(lines, name, 'consensus')):.3g}"]
            words += [f"{last(lines, name, 'megabits')[0]:.3g} Mbit", f"{self._to_target(lines, name)} to {TARGET:.0%}"]
            words += [choice.words for choice in self.methods[name].choices(of_method(lines, name), name)]
            interval = mean_interval(losses)
            ours = f"{interval.mean:.3f} ({interval.low:.3f} to {interval.high:.3f})"
            verdicts.append(PaperVerdict(f"{self.name}: {name}", "", ours, "; ".join(words), difference, losses))
        return verdicts

    def _to_target(self, lines: Lines, name: str) -> str:
        """Return the mean megabits at the first evaluation that reaches the target, in words."""
        needed = [first_at(of_seed, "accuracy", TARGET, "megabits") for of_seed in tests(lines, name).values()]
        return f"{np.mean(needed):.3g} Mbit" if np.isfinite(needed).all() else "never"


AT_64: Mapping[str, Method] = {
    **METHODS,
    "CHOCO, top 5 %": replace(METHODS["CHOCO, top 5 %"], start=(12.8, 0.25)),
    "DCD, 1 bit": replace(METHODS["DCD, 1 bit"], start=(1.6,)),
}
"""The searches begin near what is best for 16 clients."""
OF_16 = (Network("ring", 16, METHODS), Network("torus", 16, METHODS))
NETWORKS = (*OF_16, Network("ring", 64, AT_64), Network("torus", 64, AT_64))


def judge_networks(*parts: Lines) -> list[PaperVerdict]:
    """Compare the methods of each network, and say how they were tuned."""
    verdicts, choices = [], []
    for network, lines in zip(NETWORKS, parts, strict=True):
        verdicts += network.judge(lines)
        for name, method in network.methods.items():
            choices += method.choices(of_method(lines, name), f"{network.name}: {name}")
    return [*verdicts, tuning_verdict(choices)] if verdicts else []


def plot_networks(*lines_and_path: Any) -> None:
    """Draw loss and consensus error against the bits that a client sent, means over the seeds, by network."""
    *parts, path = lines_and_path
    assert isinstance(path, Path)
    quantities = {"loss": "test loss", "consensus": "consensus error"}
    figure = empty_figure("Clients' own models on all test images, against bits sent", 4 * len(NETWORKS), 7.5)
    panels = add_panels(figure, len(quantities), len(NETWORKS))
    for place, axes in enumerate(panels):
        row, column = divmod(place, len(NETWORKS))
        if place:
            axes.sharex(panels[0])
        if column:
            axes.sharey(panels[place - column])
        network, lines, (quantity, label) = NETWORKS[column], parts[column], list(quantities.items())[row]
        for turn, method in enumerate(network.methods):
            if of_seeds := tests(lines, method):
                x, y = (
                    np.mean([[float(line[key]) for line in of_seed] for of_seed in of_seeds.values()], axis=0)
                    for key in ("megabits", quantity)
                )
                axes.plot(x, y, f"C{turn}", label=method, linewidth=1.2)
        axes.set(xscale="log", yscale="log")
        if not row:
            axes.set_title(network.name, fontsize=10)
        else:
            axes.set_xlabel("megabits sent by a client")
        if not column:
            axes.set_ylabel(label)
    figure.legend(handles=panels[0].get_lines(), loc="outside lower center", ncols=len(METHODS), frameon=False)
    figure.savefig(path, dpi=90)


CHOCO = MeasuredTable(tuple(network.measurements for network in NETWORKS), judge_networks, plot_networks)
