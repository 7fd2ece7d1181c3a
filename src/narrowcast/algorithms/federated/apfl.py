"""APFL: each client keeps a model of its own and uses its mixture with the global one, which alone is averaged.

Reference: Deng, Kamani and Mahdavi, Adaptive Personalized Federated Learning, 2020 (arXiv:2003.13461), Algorithm 1.
Letters: x the server's model, y_u client u's copy of it, v_u its own model, g the gradient of its loss.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from narrowcast.algorithms.client.client_pass import Arrived, Contribution
from narrowcast.algorithms.federated.fedavg import model_of
from narrowcast.algorithms.federated.personal import Personal
from narrowcast.platform.contracts import Task
from narrowcast.platform.rounds.ledger import Weighted
from narrowcast.platform.types import Arrays, Chunk, Gradient, LocalTerms, PrefixedArrays


@dataclass(frozen=True)
class MixedStep:
    """y -= rate g(y) and v -= rate alpha g(alpha v + (1 - alpha) y) on the same batch: lines 5 to 7.

    Both gradients are taken before either moves, or with `after` that of v once y has moved.
    """

    alpha: float
    after: bool = False
    parts: int = 1

    def init(self, start: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
        """Return v of each client."""
        return {name: own[name].clone() for name in start}

    def step(
        self,
        values: Mapping[str, Any],
        slots: Mapping[str, Any],
        gradient: Gradient,
        own: Mapping[str, Any],
        rate: float,
        step: int,
    ) -> None:
        """Move y and v."""
        del own
        descent = gradient(values, 0)
        if self.after:
            _descend(values, descent, rate)
        self._move_own(values, slots, gradient(self._mixed(values, slots), 0), rate, step)
        if not self.after:
            _descend(values, descent, rate)

    def _move_own(
        self, values: Mapping[str, Any], slots: Mapping[str, Any], directions: Mapping[str, Any], rate: float, step: int
    ) -> None:
        """Move v along the gradient at the mixture."""
        del values, step
        for name, direction in directions.items():
            slots[name].sub_(direction, alpha=rate * self.alpha)

    def _mixed(self, values: Mapping[str, Any], slots: Mapping[str, Any]) -> dict[str, Any]:
        """Return alpha v + (1 - alpha) y."""
        return {name: self.alpha * slots[name] + (1 - self.alpha) * shared for name, shared in values.items()}


_ALPHA = PrefixedArrays("mixture/").name("alpha")


@dataclass(frozen=True)
class AdaptiveStep(MixedStep):
    """`MixedStep` with an alpha of each client, which descends once a round: equation 10.

    alpha -= alpha_rate <v - y, g(alpha v + (1 - alpha) y)> on the round's first batch, then clipped to 0 and 1.
    """

    alpha_rate: float = 0.0

    def init(self, start: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
        """Return v and alpha of each client."""
        return {**super().init(start, own), _ALPHA: own[_ALPHA].clone()}

    def _move_own(
        self, values: Mapping[str, Any], slots: Mapping[str, Any], directions: Mapping[str, Any], rate: float, step: int
    ) -> None:
        """Move v, and alpha in the first step."""
        alpha, slope = slots[_ALPHA].clone(), 0.0
        for name, direction in directions.items():
            slope = slope + ((slots[name] - values[name]) * direction).reshape(len(alpha), -1).sum(1)
            slots[name].sub_(_of_each(alpha, direction) * direction, alpha=rate)
        if step == 0:
            slots[_ALPHA].sub_(slope, alpha=self.alpha_rate).clamp_(0, 1)

    def _mixed(self, values: Mapping[str, Any], slots: Mapping[str, Any]) -> dict[str, Any]:
        """Return alpha v + (1 - alpha) y."""
        return {name: shared.lerp(slots[name], _of_each(slots[_ALPHA], shared)) for name, shared in values.items()}


def _descend(values: Mapping[str, Any], descent: Mapping[str, Any], rate: float) -> None:
    """Move y along its gradient."""
    for name, direction in descent.items():
        values[name].sub_(direction, alpha=rate)


def _of_each(alpha: Any, tensor: Any) -> Any:
    """Return the alpha of each client, [C], in as many dimensions as a tensor [C, ...]."""
    return alpha.reshape(-1, *[1] * (tensor.ndim - 1)).to(tensor.dtype)


class APFL(Personal):
    """Clients use alpha v_u + (1 - alpha) x, and the mean of the y_u moves x as in FedAvg.

    v_u never leaves the client: it sends and receives what FedAvg's does, and computes twice as many gradients.
    `evaluate_clients` measures each client's mixture; other evaluations are those of x.

    With `alpha_rate` each client's alpha descends from `alpha` by equation 10, once a round; its mean over the clients
    of a round is the column `alpha`.

    Differs from the paper: 1. alpha has a rate of its own, and moves once a round as in the released code (FedTorch),
    whose direction is another: there <v - y, alpha g(v) + (1 - alpha) g(y)> + 0.02 alpha, which on quadratics is the
    paper's but for the last term. 2. v_u begins as the model before round 1. 3. a client is measured with x in place of
    its last y_u. The released code mixes the outputs of two networks, here as in the paper their parameters are mixed;
    and it moves y_u before it takes v_u's gradient, as `own_gradient: after` does.
    """

    kind: Literal["apfl"] = "apfl"
    alpha: float = Field(0.5, ge=0, le=1, description="share of a client's own model in the mixture that it uses")
    alpha_rate: float = Field(0.0, ge=0, description="step size of each client's alpha, once a round; 0: it stays")
    own_gradient: Literal["before", "after"] = Field(
        "before",
        description="gradient of a client's own model: at the mixture before the step of y_u on the same batch, as in "
        "the paper, or after it, as in the released code",
    )

    def rule(self) -> MixedStep | None:
        """Return the steps of y and v; None with alpha = 0 for good, since v is not used."""
        after = self.own_gradient == "after"
        if self.alpha_rate:
            return AdaptiveStep(self.alpha, after, alpha_rate=self.alpha_rate)
        return MixedStep(self.alpha, after) if self.alpha else None

    def init_clients(self, task: Task) -> Arrays:
        """Return what clients keep: private parameters, v_u, alpha_u if it moves, and the codec's state."""
        alpha = np.full(task.data.n_clients, self.alpha, dtype=np.float32)
        return {**super().init_clients(task), **self._alpha_of(alpha)}

    def terms(self, chunk: Chunk, task: Task) -> LocalTerms:
        """Return the steps of y_u, v_u and alpha_u."""
        terms = super().terms(chunk, task)
        return replace(terms, own={**terms.own, **self._alpha_of(chunk.state.get(_ALPHA))})

    def contribution(self, broadcast: Arrays, chunk: Chunk, task: Task, arrived: Arrived) -> Contribution:
        """Return y_u - x as FedAvg does; v_u and alpha_u are kept unless they left the finite numbers."""
        whole = super().contribution(broadcast, chunk, task, arrived)
        if not self.alpha_rate:
            return whole
        learnt = np.asarray(arrived.updates.slots[_ALPHA])
        alpha = np.where(np.isfinite(learnt), learnt, chunk.state[_ALPHA])
        metrics = {**whole.metrics, "alpha": Weighted(alpha.astype(np.float64), np.ones(len(alpha)))}
        return replace(whole, state={**whole.state, _ALPHA: alpha}, metrics=metrics)

    def personal(self, broadcast: Arrays, chunk: Chunk, task: Task) -> Arrays:
        """Return alpha_u v_u + (1 - alpha_u) x, [C, ...]."""
        personal, model = super().personal(broadcast, chunk, task), self.final(model_of(broadcast))
        mixed = {}
        for name, values in model.items():
            alpha = chunk.state[_ALPHA].reshape(-1, *[1] * values.ndim) if self.alpha_rate else self.alpha
            mixed[name] = (alpha * personal[name] + (1 - alpha) * values).astype(values.dtype)
        return mixed

    def _alpha_of(self, alpha: NDArray[Any] | None) -> dict[str, NDArray[Any]]:
        """Return the clients' alphas as an entry of their state; none if alpha stays."""
        return {_ALPHA: np.asarray(alpha)} if self.alpha_rate else {}
