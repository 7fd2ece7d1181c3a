"""Backdoors: a class of the attackers' choice, and ways to get it past a server."""

from __future__ import annotations

from abc import ABC
from dataclasses import replace

import numpy as np
from pydantic import Field

from narrowcast.algorithms.attacks.poisoning import DataPoisoning
from narrowcast.algorithms.attacks.tampering import boosted
from narrowcast.platform.data.partition import random_ranks
from narrowcast.platform.data.samples import Samples
from narrowcast.platform.errors import UserError
from narrowcast.platform.rounds.adversary import Seen, View
from narrowcast.platform.types import BoolArray, FloatArray, IntArray, LocalTerms


class Backdoor(DataPoisoning, ABC):
    """A share of the attackers' samples has the label `target`, and the global model is to learn what they share.

    Attackers may train longer, and stay near the model x that they were sent: with `pull` they descend their loss +
    pull/2 |y - x|^2 (constrain-and-scale), with `radius` y is projected onto the ball of that radius around x after
    every local step (PGD). They scale what they have learnt then by `factor`, null for the one that replaces the model;
    `norm` is the longest change that they claim (train-and-scale).

    Source: Bagdasaryan et al., AISTATS 2020 (the factor, constrain-and-scale and train-and-scale); Wang et al., Attack
    of the Tails, NeurIPS 2020 (arXiv:2007.05084), section 3 (PGD, with and without replacement).

    Differs from the papers: 1. the attackers' weights decide the factor, see `replacement`. 2. the papers weigh the
    loss by alpha and the anomaly by 1 - alpha: pull is their ratio, and the learning rate has the rest; the anomaly is
    half the squared distance. 3. momentum and moments know nothing of the projection.
    """

    target: int = Field(0, ge=0, description="class that the attackers' samples are to be seen as")
    share: float = Field(0.3, gt=0, le=1, description="share of an attacker's samples that have the label `target`")
    epochs: int | None = Field(None, ge=1, description="local epochs of attackers; null: those of the training")
    pull: float = Field(0.0, ge=0, allow_inf_nan=False, description="mu of attackers' mu/2 |y - x|^2; 0: none")
    radius: float | None = Field(
        None, gt=0, allow_inf_nan=False, description="largest L2 distance of y from x in local steps; null: any"
    )
    factor: float | None = Field(
        1.0, gt=0, allow_inf_nan=False, description="factor of changes; null: the cohort's weight over the attackers'"
    )
    norm: float | None = Field(None, gt=0, allow_inf_nan=False, description="longest claim, in L2; null: any")

    @property
    def sees(self) -> View:
        """All changes, with their weights, if they give the factor."""
        return "all" if self.factor is None else "own"

    def terms(self, terms: LocalTerms, attacks: BoolArray, epochs: int) -> LocalTerms:
        """Return the terms with the attackers' epochs, pulls and radii; raise `UserError` for these in phases."""
        if self.epochs is not None:
            given = epochs if terms.epochs is None else terms.epochs
            terms = replace(terms, epochs=np.where(attacks, self.epochs, given))
        held = replace(
            terms,
            pulls=np.where(attacks, self.pull, 0.0) if self.pull else None,
            radii=None if self.radius is None else np.where(attacks, self.radius, np.inf),
        )
        if held.holds_clients and terms.phases:
            raise UserError(
                "attack.pull and attack.radius hold attackers near the model of the round, and clients of this "
                "algorithm train in phases, each from where the last ended; leave them out, or use attack.norm"
            )
        return held

    def tamper(self, own: FloatArray, seen: Seen) -> FloatArray:
        """Return factor x_i, no longer than `norm`."""
        return boosted(own, seen, self.factor, self.norm)

    def check_target(self, data: Samples) -> None:
        """Raise `UserError` if the target is not a class of the data set."""
        if self.target >= data.n_classes:
            raise UserError(f"attack.target = {self.target}: {data.name} has the classes 0 to {data.n_classes - 1}")

    def drawn(self, owners: IntArray, draw: np.random.Generator) -> BoolArray:
        """Return which samples have the label `target`, [n]: of each attacker the same share, at random."""
        return random_ranks(owners, draw) < np.ceil(self.share * np.bincount(owners))[owners]
