"""Server optimizers: the clients' mean change as a pseudo-gradient of momentum, Adam, Yogi or Adagrad.

References: Reddi et al., Adaptive Federated Optimization, ICLR 2021 (arXiv:2003.00295), Algorithm 2; Hsu et al.,
Measuring the Effects of Non-Identical Data Distribution for Federated Visual Classification, 2019 (arXiv:1909.06335).
Letters, as in the first: x the server's model, Delta the mean change, m and v its moments, eta the server's learning
rate, tau the degree of adaptivity.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from narrowcast.platform.config.files import Section
from narrowcast.platform.types import Arrays, PrefixedArrays

Values = NDArray[Any]


class ServerOptimizer(Section, ABC):
    """The server's step of `x` from the mean change, one tensor at a time.

    `slots` are what the optimizer remembers of a tensor. They stay on the server: no slot is broadcast, counted in bits
    or protected by secure aggregation.
    """

    @abstractmethod
    def init(self, values: Values) -> Arrays:
        """Return the slots of a tensor before round 1."""

    @abstractmethod
    def step(self, change: Values, slots: Arrays) -> tuple[Values, Arrays]:
        """Return the direction that x moves by, times eta, and the next slots; `change` is Delta of this tensor."""


class Momentum(ServerOptimizer):
    """FedAvgM: v = momentum v + Delta; x += eta v."""

    kind: Literal["momentum"] = "momentum"
    momentum: float = Field(0.9, ge=0, lt=1, description="share of the last step that is repeated; 0 is FedAvg")

    def init(self, values: Values) -> Arrays:
        """Return v = 0."""
        return {"v": np.zeros_like(values)}

    def step(self, change: Values, slots: Arrays) -> tuple[Values, Arrays]:
        """Return v and the slots."""
        v = self.momentum * slots["v"] + change
        return v, {"v": v}


class _Adaptive(ServerOptimizer):
    """m = beta1 m + (1 - beta1) Delta; x += eta m / (sqrt(v) + tau); subclasses move v."""

    beta1: float = Field(0.9, ge=0, lt=1, description="decay of the mean change m")
    tau: float = Field(1e-3, gt=0, description="added to sqrt(v); smaller is more adaptive. v begins at tau squared")

    def init(self, values: Values) -> Arrays:
        """Return m = 0 and v = tau squared."""
        return {"m": np.zeros_like(values), "v": np.full_like(values, self.tau**2)}

    def step(self, change: Values, slots: Arrays) -> tuple[Values, Arrays]:
        """Return m / (sqrt(v) + tau) and the slots."""
        m, v = self._moments(change, slots)
        return m / (np.sqrt(v) + self.tau), {"m": m, "v": v}

    def _moments(self, change: Values, slots: Arrays) -> tuple[Values, Values]:
        """Return the next m and v."""
        m = self.beta1 * slots["m"] + (1 - self.beta1) * change
        return m, self._second_moment(slots["v"], change * change)

    @abstractmethod
    def _second_moment(self, v: Values, square: Values) -> Values:
        """Return the next v, from Delta squared."""


class Adagrad(_Adaptive):
    """FedAdagrad: v += Delta^2."""

    kind: Literal["adagrad"] = "adagrad"
    beta1: float = Field(0.0, ge=0, lt=1, description="decay of the mean change m")

    def _second_moment(self, v: Values, square: Values) -> Values:
        return v + square


class Yogi(_Adaptive):
    """FedYogi: v -= (1 - beta2) Delta^2 sign(v - Delta^2)."""

    kind: Literal["yogi"] = "yogi"
    beta2: float = Field(0.99, ge=0, lt=1, description="decay of the mean square v")

    def _second_moment(self, v: Values, square: Values) -> Values:
        return v - (1 - self.beta2) * square * np.sign(v - square)


class Adam(_Adaptive):
    """FedAdam: v = beta2 v + (1 - beta2) Delta^2.

    With `bias_correction`, m and v begin at 0 and are divided by 1 - beta^t after t steps, as in Adam itself (Kingma
    and Ba, ICLR 2015, Algorithm 1); the paper of FedAdam has no such correction.
    """

    kind: Literal["adam"] = "adam"
    beta2: float = Field(0.99, ge=0, lt=1, description="decay of the mean square v")
    bias_correction: bool = Field(False, description="divide m and v by 1 - beta^t, as Adam for one machine does")

    def init(self, values: Values) -> Arrays:
        """Return m = 0 and v = tau squared; with bias correction v = 0, and the number of steps."""
        if not self.bias_correction:
            return super().init(values)
        return {"m": np.zeros_like(values), "v": np.zeros_like(values), "t": np.zeros((), dtype=np.int64)}

    def step(self, change: Values, slots: Arrays) -> tuple[Values, Arrays]:
        """Return m / (sqrt(v) + tau), each moment corrected if asked for, and the slots."""
        if not self.bias_correction:
            return super().step(change, slots)
        t, (m, v) = slots["t"] + 1, self._moments(change, slots)
        unbiased_m, unbiased_v = m / (1 - self.beta1 ** int(t)), v / (1 - self.beta2 ** int(t))
        return unbiased_m / (np.sqrt(unbiased_v) + self.tau), {"m": m, "v": v, "t": t}

    def _second_moment(self, v: Values, square: Values) -> Values:
        return self.beta2 * v + (1 - self.beta2) * square


SERVER_ONLY = PrefixedArrays("optimizer/")
"""Names of the arrays that stay on the server: slots of optimizers, and the memory of a method besides the model."""


def initial_slots(optimizer: ServerOptimizer, model: Arrays) -> Arrays:
    """Return the slots of all tensors before round 1, under the names of the server state."""
    return _named({name: optimizer.init(np.asarray(values)) for name, values in model.items()})


def optimizer_step(optimizer: ServerOptimizer, rate: float, model: Arrays, changes: Arrays, server: Arrays) -> Arrays:
    """Return the next model and slots; `server` has the slots now, `changes` the mean change of every tensor."""
    stepped, slots = {}, {}
    for name, values in model.items():
        state = PrefixedArrays(SERVER_ONLY.name(f"{name}/")).of(server)
        direction, slots[name] = optimizer.step(changes[name], state)
        stepped[name] = np.asarray(values + rate * direction, dtype=np.asarray(values).dtype)
    return {**stepped, **_named(slots)}


def _named(slots: dict[str, Arrays]) -> Arrays:
    return SERVER_ONLY.add(
        {f"{tensor}/{slot}": values for tensor, arrays in slots.items() for slot, values in arrays.items()}
    )
