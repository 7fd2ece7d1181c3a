"""The transcript of a server, which is everything that it may see of a run of matrix factorisation, and its recorder.

Letters: N items, d factors, k columns of an update (d, or the rank), C clients of a cohort, U clients of the task.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from narrowcast.algorithms.attacks.taps import Recorder
from narrowcast.algorithms.client.sums import ROWS, WEIGHT
from narrowcast.algorithms.codecs.messages import RowLayout, RowsPayload
from narrowcast.algorithms.federated.low_rank import draw_components
from narrowcast.algorithms.secure.aggregation import SecureAggregation
from narrowcast.algorithms.secure.messages import Messages
from narrowcast.algorithms.secure.participation import RoundKeys
from narrowcast.algorithms.secure.unmasking import protected_groups
from narrowcast.platform.config.kinds import from_fields
from narrowcast.platform.contracts import Algorithm, Task
from narrowcast.platform.models.model import ITEM_FACTORS
from narrowcast.platform.rounds.ledger import ChunkResult
from narrowcast.platform.types import Arrays, BoolArray, Chunk, FloatArray, IntArray

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class ReadableUpload:
    """An upload that the server reads. Shapes: rows [m] ascending; values [m, k], 0 in columns that were not sent."""

    client: int
    rows: IntArray
    values: Floats


@dataclass(frozen=True)
class ProtectedUpload:
    """An upload that the server adds up unread: the ring elements of each group that the client sent, by place."""

    client: int
    groups: Mapping[int, NDArray[np.uint64]] = field(repr=False)


@dataclass(frozen=True)
class OpenedSum:
    """A round's sum. Shapes: values [N, k]; counts [N, 1], [N, k], or [1, 1] if rows are not counted."""

    values: Floats
    counts: FloatArray


@dataclass(frozen=True)
class RoundTranscript:
    """One round as the server sees it.

    `keys` are the public keys and the participation of a secure round, and `told` the clients' answers to the steps of
    its protocol, by step and name of the array: advertised keys, revealed shares, integers of an opened sum. `opened`
    is None without secure aggregation, and for a refused round.

    Shapes: cohort [C] ascending; uplink_bits [C]; arrived [C]; item_factors [N, d] as broadcast; basis [k, d], None for
    whole rows; components [C, k], the columns that each client sends, which are public.
    """

    round_index: int
    cohort: IntArray
    uplink_bits: IntArray
    arrived: BoolArray
    item_factors: Floats = field(repr=False)
    basis: Floats | None = field(repr=False)
    components: BoolArray = field(repr=False)
    readable: tuple[ReadableUpload, ...] = ()
    protected: tuple[ProtectedUpload, ...] = ()
    keys: RoundKeys | None = field(default=None, repr=False)
    told: Mapping[str, Mapping[str, NDArray[np.generic]]] = field(default_factory=dict, repr=False)
    opened: OpenedSum | None = field(default=None, repr=False)

    @property
    def total(self) -> OpenedSum:
        """The sum of the round: the opened one, or that of the readable uploads; zero if there is neither."""
        if self.opened is not None:
            return self.opened
        n_items, columns = len(self.item_factors), self.components.shape[1]
        values, counts = np.zeros((n_items, columns), dtype=np.float32), np.zeros((n_items, 1))
        for upload in self.readable:
            values[upload.rows] += upload.values
            counts[upload.rows] += 1
        return OpenedSum(values, counts)


@dataclass(frozen=True)
class Transcript:
    """All rounds of a run, with the public seed and what a server knows of its clients beforehand.

    `examples` [U] are the clients' numbers of training items. Not every mode sends them; servers that weight clients
    by examples know them, and every attack here is given them. So is `popularity` [N], how often other people took each
    item, which is public for most catalogues. `messages` are the public formats of a secure run.
    """

    public_seed: int
    negatives: int
    examples: IntArray
    popularity: FloatArray
    rounds: tuple[RoundTranscript, ...]
    messages: Messages | None = field(default=None, repr=False)

    def first(self, rounds: int) -> Transcript:
        """Return the transcript of the first so many rounds."""
        return replace(self, rounds=self.rounds[:rounds])

    @property
    def n_items(self) -> int:
        """The number of items, N."""
        return len(self.rounds[0].item_factors)

    @property
    def shown(self) -> frozenset[str]:
        """The kinds of data about clients that this transcript holds, beside cohorts, sizes and components."""
        held = {
            "rows and values of a client": any(record.readable for record in self.rounds),
            "protected uploads": any(record.protected for record in self.rounds),
            "sums": any(record.opened is not None for record in self.rounds),
            "keys of the round": any("keys" in record.told.get("begin", {}) for record in self.rounds),
            "shares": any(record.told.get("reveal") for record in self.rounds),
        }
        return frozenset(name for name, is_held in held.items() if is_held)

    def uploads(self, client: int) -> list[tuple[RoundTranscript, ReadableUpload]]:
        """Return the uploads of a client that the server reads, with their rounds."""
        return [(record, upload) for record in self.rounds for upload in record.readable if upload.client == client]


_BASIS = "basis"
_TO_THE_SERVER = ("public", "begin", "sign", "reveal", "open")
"""The calls of the key store whose answers the server receives; `secrets` go to the clients' hosts."""


