"""Aggregators: robust aggregates of the clients' changes in place of their weighted mean.

Letters: u a client, w_u its weight, d_u its change, all tensors taken together as one vector; C the clients that
delivered.
"""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from narrowcast.platform.config.catalog import AGGREGATORS
from narrowcast.platform.config.files import Section
from narrowcast.platform.errors import UserError
from narrowcast.platform.seeds import generator
from narrowcast.platform.types import Arrays, BoolArray, FloatArray

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class AggregationContext:
    """A round as a rule may know it besides the changes: the public seed, the last aggregate, the server's own change.

    `last` has the tensors of a change, zeros before the first aggregate; it is empty unless the rule `remembers`.
    `reference` has those of the change that the server learns from its own samples, if the rule asks for it.
    """

    seed: int
    round_index: int
    last: Arrays = field(default_factory=dict)
    reference: Arrays = field(default_factory=dict)


@dataclass(frozen=True)
class AggregatorTraits:
    """Properties of a rule, which its laws check.

    - `remembers`: it is given its last aggregate.
    - `reference`: it is given the server's own change, which counts among all changes in what follows.
    - `keeps_equal`: the aggregate of equal changes is that change.
    - `shifts`: a vector added to all changes is added to the aggregate.
    - `scales`: a positive factor of all changes is one of the aggregate.
    - `sums`: it is the last of so many weighted means of the changes, with weights by `pulls`; 0: it needs each change.
    """

    remembers: bool = False
    reference: bool = False
    keeps_equal: bool = True
    shifts: bool = True
    scales: bool = True
    sums: int = 0


class Aggregator(Section, ABC):
    """The aggregate of a round's changes, for the server's step.

    It needs the change of each client, not a sum: buffered schedules refuse it, and the server holds all changes of a
    round at once. So does secure aggregation, but for a rule that is a chain of `AggregatorTraits.sums`.
    """

    @property
    def traits(self) -> AggregatorTraits:
        """Return the properties of the rule; by default it keeps all laws and remembers nothing."""
        return AggregatorTraits()

    def check(self, clients: int) -> None:
        """Raise `UserError` if the rule has no guarantee for so many changes.

        A round with fewer changes, since clients dropped out, leaves the server as it is.
        """

    def of_round(self, changes: Arrays, weights: FloatArray, context: AggregationContext) -> Arrays | None:
        """Return the aggregate of a round; None if no client delivered, or so few that the rule has no guarantee."""
        if not len(weights):
            return None
        try:
            self.check(len(weights))
        except UserError as error:
            logger.warning(
                "round %d: the changes of %d clients are not used: %s", context.round_index, len(weights), error
            )
            return None
        return self.aggregate(changes, weights, context)

    @abstractmethod
    def aggregate(self, changes: Arrays, weights: FloatArray, context: AggregationContext) -> Arrays:
        """Return the aggregate of each tensor of `changes` [C, ...], C > 0; `weights` [C] are positive."""

    def pulls(self, weights: FloatArray, distances: FloatArray) -> FloatArray:
        """Return the weights of the changes in the next mean, [C], from their distances to the last one, [C].

        A pull is a client's weight times a factor of its distance alone, which does not grow with it. Distances are 0
        in the first mean.
        """
        del distances
        return weights


class CoordinateMedian(Aggregator):
    """The median of each coordinate, without weights.

    Reference: Yin et al., Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates, ICML 2018
    (arXiv:1803.01498), Algorithm 1, option I.

    Differs from the paper: 1. clients may take several local steps; the paper's send one gradient.
    """

    kind: Literal["median"] = "median"

    def aggregate(self, changes: Arrays, weights: FloatArray, context: AggregationContext) -> Arrays:
        """Return the medians."""
        del weights, context
        return {name: np.median(values, axis=0) for name, values in changes.items()}


