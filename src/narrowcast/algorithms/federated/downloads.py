"""Coded downloads: a rounded model, or the change of a round, in place of the float32 model.

`CodedDownload` sends every client a rounded model, or the rows of it that the client asks for. `CodedChange` sends the
change of a round. Neither lets errors add up over rounds: under the first the server keeps the exact model, under the
second it moves its model by what clients decode.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, Annotated, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from narrowcast.algorithms.codecs.chain import Codec, Shapes, Stage, Stages, Tensors
from narrowcast.algorithms.codecs.messages import (
    CodedTensors,
    DensePayload,
    GridPayload,
    GridPoints,
    RowLayout,
    dense_wire_bits,
    grid_points,
    grid_values,
)
from narrowcast.algorithms.codecs.wire import FLOAT32, HEADER_BITS, dtype_of, varint, write_indices
from narrowcast.algorithms.local_training.negatives import draw_samples
from narrowcast.platform.config.fields import ROUNDS
from narrowcast.platform.config.files import Section
from narrowcast.platform.contracts import Algorithm, Broadcast, Recipients, Task
from narrowcast.platform.errors import UserError
from narrowcast.platform.models.model import ITEM_FACTORS
from narrowcast.platform.rounds.ledger import ChunkResult
from narrowcast.platform.seeds import stream_keys, uniform_unit
from narrowcast.platform.traits import Downloads, Traits
from narrowcast.platform.types import Arrays, Chunk, Dtype, IntArray, PrefixedArrays, RowChanges

DOWNLOAD = PrefixedArrays("download/")
"""Entries of a server state or a broadcast that only downloads need."""
START = PrefixedArrays("download/start/")
"""The initial model, in a server state."""
_HISTORY = PrefixedArrays("download/history/")  # [H, ...], the points of earlier broadcasts
_ROUNDS, _ROUND = "download/rounds", "download/round"


class CodedDownload(Section):
    """The model, or the rows that a client asks for, in float32 or on a grid.

    On a grid each value is sent as an integer next to (value - initial value) / `step`, entropy-coded. The initial
    model, at which the grid is centred, follows from the public seed. Clients train from the rounded model, and the
    server adds the mean of their changes to the exact one: the exact model less the rounded one is what error feedback
    would remember.

    `rounding`: with `dithered` the grid is shifted for each value and round by a number from the public seed, so that
    clients see the value plus uniform noise of variance step^2 / 12 that does not depend on it; `nearest` has less
    error, and the same one in every round in which the value stays.

    `history`: the server keeps the points of so many rounds, and sends a client that took part in one of them the
    change since then, in one message, if that is smaller than the model. Changes are sparse with `nearest` alone.

    With `rows: touched` a client asks for the rows of the item matrix that it is about to train. The list of rows is
    sent once, with the request, and the upload that follows leaves it out: the two have the bits of an upload that
    names its rows and of a second header, and are counted as one. A client that asked and uploads nothing is charged
    for its request. The server learns the rows of a client even if its upload is lost.

    Reference: Niu et al., Billion-scale federated learning on mobile clients: a submodel design with tunable privacy,
    MobiCom 2020, for `rows: touched`, without its private set union.
    """

    step: float | None = Field(
        None, gt=0, allow_inf_nan=False, description="step of the grid that values are rounded to; null: no rounding"
    )
    rounding: Literal["dithered", "nearest"] = Field("dithered", description="rounding to the grid")
    rows: RowLayout = Field(
        "all", description="rows of the item matrix that are sent: all, or those that a client asks for"
    )
    history: int = Field(
        0,
        ge=0,
        le=1000,
        description="age up to which a client's last model is updated by the change alone",
        json_schema_extra=ROUNDS,
    )

    @model_validator(mode="after")
    def _changes_are_of_whole_models(self) -> Self:
        if self.history and (self.step is None or self.rounding == "dithered" or self.rows == "touched"):
            raise ValueError("history needs a step, rounding = nearest and rows = all; set these, or leave it out")
        return self

    @property
    def differs_by_client(self) -> bool:
        """Return whether clients of a round are sent different messages."""
        return self.rows == "touched" or self.history > 0

    def check(self, kind: str, uploads: RowLayout, downlink_codec: Stages) -> None:
        """Raise `UserError` if clients ask for rows and upload all, or if changes are coded on their way down too."""
        if downlink_codec:
            raise UserError("algorithm.download and algorithm.downlink_codec are two ways down; leave out one")
        if self.rows == "touched" and uploads == "all":
            raise UserError(
                f"algorithm.download.rows = touched: {kind} uploads all rows, so that its clients name none; use "
                "algorithm.rows = touched, or download.rows = all"
            )

    def init(self, model: Arrays) -> Arrays:
        """Return what the server keeps besides the model: its initial value, and the points of earlier rounds: none."""
        if self.step is None:
            return {}
        if not self.history:
            return START.add(model)
        points = {name: np.zeros((self.history, *values.shape), dtype=np.int16) for name, values in model.items()}
        return {**START.add(model), **_HISTORY.add(points), _ROUNDS: np.zeros(self.history, dtype=np.int64)}

    def next_state(self, model: Arrays, server: Arrays, broadcast: Arrays) -> Arrays:
        """Return what the next server state keeps; `model` is that of `server`, whose round's `broadcast` was sent."""
        if self.step is None or not self.history:
            return DOWNLOAD.add(DOWNLOAD.of(server))
        history, rounds = _HISTORY.of(server), np.array(server[_ROUNDS])
        oldest = int(rounds.argmin())
        rounds[oldest] = int(broadcast[_ROUND])
        for name, points in self.points(model, server).items():
            history[name] = np.array(history[name])
            history[name][oldest] = points
        return {**START.add(START.of(server)), **_HISTORY.add(history), _ROUNDS: rounds}

    def points(self, model: Arrays, server: Arrays) -> dict[str, GridPoints]:
        """Return the points of a model on a grid without shifts."""
        start, unshifted = START.of(server), np.zeros((), dtype=np.float32)
        assert self.step is not None, "float32 has no grid"
        return {
            name: grid_points(np.asarray(model[name]) - start[name], self.step, unshifted) for name in sorted(model)
        }

    def broadcast(
        self, model: Arrays, server: Arrays, task: Task, round_index: int, seed: int | None = None
    ) -> Broadcast:
        """Return the rounded model that clients train from, and its integers; `seed` is sent with them."""
        if self.step is None:
            return Broadcast(model, DensePayload.of(model, seed=seed), update=None)
        start, names = START.of(server), sorted(model)
        shifts = self.shifts({name: start[name].shape for name in names}, task.seed, round_index)
        points = {name: grid_points(np.asarray(model[name]) - start[name], self.step, shifts[name]) for name in names}
        rounded = {name: start[name] + grid_values(points[name], self.step, shifts[name]) for name in names}
        if self.history:
            rounded = {**rounded, _ROUND: np.array(round_index)}
        return Broadcast(rounded, GridPayload(list(points.values()), seed), update=None)

    def shifts(self, shapes: Shapes, seed: int, round_index: int) -> dict[str, NDArray[np.float32]]:
        """Return the shift of each value's grid in a round, in steps, from -1/2 to 1/2."""
        if self.rounding == "nearest":
            return {name: np.zeros((), dtype=np.float32) for name in shapes}
        key, first, shifts = stream_keys(seed, "download", round_index, np.zeros(1, dtype=np.int64)), 0, {}
        for name in sorted(shapes):
            counters = np.arange(first, first + prod(shapes[name]))
            shifts[name] = (uniform_unit(key, counters) - 0.5).astype(np.float32).reshape(shapes[name])
            first += len(counters)
        return shifts

    def decoded_rows(
        self, data: bytes, rows: IntArray, start: Arrays, seed: int, round_index: int
    ) -> NDArray[np.float32]:
        """Return the rows of the item matrix that a client asked for, from the bytes of the answer.

        Everything besides is public: the initial model `start`, the seed and the round. Raise `PayloadError` if the
        bytes are malformed.
        """
        initial = np.asarray(start[ITEM_FACTORS])
        if self.step is None:
            shape = {ITEM_FACTORS: (len(rows), initial.shape[1])}
            return DensePayload.from_bytes(data).tensors(shape)[ITEM_FACTORS]
        (points,) = GridPayload.from_bytes(data, [(len(rows), initial.shape[1])]).points
        shifts = self.shifts({ITEM_FACTORS: initial.shape}, seed, round_index)[ITEM_FACTORS]
        return initial[rows] + grid_values(points, self.step, np.broadcast_to(shifts, initial.shape)[rows])

    def bits(self, server: Arrays, broadcast: Broadcast, task: Task, recipients: Recipients) -> IntArray | None:
        """Return the size of what each recipient is sent, [C]: rows, or changes; None for the whole model."""
        if self.history:
            return self._change_bits(server, broadcast, recipients.last_round)
        if self.rows == "all":
            return None
        samples = draw_samples(task, recipients.clients, recipients.round_index)
        payload, bits = broadcast.full, np.zeros_like(recipients.clients)
        for index, client in enumerate(samples.order):
            rows = samples.row_items[samples.row_starts[index] : samples.row_starts[index + 1]]
            if isinstance(payload, GridPayload):
                bits[client] = GridPayload([payload.points[0][rows]], payload.seed).wire_bits()
            else:
                assert isinstance(payload, DensePayload), "broadcast() made it"
                values = len(rows) * broadcast.arrays[ITEM_FACTORS].shape[1]
                bits[client] = dense_wire_bits(values, seed=payload.seed is not None)
        return bits

    def _change_bits(self, server: Arrays, broadcast: Broadcast, last_round: IntArray) -> IntArray:
        """Return the size of the change since each client's last round, [C]; of the model, if that is less."""
        assert isinstance(broadcast.full, GridPayload), "broadcast() made it"
        sizes, rounds, history = {}, np.asarray(server[_ROUNDS]), _HISTORY.of(server)
        whole = broadcast.full.wire_bits()
        for last in np.unique(last_round).tolist():
            sizes[last] = whole
            for slot in np.flatnonzero(rounds == last)[:1].tolist():
                before = [history[name][slot].astype(np.int32) for name in sorted(history)]
                change = [now - then for now, then in zip(broadcast.full.points, before, strict=True)]
                sizes[last] = min(whole, GridPayload(change).wire_bits())
        return np.array([sizes[last] for last in last_round.tolist()], dtype=np.int64)


