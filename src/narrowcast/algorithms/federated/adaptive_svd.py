"""Adaptive SVD of matrix factorisation: each client sends its change of Q in the directions in which it changed most.

A client changes every item's row along its own user factor, which moves little while it trains: on MovieLens-1M one
direction holds 98 % of the change's energy, and two hold all of it. A direction sent with the update costs d values; a
random one that follows from the seed, as in CoLR, costs nothing and holds 1 / d of the energy. The client chooses the
number of directions and the quantiser's levels that lose least within its bits. Updates in different directions cannot
be added up undecoded, so secure aggregation refuses them. Letters: Q [N, d], a client's change [m, d] of m rows.

A budget that does not carry a client's whole update carries fewer rows: those that changed most, or a random choice. On
MovieLens-1M the list of the touched rows takes about 2,300 bits of an upload, the values of one direction 500 to 1,500.
Coarser levels therefore save little, and fewer rows nearly all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from narrowcast.algorithms.channel.curves import DistortionCurves
from narrowcast.algorithms.channel.joint import STEPS, RankLevelGrid, bits_per_value, head_bits, symbol_bits
from narrowcast.algorithms.client.client_pass import Arrived, Contribution
from narrowcast.algorithms.client.sums import WEIGHT
from narrowcast.algorithms.client.uploads import Message, Sent
from narrowcast.algorithms.codecs.budget import ClientEncoder
from narrowcast.algorithms.codecs.chain import Codec, EncodedUpdate, Stage, Stages, refuse_stateful
from narrowcast.algorithms.codecs.entropy import Entropy
from narrowcast.algorithms.codecs.low_rank import truncated_svd
from narrowcast.algorithms.codecs.messages import RowUpdate, decode_rows, encode_rows
from narrowcast.algorithms.codecs.quantise import Quantise
from narrowcast.algorithms.federated.fedmf import (
    RowAveraging,
    check_rank,
    expected_rows,
    named_rows,
    only_factorisation,
)
from narrowcast.platform.contracts import RateDistortion, Task
from narrowcast.platform.errors import UserError
from narrowcast.platform.models.factorisation import MatrixFactorisation
from narrowcast.platform.models.model import ITEM_FACTORS
from narrowcast.platform.seeds import generator
from narrowcast.platform.traits import Traits
from narrowcast.platform.types import Arrays, Chunk, FloatArray, IntArray, LocalUpdates

RowChoice = Literal["all", "strongest", "random"]
_SHARES = np.linspace(0.1, 0.9, 9)
_ENERGY_EXPONENT = 0.6  # the strongest tenth of a client's rows has 0.23 of the energy, half of them 0.69
_FEWEST = 8
_USED = 0.95  # of a budget, by the estimated size


def estimated_bits(rows: FloatArray, dimension: int, n_items: int, norm_bits: float) -> FloatArray:
    """Return the bits of one direction of so many rows, rounded with a step of their root mean square."""
    values = rows + dimension
    return head_bits(n_items, rows) + values * bits_per_value(values, np.sqrt(values)) + norm_bits


def add_row_subsets(
    curves: DistortionCurves, choice: RowChoice, rows: FloatArray, dimension: int, n_items: int, norm_bits: float
) -> DistortionCurves:
    """Return the curves with a point for each tenth of the clients' `rows` [C]; the missing energy is their error."""
    share = _SHARES ** (_ENERGY_EXPONENT if choice == "strongest" else 1.0)
    bits = estimated_bits(rows[:, None] * _SHARES, dimension, n_items, norm_bits) / _USED
    errors = np.broadcast_to(1 - share * (1 - 1 / 12), bits.shape)
    bits, errors = np.hstack([bits, curves.bits]), np.hstack([errors, curves.distortion])
    return DistortionCurves.of(bits, errors, curves.weight)


def rows_within(update: RowUpdate, bits: float, norm_bits: float) -> int:
    """Return how many of the rows should fit these bits."""
    rows = np.arange(1.0, len(update.rows) + 1)
    sizes = estimated_bits(rows, update.values.shape[1], update.n_rows, norm_bits)
    return int((sizes <= _USED * bits).sum())