class TrimmedMean(Aggregator):
    """The mean of each coordinate without its largest and smallest values, without weights.

    Reference: Yin et al., ICML 2018 (arXiv:1803.01498), Algorithm 1, option II.

    Differs from the paper: 1. as the median. 2. floor(share C) values are left out at each end.
    """

    kind: Literal["trimmed_mean"] = "trimmed_mean"
    share: float = Field(0.1, ge=0, lt=0.5, description="share of the clients left out at each end")

    def check(self, clients: int) -> None:
        """Raise `UserError` if the share of the clients is less than one client."""
        if self.share and self.out_of(clients) < 1:
            share, least = math.ceil(1e4 / clients) / 1e4, math.ceil(1 / self.share)
            raise UserError(
                f"algorithm.aggregator.share = {self.share:g} leaves out none of {clients} clients; raise it to at "
                f"least {share:g}, or clients_per_round to at least {least}"
            )

    def out_of(self, clients: int) -> int:
        """Return floor(share C), the values left out at each end; 29 for .29 of 100, whose float64 product is less."""
        return math.floor(self.share * clients + 1e-9)

    def aggregate(self, changes: Arrays, weights: FloatArray, context: AggregationContext) -> Arrays:
        """Return the means of the values between the ends."""
        del context
        trimmed = {}
        for name, values in changes.items():
            out = self.out_of(len(weights))
            inside = np.partition(values, (out, len(values) - 1 - out), axis=0)[out : len(values) - out]
            trimmed[name] = inside.mean(axis=0, dtype=values.dtype)
        return trimmed


class GeometricMedian(Aggregator):
    """The point of least weighted distance to all changes, by smoothed Weiszfeld iterations: RFA.

    z = sum w_u / max(nu, |z - d_u|) d_u, normalised, from the weighted mean.

    Reference: Pillutla et al., Robust Aggregation for Federated Learning (RFA), IEEE Transactions on Signal Processing
    2022 (arXiv:1912.13445), Algorithm 2.

    With a `secure` section each z is a sum under protection, and the server sees no client's change: see `SumChain`.
    """

    kind: Literal["geometric_median"] = "geometric_median"
    iterations: int = Field(4, ge=1, description="Weiszfeld iterations, with a tolerance the most")
    nu: float = Field(1e-5, gt=0, description="least distance that divides a weight")
    tolerance: float = Field(0.0, ge=0, description="step of z, relative to z, at which iterations end; 0: never")

    @property
    def traits(self) -> AggregatorTraits:
        """It is the weighted mean and one more for each iteration, unless a tolerance says how many."""
        return AggregatorTraits(sums=0 if self.tolerance else self.iterations + 1)

    def pulls(self, weights: FloatArray, distances: FloatArray) -> FloatArray:
        """Return w_u / max(nu, |z - d_u|)."""
        return np.asarray(weights / np.maximum(self.nu, distances))

    def aggregate(self, changes: Arrays, weights: FloatArray, context: AggregationContext) -> Arrays:
        """Return z."""
        del context
        vectors = _vectors(changes)
        shares = weights / weights.sum()
        z = shares @ vectors
        for _ in range(self.iterations):
            pulls = self.pulls(shares, np.sqrt(_squared_norms(vectors, z)))
            before, z = z, pulls / pulls.sum() @ vectors
            if np.linalg.norm(z - before) <= self.tolerance * np.linalg.norm(z):
                break
        return _tensors(z, changes)


