"""Next-token prediction on documents: windows of bytes, with the byte that follows each position as the target."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray
from pydantic import Field

from narrowcast.platform.data.classification import MOST_CLIENTS, Classification, Splits
from narrowcast.platform.data.partition import Natural, Partition
from narrowcast.platform.data.samples import Labelled, Samples
from narrowcast.platform.errors import UserError
from narrowcast.platform.seeds import generator
from narrowcast.platform.types import IntArray

N_BYTES = 256
MOST_TOKENS = 200_000_000
"""Most bytes in all windows together; each is held as two int64."""


class Documents(Classification):
    """Base of the sets of documents, each of which has a client of its own unless `partition` says otherwise.

    Tokens are bytes, 256 in all. A window of `window` bytes begins at every `stride`-th byte of a document; features
    and labels [n, window] are int64. Each document is cut in order: the last `test_share` is for testing, the last
    `validation_share` of the rest for validation, and no window crosses a cut. Documents with fewer than `min_examples`
    training windows are left out. `seed` chooses `clients` of the others; null: all of them.
    """

    clients: int | None = Field(
        default=None, ge=1, le=MOST_CLIENTS, description="number of clients; null: one per document that qualifies"
    )
    partition: Partition = Field(default=Natural(), description="distribution of the training windows across clients")
    window: int = Field(default=64, ge=1, le=65_536, description="bytes of a window")
    stride: int = Field(default=64, ge=1, description="bytes between the starts of windows")
    min_examples: int = Field(default=4, ge=1, description="documents with fewer training windows are left out")
    test_share: float = Field(default=0.2, ge=0, lt=1, description="share of each document held out for testing")

    def _windows(self, name: str, source: str, texts: Mapping[str, bytes]) -> Samples:
        """Return the windows of documents; raise `UserError` if they are too few, or too many for the memory."""
        tokens = [np.frombuffer(text, dtype=np.uint8) for text in texts.values()]
        cuts = [self._cuts(len(each)) for each in tokens]
        counts = np.array([len(self._starts(*each[:2])) for each in cuts], dtype=np.int64)
        kept = np.flatnonzero(counts >= self.min_examples)
        natural = isinstance(self.partition, Natural)
        clients = len(kept) if self.clients is None else self.clients
        if not len(kept) or (natural and clients > len(kept)):
            raise UserError(
                f"{self.kind}: {len(kept)} of {len(tokens)} documents have {self.min_examples} training windows, but "  # type: ignore[attr-defined]
                f"{max(clients, 1)} clients are requested; lower clients, min_examples, window or stride"
            )
        if natural:
            kept = np.sort(generator(self.seed or 0, "documents").choice(kept, clients, replace=False))
        if (total := int(counts[kept].sum()) * self.window) > MOST_TOKENS:
            raise UserError(
                f"{self.kind}: the windows have {total:,} bytes, at most {MOST_TOKENS:,} are allowed; raise stride"  # type: ignore[attr-defined]
            )
        parts: list[list[Labelled]] = [[], [], []]
        for document in kept:
            for part, (begin, end) in zip(parts, pairwise(cuts[document]), strict=True):
                part.append(self._labelled(tokens[document], self._starts(begin, end)))
        splits = Splits(*(_together(part) for part in parts))
        users, *held_out = (np.repeat(np.arange(len(kept)), [len(each) for each in part]) for part in parts)
        held_out_users = dict(zip(("validation", "test"), held_out, strict=True))
        return self._indexed(name, source, N_BYTES, splits, clients=clients, users=users, held_out_users=held_out_users)

    def _cuts(self, length: int) -> tuple[int, int, int, int]:
        """Return the boundaries of the training, validation and test part of a document."""
        test = length - int(self.test_share * length)
        return 0, test - int(self.validation_share * test), test, length

    def _starts(self, begin: int, end: int) -> IntArray:
        """Return the start of each window in a part; the byte after the window's last is in it too."""
        return np.arange(begin, end - self.window, self.stride)

    def _labelled(self, tokens: NDArray[np.uint8], starts: IntArray) -> Labelled:
        if not len(starts):
            return Labelled(*(np.empty((0, self.window), dtype=np.int64) for _ in range(2)))
        windows = sliding_window_view(tokens, self.window + 1)[starts].astype(np.int64)
        return Labelled(np.ascontiguousarray(windows[:, :-1]), np.ascontiguousarray(windows[:, 1:]))


def _together(parts: list[Labelled]) -> Labelled:
    return Labelled(np.concatenate([part.features for part in parts]), np.concatenate([part.labels for part in parts]))
