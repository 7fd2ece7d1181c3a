"""q-FFL's comparisons: accuracy over clients on three classes of clothes, with AFL, and on synthetic data.

Reference: Li et al., Fair Resource Allocation in Federated Learning, ICLR 2020 (arXiv:1905.10497), Tables 1 and 3; the
clothes are those of Mohri et al., Agnostic Federated Learning, ICML 2019 (arXiv:1902.00146), section 5: shirts,
pullovers and T-shirts of Fashion-MNIST, one class a client, and logistic regression.

Every method has as many tries, chosen with a seed that is not a test seed: on the clothes by the validation accuracy of
the worst client, on synthetic data, where all of q is shown, by the mean over clients.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from narrowcast.reproduce.run_spec import RunSpec, best_place

TEST_SEEDS = 5
TUNING_SEED = 100
FASHION, SYNTHETIC = "fashion", "synthetic"
ROUNDS = {FASHION: 100, SYNTHETIC: 1000}
FEDAVG, AFL, QFFL = "FedAvg", "AFL", "q-FFL"
QS = (0.0, 0.1, 1.0, 5.0)
"""q on synthetic data."""
_COUPLED = (0.003, 0.01, 0.03)
_SETTINGS = {
    FASHION: (
        "data={kind: fashion-mnist, classes: [0, 2, 6], clients: 3, partition: {kind: shards, classes_per_client: 1}}",
        "clients_per_round=3",
        200,
    ),
    SYNTHETIC: ("data={kind: synthetic, alpha: 1, beta: 1, clients: 100}", "clients_per_round=10", 64),
}
"""Data, cohort and batch size."""
METHODS = {FASHION: (FEDAVG, AFL, QFFL), SYNTHETIC: tuple(f"q = {q:g}" for q in QS)}


@dataclass(frozen=True)
class FairCell:
    """A method of `METHODS` on one of the two data sets."""

    data: str
    method: str

    @property
    def grid(self) -> tuple[tuple[float, float], ...]:
        """The pairs tried: a learning rate, and the method's own field, 0 if it has none."""
        if self.data == SYNTHETIC:
            return tuple((rate, float(self.method.removeprefix("q = "))) for rate in (0.03, 0.1, 0.3, 1.0))
        own = {AFL: (0.01, 0.1), QFFL: (1.0, 5.0)}.get(self.method)
        if own is None:
            return tuple((rate, 0.0) for rate in (0.001, *_COUPLED, 0.1, 0.3))
        return tuple(product(_COUPLED, own))

    def tuning(self, place: int) -> RunSpec:
        """Return the run on validation samples at a place of the grid."""
        return self._spec(self.grid[place], "-tuning")

    def best(self, tried: Sequence[Mapping[str, Any]]) -> tuple[float, float]:
        """Return the best pair of the grid, from the results in its order."""
        metric = "worst_10_percent" if self.data == FASHION else "mean"
        return self.grid[best_place(tried, f"validation.accuracy.{metric}")]

    def test(self, tried: Sequence[Mapping[str, Any]]) -> RunSpec:
        """Return the run on test samples at the best pair of the grid."""
        return self._spec(self.best(tried), "")

    def _spec(self, pair: tuple[float, float], tuning: str) -> RunSpec:
        data, cohort, batch = _SETTINGS[self.data]
        rate, own = pair
        algorithm = {
            FEDAVG: "fedavg",
            AFL: f"{{kind: afl, mixture_learning_rate: {own:g}}}",
        }.get(self.method, f"{{kind: qffl, q: {own:g}, weights: examples}}")
        name = self.method.replace(" ", "").replace("=", "")
        return RunSpec(
            f"qffl-{self.data}-{name}-{rate:g}-{own:g}{tuning}",
            "fedavg-digits",
            (
                data,
                cohort,
                "sampling=uniform",
                f"rounds={ROUNDS[self.data]}",
                f"evaluate_every={ROUNDS[self.data]}",
                "evaluate_clients=[validation, test]",
                "checkpoint_seconds=100000",
                "model=softmax",
                f"algorithm={algorithm}",
                f"training={{learning_rate: {rate:g}, batch_size: {batch}, epochs: 1}}",
            ),
            first_seed=TUNING_SEED if tuning else 0,
            data_seed=True,
            memory_gib=0.2,
            together=f"qffl-{self.data}{tuning}",
        )


def cells(data: str) -> list[FairCell]:
    """Return the cells of a data set, the one that minimises the mean loss first."""
    return [FairCell(data, method) for method in METHODS[data]]