Download = Annotated[
    CodedDownload | None, Field(description="rounding and rows of the downloaded model; null: all of it, unrounded")
]


def broadcast_all(server: Arrays) -> Broadcast:
    """Send all tensors of the server state to every client, whatever it holds already."""
    return Broadcast(server, full=DensePayload.of(server), update=None)


class SizesDownloads(Algorithm):
    """An algorithm with a field `download`, which may code what its clients are sent."""

    if TYPE_CHECKING:

        @property
        def download(self) -> CodedDownload | None:
            """The field."""

    @property
    def traits(self) -> Traits:
        """Downloads differ by client with a history, and with rows that clients ask for."""
        if self.download is None:
            return super().traits
        downloads: Downloads = "by_client" if self.download.differs_by_client else "alike"
        return replace(super().traits, downloads=downloads, asks_rows=self.download.rows == "touched")

    def download_bits(
        self, server: Arrays, broadcast: Broadcast, task: Task, recipients: Recipients
    ) -> IntArray | None:
        """Return the size of what each recipient is sent, [C]; None for what the broadcast says."""
        if self.download is None:
            return None
        return self.download.bits(server, broadcast, task, recipients)

    def begun_download(self, model: Arrays) -> Arrays:
        """Return what the server keeps for downloads besides the initial model."""
        return {} if self.download is None else self.download.init(model)

    def kept_download(self, model: Arrays, server: Arrays, broadcast: Arrays) -> Arrays:
        """Return what the next server state keeps for downloads, as `CodedDownload.next_state` does."""
        return {} if self.download is None else self.download.next_state(model, server, broadcast)

    def broadcast_model(self, model: Arrays, server: Arrays, task: Task, round_index: int) -> Broadcast:
        """Return the model for every client of the round, or the model on a grid."""
        if self.download is None:
            return broadcast_all(model)
        return self.download.broadcast(model, server, task, round_index)


