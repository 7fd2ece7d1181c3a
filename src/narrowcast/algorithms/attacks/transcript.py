"""The transcript of a server: everything that it may see of a run of matrix factorisation, and nothing else.

Letters: N items, d factors, k columns of an update (d, or the rank), C clients of a cohort.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from narrowcast.algorithms.secure.messages import Messages
from narrowcast.algorithms.secure.round_keys import RoundKeys
from narrowcast.platform.types import BoolArray, FloatArray, IntArray

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
            "rows and values of a client": any(each.readable for each in self.rounds),
            "protected uploads": any(each.protected for each in self.rounds),
            "sums": any(each.opened is not None for each in self.rounds),
            "keys of the round": any("keys" in each.told.get("begin", {}) for each in self.rounds),
            "shares": any(each.told.get("reveal") for each in self.rounds),
        }
        return frozenset(name for name, there in held.items() if there)

    def uploads(self, client: int) -> list[tuple[RoundTranscript, ReadableUpload]]:
        """Return the uploads of a client that the server reads, with their rounds."""
        return [(each, upload) for each in self.rounds for upload in each.readable if upload.client == client]
