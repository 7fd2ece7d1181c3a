"""FedProx's comparison on synthetic data: FedAvg drops stragglers, FedProx keeps their partial work, with mu.

Reference: Li et al., Federated Optimization in Heterogeneous Networks, MLSys 2020 (arXiv:1812.06127), section 5.2 and
Figure 1. Its settings: 30 devices, 10 a round, 20 epochs of batches of 10 at the rate 0.01, stragglers that do 1 to 20
epochs, mu the best of five; FedAvg, and FedProx with mu = 0, have the same rate.

Here FedAvg, which drops partial work, and FedProx with mu = 0, which keeps it, also have as many tries of their rate as
FedProx has of mu at the paper's rate, in every cell: by mean validation accuracy over seeds that are not test seeds.
The first is no control for mu, since it drops work; the second is. Grids go on below and above the paper's as far as
best values need it. The same clients are stragglers under every method of a seed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from narrowcast.reproduce.run_spec import RunSpec, best_place
from narrowcast.reproduce.tuning_rule import Choice
from narrowcast.runs.significance import COMPARABLE_SEEDS

ROUNDS = 50
TEST_SEEDS = 5
TUNING_SEED, TUNING_SEEDS = 100, COMPARABLE_SEEDS
RATE = 0.01
TRIES = range(5)
DATA = ("iid", "0", "0.5", "1")
"""Synthetic data without heterogeneity, and with this alpha and beta."""
STRAGGLERS = (0, 50, 90)
FEDAVG, TUNED_FEDAVG = "FedAvg", "FedAvg, tuned rate"
PARTIAL, TUNED_PARTIAL, FEDPROX = "FedProx, mu = 0", "FedProx, mu = 0, tuned rate", "FedProx, best mu"
METHODS = (FEDAVG, TUNED_FEDAVG, PARTIAL, TUNED_PARTIAL, FEDPROX)
TUNED = (TUNED_FEDAVG, TUNED_PARTIAL, FEDPROX)
_RATES, _IID_RATES = (0.0001, 0.0003, 0.001, 0.003, 0.01), (0.3, 1.0, 3.0, 10.0, 30.0)
_MUS, _IID_MUS = (0.5, 1.0, 3.0, 10.0, 30.0), (0.0, 0.001, 0.01, 0.1, 0.5)


@dataclass(frozen=True)
class StragglerCell:
    """A method on a data set of `DATA`, with a percentage of stragglers."""

    data: str
    stragglers: int
    method: str

    def tuning(self, place: int) -> RunSpec:
        """Return the run on validation samples at a place of the grid; a method without a grid has a single one."""
        return self._spec(self.grid[place % len(self.grid)], "-tuning")

    def best(self, tried: Sequence[Mapping[str, Any]]) -> float:
        """Return the best value of the grid, from the results in its order."""
        return self.grid[best_place(tried[: len(self.grid)])]

    def choice(self, tried: Sequence[Mapping[str, Any]]) -> Choice | None:
        """Return what was chosen from the grid, None of a method without one; neither value is below 0."""
        if self.method not in TUNED:
            return None
        name = "mu" if self.method == FEDPROX else "rate"
        return Choice(self.what, name, self.best(tried), self.grid, TUNING_SEEDS, least=0.0)

    @property
    def what(self) -> str:
        """The cell in words."""
        return f"{set_name(self.data)}, {self.stragglers} % stragglers: {self.method}"

    def test(self, tried: Sequence[Mapping[str, Any]]) -> RunSpec:
        """Return the run on test samples at the best value of the grid."""
        return self._spec(self.best(tried), "")

    @property
    def grid(self) -> tuple[float, ...]:
        """The learning rates that are tried, and of FedProx the values of mu."""
        if self.method not in TUNED:
            return (RATE,)
        iid = self.data == "iid"
        if self.method == FEDPROX:
            return _IID_MUS if iid else _MUS
        return _IID_RATES if iid else _RATES

    def _spec(self, value: float, tuning: str) -> RunSpec:
        mu, rate = (value, RATE) if self.method == FEDPROX else (0.0, value)
        drop = self.method in (FEDAVG, TUNED_FEDAVG)
        spread = "iid: true" if self.data == "iid" else f"alpha: {self.data}, beta: {self.data}"
        fields = f"mu: {mu:g}, partial_share: {self.stragglers / 100:g}, partial_draw: number"
        kept = "dropped" if drop else "kept"
        return RunSpec(
            f"fedprox-synthetic-{self.data}-{self.stragglers}-{kept}-mu-{mu:g}-rate-{rate:g}{tuning}",
            "fedavg-digits",
            (
                f"rounds={ROUNDS}",
                f"evaluate_every={ROUNDS}",
                "checkpoint_seconds=100000",
                "clients_per_round=10",
                "sampling=uniform",
                f"data={{kind: synthetic, {spread}}}",
                "model=softmax",
                f"algorithm={{kind: fedprox, {fields}, drop_partial: {str(drop).lower()}}}",
                f"training={{learning_rate: {rate:g}, batch_size: 10, epochs: 20}}",
            ),
            first_seed=TUNING_SEED if tuning else 0,
            memory_gib=0.05,
            together=f"fedprox-synthetic-{self.data}{tuning}",
        )


def cells_by_data() -> dict[str, list[StragglerCell]]:
    """Return the cells of each data set, the most heterogeneous first; FedAvg without stragglers has mu = 0."""
    return {
        data: [
            StragglerCell(data, stragglers, method)
            for stragglers in STRAGGLERS
            for method in METHODS
            if stragglers or method not in (PARTIAL, TUNED_PARTIAL)
        ]
        for data in reversed(DATA)
    }


def set_name(data: str) -> str:
    """Return a data set of `DATA` in words: alpha and beta."""
    return data if data == "iid" else f"({data}, {data})"
