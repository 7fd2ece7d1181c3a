"""Model poisoning: attackers train as all do, and claim other changes than they have learnt.

Letters: x_i the true change of a client as a vector of d numbers; own [A, d] those of the attackers, honest [H, d]
those that attackers know of honest training; w weights in the mean; mu and sigma the mean and standard deviation of the
honest changes, coordinate by coordinate.
"""

from __future__ import annotations

from abc import abstractmethod
from statistics import NormalDist
from typing import Literal

import numpy as np
from pydantic import Field

from narrowcast.platform.rounds.adversary import Attack, Seen, View
from narrowcast.platform.types import FloatArray


class SignFlip(Attack):
    """Attackers claim the opposite of what they have learnt: -scale x_i."""

    kind: Literal["sign_flip"] = "sign_flip"
    scale: float = Field(1.0, gt=0, allow_inf_nan=False, description="factor of the opposite change")

    def tamper(self, own: FloatArray, seen: Seen) -> FloatArray:
        """Return -scale x_i."""
        del seen
        return -self.scale * own


class Gaussian(Attack):
    """Attackers claim noise, N(0, s^2) in each coordinate, in place of what they have learnt.

    Source: Blanchard et al., NeurIPS 2017, section 5, with s = 200.
    """

    kind: Literal["gaussian"] = "gaussian"
    standard_deviation: float = Field(1.0, gt=0, allow_inf_nan=False, description="s, of each coordinate")

    def tamper(self, own: FloatArray, seen: Seen) -> FloatArray:
        """Return the noise."""
        return self.standard_deviation * seen.draw.standard_normal(own.shape)


class Replacement(Attack):
    """Attackers scale what they have learnt, so that the new global model is theirs: factor x_i.

    Without a factor it is the sum of the cohort's weights over that of its attackers: if the others change nothing, and
    the server's learning rate is 1, the model becomes the mean of the attackers' models. With `norm` each claim is then
    scaled down to that length, which passes a test of norms (train-and-scale). Attackers boost what they learn of their
    true samples; `trigger` has the same factor for poisoned ones.

    Source: Bagdasaryan et al., How To Backdoor Federated Learning, AISTATS 2020, equation 3.

    Differs from the paper: 1. several attackers share the factor, so that their sum replaces the model once.
    """

    kind: Literal["replacement"] = "replacement"
    factor: float | None = Field(
        None, gt=0, allow_inf_nan=False, description="factor of changes; null: the cohort's weight over the attackers'"
    )
    norm: float | None = Field(None, gt=0, allow_inf_nan=False, description="longest claim, in L2; null: any")

    @property
    def sees(self) -> View:
        """All weights, which give the factor; the changes of others do not matter."""
        return "all"

    def tamper(self, own: FloatArray, seen: Seen) -> FloatArray:
        """Return factor x_i, no longer than `norm`."""
        return boosted(own, seen, self.factor, self.norm)


def boosted(own: FloatArray, seen: Seen, factor: float | None, norm: float | None) -> FloatArray:
    """Return the changes times a factor, None for the one that replaces the model, no longer than `norm`."""
    if factor is None:
        factor = float((seen.weights.sum() + seen.other_weights.sum()) / seen.weights.sum())
    claims = factor * own
    if norm is None:
        return claims
    lengths = np.linalg.norm(claims, axis=1, keepdims=True)
    return claims * np.minimum(1, norm / np.maximum(lengths, np.finfo(float).tiny))


class Omniscient(Attack):
    """Attackers turn the weighted mean into its opposite: x_i - 2 (W / W_A) mean, of weights of all and of attackers.

    Source: Pillutla, Kakade and Harchaoui, Robust Aggregation for Federated Learning, IEEE TSP 2022, section 5.
    """

    kind: Literal["omniscient"] = "omniscient"

    @property
    def sees(self) -> View:
        """All changes."""
        return "all"

    def tamper(self, own: FloatArray, seen: Seen) -> FloatArray:
        """Return the claims that make the mean -mean."""
        total = seen.weights @ own + seen.other_weights @ seen.others
        return own - 2 * total / seen.weights.sum()


class _Knowing(Attack):
    """An attack that follows from honest changes, of the attackers or of all clients."""

    view: Literal["group", "all"] = Field(
        "all", description="honest changes that attackers know: those of the attackers of the cohort, or of its others"
    )

    @property
    def sees(self) -> View:
        """The changes that the field says."""
        return self.view


class InnerProduct(_Knowing):
    """All attackers claim -scale mu, so that the aggregate points away from the mean (IPM).

    Source: Xie, Koyejo and Gupta, Fall of Empires, UAI 2019, with scales from 0.1 to 100.
    """

    kind: Literal["inner_product"] = "inner_product"
    scale: float = Field(1.0, gt=0, allow_inf_nan=False, description="factor of the opposite mean")

    def tamper(self, own: FloatArray, seen: Seen) -> FloatArray:
        """Return -scale mu for each."""
        return np.tile(-self.scale * seen.honest(own).mean(axis=0), (len(own), 1))


