"""SCAFFOLD's comparison: rounds to a target accuracy when a share of the clients' data is similar.

Reference: Karimireddy et al., SCAFFOLD, ICML 2020 (arXiv:1910.06378), section 7 and Table 3: logistic regression on
EMNIST, 100 clients, a fifth of them a round, local batches of a fifth of a client's data, step sizes tuned for each.

Here: scikit-learn's digits in place of EMNIST, 20 clients, 4 of them a round, batches of 13 of about 65 samples. Each
method has the step size of one grid with the fewest rounds on validation samples, a mean over seeds that are not test
seeds: from rate 3 on rounds depend on the last bits of a run's arithmetic, so that one seed does not settle a choice.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from narrowcast.reproduce.run_spec import RunSpec
from narrowcast.reproduce.tuning_rule import Choice
from narrowcast.runs.significance import COMPARABLE_SEEDS

TARGET = 0.9
MOST_ROUNDS = 300
TEST_SEEDS = 10
TUNING_SEED, TUNING_SEEDS = 100, COMPARABLE_SEEDS
SIMILARITIES = (0, 10, 100)
EPOCHS = (1, 5, 20)
RATES = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0, 3000.0)
METHODS = {"FedAvg": "fedavg", "FedProx": "{kind: fedprox, mu: 1}", "SCAFFOLD": "scaffold"}
"""FedProx has the mu of the paper."""
SGD = "SGD"


@dataclass(frozen=True)
class SimilarityCell:
    """A method with its local epochs at a percentage of similar data; `SGD` takes one step with all of its data."""

    method: str
    epochs: int
    similarity: int

    def tuning(self, rate: float) -> RunSpec:
        """Return the run on validation samples at a step size."""
        return self._spec(rate, "validation", "-tuning")

    def best(self, tried: Sequence[Mapping[str, Any]]) -> float:
        """Return the step size with the fewest rounds, of these the most accurate one; results are means, as `RATES`.

        A run that does not reach the target has `MOST_ROUNDS`; a step size of which a run failed is the last choice.
        """

        def order(place: int) -> tuple[float, float]:
            result = tried[place]
            accuracy = result["final"].get("validation.accuracy")
            return (math.inf, 0.0) if accuracy is None else (result["rounds"], -accuracy)

        return RATES[min(range(len(RATES)), key=order)]

    def choice(self, tried: Sequence[Mapping[str, Any]]) -> Choice:
        """Return what was chosen from the grid."""
        return Choice(f"{self.similarity} % similar: {self.what}", "step size", self.best(tried), RATES, TUNING_SEEDS)

    def test(self, tried: Sequence[Mapping[str, Any]]) -> RunSpec:
        """Return the run on test samples at the best step size."""
        return self._spec(self.best(tried), "test", "")

    @property
    def what(self) -> str:
        """The method in words."""
        return SGD if self.method == SGD else f"{self.method}, E = {self.epochs}"

    def _spec(self, rate: float, split: str, tuning: str) -> RunSpec:
        batch = "all" if self.method == SGD else 13
        partition = f"{{kind: similarity, share: {self.similarity / 100:g}}}"
        return RunSpec(
            f"scaffold-similarity-{self.similarity}-{self.method}-{self.epochs}-{rate:g}{tuning}",
            "fedavg-digits",
            (
                f"rounds={MOST_ROUNDS}",
                "evaluate_every=1",
                "checkpoint_seconds=100000",
                "clients_per_round=4",
                "sampling=uniform",
                f"data={{kind: digits, clients: 20, partition: {partition}}}",
                "model=softmax",
                f"algorithm={METHODS.get(self.method, 'fedavg')}",
                f"training={{learning_rate: {rate:g}, batch_size: {batch}, epochs: {self.epochs}}}",
            ),
            first_seed=TUNING_SEED if tuning else 0,
            data_seed=True,
            memory_gib=0.05,
            together=f"scaffold-similarity-{self.epochs}{tuning}",
            target=(f"{split}.accuracy", TARGET),
        )


def cells() -> list[SimilarityCell]:
    """Return the cells, those of SGD first."""
    methods = [(SGD, 1), *((method, epochs) for epochs in EPOCHS for method in METHODS)]
    return [SimilarityCell(*each, similarity) for each in methods for similarity in SIMILARITIES]
