"""The channel ablation: allocation, levels adapted or fixed, and knowledge of the gains, each apart.

Every cell sends the same codec on the same band: adaptive SVD on MovieLens-1M, adaptive ATOMO on MNIST. Adapted: each
client chooses rank or directions, and levels, within the bits that it was allocated. Fixed: all clients send one size,
the best of three on validation data, and clients that it does not fit are not allocated bits. The adapted codec gets
three tries too, for the error at which an update is no longer worth sending. Rows: adapted, and a client without the
bits for all of its rows sends some. The back-off of each error of the gains is
the one at which a simulation of the links alone, without training, delivers most uploads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from narrowcast.reproduce.run_spec import RunSpec

Codec = Literal["adapted", "fixed", "rows"]
Allocation = Literal["min_error", "max_min", "proportional", "equal"]
_QUANTISER = (
    "algorithm.codec=[{kind: quantise, levels: %d, norms: column, rounding: dithered, norm_type: bfloat16}, entropy]"
)
_TUNING_SEED = 100


@dataclass(frozen=True)
class Scenario:
    """A band: `channel` has its fields, `seconds` the upload time of a round that codecs are tuned at.

    `share_of_clients`: clients a round as a fraction of those of the ablation's `full_bits`.
    """

    name: str
    channel: str
    seconds: float
    overrides: tuple[str, ...] = ()
    share_of_clients: float = 1.0


@dataclass(frozen=True)
class Knowledge:
    """Knowledge of the gains that rates are planned on: fields of the channel for each allocation, or for all."""

    name: str
    fields: Mapping[str, str] = field(hash=False)

    def of(self, allocation: str) -> str:
        """Return the channel's fields."""
        return self.fields.get(allocation, self.fields["all"])


@dataclass(frozen=True)
class Cell:
    """One cell of the table."""

    scenario: Scenario
    allocation: Allocation
    codec: Codec
    knowledge: Knowledge
    seconds: float

    @property
    def label(self) -> str:
        """The cell's name in files."""
        parts = (self.scenario.name, self.allocation, self.codec, self.knowledge.name, f"{self.seconds:g}s")
        return "-".join(parts)


PERFECT = Knowledge("perfect", {"all": ""})
_SHARED = Scenario("shared", "kind: rayleigh, access: shared", 0.016)
_OWN = Scenario("own", "kind: rayleigh, access: orthogonal, shadowing_decibel: 8", 0.002)
_TIERS = Scenario(
    "tiers",
    "kind: multiple_access",
    0.01,
    (
        "fleet={kind: tiers, tiers: ["
        "{name: 2g, share: 2, uplink_mbit_per_second: 0.2, downlink_mbit_per_second: 0.4, compute_speed: 0.5}, "
        "{name: 3g, share: 4, uplink_mbit_per_second: 1, downlink_mbit_per_second: 4, compute_speed: 1}, "
        "{name: 4g, share: 3, uplink_mbit_per_second: 5, downlink_mbit_per_second: 20, compute_speed: 2}, "
        "{name: wifi, share: 1, uplink_mbit_per_second: 20, downlink_mbit_per_second: 80, compute_speed: 2}]}",
    ),
)
_FEW = Scenario(
    "few", "kind: rayleigh, access: shared", 0.0016, ("clients_per_round=6", "rounds=3000", "evaluate_every=3000"), 0.1
)
_DEEP = Scenario("deep", "kind: rayleigh, access: shared, shadowing_decibel: 12", 0.016)
_MNIST_SHARED = Scenario("shared", "kind: rayleigh, access: shared", 0.0234)


def _error(decibel: int, back_off: Mapping[str, int]) -> Knowledge:
    fields = {name: f", csi_error_decibel: {decibel}, back_off_decibel: {each}" for name, each in back_off.items()}
    return Knowledge(f"error-{decibel}-db", fields)


_ERROR_3, _ERROR_6 = _error(3, {"min_error": 2, "all": 4}), _error(6, {"min_error": 6, "all": 10})
_OWN_ERROR_6 = _error(6, {"all": 4})
_NAIVE_3 = Knowledge("error-3-db-no-back-off", {"all": ", csi_error_decibel: 3"})
_OUTAGE = Knowledge("outage", {"all": ", outage_probability: 0.15"})
_CODECS: tuple[Codec, ...] = ("adapted", "fixed")
_ALLOCATIONS: tuple[Allocation, ...] = ("min_error", "max_min", "proportional", "equal")