def select_rows(update: RowUpdate, choice: RowChoice, number: int, key: int) -> RowUpdate | None:
    """Return the update with so many of its rows; None if these are too few to be worth naming."""
    if number < _FEWEST:
        return None
    if choice == "strongest":
        order: IntArray = np.argsort(-np.square(update.values).sum(axis=1), kind="stable")
    else:
        order = generator(key, "rows").permutation(len(update.rows))
    chosen = np.sort(order[:number])
    return replace(update, rows=update.rows[chosen], values=update.values[chosen])


DEFAULT_CODEC: tuple[Stage, ...] = (
    Quantise(levels=10, norms="column", rounding="dithered", norm_type="bfloat16"),
    Entropy(),
)


def check_adaptive_codec(kind: str, codec: Sequence[Stage]) -> None:
    """Raise `UserError` for a codec without levels to choose, or one that remembers from round to round."""
    if Codec(tuple(codec)).levels is None:
        raise UserError(
            f"algorithm.kind = {kind} does not go with a codec that does not quantise; put quantise into "
            "algorithm.codec"
        )
    refuse_stateful(codec, f"the directions of {kind} change in every round; use it with fedmf or fedavg")


_SIZE_MARGIN = 1.08  # of an upload at fixed levels over its estimate, which it exceeds by up to 6 % on MovieLens-1M
NORM_BITS = 32.0  # two bfloat16 norms for a column: of the rows, and of the directions
SHARED_NORM_BITS = 48.0  # with shared negatives three: of the likely rows, of the others, and of the directions