class Krum(Aggregator):
    """The mean of the changes that are nearest to their neighbours, without weights: Krum, and multi-Krum.

    A change's score is the sum of its squared distances to the C - byzantine - 2 nearest others.

    Reference: Blanchard et al., Machine Learning with Adversaries: Byzantine Tolerant Gradient Descent, NeurIPS 2017
    (arXiv:1703.02757), sections 4 and 6.

    It needs 2 byzantine + 3 changes (the paper's proposition 1: 2 f + 2 < n), and a mean of more than C - byzantine
    would have one of any origin. Released codes count other neighbours: `left_out` 1 is byzfl's, 3 that of the code of
    Shejwalkar and Houmansadr (NDSS 2021), and 0 without `squared` that of ALIE's authors.
    """

    kind: Literal["krum"] = "krum"
    byzantine: int = Field(1, ge=0, description="clients that may send anything")
    selected: int = Field(1, ge=1, description="changes of the least scores that are averaged; 1 is Krum")
    left_out: int = Field(2, ge=0, le=3, description="others that a score leaves out besides byzantine; 2 in the paper")
    squared: bool = Field(True, description="whether a score adds up squares of distances, as in the paper")

    def check(self, clients: int) -> None:
        """Raise `UserError` for fewer than 2 byzantine + 3 clients, or a mean of more than C - byzantine changes."""
        _check_minority(self.byzantine, clients, 2, 3)
        if self.selected > clients - self.byzantine:
            raise UserError(
                f"algorithm.aggregator.selected = {self.selected}: of {clients} clients, {self.byzantine} of them "
                f"byzantine, at most {clients - self.byzantine} can be averaged; lower it, or raise clients_per_round"
            )

    def aggregate(self, changes: Arrays, weights: FloatArray, context: AggregationContext) -> Arrays:
        """Return the mean of the selected changes."""
        del weights, context
        distances = _squared_distances(_vectors(changes))
        np.fill_diagonal(distances, np.inf)
        scores = _krum_scores(distances if self.squared else np.sqrt(distances), self.byzantine + self.left_out)
        selected = np.argsort(scores, kind="stable")[: self.selected]
        return {name: values[selected].mean(axis=0, dtype=values.dtype) for name, values in changes.items()}


class Bulyan(Aggregator):
    """The mean of the values nearest to the median, coordinate by coordinate, of changes that Krum selects in turn.

    C - 2 byzantine changes are selected, each by Krum among those that are left; of their values at a coordinate the
    C - 4 byzantine nearest to the median are averaged, without weights.

    Reference: El Mhamdi, Guerraoui and Rouault, The Hidden Vulnerability of Distributed Learning in Byzantium, ICML
    2018 (arXiv:1802.07927), section 4; it needs 4 byzantine + 3 changes.

    Differs from the paper: 1. a score has one neighbour at least, where fewer than byzantine + 3 changes are left. 2.
    of equal scores, as two nearest neighbours of one another then have, that of the change nearer to all others wins.
    """

    kind: Literal["bulyan"] = "bulyan"
    byzantine: int = Field(1, ge=0, description="clients that may send anything")

    def check(self, clients: int) -> None:
        """Raise `UserError` for fewer than 4 byzantine + 3 clients."""
        _check_minority(self.byzantine, clients, 4, 3)

    def aggregate(self, changes: Arrays, weights: FloatArray, context: AggregationContext) -> Arrays:
        """Return the means around the medians."""
        del weights, context
        distances = _squared_distances(_vectors(changes))
        to_all = distances.sum(axis=1)
        np.fill_diagonal(distances, np.inf)
        left, selected = np.arange(len(distances)), []
        for _ in range(len(distances) - 2 * self.byzantine):
            scores = _krum_scores(distances[np.ix_(left, left)], self.byzantine + 2)
            best = np.lexsort((to_all[left], scores))[0]
            selected.append(left[best])
            left = np.delete(left, best)
        return {
            name: _mean_around_median(values[np.sort(selected)], 2 * self.byzantine) for name, values in changes.items()
        }


Radius = Annotated[float, Field(gt=0)] | Literal["median"]


