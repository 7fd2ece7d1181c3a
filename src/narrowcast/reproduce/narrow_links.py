"""Federated optimisation methods under narrow links: the same methods through the same codecs, at the same bits.

MNIST, 100 clients with Dirichlet(0.1) labels, 10 a round, 2 epochs of batches of 32, one hidden layer of 64. Every
method has as many tries in every cell: three client rates and two values of its own field, on validation samples with a
seed that is not a test seed. SCAFFOLD sends two tensors for one and has half of the rounds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from narrowcast.reproduce.run_spec import RunSpec

ROUNDS = 60
TEST_SEEDS = 5
TUNING_SEED = 100
RATES = (0.03, 0.1, 0.3)
FEDAVG, SCAFFOLD = "FedAvg", "SCAFFOLD"
METHODS: Mapping[str, tuple[str, tuple[float, float]]] = {
    FEDAVG: ("kind: fedavg, server_learning_rate: $", (1.0, 1.5)),
    "FedProx": ("kind: fedprox, mu: $", (0.01, 0.1)),
    "FedNova": ("kind: fednova, server_learning_rate: $", (1.0, 1.5)),
    "FedAvgM": ("kind: fedavg, server_optimizer: {kind: momentum, momentum: $}", (0.5, 0.9)),
    "FedAdam": ("kind: fedavg, server_optimizer: adam, server_learning_rate: $", (0.01, 0.03)),
    "FedYogi": ("kind: fedavg, server_optimizer: yogi, server_learning_rate: $", (0.01, 0.03)),
    "FedDyn": ("kind: feddyn, alpha: $", (0.01, 0.1)),
    SCAFFOLD: ("kind: scaffold, server_learning_rate: $", (0.5, 1.0)),
    "q-FFL": ("kind: qffl, q: $", (0.1, 1.0)),
}
"""The fields of each method, and the values that are tried in the place of $."""
_LEVELS = "norms: column, rounding: dithered, norm_type: bfloat16"
FULL = "float32"
LINKS: Mapping[str, str] = {
    FULL: "[]",
    "quantised": f"[{{kind: quantise, levels: 3, {_LEVELS}}}, entropy]",
    "a tenth of the entries, EDEN": "[{kind: random_k, fraction: 0.1}, {kind: eden, levels: 2}, entropy]",
    "rank 2, quantised": f"[{{kind: svd, rank: 2}}, {{kind: quantise, levels: 16, {_LEVELS}}}, entropy]",
}
"""The codec of the uploads, widest first."""
DENSE_BITS = 10 * (784 * 64 + 64 + 64 * 10 + 10) * 32
"""A round's updates in float32: 10 clients."""
_GRID = tuple(product(RATES, (0, 1)))
TRIES = range(len(_GRID))


@dataclass(frozen=True)
class Cell:
    """A method of `METHODS` through a codec of `LINKS`."""

    method: str
    link: str

    def tuning(self, place: int) -> RunSpec:
        """Return the run on validation samples at a place of the grid."""
        return self._spec(place, "-tuning")

    def best(self, tried: Sequence[Mapping[str, Any]]) -> int:
        """Return the best place of the grid, from the results in its order."""
        reached = [result["final"].get("validation.accuracy", 0.0) for result in tried]
        return reached.index(max(reached))

    def settings(self, place: int) -> str:
        """Return the values at a place of the grid in words."""
        rate, value = self._values(place)
        return f"rate {rate:g}, {METHODS[self.method][0].rpartition(', ')[2].strip('}').replace('$', f'{value:g}')}"

    def test(self, tried: Sequence[Mapping[str, Any]]) -> RunSpec:
        """Return the run on test samples at the best place of the grid."""
        return self._spec(self.best(tried), "")

    def _values(self, place: int) -> tuple[float, float]:
        rate, which = _GRID[place]
        return rate, METHODS[self.method][1][which]

    def _spec(self, place: int, tuning: str) -> RunSpec:
        rate, value = self._values(place)
        fields = METHODS[self.method][0].replace("$", f"{value:g}")
        rounds = ROUNDS // 2 if self.method == SCAFFOLD else ROUNDS
        group = f"narrow-links-{list(LINKS).index(self.link)}-{self.method}".lower()
        return RunSpec(
            f"{group}-{value:g}-rate-{rate:g}{tuning}",
            "fedavg-digits",
            (
                f"rounds={rounds}",
                f"evaluate_every={rounds}",
                "checkpoint_seconds=100000",
                "clients_per_round=10",
                "sampling=uniform",
                "chunk_size=10",
                "data={kind: mnist, clients: 100, partition: {kind: dirichlet, alpha: 0.1}}",
                "model={kind: mlp, hidden: [64]}",
                f"algorithm={{{fields}, codec: {LINKS[self.link]}}}",
                f"training={{learning_rate: {rate:g}, batch_size: 32, epochs: 2}}",
            ),
            first_seed=TUNING_SEED if tuning else 0,
            data_seed=True,
            memory_gib=0.2,
            together=f"{group}{tuning}" if tuning else "",
        )


def cells() -> list[Cell]:
    """Return the cells, those of the widest link first."""
    return [Cell(method, link) for link in LINKS for method in METHODS]
