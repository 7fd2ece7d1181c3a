"""Backdoors by edge cases: planes of one airline as trucks, by rule, attack and round.

A small network on 2,000 of the 12,000 JPEG images of CIFAR-10 over 10 clients with Dirichlet(0.3) classes, of whom one
attacks in every round. It starts from what the server learns of 7,000 other images, as the paper starts from a trained
model. Attackers have 784 planes to train on, and success is measured on 196 others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from narrowcast.algorithms.local_training.sgd import SGD
from narrowcast.experiment import Experiment
from narrowcast.platform.contracts import Task
from narrowcast.platform.tracking.figures import COLOURS, add_panels, empty_figure
from narrowcast.platform.types import Arrays, Chunk, LocalTerms
from narrowcast.studies.results import Lines
from narrowcast_papers.robust.matrix import NONE, Matrix, Setting, Settings, data_of
from narrowcast_papers.robust.tables import FEDAVG

ATTACKERS, ROUNDS, EVERY = 1, 8, 2
SPLIT = "Dirichlet 0.3"
CIFAR = Setting(
    {"kind": "image_folder", "path": "cifar10-jpeg-12k", "validation_share": 0.1},
    model={"kind": "cnn", "channels": [8, 16], "hidden": 64},
    clients=10,
    attackers=ATTACKERS,
    rounds=ROUNDS,
    every=EVERY,
    server=7_000,
)
FIRST = SGD(learning_rate=0.01, momentum=0.9, batch_size=32, epochs=9)
"""The training on the images of the server's own, before round 1."""
_CLIP: Mapping[str, Any] = {"kind": "norm_clip", "radius": "median"}
RULES: Settings = {
    "mean": FEDAVG,
    "norm clip": {**FEDAVG, "aggregator": _CLIP},
    "norm clip, noise": {**FEDAVG, "aggregator": {**_CLIP, "noise": 0.001}},
    "multi-Krum": {**FEDAVG, "aggregator": {"kind": "krum", "byzantine": ATTACKERS, "selected": 9}},
    "geometric median": {**FEDAVG, "aggregator": {"kind": "geometric_median", "iterations": 4}},
}
RADIUS = 0.3
"""Of PGD: the median length of honest changes of a first round at rate 0.0125, of one seed."""
_EDGE: Mapping[str, Any] = {"kind": "edge_case", "target": 9}
PLANES: Settings = {
    NONE: {**_EDGE, "first_round": ROUNDS + 1},
    "black box": _EDGE,
    "PGD": {**_EDGE, "radius": RADIUS},
    "PGD, replacement": {**_EDGE, "radius": RADIUS, "factor": None},
}
"""With none nobody attacks, and success is what an untouched model errs."""


@lru_cache(maxsize=8)
def first_model(seed: int) -> Arrays:
    """Return the model that the server learns of its own images."""
    of = CIFAR.experiment(SPLIT, FEDAVG, {}, FIRST.learning_rate, seed)
    task = replace(of.task(data_of(of.data_source)).of_server(), training=FIRST)
    drawn, server = task.initial_parameters(), Chunk(1, 0, np.zeros(1, dtype=np.int64), {})
    learnt = FIRST.train(drawn, server, task, LocalTerms())
    return {name: values + learnt.changes[name][0] for name, values in drawn.items()}


@dataclass(frozen=True)
class FromFirstModel(Matrix):
    """A matrix whose runs start from the server's model, and are drawn by round.

    Success is above accuracy, with a panel for each attack and a line for each method.
    """

    def task(self, of: Experiment) -> Task:
        """Return the task of an experiment, which starts from the model of its seed."""
        return replace(super().task(of), start=first_model(of.seed))

    def plot(self, lines: Lines, path: Path) -> None:
        """Draw the means over the test seeds, of methods that have all of them."""
        figure = empty_figure(self.title, 3 * len(self.attacks), 6)
        panels = add_panels(figure, 2, len(self.attacks))
        ticks = list(range(self.setting.every, self.setting.rounds + 1, self.setting.every))
        for (row, column), (place, attack) in product(enumerate((self.judged, "test")), enumerate(self.attacks)):
            axes = panels[row * len(self.attacks) + place]
            for colour, method in zip(COLOURS, self.methods, strict=False):
                found = {
                    (int(line["seed"]), int(line["round"])): float(line[column])
                    for line in lines
                    if (line["method"], line["attack"]) == (method, attack) and int(line["seed"]) in self.test_seeds
                }
                if len(found) == len(ticks) * len(self.test_seeds):
                    means = [np.mean([found[seed, tick] for seed in self.test_seeds]) for tick in ticks]
                    axes.plot(ticks, means, color=colour, label=method)
            axes.set_title(f"{attack}: {column}", fontsize=9)
            axes.set_ylim(0, 100 if column == self.judged else 60)
            axes.set_xlabel("round")
        panels[0].legend(fontsize=7)
        figure.savefig(path, dpi=100)


BY_ROUND = FromFirstModel(
    "Planes of one airline seen as trucks (%), and test accuracy (%), by round",
    "backdoor-edge.csv",
    (SPLIT,),
    RULES,
    PLANES,
    "mean",
    ("round", "success"),
    judged="success",
    setting=CIFAR,
    test_seeds=(0, 1, 2),
    first_rates=(0.0125, 0.025, 0.05),
)
EDGE = BY_ROUND.table