class NormClip(Aggregator):
    """The weighted mean of the changes, each scaled down to a norm, with normal noise if asked for.

    Reference: Sun et al., Can You Really Backdoor Federated Learning?, 2019 (arXiv:1911.07963), section 4, where
    `noise` is the weak differential privacy. `radius: median` clips to the median of the round's norms.

    Differs from the paper: 1. the noise follows from the public seed, so that it is a defence and hides nothing.
    """

    kind: Literal["norm_clip"] = "norm_clip"
    radius: Radius = Field("median", description="largest L2 norm of a change; median: that of the round's norms")
    noise: float = Field(
        0.0, ge=0, allow_inf_nan=False, description="standard deviation of the noise in each coordinate of the mean"
    )

    @property
    def traits(self) -> AggregatorTraits:
        """Clipping depends on where 0 is, and on the scale unless the radius has it; noise has a scale of its own."""
        follows = self.radius == "median" and not self.noise
        return AggregatorTraits(shifts=False, keeps_equal=follows, scales=follows)

    def aggregate(self, changes: Arrays, weights: FloatArray, context: AggregationContext) -> Arrays:
        """Return the mean of the clipped changes, with noise."""
        mean = weights / weights.sum() @ _clipped(_vectors(changes), self.radius)
        if self.noise:
            draw = generator(context.seed, "clip noise", context.round_index)
            mean = mean + self.noise * draw.standard_normal(mean.shape)
        return _tensors(mean, changes)


class CentredClip(Aggregator):
    """v += mean of the d_u - v, each scaled down to a norm, from the last round's v, several times; without weights.

    Reference: Karimireddy, He and Jaggi, Learning from History for Byzantine Robust Optimization, ICML 2021
    (arXiv:2012.10333), Algorithm 2. `radius: median` clips to the median distance from v.

    Differs from the paper: 1. clients send changes of several local steps, and no momentum.
    """

    kind: Literal["centred_clip"] = "centred_clip"
    radius: Radius = Field("median", description="largest distance from v; median: that of the round's distances")
    iterations: int = Field(3, ge=1, description="steps of v in a round")

    @property
    def traits(self) -> AggregatorTraits:
        """The clip is around the last aggregate."""
        fixed = self.radius != "median"
        return AggregatorTraits(remembers=True, shifts=False, keeps_equal=not fixed, scales=not fixed)

    def aggregate(self, changes: Arrays, weights: FloatArray, context: AggregationContext) -> Arrays:
        """Return v."""
        del weights
        vectors = _vectors(changes)
        v = _vectors({name: values[np.newaxis] for name, values in context.last.items()})[0]
        for _ in range(self.iterations):
            v = v + _clipped(vectors - v, self.radius).mean(axis=0)
        return _tensors(v, changes)


class SignMajority(Aggregator):
    """A step of one size for each coordinate, in the direction of most clients: the sign of the sum of their signs.

    Reference: Bernstein et al., signSGD with Majority Vote, ICLR 2019 (arXiv:1810.05291), Algorithm 1.
    """

    kind: Literal["sign_majority"] = "sign_majority"
    size: float = Field(1e-3, gt=0, description="size of each coordinate of the aggregate")

    @property
    def traits(self) -> AggregatorTraits:
        """Signs have no size."""
        return AggregatorTraits(keeps_equal=False, shifts=False, scales=False)

    def aggregate(self, changes: Arrays, weights: FloatArray, context: AggregationContext) -> Arrays:
        """Return the step; 0 where votes are equal."""
        del weights, context
        votes = {name: np.sign(np.sign(values).sum(axis=0)) for name, values in changes.items()}
        return {name: (self.size * vote).astype(changes[name].dtype) for name, vote in votes.items()}


