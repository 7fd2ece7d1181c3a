"""The contest of uploads in sums that nobody may open: smaller models, CoLR and SCoLR as integers of common levels.

An SVD of a client's own, ATOMO and entropy coding are out: they do not add up undecoded. So are downloads of some rows,
whose list would name what a client has. Q comes down on a grid, or as the mean of A in the basis that all share.

Masks cancel in the sum, so that the model is that of the plain integers to the bit. The runs over five seeds are plain;
what keys and shares add to a round is measured in a short run under masks. SCoLR's time for an upload is set for each
scheme such that its clients choose the same ranks: keys and shares take their part of it. Rates are those of the open
contest, where the same clients send the same columns.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from narrowcast.algorithms.client.sums import ROWS, WEIGHT, MaskGroup, SumBlock, SumLayout
from narrowcast.algorithms.secure.ckks import CKKS
from narrowcast.algorithms.secure.messages import Messages
from narrowcast.algorithms.secure.schemes import Masked, Plain, Protection
from narrowcast.platform.tracking.figures import new_figure
from narrowcast.studies.execution import Planned
from narrowcast.studies.results import COUNTS, Rows
from narrowcast.studies.spec import RunSpec, slug
from narrowcast.studies.tables import StudyTable
from narrowcast.studies.verdicts import PaperVerdict, accuracies
from narrowcast_papers.headline import contest
from narrowcast_papers.headline.contest import OPEN, ContestCell, Rates, contest_plan, searched
from narrowcast_papers.headline.table import Cost, Point, compared, draw_curve, save_contest, seconds, traffic, within

STUDY = "headline-secure-ml100k"
COST_ROUNDS = 10
_BITS = "bits: 8, clip: 1"
_GRID, _FINER = "download: {step: 2.5}", "download: {step: 1}"
_MEAN = "downlink_codec: [{kind: quantise, levels: 16}, entropy]"
_WIDER = "secure.clip=4"
"""For changes of whole rows at the rates that are best for them, of which a clip of 1 would cut a twentieth."""


@dataclass(frozen=True)
class SummedUpload:
    """An upload that clients add up; `$` in the algorithm is its time, of `seconds` in the clear and under masks.

    `rates_of`: the upload of the open contest that was tuned. `columns`: those of the sum that the server keeps.
    """

    algorithm: str
    down: str
    rates_of: str
    columns: int
    others: tuple[str, ...] = ()
    seconds: tuple[float, float] = (0.0, 0.0)

    @property
    def tuned(self) -> ContestCell:
        """The cell of the open contest whose rates these clients have."""
        return ContestCell(OPEN, self.rates_of)

    def plain(self, name: str, rates: Rates) -> RunSpec:
        """Return the run on test items, evaluated in every tenth round."""
        return self._spec(name, rates, "plain", self.seconds[0], contest.ROUNDS, curve=True)

    def masked(self, name: str, rates: Rates) -> RunSpec:
        """Return the short run under masks."""
        return self._spec(name, rates, "masked", self.seconds[1], COST_ROUNDS)

    def _spec(
        self, name: str, rates: Rates, scheme: str, seconds: float, rounds: int, *, curve: bool = False
    ) -> RunSpec:
        client, server = rates
        algorithm = self.algorithm.replace("$", f"{seconds:g}")
        return OPEN.spec(
            f"{STUDY}-{slug(name)}-{scheme}-{client:g}-{server:g}",
            (
                f"algorithm={{{algorithm}, {self.down}}}",
                *(
                    f"secure={{kind: {scheme}, {_BITS}}}",
                    *self.others,
                    f"rounds={rounds}",
                    f"evaluate_every={COST_ROUNDS}",
                ),
                *(f"training.learning_rate={client:g}", f"algorithm.server_learning_rate={server:g}"),
            ),
            0,
            curve=curve,
        )


_SCOLR = "kind: scolr, rank: %d, rank_policy: {kind: bandwidth, upload_seconds: $}, aggregation: per_component_mean"
_SECONDS = (0.56, 0.8)
UPLOADS: Mapping[str, SummedUpload] = {
    "CoLR-1": SummedUpload("kind: colr, rank: 1", _GRID, contest.COLR, 1),
    "SCoLR": SummedUpload(_SCOLR % 16, _GRID, contest.SCOLR, 16, seconds=_SECONDS),
    "rows, d = 4": SummedUpload("kind: fedmf", _FINER, contest.SMALL, 4, ("model.embedding_dim=4", _WIDER)),
    "rows, d = 8": SummedUpload("kind: fedmf", _FINER, contest.SMALL_8, 8, ("model.embedding_dim=8", _WIDER)),
    "CoLR-4": SummedUpload("kind: colr, rank: 4", _GRID, contest.COLR_4, 4),
    "CoLR-1, mean down": SummedUpload("kind: colr, rank: 1", _MEAN, contest.COLR, 1),
    "rows, d = 64": SummedUpload("kind: fedmf", _GRID, contest.ROWS, 64, (_WIDER,)),
    "SCoLR, d = 8": SummedUpload(_SCOLR % 8, _FINER, contest.SCOLR_8, 8, ("model.embedding_dim=8", _WIDER), _SECONDS),
}
REFERENCE = "SCoLR, d = 8"


def runs_of(upload: str, rates: Rates) -> Sequence[tuple[RunSpec, int]]:
    """Return the runs of an upload with their seeds: the short one under masks, and those of the test seeds."""
    summed = UPLOADS[upload]
    plain = summed.plain(upload, rates)
    return [(summed.masked(upload, rates), 0), *((plain, seed) for seed in plain.seeds(contest.TEST_SEEDS))]


ITEMS, COHORT = 1682, 60
BUDGETS = ((50.0, 100.0, 200.0), (100.0, 200.0, 400.0), (20.0, 40.0, 80.0, 160.0))
"""MB of uplink, MB of uplink and downlink together, and simulated seconds."""
SCHEMES: Mapping[str, Protection] = {
    "plain": Plain(bits=8, clip=1),
    "masks": Masked(bits=8, clip=1),
    "CKKS": CKKS(bits=8, clip=1),
}


def upload_kilobytes(scheme: Protection, columns: int, sent: int, *, by_column: bool) -> float:
    """Return what a client of a cohort sends in a round, keys and shares included, if it sends so many columns.

    `by_column`: the columns of the sum are apart, each with its own counts, so that clients may send some of them.
    """
    groups = [MaskGroup((SumBlock(ROWS, None, ITEMS * columns),), (SumBlock(WEIGHT, None, ITEMS),))]
    if by_column:
        groups = [
            MaskGroup((SumBlock(ROWS, column, ITEMS),), (SumBlock(WEIGHT, column, ITEMS),)) for column in range(columns)
        ]
    layout = SumLayout(tuple(groups), {}, COHORT, COHORT, max_rank=columns * by_column, n_items=ITEMS)
    messages = Messages(scheme, layout, COHORT)
    own = np.arange(len(groups))[None] < (sent if by_column else 1)
    protocol = messages.protocol_bits(np.zeros(COHORT, dtype=np.int64))
    return float(messages.update_bits(own)[0] + protocol.max()) / 8e3


def summed_curves(rows: Rows) -> dict[str, list[list[dict[str, Any]]]]:
    """Return the curves of each upload by seed at the costs of rounds under masks, of those that are finished.

    Masks cost a round what the short run has beyond the plain run of its seed: keys and shares, up and down.
    """
    curves_of = {}
    for name, upload in UPLOADS.items():
        rates, _ = searched(rows, upload.tuned)
        results = [rows.get(spec, seed) for spec, seed in runs_of(name, rates)] if rates is not None else []
        if not results or None in results:
            continue
        masked, *plain = (result for result in results if result is not None)
        begun = next(point for point in plain[0]["curve"] if point["rounds"] == COST_ROUNDS)
        extra = {entry: (masked[entry] - begun[entry]) / COST_ROUNDS for entry in (*COUNTS, "simulated_seconds")}
        curves_of[name] = [
            [
                {**point, **{entry: point[entry] + more * point["rounds"] for entry, more in extra.items()}}
                for point in run["curve"]
            ]
            for run in plain
        ]
    return curves_of


def uplink(point: Point) -> float:
    """Return the uplink alone in MB."""
    return float(point["uplink_bits"]) / 8e6


def judge_sums(rows: Rows) -> list[PaperVerdict]:
    """Return the sizes of uploads by scheme, and the accuracy at every budget less that of the reference."""
    verdicts = [_sizes(name) for name in UPLOADS]
    curves = summed_curves(rows)
    costs: Sequence[tuple[str, Cost]] = (("MB up", uplink), ("MB", traffic), ("s", seconds))
    named = [
        (f"{budget:g} {unit}", cost, budget)
        for (unit, cost), budgets in zip(costs, BUDGETS, strict=True)
        for budget in budgets
    ]
    for place, cost, budget in named:
        verdicts += compared(f"masks, {place}", REFERENCE, within(curves, cost, budget), {})
    spent = {name: _spent(of_seeds) for name, of_seeds in curves.items()}
    last = within(curves, traffic, np.inf)
    return [*verdicts, *compared("masks, last round", REFERENCE, last, spent)]


def _sizes(name: str) -> PaperVerdict:
    upload = UPLOADS[name]
    by_column = any(upload.seconds)
    sizes = {
        scheme: upload_kilobytes(each, upload.columns, upload.columns, by_column=by_column)
        for scheme, each in SCHEMES.items()
    }
    said = ", ".join(f"{size:.3g} kB {scheme}" for scheme, size in sizes.items())
    kept = 8 * ITEMS * (upload.columns + (upload.columns if by_column else 1)) / 1e3
    columns = f"{upload.columns} column{'s' * (upload.columns > 1)}"
    return PaperVerdict(f"an upload of {name}, {columns}", "", "", f"{said}; the server keeps {kept:.3g} kB")


def _spent(curves: list[list[dict[str, Any]]]) -> str:
    last = curves[0][-1]
    up, down, time = (last[entry] / last["rounds"] for entry in (*COUNTS, "simulated_seconds"))
    return f"{last['rounds']} rounds of {up / 8e6:.3g} MB up, {down / 8e6:.3g} MB down, {time:.3g} s"


def plot_sums(rows: Rows, path: Path) -> None:
    """Plot the mean test HR@10 against uplink and time under masks, with the seeds' standard deviation."""
    figure, panels = new_figure("Test HR@10 of sums under masks, MovieLens-100K over unequal links", panels=2)
    labels = ("uplink (MB)", "simulated time (s)")
    for axes, cost, label in zip(panels, (uplink, seconds), labels, strict=True):
        for name, curves in summed_curves(rows).items():
            values = np.array([accuracies(curve, "hr@10") for curve in curves])
            draw_curve(axes, [cost(point) for point in curves[0]], values, name, UPLOADS)
        axes.set_xlabel(label)
    save_contest(figure, path, columns=3)


def _summed(rows: Rows) -> Iterator[Planned]:
    for name, upload in UPLOADS.items():
        rates, _ = searched(rows, upload.tuned)
        for spec, seed in runs_of(name, rates) if rates is not None else ():
            yield Planned(STUDY, spec, seed, per_user=False)


SECURE = StudyTable({OPEN.name: contest_plan(OPEN), STUDY: _summed}, judge_sums, plot_sums)
