"""The contest of uploads by budget: all uploads of the platform with one download, equally tuned, on unequal links.

Clients of MovieLens-100K have uplinks of 0.2 to 20 Mbit/s. All methods download the rows that they train on one
grid, so that they differ in the upload alone. `secure` has the contest of sums that nobody may open.

The client's and the server's rate of each cell are those of one search on validation items, with seeds that are not
test seeds: from the same start in factors of two, until no neighbour is better. So no best rate is at the edge of what
was tried. The search looks at half of the test's rounds, since a budget may end before the rounds do.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from narrowcast.studies.execution import Plan, Planned
from narrowcast.studies.results import Rows
from narrowcast.studies.spec import RunSpec, slug
from narrowcast.studies.tuning import TUNING_SEED
from narrowcast.studies.tuning import searched as search

TEST_SEEDS = 5
TUNING_SEEDS = 3
START = (0.5, 2.0)
"""Client and server rate at which every search begins: the packaged client rate, and twice the packaged server rate."""
POPULARITY = "popularity"
ROUNDS, _TUNING_ROUNDS = 200, 100

Rates = tuple[float, float]


@dataclass(frozen=True)
class Upload:
    """An upload: an algorithm's fields, the stages of its codec before the entropy coder, and the way of Q down.

    `others`: overrides besides.
    """

    algorithm: str
    stages: str = ""
    down: str = "download: {rows: $, step: 2.5}"
    others: tuple[str, ...] = ()

    def overrides(self, *, counted: bool) -> tuple[str, ...]:
        """Return the overrides; where bits are not counted, without what costs time and leaves the model as it is."""
        stages = f"{self.stages}, entropy" if counted else self.stages
        codec = f", codec: [{stages}]" if self.stages else ""
        down = self.down.replace("$", "touched" if counted else "all")
        return (f"algorithm={{{self.algorithm}{codec}, {down}}}", *self.others)


@dataclass(frozen=True)
class Contest:
    """Uploads by name, and the conditions under which they are tested at the rates that were chosen.

    `overrides` are those of all runs. Uploads are compared with `reference` after so many MB of uplink and downlink
    together, and after so many simulated seconds.
    """

    name: str
    title: str
    uploads: Mapping[str, Upload]
    conditions: Mapping[str, tuple[str, ...]]
    reference: str
    megabytes: tuple[float, ...]
    seconds: tuple[float, ...]
    overrides: tuple[str, ...] = ()

    @property
    def cells(self) -> tuple[ContestCell, ...]:
        """Every upload."""
        return tuple(ContestCell(self, upload) for upload in self.uploads)

    @property
    def baseline(self) -> RunSpec:
        """The ranking of items by how many users have them, for which nobody trains."""
        return self.spec(f"{self.name}-{POPULARITY}", (), 0, measure="popularity")

    def spec(self, label: str, overrides: tuple[str, ...], first_seed: int, **fields: Any) -> RunSpec:
        """Return a run of this contest."""
        common = ("downlink=catch_up", "clock.compute_overhead_seconds=0", "checkpoint_seconds=100000")
        return RunSpec(label, "scolr-ml100k", (*common, *self.overrides, *overrides), first_seed=first_seed, **fields)


@dataclass(frozen=True)
class ContestCell:
    """An upload of a contest."""

    of: Contest
    upload: str

    def tuning(self, rates: Rates) -> RunSpec:
        """Return the run on validation items at a pair of rates, of half the rounds."""
        rounds = (f"rounds={_TUNING_ROUNDS}", f"evaluate_every={_TUNING_ROUNDS}")
        own = (*self.of.uploads[self.upload].overrides(counted=False), *rounds)
        return self._spec(rates, own, "-tuning", TUNING_SEED)

    def test(self, rates: Rates, condition: str) -> RunSpec:
        """Return the run on test items under a condition, evaluated in every tenth round."""
        own = (*self.of.uploads[self.upload].overrides(counted=True), f"rounds={ROUNDS}", "evaluate_every=10")
        return self._spec(rates, (*own, *self.of.conditions[condition]), f"-{slug(condition)}", 0, curve=True)

    def _spec(self, rates: Rates, overrides: tuple[str, ...], part: str, first_seed: int, **fields: Any) -> RunSpec:
        client, server = rates
        label = f"{self.of.name}-{slug(self.upload)}{part}-{client:g}-{server:g}"
        own = (f"training.learning_rate={client:g}", f"algorithm.server_learning_rate={server:g}")
        return self.of.spec(label, (*overrides, *own), first_seed, **fields)


def neighbours(rates: Rates) -> tuple[Rates, ...]:
    """Return half and twice either rate."""
    client, server = rates
    return (client / 2, server), (2 * client, server), (client, server / 2), (client, 2 * server)


def _levels(levels: int) -> str:
    return f"{{kind: quantise, levels: {levels}, norms: column, rounding: dithered, norm_type: bfloat16}}"


def _chosen_ranks(seconds: float, mean: str = "per_item_mean", most: int = 16) -> str:
    policy = f"rank_policy: {{kind: bandwidth, upload_seconds: {seconds:g}}}"
    return f"kind: scolr, rank: {most}, {policy}, aggregation: {mean}"


SVD, COLR, COLR_4, SCOLR = "SVD, rank 1", "CoLR-1", "CoLR-4", "SCoLR"
SCOLR_BY_ITEM, ROWS = "SCoLR, mean by item", "float32 rows"
SMALL, SMALL_8 = "float32 rows, d = 4", "float32 rows, d = 8"
ATOMO, SVD_8, SCOLR_8 = "ATOMO", "SVD, rank 1, d = 8", "SCoLR, d = 8"
QUANTISED, QUANTISED_8 = "quantised rows", "quantised rows, d = 8"
_FINER = "download: {rows: $, step: 1}"
OPEN = Contest(
    "headline-ml100k",
    "MovieLens-100K over unequal links, rounds of at most 0.8 s",
    {
        SVD: Upload("kind: fedmf", f"{{kind: svd, rank: 1}}, {_levels(16)}"),
        COLR: Upload("kind: colr, rank: 1", _levels(16)),
        SCOLR_BY_ITEM: Upload(_chosen_ranks(0.3), _levels(16)),
        SCOLR: Upload(_chosen_ranks(0.3, "per_component_mean"), _levels(16)),
        ROWS: Upload("kind: fedmf"),
        QUANTISED: Upload("kind: fedmf", _levels(6)),
        SMALL: Upload("kind: fedmf", down=_FINER, others=("model.embedding_dim=4",)),
        COLR_4: Upload("kind: colr, rank: 4", _levels(16)),
        SMALL_8: Upload("kind: fedmf", down=_FINER, others=("model.embedding_dim=8",)),
        ATOMO: Upload("kind: fedmf", f"{{kind: atomo, fraction: 0.03}}, {_levels(16)}"),
        SVD_8: Upload(
            "kind: fedmf", f"{{kind: svd, rank: 1}}, {_levels(16)}", _FINER, others=("model.embedding_dim=8",)
        ),
        SCOLR_8: Upload(
            _chosen_ranks(0.3, "per_component_mean", 8), _levels(16), _FINER, others=("model.embedding_dim=8",)
        ),
        QUANTISED_8: Upload("kind: fedmf", _levels(6), _FINER, others=("model.embedding_dim=8",)),
    },
    {"0.8 s": ("deadline_seconds=0.8",), "no deadline": ()},
    SVD,
    (5.0, 10.0, 20.0, 40.0),
    (10.0, 20.0, 40.0),
)
"""SCoLR's clients choose ranks up to 16 whose upload takes at most 0.3 s uncoded, as in the demo's figure.

ATOMO's clients send one to two directions: 0.03 of the values of 30 to 300 rows of 64 dimensions.
"""


def searched(rows: Rows, cell: ContestCell) -> tuple[Rates | None, list[Rates]]:
    """Return the best rates of a cell, None while its search is not finished; and all that it tried or tries next."""
    return search(rows, START, neighbours, cell.tuning, "validation.hr@10", TUNING_SEEDS)


def contest_plan(contest: Contest) -> Plan:
    """Return the plan of a contest: the search of each cell, then its tests."""

    def plan(rows: Rows) -> Iterator[Planned]:
        yield Planned(contest.name, contest.baseline, 0)
        for cell in contest.cells:
            best, tried = searched(rows, cell)
            for spec in map(cell.tuning, tried):
                for seed in spec.seeds(TUNING_SEEDS):
                    yield Planned(contest.name, spec, seed, test=False)
            tests = [] if best is None else [cell.test(best, condition) for condition in contest.conditions]
            for spec in tests:
                for seed in range(TEST_SEEDS):
                    yield Planned(contest.name, spec, seed, per_user=False)

    return plan