class FLTrust(Aggregator):
    """The mean of the changes at the length of the server's own, weighted by their cosines with it if positive.

    z = sum t_u |g| / |d_u| d_u / sum t_u with t_u = max(0, <d_u, g> / (|d_u| |g|)), where g is the change that the
    server learns from samples of its own, `data.server`, from the same model by the same local steps.

    Reference: Cao, Fang, Liu and Gong, FLTrust: Byzantine-robust Federated Learning via Trust Bootstrapping, NDSS 2021
    (arXiv:2012.13995), Algorithm 2.

    Differs from the paper: 1. the server trains for the epochs of `training`, as clients do; the paper's take equal
    numbers of steps. 2. the aggregate is 0 if no t_u is positive, where the paper divides by 0.
    """

    kind: Literal["fltrust"] = "fltrust"

    @property
    def traits(self) -> AggregatorTraits:
        """Directions are compared, and the length is the reference's."""
        return AggregatorTraits(reference=True, shifts=False)

    def aggregate(self, changes: Arrays, weights: FloatArray, context: AggregationContext) -> Arrays:
        """Return z."""
        del weights
        vectors, g = _vectors(changes), _vectors({name: context.reference[name][np.newaxis] for name in changes})[0]
        least = np.finfo(float).tiny
        norms, length = np.maximum(np.sqrt(_squared_norms(vectors)), least), np.linalg.norm(g)
        trust = np.maximum(vectors @ g / norms / max(length, least), 0.0)
        return _tensors(trust / max(trust.sum(), least) * length / norms @ vectors, changes)


class _Before(Aggregator):
    """A rule that averages some of the changes for another one, whose laws it keeps."""

    rule: Annotated[Aggregator, AGGREGATORS] = Field(default_factory=CoordinateMedian, description="rule that follows")

    @property
    def traits(self) -> AggregatorTraits:
        """Those of the rule that follows; but its changes are means of some, which no sum over all gives."""
        return replace(self.rule.traits, sums=0)

    def aggregate(self, changes: Arrays, weights: FloatArray, context: AggregationContext) -> Arrays:
        """Return the aggregate by `rule` of the means of some changes, without weights."""
        del weights
        vectors = _vectors(changes)
        averaging = self.averaging(vectors, context)
        means = averaging / averaging.sum(axis=1, keepdims=True) @ vectors
        return self.rule.aggregate(_stacked(means, changes), np.ones(len(means)), context)

    @abstractmethod
    def averaging(self, vectors: FloatArray, context: AggregationContext) -> BoolArray:
        """Return which changes [C, parameters] each new one is the mean of, [new, C]."""


class NearestNeighbourMixing(_Before):
    """Each change becomes the mean of the C - byzantine nearest ones, itself among them; then `rule` follows.

    Reference: Allouah et al., Fixing by Mixing: A Recipe for Optimal Byzantine ML under Heterogeneity, AISTATS 2023
    (arXiv:2302.01772), Algorithm 2.
    """

    kind: Literal["nnm"] = "nnm"
    byzantine: int = Field(1, ge=0, description="clients that may send anything")

    def check(self, clients: int) -> None:
        """Raise `UserError` unless the byzantine clients are a minority, and as the rule does."""
        _check_minority(self.byzantine, clients, 2, 1)
        self.rule.check(clients)

    def averaging(self, vectors: FloatArray, context: AggregationContext) -> BoolArray:
        """Return the nearest changes of each."""
        del context
        distances = _squared_distances(vectors)
        np.fill_diagonal(distances, -1.0)
        nearest = np.argsort(distances, axis=1, kind="stable")[:, : len(vectors) - self.byzantine]
        taken = np.zeros(distances.shape, dtype=bool)
        np.put_along_axis(taken, nearest, values=True, axis=1)
        return taken