class ALIE(_Knowing):
    """All attackers claim mu - z sigma: a little is enough, where clients differ.

    Without z it is the largest with which attackers are nearer to mu than enough honest clients, for n clients of whom
    m attack: Phi^-1((n - m - s) / (n - m)) with s = floor(n / 2 + 1) - m; it may be 0, as for n 10 and m 2.

    Source: Baruch, Baruch and Goldberg, A Little Is Enough, NeurIPS 2019, Algorithm 3. Its code uses 1.5.

    Differs from the paper: 1. `view: all` takes mu and sigma of the honest clients; the paper's attackers know what
    they have learnt themselves, `view: group`.
    """

    kind: Literal["alie"] = "alie"
    z: float | None = Field(
        None, ge=0, allow_inf_nan=False, description="deviations from the mean; null: what n and m allow"
    )

    def tamper(self, own: FloatArray, seen: Seen) -> FloatArray:
        """Return mu - z sigma for each."""
        honest = seen.honest(own)
        z = self.z if self.z is not None else largest_z(len(own) + len(seen.others), len(own))
        return np.tile(honest.mean(axis=0) - z * honest.std(axis=0), (len(own), 1))


def largest_z(n: int, m: int) -> float:
    """Return z of n clients of whom m attack, 0 to 3: where m are a majority, any would do."""
    needed, honest = n // 2 + 1 - m, n - m
    if needed <= 0:
        return 3.0
    return max(0.0, NormalDist().inv_cdf((honest - needed) / honest)) if honest > needed else 0.0


Direction = Literal["mean", "std", "sign"]
"""Of the perturbation: the unit vector of mu, sigma, or the sign of mu."""


def perturbation(honest: FloatArray, direction: Direction) -> FloatArray:
    """Return d, against which claims move, [d]."""
    mean = honest.mean(axis=0)
    match direction:
        case "mean":
            return mean / max(float(np.linalg.norm(mean)), np.finfo(float).tiny)
        case "std":
            return honest.std(axis=0)
        case "sign":
            return np.sign(mean)


class _Spread(_Knowing):
    """All attackers claim mu - gamma d with the largest gamma that keeps them as near as the honest ones are."""

    direction: Direction = Field("std", description="d: the unit mean, standard deviations, or signs of the mean")

    def tamper(self, own: FloatArray, seen: Seen) -> FloatArray:
        """Return mu - gamma d for each."""
        honest = seen.honest(own)
        mean, d = honest.mean(axis=0), perturbation(honest, self.direction)
        return np.tile(mean - self.largest(honest, mean, d) * d, (len(own), 1))

    @abstractmethod
    def largest(self, honest: FloatArray, mean: FloatArray, d: FloatArray) -> float:
        """Return gamma."""


def squared_distances(vectors: FloatArray) -> FloatArray:
    """Return the squared distance of each pair, [n, n], by differences, which do not cancel."""
    return np.stack([((vectors - vector) ** 2).sum(axis=1) for vector in vectors])


class MinMax(_Spread):
    """Attackers are as far from any honest client as two honest clients are from each other, at most.

    gamma is in closed form: with a = |d|^2, b_i = <d, mu - x_i>, c_i = |mu - x_i|^2 and D the largest distance,
    min_i (b_i + sqrt(b_i^2 - a (c_i - D^2))) / a.

    Source: Shejwalkar and Houmansadr, Manipulating the Byzantine, NDSS 2021, equation 7.

    Differs from the paper: 1. gamma is exact; the paper halves steps of a search.
    """

    kind: Literal["min_max"] = "min_max"

    def largest(self, honest: FloatArray, mean: FloatArray, d: FloatArray) -> float:
        """Return the largest gamma with max_i |mu - gamma d - x_i| <= D."""
        a = float(d @ d)
        if not a:
            return 0.0
        b, c = (mean - honest) @ d, ((mean - honest) ** 2).sum(axis=1)
        roots = b + np.sqrt(np.maximum(b**2 - a * (c - squared_distances(honest).max()), 0))
        return max(0.0, float(roots.min()) / a)


class MinSum(_Spread):
    """Attackers' squared distances to all honest clients add up to no more than those of an honest client.

    gamma is in closed form: sqrt((S - sum_i c_i) / (n a)), letters as in `min_max`, S the smallest sum of an honest
    client's squared distances (`bound: smallest`, as in the paper's code) or the largest, as in its text.

    Source: Shejwalkar and Houmansadr, Manipulating the Byzantine, NDSS 2021, equation 8.

    Differs from the paper: 1. gamma is exact; the paper halves steps of a search.
    """

    kind: Literal["min_sum"] = "min_sum"
    bound: Literal["smallest", "largest"] = Field("smallest", description="S, of the honest clients' sums")

    def largest(self, honest: FloatArray, mean: FloatArray, d: FloatArray) -> float:
        """Return the largest gamma with sum_i |mu - gamma d - x_i|^2 <= S."""
        a = float(d @ d)
        if not a:
            return 0.0
        sums = squared_distances(honest).sum(axis=1)
        bound = sums.min() if self.bound == "smallest" else sums.max()
        c = ((mean - honest) ** 2).sum()
        return float(np.sqrt(max(0.0, bound - c) / (len(honest) * a)))


class Mimic(_Knowing):
    """All attackers claim the change of one honest client, which so counts more than the others.

    It is the one that is farthest from mu along the direction in which honest changes differ most.

    Source: Karimireddy, He and Jaggi, Byzantine-Robust Learning on Heterogeneous Datasets via Bucketing, ICLR 2022,
    appendix B.

    Differs from the paper: 1. the direction is that of the round's changes; the paper estimates it over first rounds.
    """

    kind: Literal["mimic"] = "mimic"

    def tamper(self, own: FloatArray, seen: Seen) -> FloatArray:
        """Return the change of the chosen client for each."""
        honest = seen.honest(own)
        centred = honest - honest.mean(axis=0)
        # The first principal direction by the products of clients, of whom there are fewer than coordinates.
        _, vectors = np.linalg.eigh(centred @ centred.T)
        chosen = int(np.argmax(np.abs(vectors[:, -1])))
        return np.tile(honest[chosen], (len(own), 1))
