"""Joining the layers that clients sent: hidden layers unit by unit, the last layer class by class."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from narrowcast.algorithms.federated.layer_rows import LayerRows, RecurrentMean
from narrowcast.algorithms.federated.unit_matching import UnitPrior, match_units
from narrowcast.platform.models.hidden_units import HiddenUnits
from narrowcast.platform.section import Section
from narrowcast.platform.types import Arrays, FloatArray, IntArray


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
        matched = match_units([layer_rows.rows(each) for each in clients], prior, random)
        rows = matched.means if self.unit_mean == "posterior" else matched.sums / matched.owners[:, None]
        recurrent = layer_rows.recurrent_means(clients, matched.units, matched.owners, self.recurrent_mean)
        return {**layer_rows.tensors(rows, first), **recurrent}, matched.units


HeadWeights = Literal["classes", "examples", "equal"]
"""A client's weight in the mean of the last layer: for the output of a class its examples of it; or all; or 1."""


def joined_head(
    names: Sequence[str], clients: Sequence[Arrays], examples: FloatArray, classes: FloatArray | None
) -> dict[str, NDArray[Any]]:
    """Return the mean of the last layer by `examples` [C], or for each output by `classes` [C, outputs].

    A class of which nobody has examples has their mean by `examples`.
    """
    if classes is None:
        return weighted_mean(clients, examples, names)
    weights = np.where(classes.sum(axis=0) > 0, classes, examples[:, None])
    shares = weights / weights.sum(axis=0)
    joined = {}
    for name in names:
        stacked = np.stack([np.asarray(each[name], dtype=np.float64) for each in clients])
        by_class = shares.reshape(*shares.shape, *[1] * (stacked.ndim - 2))
        joined[name] = (by_class * stacked).sum(axis=0).astype(clients[0][name].dtype)
    return joined


def weighted_mean(clients: Sequence[Arrays], weights: FloatArray, names: Sequence[str]) -> dict[str, NDArray[Any]]:
    """Return the mean of each parameter by the weights [C] of the clients."""
    shares = weights / weights.sum()
    return {
        name: np.tensordot(shares, np.stack([np.asarray(each[name], dtype=np.float64) for each in clients]), 1).astype(
            clients[0][name].dtype
        )
        for name in names
    }
