"""Matching of hidden units across clients: MAP estimates of a Beta-Bernoulli process by Hungarian assignments.

`match_units` works on rows, one for each unit; `LayerRows` makes the rows of a hidden layer and tensors of them again;
`Matching` joins the hidden layers that clients sent, unit by unit, and `joined_head` the last layer, class by class.

References: Yurochkin et al., Bayesian Nonparametric Federated Learning of Neural Networks (PFNM), ICML 2019
(arXiv:1905.12022); Wang et al., Federated Learning with Matched Averaging (FedMA), ICLR 2020 (arXiv:2002.06440), and
its code. Letters: J clients, client j has L_j units, G global units so far, D weights of a unit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from narrowcast.platform.config.files import Section
from narrowcast.platform.models.hidden_units import HiddenUnits, UnitAxis, Units
from narrowcast.platform.types import Arrays, FloatArray, IntArray

_MOST_POPULAR = 10
"""Popularities above it count as this many, as in the code of FedMA."""


@dataclass(frozen=True)
class UnitPrior:
    """The prior of global units and the search for their best assignment.

    A global unit has the mean `mean` [D] and the variance `sigma_prior`; a client's unit varies around it by `sigma`. A
    unit owned by c of J clients has the log-odds `popularity_factor` log(c / (J - c)), the k-th new one of a client
    2 log(gamma / J) - 2 log k. After `most_units` global units, a client may add one alone, if it has no more units.
    """

    mean: FloatArray
    sigma: float = 1.0
    sigma_prior: float = 1.0
    gamma: float = 7.0
    popularity_factor: int = 1
    sweeps: int = 5
    most_units: int = 700


@dataclass(frozen=True)
class MatchedUnits:
    """The global units of one layer.

    Shapes: means [G, D], the posterior means; sums [G, D] of the clients' units; owners [G], the clients that have each
    unit; units, for each client the global unit of each of its own, [L_j].
    """

    means: FloatArray
    sums: FloatArray
    owners: IntArray
    units: tuple[IntArray, ...]


def match_units(clients: Sequence[FloatArray], prior: UnitPrior, random: np.random.Generator) -> MatchedUnits:
    """Return the global units of the clients' units [L_j, D].

    The clients are matched one by one, those with most units first, each by the best assignment of its units to global
    ones and to new ones. Then in each of `sweeps` sweeps every client, in a random order, is taken out and matched
    again.
    """
    growing = _Growing(prior, len(clients), prior.mean.size)
    order = np.argsort([-len(units) for units in clients], kind="stable")
    for client in order.tolist():
        growing.add(client, clients[client])
    for _ in range(prior.sweeps):
        for client in random.permutation(len(clients)).tolist():
            growing.remove(client, clients[client])
            growing.add(client, clients[client])
    units = tuple(growing.units[client] for client in range(len(clients)))
    return MatchedUnits(growing.means(), growing.sums, growing.owners, units)


def best_assignment(gains: FloatArray) -> IntArray:
    """Return the column of each row in the assignment of the largest sum of gains; columns are as many or more."""
    from scipy.optimize import linear_sum_assignment

    assigned: IntArray = linear_sum_assignment(gains, maximize=True)[1]
    return assigned


class _Growing:
    """The global units while clients are added and taken out."""

    def __init__(self, prior: UnitPrior, n_clients: int, size: int) -> None:
        self.prior, self.n_clients = prior, n_clients
        self.sums, self.owners = np.zeros((0, size)), np.zeros(0, dtype=np.int64)
        self.units: dict[int, IntArray] = {}

    def means(self) -> FloatArray:
        """Return the posterior means, [G, D]."""
        means: FloatArray = self._weighted() / self._precisions(self.owners)[:, None]
        return means

    def add(self, client: int, rows: FloatArray) -> None:
        """Match a client's units [L_j, D]."""
        units, before = best_assignment(self.gains(rows)), len(self.owners)
        new = np.flatnonzero(units >= before)
        # Gains of new units fall with their position and never with the unit, so that theirs are the first positions.
        units[new] = before + np.arange(len(new))
        self.sums = np.concatenate([self.sums, np.zeros((len(new), rows.shape[1]))])
        self.owners = np.concatenate([self.owners, np.zeros(len(new), dtype=np.int64)])
        self.sums[units] += rows
        self.owners[units] += 1
        self.units[client] = units

    def remove(self, client: int, rows: FloatArray) -> None:
        """Take a client's units out, and global units that no other client has."""
        units = self.units.pop(client)
        self.sums[units] -= rows
        self.owners[units] -= 1
        stays = self.owners > 0
        renumbered = np.cumsum(stays) - 1
        self.sums, self.owners = self.sums[stays], self.owners[stays]
        self.units = {member: renumbered[assigned] for member, assigned in self.units.items()}

    def gains(self, rows: FloatArray) -> FloatArray:
        """Return the gain in the log posterior of each assignment, [L_j, G + new]."""
        prior, least = self.prior, len(rows) - len(self.owners)
        n_new = max(min(len(rows), max(prior.most_units - len(self.owners), 1)), least)
        weighted, precisions = self._weighted(), self._precisions(self.owners)
        data = rows / prior.sigma
        squares = np.square(data).sum(axis=1)[:, None]
        joined = squares + 2 * data @ weighted.T + np.square(weighted).sum(axis=1)
        popular = np.minimum(self.owners, _MOST_POPULAR)
        odds = prior.popularity_factor * np.log(popular / (self.n_clients - popular))
        matched = joined / (precisions + 1 / prior.sigma) - np.square(weighted).sum(axis=1) / precisions + odds
        mean = prior.mean / prior.sigma_prior
        of_new = np.square(data + mean).sum(axis=1) / self._precisions(1) - np.square(mean).sum() * prior.sigma_prior
        penalty = 2 * np.log(prior.gamma / self.n_clients) - 2 * np.log(np.arange(1, n_new + 1))
        return np.concatenate([matched, of_new[:, None] + penalty], axis=1)

    def _weighted(self) -> FloatArray:
        """Return the sum of prior and data, each divided by its variance, [G, D]."""
        weighted: FloatArray = self.prior.mean / self.prior.sigma_prior + self.sums / self.prior.sigma
        return weighted

    def _precisions(self, owners: IntArray | int) -> FloatArray:
        """Return one over the posterior variance of units with so many owners."""
        return np.asarray(1 / self.prior.sigma_prior + owners / self.prior.sigma)