@dataclass(frozen=True)
class Ablation:
    """The cells of one data set and how they are run.

    `tries`: for each codec, the overrides to choose from by `metric` of validation data. `full_bits`: bits of a
    round's updates in float32. With `data_seed` the partition follows the seed.
    """

    name: str
    experiment: str
    metric: str
    common: tuple[str, ...]
    validation: tuple[str, ...]
    tries: Mapping[Codec, Mapping[str, tuple[str, ...]]]
    cells: tuple[Cell, ...]
    full_bits: int
    data_seed: bool = False

    @property
    def scenarios(self) -> tuple[Scenario, ...]:
        """The scenarios of the cells."""
        return tuple(dict.fromkeys(each.scenario for each in self.cells))

    def trial(self, scenario: Scenario, codec: Codec, name: str) -> RunSpec:
        """Return a run on validation data."""
        cell = Cell(scenario, "max_min" if scenario is _OWN else "min_error", codec, PERFECT, scenario.seconds)
        label = f"tuning-{cell.label}-{name}"
        overrides = (*self._overrides(cell, name), *self.validation)
        return RunSpec(
            label, self.experiment, overrides, first_seed=_TUNING_SEED, most_seeds=1, data_seed=self.data_seed
        )

    def run(self, cell: Cell, name: str) -> RunSpec:
        """Return the run of a cell with the chosen setting of its codec."""
        return RunSpec(f"{cell.label}-{name}", self.experiment, self._overrides(cell, name), data_seed=self.data_seed)

    def _overrides(self, cell: Cell, name: str) -> tuple[str, ...]:
        tuned = self.tries[cell.codec][name]
        radio = (
            f"radio={{channel: {{{cell.scenario.channel}{cell.knowledge.of(cell.allocation)}}}, "
            f"allocation: {cell.allocation}, upload_seconds: {cell.seconds:g}}}"
        )
        return (*self.common, *tuned, *cell.scenario.overrides, radio)


def _cells(
    scenario: Scenario,
    allocations: tuple[Allocation, ...],
    codecs: tuple[Codec, ...],
    knowledge: Knowledge = PERFECT,
    seconds: float | None = None,
) -> tuple[Cell, ...]:
    at = scenario.seconds if seconds is None else seconds
    return tuple(Cell(scenario, each, codec, knowledge, at) for each in allocations for codec in codecs)


def _svd(fields: str, levels: int) -> tuple[str, ...]:
    return (f"algorithm={{kind: adaptive_svd, server_learning_rate: 1.5, {fields}}}", _QUANTISER % levels)


def _atomo(fields: str, levels: int) -> tuple[str, ...]:
    return (f"algorithm={{kind: adaptive_atomo, informs_allocation: true, {fields}}}", _QUANTISER % levels)


ML1M = Ablation(
    "channel-ml1m",
    "scolr-channel-ml1m",
    "hr@10",
    ("rounds=300", "evaluate_every=300"),
    ("data.validation=random",),
    {
        "adapted": {f"error-{error:g}": _svd(f"rank: 4, most_error: {error:g}", 10) for error in (3.0, 0.4, 0.05)},
        "fixed": {f"k-{levels}": _svd("rank: 1, adapted: false", levels) for levels in (3, 8, 24)},
        "rows": {
            f"{choice}-within-{error:g}": _svd(f"rank: 4, row_choice: {choice}, most_error: {error:g}", 10)
            for choice, error in (("random", 0.4), ("random", 0.1), ("strongest", 0.4))
        },
    },
    (
        *_cells(_SHARED, _ALLOCATIONS, _CODECS),
        *_cells(_OWN, ("max_min",), _CODECS),
        *_cells(_SHARED, ("min_error",), _CODECS, seconds=0.008),
        *_cells(_SHARED, ("min_error",), _CODECS, _ERROR_3),
        *_cells(_SHARED, ("min_error", "max_min"), _CODECS, _ERROR_6),
        *_cells(_SHARED, ("min_error",), _CODECS, _OUTAGE),
        *_cells(_SHARED, ("min_error",), ("adapted",), _NAIVE_3),
        *_cells(_OWN, ("max_min",), _CODECS, _OWN_ERROR_6),
        *_cells(_TIERS, ("min_error", "equal"), _CODECS),
        *_cells(_SHARED, ("min_error",), _CODECS, seconds=0.0238),
        *_cells(_SHARED, ("max_min",), _CODECS, _ERROR_3),
        *_cells(_OWN, ("max_min",), ("rows",)),
        *_cells(_OWN, ("max_min",), ("rows",), _OWN_ERROR_6),
        *_cells(_TIERS, ("min_error",), ("rows",)),
        *_cells(_SHARED, ("min_error",), ("rows",), seconds=0.008),
        *_cells(_FEW, ("min_error",), _CODECS),
        *_cells(_DEEP, ("min_error",), _CODECS),
    ),
    full_bits=60 * 3706 * 64 * 32,
)

MNIST = Ablation(
    "channel-mnist",
    "scolr-mnist",
    "accuracy",
    ("rounds=30", "evaluate_every=30"),
    (),
    {
        "adapted": {f"rank-{rank}": _atomo(f"rank: {rank}", 8) for rank in (16, 32, 64)},
        "fixed": {f"share-{share:g}": _atomo(f"rank: 64, fraction: {share:g}", 24) for share in (0.05, 0.025, 0.0125)},
    },
    (
        *_cells(_MNIST_SHARED, ("max_min", "min_error"), _CODECS),
        *_cells(_MNIST_SHARED, ("max_min",), _CODECS, _ERROR_6),
        *_cells(_MNIST_SHARED, ("proportional", "equal"), ("adapted",)),
    ),
    full_bits=10 * 215_370 * 32,
    data_seed=True,
)
