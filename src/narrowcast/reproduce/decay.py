"""The decay ablation on MovieLens-1M: how much of a truncation's gain over float32 is weight decay that it discards.

Every local step pulls the touched rows of Q by 2 wd q. A truncation to rank 1 leaves most of that pull out, so float32
is run with less decay of Q too: {5e-4, 1e-4, 0} for Q, 5e-4 for the user factors. Every cell has the same tries of
client and server rate on validation users, at its own number of rounds, with a seed that is not a test seed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from narrowcast.reproduce.run_spec import RunSpec, best_place

TUNING_SEED = 100
_RATES = ((0.5, 1.0), (0.5, 2.0), (1.0, 1.0), (1.0, 2.0))
RATES = {1000: _RATES, 3000: (*_RATES, (0.25, 1.0), (0.5, 0.5), (0.25, 0.5))}
"""Client and server rates tried for each number of rounds; with more rounds, smaller rates are better."""
ITEM_DECAYS = ("5e-4", "1e-4", "0")
_LEVELS = "{kind: quantise, levels: %d, norms: column, rounding: dithered, norm_type: bfloat16}"
CODECS = {
    "FedMF, float32": "",
    "SVD of rank 1, k = 16": f"{{kind: svd, rank: 1}}, {_LEVELS % 16}",
    "FedMF, quantised, k = 12": _LEVELS % 12,
    "FedMF, EDEN, 2 levels": "{kind: eden, levels: 2}",
}
_SHORT = dict(zip(CODECS, ("float32", "svd", "quantised", "eden"), strict=True))


@dataclass(frozen=True)
class Cell:
    """A method with a decay of Q, for so many rounds."""

    codec: str
    item_decay: str
    rounds: int

    def tuning(self, rates: tuple[float, float]) -> RunSpec:
        """Return the run on validation users at a client and a server rate."""
        client, server = rates
        spec = self._spec(f"{self._label}-tuning-{client:g}-{server:g}", rates, ("data.validation=random",))
        return RunSpec(spec.label, spec.experiment, spec.overrides, first_seed=TUNING_SEED)

    def best_rates(self, tried: Sequence[Mapping[str, Any]]) -> tuple[float, float]:
        """Return the rates of the best of the results, which are in the order of `RATES`."""
        return RATES[self.rounds][best_place(tried, "validation.hr@10")]

    def test(self, tried: Sequence[Mapping[str, Any]]) -> RunSpec:
        """Return the run on test users at the best of the rates tried."""
        return self._spec(self._label, self.best_rates(tried), ())

    @property
    def _label(self) -> str:
        return f"decay-ml1m-{_SHORT[self.codec]}-{self.item_decay}-{self.rounds}"

    def _spec(self, label: str, rates: tuple[float, float], overrides: tuple[str, ...]) -> RunSpec:
        codec = (f"algorithm.codec=[{CODECS[self.codec]}, entropy]",) if CODECS[self.codec] else ()
        return RunSpec(
            label,
            "fedmf-ml1m",
            (
                f"rounds={self.rounds}",
                f"evaluate_every={self.rounds}",
                f"checkpoint_every={self.rounds}",
                "checkpoint_seconds=100000",
                "algorithm.rows=touched",
                *codec,
                f"training.item_weight_decay={self.item_decay}",
                f"training.learning_rate={rates[0]:g}",
                f"algorithm.server_learning_rate={rates[1]:g}",
                *overrides,
            ),
        )


def cells(rounds: int) -> list[Cell]:
    """Return the cells of a number of rounds, for each decay float32 first."""
    return [Cell(codec, item_decay, rounds) for item_decay in ITEM_DECAYS for codec in CODECS]
