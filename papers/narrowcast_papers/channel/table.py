"""The channel ablation: allocation, levels adapted or fixed, and knowledge of the gains, each apart.

Every cell sends the same codec on the same band: adaptive SVD on MovieLens-1M, adaptive ATOMO on MNIST. Adapted: each
client chooses rank or directions, and levels, within the bits that it was allocated. Fixed: all clients send one size,
the best of three on validation data, and clients that it does not fit are not allocated bits. The adapted codec gets
three tries too, for the error at which an update is no longer worth sending. Rows: adapted, and a client without the
bits for all of its rows sends some. The back-off of each error of the gains is
the one at which a simulation of the links alone, without training, delivers most uploads.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from narrowcast.platform.tracking.figures import BLUE, ORANGE, VERMILLION, new_figure
from narrowcast.platform.tracking.metrics import metric_label
from narrowcast.platform.types import FloatArray
from narrowcast.studies.execution import Plan, Planned
from narrowcast.studies.results import Rows
from narrowcast.studies.spec import RunSpec
from narrowcast.studies.tables import StudyTable
from narrowcast.studies.tuning import TEST_SEEDS, TUNING_SEED, finished, first_finished
from narrowcast.studies.verdicts import PaperVerdict, mean_and_spread, paired_differences

Codec = Literal["adapted", "fixed", "rows"]
Allocation = Literal["min_error", "max_min", "proportional", "equal"]
_QUANTISER = (
    "algorithm.codec=[{kind: quantise, levels: %d, norms: column, rounding: dithered, norm_type: bfloat16}, entropy]"
)


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
            label, self.experiment, overrides, first_seed=TUNING_SEED, most_seeds=1, data_seed=self.data_seed
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


CellResults = Mapping[Cell, Sequence[Mapping[str, Any]]]
"""The results of the seeds of each cell, in the order of the seeds."""
_COLOURS = {"adapted": BLUE, "fixed": ORANGE, "rows": VERMILLION}
_OFFSETS = {"adapted": 0.2, "fixed": 0.0, "rows": -0.2}


@dataclass(frozen=True)
class ChannelTable:
    """The results of an ablation.

    Cells of one scenario, with one upload time, take the same time. Comparisons are paired by seed, and corrected over
    all of them by Holm's method.
    """

    ablation: Ablation
    results: CellResults

    def judge(self) -> list[PaperVerdict]:
        """Return a row for each cell, then one for each comparison."""
        rows = [
            PaperVerdict(
                describe_cell(cell),
                "",
                mean_and_spread(self._accuracy(cell).tolist()),
                f"for 1/{self._compression(cell):.0f}",
                by_seed=tuple(self._accuracy(cell)),
            )
            for cell in self._cells
        ]
        differences = paired_differences(list(self._pairs()))
        return rows + [
            replace(each, difference="", verdict=each.verdict.replace("off by", "differs by")) for each in differences
        ]

    def plot(self, path: Path) -> None:
        """Plot the accuracy of each cell, a line for each band, and the accuracy against the bits of the same cells."""
        title = f"Adaptation to the channel: {self.ablation.name.removeprefix('channel-')}"
        figure, (left, right) = new_figure(title, panels=2)
        places = {name: -place for place, name in enumerate(dict.fromkeys(map(_describe_band, self._cells)))}
        figure.set_size_inches(13, 1.5 + 0.28 * len(places))
        for cell in self._cells:
            values, colour = self._accuracy(cell), _COLOURS[cell.codec]
            spread = np.std(values, ddof=min(1, len(values) - 1))
            place = places[_describe_band(cell)] + _OFFSETS[cell.codec]
            left.errorbar(np.mean(values), place, xerr=spread, fmt="o", color=colour, markersize=4, capsize=2)
            right.plot(1 / self._compression(cell), np.mean(values), "o", color=colour, markersize=4)
        left.set_yticks(list(places.values()), list(places), fontsize=8)
        label = f"{metric_label(f'test.{self.ablation.metric}')} (%)"
        left.set(xlabel=label)
        right.set(xlabel="uplink, of full updates in float32", ylabel=label)
        right.set_xscale("log", base=2)
        right.xaxis.set_major_formatter(lambda value, _: f"1/{1 / value:.0f}")
        for codec in dict.fromkeys(cell.codec for cell in self._cells):
            right.plot([], [], "o", color=_COLOURS[codec], label=codec)
        right.legend(fontsize=8, frameon=False)
        figure.savefig(path, dpi=150)

    @property
    def _cells(self) -> list[Cell]:
        return [cell for cell in self.ablation.cells if self.results.get(cell)]

    def _accuracy(self, cell: Cell) -> FloatArray:
        metric = f"test.{self.ablation.metric}"
        return np.array([100 * result["final"][metric] for result in self.results[cell]])

    def _compression(self, cell: Cell) -> float:
        """Return the bits of full updates in float32 over those of the cell, mean over its seeds."""
        bits = np.mean([result["uplink_bits"] / result["rounds"] for result in self.results[cell]])
        return float(self.ablation.full_bits * cell.scenario.share_of_clients / bits)

    def _pairs(self) -> Iterator[tuple[str, FloatArray, FloatArray]]:
        for cell in self._cells:
            where = _describe_band(cell)
            fixed, rows = replace(cell, codec="fixed"), replace(cell, codec="rows")
            if cell.codec == "adapted":
                yield from self._pair(f"adapted less fixed: {where}", cell, fixed)
                yield from self._pair(f"rows less adapted: {where}", rows, cell)
                yield from self._pair(f"rows less fixed: {where}", rows, fixed)
                if cell.allocation != "max_min":
                    fair = replace(cell, allocation="max_min")
                    yield from self._pair(f"{cell.allocation} less max_min: {describe_cell(fair)}", cell, fair)
            if cell.knowledge is not PERFECT and cell.codec != "fixed":
                known = replace(cell, knowledge=PERFECT)
                yield from self._pair(f"{cell.knowledge.name} less perfect: {describe_cell(known)}", cell, known)
        yield from self._equal_bits()

    def _pair(self, what: str, cell: Cell, other: Cell) -> Iterator[tuple[str, FloatArray, FloatArray]]:
        if cell in self._cells and other in self._cells:
            ours, theirs = self._accuracy(cell), self._accuracy(other)
            seeds = min(len(ours), len(theirs))
            yield what, ours[:seeds], theirs[:seeds]

    def _equal_bits(self) -> Iterator[tuple[str, FloatArray, FloatArray]]:
        """Compare at the bits of each fixed cell, with the adapted codec interpolated between its upload times."""
        for fixed in self._cells:
            if fixed.codec != "fixed" or fixed.knowledge is not PERFECT:
                continue
            same = [
                replace(fixed, codec="adapted", seconds=each)
                for each in sorted({cell.seconds for cell in self._cells if cell.scenario == fixed.scenario})
            ]
            same = [cell for cell in same if cell in self._cells]
            shares = [-np.log(self._compression(cell)) for cell in same]
            at = -np.log(self._compression(fixed))
            if len(same) > 1 and shares[0] <= at <= shares[-1]:
                seeds = min(len(self._accuracy(cell)) for cell in (fixed, *same))
                by_seed = np.array([self._accuracy(cell)[:seeds] for cell in same]).T
                adapted = np.array([np.interp(at, shares, each) for each in by_seed])
                yield f"adapted less fixed, equal bits: {describe_cell(fixed)}", adapted, self._accuracy(fixed)[:seeds]


def describe_cell(cell: Cell) -> str:
    """Return the cell's name in tables."""
    return f"{_describe_band(cell)}, {cell.codec}"


