"""Point estimation by Ditto: the data, the personal models and their expected error in closed form.

Reference: Li, Hu, Beirami and Smith, Ditto: Fair and Robust Federated Learning Through Personalization, ICML 2021
(arXiv:2012.04221), section 3.2. Letters: K clients, of which m attack; client k has n samples around its mean u_k, with
the standard deviation sigma; u_k is normal around theta, with the standard deviation tau, or tau_a for an attacker;
z_k is the mean of its samples, and w the mean of all z_k, the fixed point of FedAvg.

With f_k(v) = (v - z_k)^2 / 2 Ditto's own model is v_k = (lambda w + z_k) / (1 + lambda). Its expected squared error is
least at lambda = sigma^2 / n tau^2 without attackers, and for honest clients beside m attackers at

    lambda = (sigma^2 / n) K / (K tau^2 + m (tau_a^2 - tau^2) / (K - 1)).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Self

import numpy as np
from pydantic import Field, model_validator

from narrowcast.platform.config.files import Section
from narrowcast.platform.data.dataset import DataSource
from narrowcast.platform.data.samples import Labelled, Samples
from narrowcast.platform.seeds import generator
from narrowcast.platform.types import FloatArray


class Points(DataSource, Section):
    """Samples of `clients` users around means of their own, in `dimensions` coordinates that are drawn alike.

    The feature is 1, so that a linear layer without bias is an estimate of the mean. The last `attackers` clients have
    means with another spread. The one test sample of each honest client is its mean u_k, without noise: the squared
    error there is that of the estimate. Targets [n, dimensions] are float64.
    """

    kind: Literal["narrowcast_papers.ditto.theory:Points"] = "narrowcast_papers.ditto.theory:Points"
    clients: int = Field(50, ge=2, description="K")
    samples: int = Field(10, ge=1, description="n, of each client")
    noise: float = Field(1.0, ge=0, description="sigma, standard deviation of a client's samples around its mean")
    spread: float = Field(1.0, gt=0, description="tau, standard deviation of the honest clients' means")
    attackers: int = Field(0, ge=0, description="m")
    attacker_spread: float = Field(1.0, ge=0, description="tau_a, standard deviation of the attackers' means")
    dimensions: int = Field(200, ge=1, description="coordinates, each of which is a problem of its own")
    seed: int | None = Field(None, ge=0, description="seed of all draws; null: that of the run")

    @model_validator(mode="after")
    def _has_honest_clients(self) -> Self:
        if self.attackers >= self.clients:
            raise ValueError(f"all {self.clients} clients attack; lower attackers")
        return self

    @property
    def honest(self) -> int:
        """The number of clients that do not attack."""
        return self.clients - self.attackers

    def draw(self) -> tuple[FloatArray, FloatArray]:
        """Return the means u [K, dimensions], and the samples [K, n, dimensions]; theta is 0."""
        random = generator(self.seed or 0, "points")
        spreads = np.where(np.arange(self.clients) < self.honest, self.spread, self.attacker_spread)
        means = spreads[:, np.newaxis] * random.standard_normal((self.clients, self.dimensions))
        noise = random.standard_normal((self.clients, self.samples, self.dimensions))
        return means, means[:, np.newaxis] + self.noise * noise

    def load(self) -> Samples:
        """Draw the samples of all clients."""
        (means, samples), total = self.draw(), self.clients * self.samples
        train = Labelled(np.ones((total, 1)), samples.reshape(total, -1))
        return Samples(
            name="points",
            source="drawn",
            n_classes=0,
            train=train,
            validation=train.take(np.arange(0)),
            test=Labelled(np.ones((self.honest, 1)), means[: self.honest]),
            order=np.arange(total),
            indptr=np.arange(0, total + 1, self.samples),
            held_out_users={"test": np.arange(self.honest)},
            seed=self.seed or 0,
        )


@dataclass(frozen=True)
class PersonalError:
    """The error of honest clients with w, the mean of all z_k; of one coordinate, in expectation over all draws."""

    points: Points

    @property
    def best_pull(self) -> float:
        """The lambda of the least expected error."""
        of = self.points
        attack = of.attackers * (of.attacker_spread**2 - of.spread**2) / (of.clients - 1)
        return self._noise * of.clients / (of.clients * of.spread**2 + attack)

    def expected(self, pull: float) -> float:
        """Return the expected squared error of v_k at a lambda.

        With s = lambda / (1 + lambda) the error is (1 - s) (z_k - u_k) + s (w - u_k), and w - u_k has the variances of
        the means u of the others, less that of its own, and of the noise of all.
        """
        of, share = self.points, pull / (1 + pull)
        own, others = 1 - 1 / of.clients, of.clients**-2
        means = of.spread**2 * (own**2 + (of.honest - 1) * others) + of.attackers * others * of.attacker_spread**2
        noise = self._noise * ((1 - share + share / of.clients) ** 2 + (of.clients - 1) * others * share**2)
        return share**2 * means + noise

    def drawn(self, pull: float, shared: FloatArray) -> float:
        """Return the mean squared error of v_k over the honest clients and coordinates, of these draws, at a w."""
        means, samples = self.points.draw()
        own = (pull * shared + samples.mean(axis=1)) / (1 + pull)
        return float(np.mean((own - means)[: self.points.honest] ** 2))

    @property
    def _noise(self) -> float:
        """The variance of z_k around u_k."""
        return self.points.noise**2 / self.points.samples
