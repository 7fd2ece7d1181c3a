"""Which upload for sums that nobody may open: smaller models, CoLR and SCoLR as integers of common levels.

An SVD of a client's own, ATOMO and entropy coding are out: they do not add up undecoded. So are downloads of some rows,
whose list would name what a client has. Q comes down on a grid, or as the mean of A in the basis that all share.

Masks cancel in the sum, so that the model is that of the plain integers to the bit. The runs over five seeds are plain;
what keys and shares add to a round is measured in a short run under masks. SCoLR's time for an upload is set for each
scheme such that its clients choose the same ranks: keys and shares take their part of it. Rates are those of the open
contest, where the same clients send the same columns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from narrowcast.reproduce import headline
from narrowcast.reproduce.headline import OPEN, ContestCell, Rates
from narrowcast.reproduce.run_spec import RunSpec, slug

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
        return self._spec(name, rates, "plain", self.seconds[0], headline.ROUNDS, curve=True)

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
    "CoLR-1": SummedUpload("kind: colr, rank: 1", _GRID, headline.COLR, 1),
    "SCoLR": SummedUpload(_SCOLR % 16, _GRID, headline.SCOLR, 16, seconds=_SECONDS),
    "rows, d = 4": SummedUpload("kind: fedmf", _FINER, headline.SMALL, 4, ("model.embedding_dim=4", _WIDER)),
    "rows, d = 8": SummedUpload("kind: fedmf", _FINER, headline.SMALL_8, 8, ("model.embedding_dim=8", _WIDER)),
    "CoLR-4": SummedUpload("kind: colr, rank: 4", _GRID, headline.COLR_4, 4),
    "CoLR-1, mean down": SummedUpload("kind: colr, rank: 1", _MEAN, headline.COLR, 1),
    "rows, d = 64": SummedUpload("kind: fedmf", _GRID, headline.ROWS, 64, (_WIDER,)),
    "SCoLR, d = 8": SummedUpload(_SCOLR % 8, _FINER, headline.SCOLR_8, 8, ("model.embedding_dim=8", _WIDER), _SECONDS),
}
REFERENCE = "SCoLR, d = 8"


def runs_of(upload: str, rates: Rates) -> Sequence[tuple[RunSpec, int]]:
    """Return the runs of an upload with their seeds: the short one under masks, and those of the test seeds."""
    summed = UPLOADS[upload]
    plain = summed.plain(upload, rates)
    return [(summed.masked(upload, rates), 0), *((plain, seed) for seed in plain.seeds(headline.TEST_SEEDS))]