def reserve_request_header(download: CodedDownload | None, chunk: Chunk) -> Chunk:
    """Return a chunk whose budgets leave room for the header of each client's request for rows."""
    return chunk if download is None or download.rows == "all" else chunk.reserve_bits(HEADER_BITS)


def charge_requests(
    download: CodedDownload | None, chunk: Chunk, rows: RowChanges | None, result: ChunkResult
) -> ChunkResult:
    """Return the result of a chunk of `reserve_request_header` with the requests for rows, counted with the uploads.

    Of a client that uploads nothing it is the request alone; one that exceeds the client's budget is not sent.
    """
    if download is None or download.rows == "all" or rows is None:
        return result
    bits = np.array(result.ledger.uplink_bits)
    for index in np.flatnonzero(bits == 0).tolist():
        asked, _ = rows.of_client(index)
        bits[index] = 8 * len(varint(len(asked)) + write_indices(asked, rows.n_rows, "smallest"))
    sent = np.where(chunk.affords(bits), bits + HEADER_BITS, 0)
    return replace(result, ledger=replace(result.ledger, uplink_bits=sent))


_MEMORY = PrefixedArrays("downlink/memory/")
_SENT, _KEY = "sent", "downlink_key"


@dataclass(frozen=True)
class CodedChange:
    """An optional codec for the server's updates: a round's change is coded once, for all clients.

    The server moves its model by what clients decode. With `error_feedback` first, it remembers what the codec left out
    of earlier changes, and adds it to the next.
    """

    stages: tuple[Stage, ...]

    def init(self, shapes: Shapes, dtype: Dtype = FLOAT32) -> Arrays:
        """Return what the server keeps: the last message, none, and the codec's memory."""
        if not self.stages:
            return {}
        return {_SENT: np.empty(0, dtype=np.uint8), **_MEMORY.add(Codec(self.stages, dtype).init_state(shapes))}

    def broadcast(self, seed: int, round_index: int = 0) -> Arrays:
        """Return the key of a round, as an entry of its broadcast; `seed` is the run's, or the round's own."""
        if not self.stages:
            return {}
        return {_KEY: stream_keys(seed, "downlink codec", round_index, np.zeros(1, dtype=np.int64))}

    def message(self, server: Arrays, seed: int | None = None, dtype: Dtype = FLOAT32) -> CodedTensors | None:
        """Return the message of the last round's change, None without a codec; `seed` is sent with it."""
        return None if not self.stages else CodedTensors(0, 0, np.asarray(server[_SENT]).tobytes(), seed, dtype)

    def send(self, change: Tensors, server: Arrays, broadcast: Arrays) -> tuple[Tensors, Arrays]:
        """Return the change as clients decode it, and what the next server state keeps.

        A change that is not finite is returned as it is, for the round to refuse.
        """
        if not self.stages:
            return change, {}
        if not all(np.isfinite(values).all() for values in change.values()):
            return change, self.idle(server)
        codec, key = Codec(self.stages, dtype_of(change)), int(broadcast[_KEY][0])
        update, memory = codec.encode_with_state(change, key, _MEMORY.of(server))
        received = codec.decode(update.data, {name: values.shape for name, values in change.items()}, key)
        return received, {_SENT: np.frombuffer(update.data, dtype=np.uint8), **_MEMORY.add(memory)}

    def idle(self, server: Arrays) -> Arrays:
        """Return what the next server state keeps if nothing is sent: an empty message, and the memory as it is."""
        if not self.stages:
            return {}
        return {_SENT: np.empty(0, dtype=np.uint8), **_MEMORY.add(_MEMORY.of(server))}

    def without(self, arrays: Arrays) -> Arrays:
        """Return the arrays of a server state or a broadcast that are not of this coding."""
        return {name: values for name, values in _MEMORY.without(arrays).items() if name not in (_SENT, _KEY)}