RecurrentMean = Literal["owners", "clients"]
"""The divisor of the weights that a unit reads other units of its layer with: the clients that have it, or all."""


@dataclass(frozen=True)
class LayerRows:
    """The parameters that one hidden layer computes with, weights before biases.

    A unit's row has its incoming weights and its biases. Weights between units of the layer, as of an LSTM, are not in
    it: they follow the units.
    """

    hidden: HiddenUnits
    layer: int

    @property
    def names(self) -> list[str]:
        """The parameters of the layer."""
        return [name for name in self.hidden.axes if self.hidden.owner(name) == self.layer]

    @property
    def recurrent(self) -> list[str]:
        """Those of them that the units of the layer index twice."""
        return [name for name in self.names if len(self._dimensions(name)) > 1]

    def rows(self, parameters: Arrays) -> FloatArray:
        """Return the row of each unit, [L, D]."""
        parts = []
        for name in self._in_rows(parameters):
            values, axis = self._units_first(name, np.asarray(parameters[name], dtype=np.float64))
            blocks = values.reshape(axis.blocks, -1, axis.width, prod(values.shape[1:]))
            parts.append(blocks.swapaxes(0, 1).reshape(blocks.shape[1], -1))
        return np.concatenate(parts, axis=1)

    def prior_mean(self, parameters: Arrays, bias: float, *, on_first_weights: bool) -> FloatArray:
        """Return the mean of a row before any data, [D]: `bias` for biases, or for as many of the first weights."""
        names = self._in_rows(parameters)
        sizes = [parameters[name].size // self.hidden.counts[self.layer] for name in names]
        n_biases = sum(size for name, size in zip(names, sizes, strict=True) if parameters[name].ndim == 1)
        mean = np.zeros(sum(sizes))
        mean[slice(n_biases) if on_first_weights else slice(len(mean) - n_biases, None)] = bias
        return mean

    def tensors(self, rows: FloatArray, like: Arrays) -> dict[str, NDArray[Any]]:
        """Return rows [G, D] as parameters of G units, otherwise of the shapes and types of `like`."""
        tensors, first = {}, 0
        for name in self._in_rows(like):
            values, axis = self._units_first(name, np.asarray(like[name]))
            size = values.size // self.hidden.counts[self.layer]
            blocks = rows[:, first : first + size].reshape(len(rows), axis.blocks, axis.width, -1).swapaxes(0, 1)
            units_first = blocks.reshape(-1, *values.shape[1:])
            tensors[name] = np.moveaxis(units_first, 0, self._dimensions(name)[0]).astype(like[name].dtype)
            first += size
        return tensors

    def recurrent_means(
        self, clients: Sequence[Arrays], units: Sequence[IntArray], owners: IntArray, divisor: RecurrentMean
    ) -> dict[str, NDArray[Any]]:
        """Return the mean of the weights between units, each client's at its units' indices among the global ones.

        `owners` [G] are the clients that have each global unit. Their sum of what a unit reads is divided by them, with
        zeros where one of them lacks the unit that is read, as a unit's row is: so a unit that clients have at several
        positions is read as often as it is there.
        """
        counts = [*self.hidden.counts]
        counts[self.layer] = len(owners)
        whole, means = self.hidden.resized(counts), {}
        for name in self.recurrent:
            total = np.zeros(())
            for parameters, units_of_client in zip(clients, units, strict=True):
                values = np.asarray(parameters[name], dtype=np.float64)
                total = total + whole.put(name, values, self._units(units_of_client))
            by_unit, axis = self._units_first(name, total)
            count = np.full(len(owners), len(clients)) if divisor == "clients" else owners
            divisors = np.tile(np.repeat(count, axis.width), axis.blocks).reshape(-1, *[1] * (by_unit.ndim - 1))
            mean = np.moveaxis(by_unit / divisors, 0, self._dimensions(name)[0])
            means[name] = mean.astype(clients[0][name].dtype)
        return means

    def _units(self, units: IntArray) -> Units:
        """Return the units of each layer, of which all but this one's are those that the client has."""
        every = [np.arange(count) for count in self.hidden.counts]
        every[self.layer] = units
        return tuple(every)

    def _in_rows(self, parameters: Arrays) -> list[str]:
        """Return the parameters of a row, weights before biases."""
        twice = self.recurrent
        return sorted((name for name in self.names if name not in twice), key=lambda name: parameters[name].ndim == 1)

    def _dimensions(self, name: str) -> list[int]:
        """Return the dimensions of a parameter that the units of the layer index."""
        axes = self.hidden.axes[name]
        return [dimension for dimension, axis in enumerate(axes) if axis is not None and axis.layer == self.layer]

    def _units_first(self, name: str, values: NDArray[Any]) -> tuple[NDArray[Any], UnitAxis]:
        """Return a parameter with the dimension of the units in front, and what is known of that."""
        dimension = self._dimensions(name)[0]
        axis = self.hidden.axes[name][dimension]
        assert axis is not None, "it is one of the layer's"
        return np.moveaxis(values, dimension, 0), axis


class Matching(Section):
    """The assignment of clients' hidden units to global ones, and the mean of those that are assigned to one.

    Rows of units have a normal prior around 0, of biases around `bias_mean`. `unit_mean: posterior` shrinks a unit that
    c clients have by c / (c + sigma / sigma_prior), `owners` does not.
    """

    units: Literal["bbp_map", "by_index", "untrained"] = Field(
        "bbp_map",
        description="how units are matched: Beta-Bernoulli process MAP; or, as controls, unit i with unit i and means "
        "by examples, or the layers of the untrained model of the seed in their place",
    )
    sigma: float = Field(1.0, gt=0, description="variance of a client's unit around the global one")
    sigma_prior: float = Field(1.0, gt=0, description="variance of global units")
    gamma: float = Field(7.0, gt=0, description="mass of the process: larger values make more units")
    bias_mean: float = Field(0.1, description="prior mean of biases")
    bias_prior: Literal["bias", "first_weight"] = Field(
        "bias",
        description="place of bias_mean after the first layer: the bias, or as in the code the first weight",
    )
    popularity_factor: Literal[1, 2] = Field(
        1, description="factor of the log-odds of a unit's popularity: 1 as in the code, 2 as in the paper's derivation"
    )
    sweeps: int = Field(5, ge=0, description="times that every client is taken out and matched again")
    most_units: int = Field(700, ge=1, description="units of a layer after which a client adds one at most")
    unit_mean: Literal["posterior", "owners"] = Field(
        "posterior", description="mean of a global unit: the posterior's, or that of the clients that have it"
    )
    recurrent_mean: RecurrentMean = Field(
        "owners",
        description="divisor of the weights with which units of an LSTM read others: the reader's owners, or all",
    )

    def join(
        self,
        hidden: HiddenUnits,
        layer: int,
        clients: Sequence[Arrays],
        examples: FloatArray,
        untrained: Arrays,
        random: np.random.Generator,
    ) -> tuple[dict[str, NDArray[Any]], tuple[IntArray, ...]]:
        """Return the global layer and, for each client, the global unit of each of its own, [L].

        `clients` have the layer's parameters, of L units and all units of the layer before; `hidden` has these counts.
        """
        layer_rows, first = LayerRows(hidden, layer), clients[0]
        if self.units != "bbp_map":
            units = (np.arange(hidden.counts[layer]),) * len(clients)
            if self.units == "untrained":
                return {name: untrained[name] for name in layer_rows.names}, units
            return weighted_mean(clients, examples, layer_rows.names), units
        prior = UnitPrior(
            layer_rows.prior_mean(
                first, self.bias_mean, on_first_weights=layer > 0 and self.bias_prior == "first_weight"
            ),
            self.sigma,
            self.sigma_prior,
            self.gamma,
            self.popularity_factor,
            self.sweeps,
            self.most_units,
        )
        matched = match_units([layer_rows.rows(client) for client in clients], prior, random)
        rows = matched.means if self.unit_mean == "posterior" else matched.sums / matched.owners[:, None]
        recurrent = layer_rows.recurrent_means(clients, matched.units, matched.owners, self.recurrent_mean)
        return {**layer_rows.tensors(rows, first), **recurrent}, matched.units


HeadWeights = Literal["classes", "examples", "equal"]
"""A client's weight in the mean of the last layer: for the output of a class its examples of it; or all; or 1."""


def joined_head(
    names: Sequence[str], clients: Sequence[Arrays], examples: FloatArray, classes: FloatArray | None
) -> dict[str, NDArray[Any]]:
    """Return the mean of the last layer by `examples` [C], or for each output by `classes` [C, outputs].

    A class of which no client has examples has their mean by `examples`.
    """
    if classes is None:
        return weighted_mean(clients, examples, names)
    weights = np.where(classes.sum(axis=0) > 0, classes, examples[:, None])
    shares = weights / weights.sum(axis=0)
    joined = {}
    for name in names:
        stacked = np.stack([np.asarray(client[name], dtype=np.float64) for client in clients])
        by_class = shares.reshape(*shares.shape, *[1] * (stacked.ndim - 2))
        joined[name] = (by_class * stacked).sum(axis=0).astype(clients[0][name].dtype)
    return joined


def weighted_mean(clients: Sequence[Arrays], weights: FloatArray, names: Sequence[str]) -> dict[str, NDArray[Any]]:
    """Return the mean of each parameter by the weights [C] of the clients."""
    shares = weights / weights.sum()
    return {
        name: np.tensordot(
            shares, np.stack([np.asarray(client[name], dtype=np.float64) for client in clients]), 1
        ).astype(clients[0][name].dtype)
        for name in names
    }