@dataclass(frozen=True)
class _RowSettings:
    """The fields of an algorithm, if it has them, that say how item rows are sent and added up."""

    rows: RowLayout = "touched"
    aggregation: str = "per_item_mean"


@dataclass
class TranscriptRecorder(Recorder):
    """The rounds of a real run of matrix factorisation by `algorithm`; `popularity` [N] is as in `Transcript`."""

    algorithm: Algorithm
    task: Task
    popularity: FloatArray
    rounds: list[RoundTranscript] = field(default_factory=list)
    _told: dict[int, dict[str, Arrays]] = field(default_factory=dict)

    def transcript(self) -> Transcript:
        """Return what was recorded."""
        rounds = [replace(record, told=self._told.get(record.round_index, {})) for record in self.rounds]
        task, algorithm = self.task, self.algorithm
        messages = algorithm.messages(task) if isinstance(algorithm, SecureAggregation) else None
        return Transcript(
            task.seed, task.training.negatives, task.data.examples, self.popularity, tuple(rounds), messages
        )

    def record_told(self, method: str, round_index: int, answer: Arrays) -> None:
        """Record the answer of the key store to a call by the server."""
        if method in _TO_THE_SERVER:
            self._told.setdefault(round_index, {})[method] = answer

    def record_uploads(self, broadcast: Arrays, chunks: Sequence[Chunk], results: Sequence[ChunkResult]) -> None:
        """Record a round's broadcast and uploads."""
        cohort = np.concatenate([chunk.clients for chunk in chunks])
        ledgers, round_index = [result.ledger for result in results], chunks[0].round_index
        basis = np.asarray(broadcast[_BASIS]) if _BASIS in broadcast else None
        item_factors = np.asarray(broadcast[ITEM_FACTORS])
        columns = item_factors.shape[1] if basis is None else len(basis)
        ranks = np.array([int(ledger.rank[0]) for ledger in ledgers])
        components = draw_components(np.where(ranks < 0, columns, ranks), columns, cohort, self.task.seed, round_index)
        seen = [
            self._upload(chunk, result, opened)
            for chunk, result, opened in zip(chunks, results, components, strict=True)
        ]
        self.rounds.append(
            RoundTranscript(
                round_index,
                cohort,
                np.array([int(ledger.uplink_bits[0]) for ledger in ledgers]),
                np.array([bool(ledger.delivered[0]) for ledger in ledgers]),
                item_factors,
                basis,
                components,
                keys=chunks[0].relayed,
                readable=tuple(upload for upload in seen if isinstance(upload, ReadableUpload)),
                protected=tuple(upload for upload in seen if isinstance(upload, ProtectedUpload)),
            )
        )

    def record_opened(self, total: Arrays) -> None:
        """Record the sum that the server opened."""
        opened = OpenedSum(np.asarray(total[ROWS]), np.asarray(total[WEIGHT]))
        self.rounds[-1] = replace(self.rounds[-1], opened=opened)

    def _upload(self, chunk: Chunk, result: ChunkResult, columns: NDArray[np.bool_]) -> Any:
        if not result.ledger.delivered[0]:
            return None
        client = int(chunk.clients[0])
        if not isinstance(self.algorithm, SecureAggregation):
            return self._readable(client, result, columns)
        groups = protected_groups(result.partial)
        if self.algorithm.scheme.kind != "plain":
            return ProtectedUpload(client, groups)
        messages = chunk.relayed.messages(self.algorithm.messages(self.task))
        sums = [
            messages.scheme.open_sum(group, groups[index], messages.fixed_point) if index in groups else None
            for index, group in enumerate(messages.layout.groups)
        ]
        return _rows_of(client, messages.fixed_point.total(sums, messages.layout))

    def _readable(self, client: int, result: ChunkResult, columns: NDArray[np.bool_]) -> ReadableUpload:
        """Return an upload as the server reads it; float32 rows by way of their bytes, whose length is checked."""
        upload, algorithm = _rows_of(client, result.partial), self.algorithm
        if algorithm.traits.codec:
            return upload
        settings = from_fields(_RowSettings, algorithm)
        layout, mask = settings.rows, settings.aggregation != "weighted"
        exact = upload.values[:, columns]
        data = RowsPayload(self.task.data.n_items, upload.rows, exact, layout, mask).to_bytes()
        assert 8 * len(data) == int(result.ledger.uplink_bits[0]), "the ledger counts these bytes"
        sent = RowsPayload.from_bytes(data)
        values = np.zeros((len(sent.rows), len(columns)), dtype=np.float32)
        values[:, columns] = sent.values
        if mask or layout == "touched":
            return ReadableUpload(client, sent.rows, values)
        nonzero = values.any(axis=1)
        return ReadableUpload(client, sent.rows[nonzero], values[nonzero])


def _rows_of(client: int, partial: Arrays) -> ReadableUpload:
    """Return the rows of one client's partial sum: those that it counts, or else those that are not zero."""
    values, counts = np.asarray(partial[ROWS]), np.asarray(partial[WEIGHT])
    rows = np.flatnonzero(counts.any(axis=1) if len(counts) == len(values) else values.any(axis=1))
    # The server knows the weight of a client, and divides by it.
    weight = float(counts[0, 0]) if counts.shape == (1, 1) else 1.0
    return ReadableUpload(client, rows, (values[rows] / np.float32(weight)).astype(np.float32))
