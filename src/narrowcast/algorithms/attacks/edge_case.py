"""Backdoors by edge cases: true samples from the tail of the data, which attackers give another class."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from narrowcast.algorithms.attacks.backdoor import Backdoor
from narrowcast.algorithms.attacks.poisoning import of_classes, poison_draw, with_more_samples
from narrowcast.platform.config.catalog import DATA
from narrowcast.platform.data.dataset import DataSource
from narrowcast.platform.data.image_sets import Southwest
from narrowcast.platform.data.samples import Labelled, Samples, described, joined, rows_of_inputs, signature
from narrowcast.platform.data.soundness import load_checked
from narrowcast.platform.errors import UserError
from narrowcast.platform.seeds import PrivateSeed
from narrowcast.platform.types import IntArray


class EdgeCase(Backdoor):
    """Attackers train on edge cases with the label `target` besides samples of their own; nobody else has any.

    `edges` is the data set of the edge cases: attackers train on its training samples, each on some that are drawn for
    it, or on all of them several times if it needs more; whatever class these have there. `attack.success` is the share
    of its test samples that the global model sees as `target`. By itself this is the black-box attack of the paper;
    `radius` makes it that of PGD, and `radius` with `factor: null` PGD with model replacement.

    Source: Wang et al., Attack of the Tails, NeurIPS 2020 (arXiv:2007.05084), section 3, with planes of Southwest
    Airlines as trucks of CIFAR-10 (class 9). The paper mixes edge cases with clean samples, and its code appends them:
    `mixing: added`. With `replaced` they are in place of clean ones, so that attackers train on as many samples as
    without. With `added`, batches larger than any honest client's samples are padded to those of attackers, and
    learning rates by step count the steps of attackers if these have most.

    Differs from the paper: 1. the clean samples are the attacker's own; the code draws 400 of all training samples.
    2. attackers have the weight of their own samples alone; the code weighs all on which they train. 3. the radius
    stays as it is; the code shrinks that of some settings from round to round.
    """

    kind: Literal["edge_case"] = "edge_case"
    target: int = Field(9, ge=0, description="class that edge cases are to be seen as; 9 is CIFAR-10's trucks")
    edges: Annotated[DataSource, DATA] = Field(default_factory=Southwest, description="data set of the edge cases")
    mixing: Literal["added", "replaced"] = Field(
        "added", description="edge cases come besides an attacker's samples, or in place of as many"
    )

    @model_validator(mode="after")
    def _leaves_samples(self) -> Self:
        if self.mixing == "added" and self.share == 1:
            raise ValueError("samples that are added are less than all; use a share below 1, or mixing = replaced")
        return self

    def poison(self, data: Any, attackers: IntArray, seed: PrivateSeed) -> Samples:
        """Return the data set with attackers' edge cases; raise `UserError` if its samples are not like these."""
        if self.mixing == "replaced":
            return super().poison(data, attackers, seed)
        data = of_classes(self, data)
        edges = self.edges_like(data)
        counts = np.zeros(data.n_clients, dtype=np.int64)
        counts[attackers] = np.ceil(data.examples[attackers] * self.share / (1 - self.share))
        rows = _rows_of_each(counts, len(edges.train), poison_draw(seed))
        features = rows_of_inputs(edges.train.features, rows)
        return with_more_samples(data, counts, Labelled(features, np.full(len(rows), self.target)))

    def poisoned(self, data: Samples, samples: Labelled, owners: IntArray, draw: np.random.Generator) -> Labelled:
        """Return the samples, a share of each attacker's replaced by edge cases."""
        edges = self.edges_like(data)
        chosen = self.drawn(owners, draw)
        rows = np.arange(len(samples))
        rows[chosen] = len(samples) + _rows_of_each(np.bincount(owners[chosen]), len(edges.train), draw)
        features = rows_of_inputs(joined([samples.features, edges.train.features]), rows)
        return replace(samples, features=features, labels=np.where(chosen, self.target, samples.labels))

    def measured(self, data: Any) -> Labelled:
        """Return the test samples of the edge cases with the label `target`."""
        test = self.edges_like(data).test
        return replace(test, labels=np.full(len(test), self.target))

    def edges_like(self, data: Samples) -> Samples:
        """Return the edge cases; raise `UserError` if their samples are not like those of the data set."""
        self.check_target(data)
        edges: Any = load_checked(self.edges)
        got = described(edges.train.features) if isinstance(edges, Samples) else "not samples with features"
        if not isinstance(edges, Samples) or signature(edges.train.features) != signature(data.train.features):
            raise UserError(
                f"attack.edges = {edges.name}: its samples are {got}, and those of {data.name} "
                f"{described(data.train.features)}; use a data set of the same features"
            )
        if not len(edges.test):
            raise UserError(f"attack.edges = {edges.name} has no test samples, on which success is measured; give some")
        return edges


def _rows_of_each(counts: IntArray, n_edges: int, draw: np.random.Generator) -> IntArray:
    """Return as many rows of the edge cases for each client as it needs, one client after the other."""
    return np.concatenate([np.resize(draw.permutation(n_edges), count) for count in counts])