class AdaptiveSVD(RowAveraging):
    """Clients train whole rows of Q, and send the truncated SVD of their change; the server adds the mean.

    `rank` bounds the directions that a client sends. Without a budget a client sends that many, at the codec's own
    levels; with one it chooses both, unless `adapted` is false: then it sends the same as without a budget, or nothing
    if that is too much. With `informs_allocation` the radio's allocation knows what bits are worth to each client,
    which `min_error` needs.
    """

    kind: Literal["adaptive_svd"] = "adaptive_svd"
    rank: int = Field(8, ge=1, description="most directions that a client sends; at most model.embedding_dim")
    aggregation: Literal["per_item_mean", "weighted"] = Field(
        "per_item_mean", description="divisor of a row's sum: the clients that changed the row, or all weights"
    )
    codec: Stages = DEFAULT_CODEC
    adapted: bool = Field(True, description="choose rank and levels for a client's budget, if it has one")
    row_choice: RowChoice = Field(
        "all", description="rows that a client sends if its budget does not carry all of them"
    )
    informs_allocation: bool = Field(True, description="tell the radio's allocation what bits are worth to clients")
    most_error: float = Field(
        0.4,
        gt=0,
        description="largest squared rounding error over squared norm; a client that would exceed it gets no bits",
    )

    def check(self, task: Task) -> None:
        """Raise `UserError` for models other than matrix factorisation, and for codecs that do not fit."""
        only_factorisation(self.kind, task, instead="adaptive_atomo")
        check_adaptive_codec(self.kind, self.codec)
        check_rank(self.rank, task.model)
        if self.row_choice != "all" and self.download is not None and self.download.rows == "touched":
            raise UserError(
                f"algorithm.row_choice = {self.row_choice} uploads some of the rows that a request names; use "
                "row_choice = all, or download.rows = all"
            )
        if self.row_choice != "all" and (task.training.shared_negatives or self.aggregation != "per_item_mean"):
            raise UserError(
                f"algorithm.row_choice = {self.row_choice} leaves out rows, which training.shared_negatives would "
                "expect and aggregation = weighted would count as zeros; set the first to false and the second to "
                "per_item_mean"
            )
        if self.row_choice != "all" and not self.adapted:
            raise UserError(
                f"algorithm.row_choice = {self.row_choice} adapts to a budget; leave out adapted, or row_choice"
            )

    @property
    def traits(self) -> Traits:
        """Uploads are touched rows through a codec."""
        return replace(super().traits, codes_row_lists=True)

    def message(self, broadcast: Arrays, chunk: Chunk, task: Task, updates: LocalUpdates) -> Message:
        """Send each change in its own directions."""
        wire = partial(
            send_directions, self.rank, adapted=self.adapted, choice=self.row_choice, most_error=self.most_error
        )
        return replace(super().message(broadcast, chunk, task, updates), wire=wire)

    def contribution(self, broadcast: Arrays, chunk: Chunk, task: Task, arrived: Arrived) -> Contribution:
        """Return the rows that clients sent; those that they left out are not counted."""
        contribution, rows = super().contribution(broadcast, chunk, task, arrived), arrived.rows[ITEM_FACTORS]
        if self.row_choice == "all":
            return contribution
        sent = np.isfinite(rows.values[:, :1])
        tensors = {ITEM_FACTORS: replace(rows, values=np.where(sent, rows.values, np.float32(0)))}
        return replace(contribution, tensors=tensors, sums={WEIGHT: replace(rows, values=sent.astype(np.float64))})

    # What the channel is told before a round

    def rate_distortion(self, task: Task, cohort: IntArray) -> RateDistortion | None:
        """Return the error of each client's update at so many bits: that of rounding one direction.

        One direction has nearly all of the energy, so that only its rounding is worth bits. If nothing is adapted, the
        error is that of a single size, which is estimated.
        """
        if not self.informs_allocation:
            return None
        assert isinstance(task.model, MatrixFactorisation), "check() refuses other models"
        norm_bits = SHARED_NORM_BITS if task.training.shared_negatives else NORM_BITS
        choices, values = RankLevelGrid(1, 1, norm_bits), expected_rows(task, cohort) + task.model.embedding_dim
        heads = head_bits(task.data.n_items, named_rows(task, cohort))
        if not self.adapted:
            levels = Codec(self.codec).levels or 1
            bits = heads + self.rank * (values * bits_per_value(values, levels) + norm_bits)
            curves = DistortionCurves.single_point(_SIZE_MARGIN * bits, weight=values)
            return RateDistortion(np.ceil(curves.min_bits()).astype(np.int64), curves)
        curves = choices.curves(choices.values_per_rank(values), heads, self.most_error)
        if self.row_choice != "all":
            touched, dimension = values - task.model.embedding_dim, task.model.embedding_dim
            curves = add_row_subsets(curves, self.row_choice, touched, dimension, task.data.n_items, norm_bits)
        return RateDistortion(np.ceil(curves.min_bits()).astype(np.int64), curves)


def send_directions(
    max_rank: int,
    update: RowUpdate,
    encoder: ClientEncoder,
    *,
    adapted: bool = True,
    choice: RowChoice = "all",
    most_error: float = np.inf,
) -> Sent[NDArray[np.float32]] | None:
    """Send one client's change in its own directions, and decode it; rows that are left out are nan."""
    if choice == "all" or carries(update, encoder, most_error):
        fitting = encode_directions(update, encoder, max_rank, adapted=adapted)
    else:
        fitting = encode_some_rows(update, encoder, choice)
    if fitting is None:
        return None
    payload, rank = fitting
    dimension = update.values.shape[1]
    rows, values = decode_rows(
        *(encoder.codec, payload.to_bytes(), update.n_rows, max_rank, encoder.key),
        likely=update.likely,
        dimension=dimension,
    )
    received = values
    if len(rows) < len(update.rows):
        received = np.full(update.values.shape, np.nan, dtype=np.float32)
        received[np.searchsorted(update.rows, rows)] = values
    return Sent(payload.wire_bits(), received, {}, rank)


