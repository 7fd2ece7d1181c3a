"""Next-character prediction on the plays of Shakespeare, with one user per character of each play."""

from __future__ import annotations

import json
import lzma
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from pydantic import Field

from narrowcast.platform.data.classification import MOST_CLIENTS, Classification, Splits
from narrowcast.platform.data.fetch import find
from narrowcast.platform.data.partition import Natural, Partition
from narrowcast.platform.data.plays import BY_CHARACTER
from narrowcast.platform.data.samples import Labelled, Samples
from narrowcast.platform.errors import UserError
from narrowcast.platform.seeds import generator
from narrowcast.platform.types import IntArray

NAME = "mit-shakespeare"
WINDOW = 80
VOCABULARY = "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"
"""The 80 characters of LEAF (Caldas et al. 2018) in the order of their tokens; other characters are dropped."""

_TOKENS = np.full(0x110000, -1, dtype=np.int64)
_TOKENS[[ord(character) for character in VOCABULARY]] = np.arange(len(VOCABULARY))


class Shakespeare(Classification):
    """Windows of 80 characters and the character that follows, as in LEAF; features [n, 80] are int64 tokens.

    With `predict: every` the labels [n, 80] are the characters that follow each position.

    A window begins at every `stride`-th position of a text; LEAF uses stride 1, which gives 8 times as many. Each text
    is cut in time: the last `test_share` is for testing, the last `validation_share` of the rest for validation, and no
    window crosses a cut. Characters with fewer than `min_examples` training windows are dropped. With the natural
    partition the seed chooses `clients` of the others, or all of them if `clients` is not given.

    Differs from LEAF: 1. the text is that of MIT's site. 2. a text is one stretch; LEAF pads each speech to 80
    characters.
    """

    kind: Literal["shakespeare"] = "shakespeare"
    clients: int | None = Field(
        default=None, ge=1, le=MOST_CLIENTS, description="number of clients; null: every character that qualifies"
    )
    partition: Partition = Field(default=Natural(), description="distribution of the training windows across clients")
    min_examples: int = Field(default=10, ge=1, description="characters with fewer training windows are dropped")
    stride: int = Field(default=8, ge=1, description="characters between the starts of windows")
    predict: Literal["last", "every"] = Field(
        default="last", description="the character after the window, or after every position of it"
    )
    test_share: float = Field(default=0.2, ge=0, lt=1, description="share of each text held out for testing")

    def load(self) -> Samples:
        """Return the windows partitioned across clients.

        Raise `UserError` if the plays are missing, malformed or too few.
        """
        path = find(NAME, (BY_CHARACTER,)) / BY_CHARACTER
        texts = [tokens(text) for text in _read(path).values()]
        cuts = np.array([self._cuts(len(text)) for text in texts], dtype=np.int64).reshape(-1, 4)
        kept = np.flatnonzero(_n_windows(cuts[:, 1] - cuts[:, 0], self.stride) >= self.min_examples)
        clients = len(kept) if self.clients is None else self.clients
        if len(kept) == 0 or (isinstance(self.partition, Natural) and clients > len(kept)):
            raise UserError(
                f"shakespeare: {len(kept)} characters have {self.min_examples} training windows, "
                f"but {max(clients, 1)} clients are requested; lower clients, min_examples or stride"
            )
        if isinstance(self.partition, Natural):
            kept = np.sort(generator(self.seed or 0, "characters").choice(kept, clients, replace=False))
        places = np.cumsum([0, *(len(texts[user]) for user in kept)])[:-1, np.newaxis]
        windows = sliding_window_view(np.concatenate([texts[user] for user in kept]), WINDOW + 1)
        train, validation, test = (self._starts((places + cuts[kept])[:, part : part + 2]) for part in range(3))
        return self._indexed(
            self.kind,
            str(path),
            len(VOCABULARY),
            Splits(*(self._labelled(windows, np.concatenate(starts)) for starts in (train, validation, test))),
            clients=clients,
            users=_users(train),
            held_out_users={"validation": _users(validation), "test": _users(test)},
        )

    def _cuts(self, length: int) -> tuple[int, int, int, int]:
        """Return the boundaries of the training, validation and test part of a text."""
        test = length - int(self.test_share * length)
        return 0, test - int(self.validation_share * test), test, length

    def _starts(self, spans: IntArray) -> list[IntArray]:
        """Return the start of each window that lies in the span of its user; spans [U, 2]."""
        return [np.arange(begin, end - WINDOW, self.stride) for begin, end in spans.tolist()]

    def _labelled(self, windows: IntArray, starts: IntArray) -> Labelled:
        following = windows[:, 1:] if self.predict == "every" else windows[:, WINDOW]
        return Labelled(windows[:, :WINDOW][starts], following[starts])


def tokens(text: str) -> IntArray:
    """Return the tokens of a text; runs of blanks and tabs count as one blank."""
    text = re.sub(r"[ \t]+", " ", text)
    found = _TOKENS[np.frombuffer(text.encode("utf-32-le", "surrogatepass"), "<u4")]
    return found[found >= 0]


def _users(starts: list[IntArray]) -> IntArray:
    """Return the user of each window, from the starts of the windows of each user."""
    return np.repeat(np.arange(len(starts)), [len(each) for each in starts])


def _n_windows(lengths: IntArray, stride: int) -> IntArray:
    return np.maximum((lengths - WINDOW + stride - 1) // stride, 0)


def _read(path: Path) -> Mapping[str, str]:
    try:
        with lzma.open(path) as file:
            texts = json.load(file)
    except (OSError, EOFError, lzma.LZMAError, ValueError) as error:
        raise UserError(f"{path}: {error}; download the file again") from error
    if not isinstance(texts, dict) or not all(isinstance(text, str) for text in texts.values()):
        raise UserError(f'{path}: expected {{"PLAY_CHARACTER": "text", ...}}; download the file again')
    return texts
