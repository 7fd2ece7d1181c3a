"""Federated optimisation methods with equal tuning: through narrow links on MNIST, and on Shakespeare.

Every method has as many tries in every cell: three client rates and two values of its own field, on validation samples
with a seed that is not a test seed. SCAFFOLD's server derives the control variates, so that all send one tensor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from narrowcast.reproduce.run_spec import RunSpec, best_place, slug

TEST_SEEDS = 5
TUNING_SEED = 100
FEDAVG, FEDAVG_FAST = "FedAvg", "FedAvg-fast"
METHODS: Mapping[str, tuple[str, tuple[float, float]]] = {
    FEDAVG: ("kind: fedavg, server_learning_rate: $", (0.5, 1.0)),
    FEDAVG_FAST: ("kind: fedavg, server_learning_rate: $", (1.5, 2.0)),
    "FedProx": ("kind: fedprox, mu: $", (0.01, 0.1)),
    "FedNova": ("kind: fednova, server_learning_rate: $", (0.5, 1.0)),
    "FedAvgM": ("kind: fedavg, server_optimizer: momentum, server_learning_rate: $", (0.1, 0.3)),
    "FedAdam": ("kind: fedavg, server_optimizer: adam, server_learning_rate: $", (0.03, 0.1)),
    "FedYogi": ("kind: fedavg, server_optimizer: yogi, server_learning_rate: $", (0.03, 0.1)),
    "FedAdagrad": ("kind: fedavg, server_optimizer: adagrad, server_learning_rate: $", (0.1, 0.3)),
    "FedDyn": ("kind: feddyn, alpha: $", (0.01, 0.1)),
    "SCAFFOLD": ("kind: scaffold, server_learning_rate: $", (0.5, 1.0)),
    "q-FFL": ("kind: qffl, q: $", (0.1, 1.0)),
}
"""The fields of each method, and the values that are tried in the place of $."""
FULL = "float32"
_LEVELS = "norms: column, rounding: dithered, norm_type: bfloat16"
CODECS: Mapping[str, str] = {
    FULL: "[]",
    "quantised": f"[{{kind: quantise, levels: 3, {_LEVELS}}}, entropy]",
    "a tenth of the entries, EDEN": "[{kind: random_k, fraction: 0.1}, {kind: eden, levels: 2}, entropy]",
    "rank 2, quantised": f"[{{kind: svd, rank: 2}}, {{kind: quantise, levels: 16, {_LEVELS}}}, entropy]",
}
"""The codec of the uploads, widest first."""


@dataclass(frozen=True)
class Comparison:
    """Methods on a data set through codecs; `rates` are the client rates tried, `parameters` those of the model."""

    name: str
    data: str
    rounds: int
    parameters: int
    rates: tuple[float, float, float]
    overrides: tuple[str, str]
    training: str
    methods: tuple[str, ...]
    codecs: tuple[str, ...]

    @property
    def dense_bits(self) -> int:
        """The uplink of all rounds in float32, of 10 clients each."""
        return self.rounds * 10 * self.parameters * 32

    @property
    def cells(self) -> list[Cell]:
        """The cells, those of the widest link first."""
        return [Cell(self, method, codec) for codec in self.codecs for method in self.methods]


NARROW_LINKS = Comparison(
    "narrow-links",
    "MNIST, Dirichlet(0.1)",
    60,
    784 * 64 + 64 + 64 * 10 + 10,
    (0.1, 0.3, 0.6),
    ("data={kind: mnist, clients: 100, partition: {kind: dirichlet, alpha: 0.1}}", "model={kind: mlp, hidden: [64]}"),
    "batch_size: 32, epochs: 2",
    tuple(method for method in METHODS if method not in (FEDAVG_FAST, "FedAdagrad")),
    tuple(CODECS),
)
SERVER_OPTIMIZERS = Comparison(
    "server-optimizers",
    "Shakespeare, 100 characters",
    60,
    80 * 8 + 4 * 64 * (8 + 64 + 2) + 64 * 80 + 80,
    (1.0, 3.0, 10.0),
    (
        "data={kind: shakespeare, clients: 100, min_examples: 20, stride: 80, predict: every}",
        "model={kind: char_lstm, hidden: 64, layers: 1}",
    ),
    "batch_size: 4, epochs: 1",
    (FEDAVG, FEDAVG_FAST, "FedAvgM", "FedAdam", "FedYogi", "FedAdagrad"),
    (FULL,),
)


@dataclass(frozen=True)
class Cell:
    """A method of a comparison through a codec of `CODECS`."""

    of: Comparison
    method: str
    codec: str

    def tuning(self, place: int) -> RunSpec:
        """Return the run on validation samples at a place of the grid."""
        return self._spec(place, "-tuning")

    def best(self, tried: Sequence[Mapping[str, Any]]) -> int:
        """Return the best place of the grid, from the results in its order."""
        return best_place(tried)

    def settings(self, place: int) -> str:
        """Return the values at a place of the grid in words."""
        rate, value = self._values(place)
        return f"rate {rate:g}, {METHODS[self.method][0].rpartition(', ')[2].strip('}').replace('$', f'{value:g}')}"

    def test(self, tried: Sequence[Mapping[str, Any]]) -> RunSpec:
        """Return the run on test samples at the best place of the grid."""
        return self._spec(self.best(tried), "")

    def _values(self, place: int) -> tuple[float, float]:
        return tuple(product(self.of.rates, METHODS[self.method][1]))[place]

    def _spec(self, place: int, tuning: str) -> RunSpec:
        rate, value = self._values(place)
        fields = METHODS[self.method][0].replace("$", f"{value:g}")
        group = f"{self.of.name}-{slug(self.codec)}-{self.method}".lower()
        return RunSpec(
            f"{group}-{value:g}-rate-{rate:g}{tuning}",
            "fedavg-digits",
            (
                f"rounds={self.of.rounds}",
                f"evaluate_every={self.of.rounds}",
                "checkpoint_seconds=100000",
                "clients_per_round=10",
                "sampling=uniform",
                "chunk_size=10",
                *self.of.overrides,
                f"algorithm={{{fields}, codec: {CODECS[self.codec]}}}",
                f"training={{learning_rate: {rate:g}, {self.of.training}}}",
            ),
            first_seed=TUNING_SEED if tuning else 0,
            data_seed=True,
            memory_gib=0.2,
            together=f"{group}{tuning}" if tuning else "",
        )


TRIES = range(6)
"""The places of the grid: client rates, and for each the two values of the method's own field."""