def carries(update: RowUpdate, encoder: ClientEncoder, most_error: float) -> bool:
    """Return whether the budget carries one direction of all rows whose rounding has no more than this error."""
    levels = round(((len(update.rows) + update.values.shape[1]) / (12 * most_error)) ** 0.5 + 0.5)
    coarsest = replace(encoder, codec=encoder.codec.with_levels(max(levels, 1)))
    return encode_directions(update, coarsest, 1, adapted=False) is not None


def encode_some_rows(update: RowUpdate, encoder: ClientEncoder, choice: RowChoice) -> tuple[EncodedUpdate, int] | None:
    """Pack one direction of as many rows as fit the budget; None if too few do."""
    number = rows_within(update, encoder.budget_bits, NORM_BITS)
    while (fewer := select_rows(update, choice, number, encoder.key)) is not None:
        fitting = encode_directions(fewer, encoder, 1)
        if fitting is not None:
            return fitting
        number = number * 7 // 8
    return None


def encode_directions(
    update: RowUpdate, encoder: ClientEncoder, max_rank: int, *, adapted: bool = True
) -> tuple[EncodedUpdate, int] | None:
    """Pack a change [m, d] as coordinates and directions, at the rank and levels that should lose least.

    If not `adapted`, at `max_rank` and the codec's own levels. Return the payload and its rank, 1..`max_rank`; None if
    it, or not even rank 1, fits the budget. Raise `UnsendableUpdateError` for values that are not finite.
    """
    if not adapted and np.isfinite(budget := encoder.budget_bits):
        whole = encode_directions(update, replace(encoder, budget_bits=np.inf), max_rank)
        return whole if whole is not None and whole[0].wire_bits() <= budget else None
    rows, changes = update.rows, update.values
    most = min(max_rank, *changes.shape)
    left, strengths, right = truncated_svd(changes, most)
    energy = max(float(np.square(changes, dtype=np.float64).sum()), 1e-300)
    missing = np.maximum(1 - np.cumsum(strengths**2) / energy, 0)
    head = head_bits(update.n_rows, np.array([len(update.unexpected)]))[0]
    norm_bits = NORM_BITS if update.likely is None else SHARED_NORM_BITS
    best, levels = best_choice(missing, len(rows), changes.shape[1], encoder.budget_bits - head, norm_bits)
    if np.isinf(encoder.budget_bits):
        best, levels = most, encoder.codec.levels or 1
    encoder = replace(encoder, codec=encoder.codec.with_levels(levels))
    finest = round(max(len(rows), 1) ** 0.5 / STEPS[0])
    for rank in range(best, 0, -1):
        coordinates = (left[:, :rank] * strengths[:rank]).astype(np.float32)
        directions = np.ascontiguousarray(right[:rank].T, dtype=np.float32)
        fitting = encode_rows(encoder, replace(update, values=coordinates), basis=directions, finest=finest)
        if fitting is not None:
            return fitting[0], rank
    return None


def best_choice(missing: FloatArray, rows: int, dimension: int, bits: float, norm_bits: float) -> tuple[int, int]:
    """Return the rank and the levels within so many bits with the least error; rank 1 at one level if none fits.

    `missing` [R] is the share of the energy that ranks 1..R leave out. At rank r and k levels the error is that share
    and, of the rest, (rows + dimension) / 12 k^2 for the dithered rounding of coordinates and directions.
    """
    ranks = np.arange(1.0, len(missing) + 1)[:, None]
    levels = max(rows, 1) ** 0.5 / STEPS
    # directions have the same levels, and so finer steps if there are more rows than columns
    entropy = (rows + dimension) * symbol_bits() + dimension * 0.5 * np.log2(max(rows, 1) / dimension)
    error = missing[:, None] + (1 - missing[:, None]) * (rows + dimension) / (12 * levels**2)
    error = np.where((ranks * (entropy + norm_bits) <= bits) & (levels >= 1), error, np.inf)
    if not np.isfinite(error).any():
        return 1, 1
    rank, step = np.unravel_index(int(error.argmin()), error.shape)
    return int(rank) + 1, round(float(levels[step]))
