"""The linear representation of FedRep's theory, its network, its asymptotic rate, and Algorithm 1 as a plain loop.

Reference: Collins, Hassani, Mokhtari and Shakkottai, Exploiting Shared Representations for Personalized Federated
Learning, ICML 2021 (arXiv:2102.07078), section 4 and the notebook of its code. Letters: n clients with m samples each;
X_i [m, d] and y_i = X_i B* w_i* the samples of client i; B [d, k] the representation, whose transpose is the body of
the network, and w_i [k] the head of client i; f_i = |X_i B w_i - y_i|^2 / 2 m.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from pydantic import Field
from scipy.linalg import subspace_angles
from torch import nn

from narrowcast.platform.config.files import Section
from narrowcast.platform.data.dataset import DataSource
from narrowcast.platform.data.samples import Labelled, Samples, one_array
from narrowcast.platform.seeds import generator
from narrowcast.platform.types import FloatArray


class LinearRepresentation(DataSource, Section):
    """Linear regressions of `clients` users whose solutions B* w_i* lie in one subspace, without noise.

    B* [features, components] has orthonormal columns, w_i* and the features are normal with variance 1. Features [n,
    features] and targets [n, 1] are float64, `samples` of each client, and as many for testing.
    """

    kind: Literal["narrowcast_papers.fedrep.problem:LinearRepresentation"] = (
        "narrowcast_papers.fedrep.problem:LinearRepresentation"
    )
    clients: int = Field(100, ge=1, description="n")
    samples: int = Field(10, ge=1, description="m, training samples of each client, and as many for testing")
    features: int = Field(20, ge=1, description="d")
    components: int = Field(2, ge=1, description="k")
    seed: int | None = Field(None, ge=0, description="seed of all draws; null: that of the run")

    def basis(self) -> FloatArray:
        """Return B*, [features, components]."""
        draws = self._random(0).standard_normal((self.features, self.components))
        return np.asarray(np.linalg.qr(draws)[0])

    def load(self) -> Samples:
        """Draw the samples of all clients."""
        parts, basis, total = [], self.basis(), self.clients * self.samples
        for client in range(self.clients):
            random = self._random(1 + client)
            solution = basis @ random.standard_normal(self.components)
            features = random.standard_normal((2, self.samples, self.features))
            parts.append((features, (features @ solution)[..., np.newaxis]))
        train, test = (
            Labelled(*(np.concatenate([arrays[part] for arrays in each]) for each in zip(*parts, strict=True)))
            for part in (0, 1)
        )
        return Samples(
            name="linear_representation",
            source="drawn",
            n_classes=0,
            train=train,
            validation=train.take(np.arange(0)),
            test=test,
            order=np.arange(total),
            indptr=np.arange(0, total + 1, self.samples),
            held_out_users={"test": np.repeat(np.arange(self.clients), self.samples)},
            seed=self.seed or 0,
        )

    def _random(self, client: int) -> np.random.Generator:
        return generator(self.seed or 0, "linear representation", client=client)


def network(features: int, components: int) -> nn.Module:
    """Return two linear layers without biases; the rows of the first one, B', are orthonormal before round 1."""
    body = nn.Linear(features, components, bias=False)
    nn.init.orthogonal_(body.weight)
    return nn.Sequential(body, nn.Linear(components, 1, bias=False))


def distances(body: FloatArray, basis: FloatArray) -> FloatArray:
    """Return the sines of the principal angles between the rows of the body [k, d] and B* [d, k], the largest first."""
    return np.asarray(np.sin(subspace_angles(body.T, basis)))


@dataclass(frozen=True)
class ExactHeads:
    """Algorithm 1 with heads of least squares, on samples X [n, m, d] and y [n, m] of all clients."""

    features: FloatArray
    targets: FloatArray

    @classmethod
    def of(cls, data: Samples) -> ExactHeads:
        """Return the problem of a data set whose clients have equally many samples."""
        rows = one_array(data.train.features)[data.order]
        (samples,) = set(data.examples.tolist())
        return cls(rows.reshape(-1, samples, rows.shape[1]), data.train.labels[data.order, 0].reshape(-1, samples))

    def heads(self, body: FloatArray) -> FloatArray:
        """Return the w_i that minimise f_i at B' = `body`, [n, k]."""
        pairs = zip(self.features @ body.T, self.targets, strict=True)
        return np.stack([np.linalg.lstsq(seen, targets)[0] for seen, targets in pairs])

    def step(self, body: FloatArray, rate: float) -> FloatArray:
        """Return the body after a round: the mean of the clients' bodies after a gradient step of f_i."""
        heads = self.heads(body)
        residuals = np.einsum("nmd,kd,nk->nm", self.features, body, heads) - self.targets
        gradients = np.einsum("nk,nm,nmd->nkd", heads, residuals, self.features) / self.targets.shape[1]
        return np.asarray(body - rate * gradients.mean(axis=0))

    def error(self, body: FloatArray, data: Samples) -> float:
        """Return the mean over clients of the root mean squared error on their test samples, with their heads."""
        owners = data.held_out_users["test"]
        predicted = np.einsum("nd,kd,nk->n", one_array(data.test.features), body, self.heads(body)[owners])
        squares = (predicted - data.test.labels[:, 0]) ** 2
        return float(np.sqrt(np.bincount(owners, squares) / np.bincount(owners)).mean())

    def factor(self, body: FloatArray, rate: float) -> float:
        """Return what a round near the solution `body` multiplies the distance with: 1 - rate times a curvature.

        The Hessian of mean_i min_w f_i is mean_i w_i w_i' x X_i' P_i X_i / m, with P_i the projection off the columns
        of X_i B. It is zero along the k^2 directions that leave the subspace as it is; the least of its other
        eigenvalues counts.
        """
        heads, (components, n_features) = self.heads(body), body.shape
        total = np.zeros((components, n_features) * 2)
        for head, rows in zip(heads, self.features, strict=True):
            seen = np.linalg.qr(rows @ body.T)[0]
            unseen = rows - seen @ (seen.T @ rows)
            total += np.einsum("j,k,de->jdke", head, head, unseen.T @ unseen / len(rows))
        curvatures = np.linalg.eigvalsh(total.reshape(body.size, body.size) / len(heads))
        return float(1 - rate * curvatures[components**2])