def _describe_band(cell: Cell) -> str:
    """Return the cell's name without its codec."""
    knowledge = cell.knowledge.name.replace("error-", "error ").replace("-db", " dB").replace("-", " ")
    return f"{cell.scenario.name}, {1000 * cell.seconds:g} ms, {knowledge}, {cell.allocation}"


def channel_results(rows: Rows, ablation: Ablation) -> dict[Cell, list[Mapping[str, Any]]]:
    """Return the results of each cell's seeds, in order up to the first that is not finished."""
    winners = _winners(rows, ablation)
    found = dict[Cell, list[Mapping[str, Any]]]()
    for cell in ablation.cells:
        if name := winners.get((cell.scenario.name, cell.codec)):
            found[cell] = first_finished(rows, ablation.run(cell, name), TEST_SEEDS)
    return found


def _winners(rows: Rows, ablation: Ablation) -> dict[tuple[str, Codec], str]:
    """Return the best of the tries of each scenario and codec, those whose tries are all finished."""
    metric = f"validation.{ablation.metric}"
    winners = dict[tuple[str, Codec], str]()
    for scenario in ablation.scenarios:
        for codec, tries in ablation.tries.items():
            found = {name: finished(rows, ablation.trial(scenario, codec, name)) for name in tries}
            if all(found.values()):
                reached = {name: results[0]["final"].get(metric, 0.0) for name, results in found.items()}
                winners[scenario.name, codec] = max(reached, key=lambda name: reached[name])
    return winners


def _plan(ablation: Ablation) -> Plan:
    def plan(rows: Rows) -> Iterator[Planned]:
        for scenario in ablation.scenarios:
            for codec, tries in ablation.tries.items():
                if any((cell.scenario, cell.codec) == (scenario, codec) for cell in ablation.cells):
                    for name in tries:
                        spec = ablation.trial(scenario, codec, name)
                        yield Planned(ablation.name, spec, spec.first_seed, test=False)
        winners = _winners(rows, ablation)
        for seed in range(TEST_SEEDS):
            for cell in ablation.cells:
                if best := winners.get((cell.scenario.name, cell.codec)):
                    yield Planned(ablation.name, ablation.run(cell, best), seed, per_user=False)

    return plan


def _ablation(ablation: Ablation) -> StudyTable:
    def table(rows: Rows) -> ChannelTable:
        return ChannelTable(ablation, channel_results(rows, ablation))

    return StudyTable(
        {ablation.name: _plan(ablation)}, lambda rows: table(rows).judge(), lambda rows, path: table(rows).plot(path)
    )


CHANNEL_ML1M, CHANNEL_MNIST = _ablation(ML1M), _ablation(MNIST)