class Bucketing(_Before):
    """The changes are dealt at random into buckets of `size`; `rule` aggregates the means of the buckets.

    Reference: Karimireddy, He and Jaggi, Byzantine-Robust Learning on Heterogeneous Datasets via Bucketing, ICLR 2022
    (arXiv:2006.09365), Algorithm 1.
    """

    kind: Literal["bucketing"] = "bucketing"
    size: int = Field(2, ge=1, description="changes in a bucket; the last one may have fewer")

    def check(self, clients: int) -> None:
        """Raise `UserError` as the rule does, for the number of buckets."""
        self.rule.check(-(-clients // self.size))

    def averaging(self, vectors: FloatArray, context: AggregationContext) -> BoolArray:
        """Return the changes of each bucket."""
        dealt = generator(context.seed, "buckets", context.round_index).permutation(len(vectors))
        bucket = np.empty(len(vectors), dtype=np.int64)
        # Changes are dealt out in the order of their sums, since that of their arrival is no part of a round.
        bucket[np.argsort(vectors.sum(axis=1), kind="stable")] = dealt // self.size
        return bucket == np.arange(bucket.max() + 1)[:, np.newaxis]


def _check_minority(byzantine: int, clients: int, share: int, more: int) -> None:
    """Raise `UserError` for fewer than share byzantine + more clients."""
    if clients < (least := share * byzantine + more):
        raise UserError(
            f"algorithm.aggregator.byzantine = {byzantine} needs at least {least} clients in a round, and there are "
            f"{clients}; raise clients_per_round, or lower it to at most {max((clients - more) // share, 0)}"
        )


def _squared_distances(vectors: FloatArray) -> FloatArray:
    """Return the squared distance of each pair, [C, C]."""
    squares = _squared_norms(vectors)
    distances = np.maximum(squares[:, np.newaxis] + squares - 2 * (vectors @ vectors.T), 0)
    return np.asarray(np.minimum(distances, distances.T))  # a product need not be symmetric to the last bit


def _squared_norms(vectors: FloatArray, centre: FloatArray | float = 0.0) -> FloatArray:
    """Return the squared distance of each vector to a point, [C]."""
    squares, difference = np.empty(len(vectors)), np.empty(vectors.shape[1])
    for client, vector in enumerate(vectors):  # one at a time: differences of all would not stay in the cache
        np.subtract(vector, centre, out=difference)
        squares[client] = np.multiply(difference, difference, out=difference).sum()
    return squares


def _krum_scores(distances: FloatArray, left_out: int) -> FloatArray:
    """Return the sum of the least C - left_out distances [C, C] of each, of one at least; inf is its own."""
    neighbours = min(max(len(distances) - left_out, 1), len(distances) - 1)
    return np.asarray(np.sort(distances, axis=1)[:, :neighbours].sum(axis=1))


def _mean_around_median(values: NDArray[Any], out: int) -> NDArray[Any]:
    """Return the mean, at each coordinate, of all but `out` values [S, ...]: those nearest to the median."""
    nearest = np.argsort(np.abs(values - np.median(values, axis=0)), axis=0, kind="stable")[: len(values) - out]
    return np.asarray(np.take_along_axis(values, nearest, axis=0).mean(axis=0, dtype=values.dtype))


def _clipped(vectors: FloatArray, radius: Radius) -> FloatArray:
    """Return the vectors [C, parameters], scaled down to a norm; median: to the median of their norms."""
    norms = np.sqrt(_squared_norms(vectors))
    most = np.median(norms) if radius == "median" else radius
    return np.asarray(vectors * np.minimum(1.0, most / np.maximum(norms, np.finfo(float).tiny))[:, np.newaxis])


def _stacked(vectors: FloatArray, changes: Mapping[str, NDArray[Any]]) -> Arrays:
    """Return vectors [N, parameters] as tensors [N, ...] of the shapes and precisions of the changes."""
    tensors: dict[str, NDArray[Any]] = {}
    first = 0
    for name, values in changes.items():
        size = values[0].size
        part = vectors[:, first : first + size].reshape(len(vectors), *values.shape[1:])
        tensors[name] = part.astype(values.dtype)
        first += size
    return tensors


def _vectors(changes: Arrays) -> NDArray[np.float64]:
    """Return the changes of each client as one vector, [C, parameters]."""
    rows = [values.reshape(len(values), -1) for values in map(np.asarray, changes.values())]
    return np.concatenate(rows, axis=1, dtype=np.float64)


def _tensors(vector: NDArray[np.float64], changes: Arrays) -> Arrays:
    """Return a vector as tensors of the shapes and precisions of one client's change."""
    return {name: values[0] for name, values in _stacked(vector[np.newaxis], changes).items()}
