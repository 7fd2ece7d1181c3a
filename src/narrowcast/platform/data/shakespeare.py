"""Next-character prediction on the plays of Shakespeare, one user for each character of each play."""

from __future__ import annotations

import json
import lzma
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray
from pydantic import Field

from narrowcast.platform.data.classification import MOST_CLIENTS, Classification, Splits
from narrowcast.platform.data.fetch import find
from narrowcast.platform.data.partition import Natural, Partition
from narrowcast.platform.data.plays import BY_CHARACTER
from narrowcast.platform.data.samples import Labelled, Samples
from narrowcast.platform.errors import UserError
from narrowcast.platform.seeds import generator

IntArray = NDArray[np.int64]

NAME = "mit-shakespeare"
WINDOW = 80
VOCABULARY = "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"
"""The 80 characters of LEAF (Caldas et al. 2018), token k being the k-th; other characters are left out."""

_TOKENS = np.full(0x110000, -1, dtype=np.int64)
_TOKENS[[ord(character) for character in VOCABULARY]] = np.arange(len(VOCABULARY))


class Shakespeare(Classification):
    """Windows of 80 characters and the character after them, as LEAF has them; features [n, 80] are tokens.

    Every `stride`-th place of a text begins a window; LEAF takes every one, which is 8 times as much. Each text is cut
    in time: the last `test_share` is for the test, the last `validation_share` of what is before for validation, and
    no window crosses a cut. Characters with fewer than `min_examples` training windows are dropped, and with the
    natural partition `clients` of the others are chosen by the seed; without `clients` all of them are.
    Not as in LEAF: the text is MIT's, and a text is one stretch rather than speeches padded to 80 characters each.
    """

    kind: Literal["shakespeare"] = "shakespeare"
    clients: int | None = Field(default=None, ge=1, le=MOST_CLIENTS)
    partition: Partition = Natural()
    min_examples: int = Field(default=10, ge=1)
    stride: int = Field(default=8, ge=1)
    test_share: float = Field(default=0.2, ge=0, lt=1)

    def load(self) -> Samples:
        """Read the plays, or raise a `UserError` where they are missing, malformed or have too few characters."""
        path = find(NAME, (BY_CHARACTER,)) / BY_CHARACTER
        texts = [tokens(text) for text in _read(path).values()]
        cuts = np.array([self._cuts(len(text)) for text in texts], dtype=np.int64).reshape(-1, 4)
        kept = np.flatnonzero(_n_windows(cuts[:, 1] - cuts[:, 0], self.stride) >= self.min_examples)
        clients = len(kept) if self.clients is None else self.clients
        if len(kept) == 0 or (isinstance(self.partition, Natural) and clients > len(kept)):
            raise UserError(
                f"shakespeare: {len(kept)} characters have {self.min_examples} windows to train on, "
                f"not the {max(clients, 1)} clients asked for; lower clients, min_examples or stride"
            )
        if isinstance(self.partition, Natural):
            kept = np.sort(generator(self.seed, "characters").choice(kept, clients, replace=False))
        places = np.cumsum([0, *(len(texts[user]) for user in kept)])[:-1, np.newaxis]
        windows = sliding_window_view(np.concatenate([texts[user] for user in kept]), WINDOW + 1)
        train, validation, test = (self._starts((places + cuts[kept])[:, part : part + 2]) for part in range(3))
        return self._indexed(
            self.kind,
            str(path),
            len(VOCABULARY),
            Splits(*(_labelled(windows, np.concatenate(starts)) for starts in (train, validation, test))),
            clients=clients,
            users=np.repeat(np.arange(len(kept)), [len(starts) for starts in train]),
        )

    def _cuts(self, length: int) -> tuple[int, int, int, int]:
        """Where training, validation and test begin and end."""
        test = length - int(self.test_share * length)
        return 0, test - int(self.validation_share * test), test, length

    def _starts(self, spans: IntArray) -> list[IntArray]:
        """Where the windows of each user begin that lie in its span; spans [U, 2]."""
        return [np.arange(begin, end - WINDOW, self.stride) for begin, end in spans.tolist()]


def tokens(text: str) -> IntArray:
    """The tokens of a text, runs of blanks and tabs taken as one blank."""
    text = re.sub(r"[ \t]+", " ", text)
    found = _TOKENS[np.frombuffer(text.encode("utf-32-le", "surrogatepass"), "<u4")]
    return found[found >= 0]


def _labelled(windows: IntArray, starts: IntArray) -> Labelled:
    return Labelled(windows[:, :WINDOW][starts], windows[:, WINDOW][starts])


def _n_windows(lengths: IntArray, stride: int) -> IntArray:
    return np.maximum((lengths - WINDOW + stride - 1) // stride, 0)


def _read(path: Path) -> Mapping[str, str]:
    try:
        with lzma.open(path) as file:
            texts = json.load(file)
    except (OSError, EOFError, lzma.LZMAError, ValueError) as error:
        raise UserError(f"{path}: {error}; get the file anew") from error
    if not isinstance(texts, dict) or not all(isinstance(text, str) for text in texts.values()):
        raise UserError(f'{path}: expected {{"PLAY_CHARACTER": "text", ...}}; get the file anew')
    return texts
