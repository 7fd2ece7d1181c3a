"""Texts for next-token prediction: Python's language reference, a user's text files, and the plays of Shakespeare.

Features are windows of tokens, and the target is the token that follows each position, or the window. A document, a
file, or a character of a play has a client of its own.
"""

from __future__ import annotations

import json
import lzma
import platform
import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray
from pydantic import Field

from narrowcast.platform.config.plugins import check_installed
from narrowcast.platform.data.classification import MOST_CLIENTS, Classification, Splits, cuts_in_time
from narrowcast.platform.data.download import find, located
from narrowcast.platform.data.partition import Natural, Partition
from narrowcast.platform.data.samples import Labelled, Samples
from narrowcast.platform.data.sources import BY_CHARACTER
from narrowcast.platform.errors import UserError
from narrowcast.platform.seeds import generator
from narrowcast.platform.types import IntArray

N_BYTES = 256
MOST_TOKENS = 200_000_000
"""Most tokens in all windows together; each is held as two int64."""


def tokenizer_of(file: Path) -> Any:
    """Return the tokenizer of a tokenizer.json, or of a model in a GGUF file; raise `UserError` if it has none."""
    path = located(file, "tokenizer")
    in_gguf = path.suffix == ".gguf"
    for library in ("transformers", "gguf") if in_gguf else ("tokenizers",):
        check_installed(library, f"data.tokenizer = {path}")
    try:
        if in_gguf:
            from transformers import AutoTokenizer

            read: Any = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name, local_files_only=True)
            return read.backend_tokenizer
        from tokenizers import Tokenizer

        return Tokenizer.from_file(str(path))
    except Exception as error:  # the libraries raise nothing more exact
        raise UserError(f"data.tokenizer = {path}: {error}; give a tokenizer.json, or a .gguf file") from error


class Documents(Classification):
    """Base of the sets of documents, each of which has a client of its own unless `partition` says otherwise.

    Tokens are bytes, 256 in all, or those of a `tokenizer`. A window of `window` tokens begins at every `stride`-th
    token of a document; features and labels [n, window] are int64. Each document is cut in order: the last `test_share`
    is for testing, the last `validation_share` of the rest for validation, and no window crosses a cut. Documents with
    fewer than `min_examples` training windows are left out. `seed` chooses `clients` of the others; null: all of them.
    """

    clients: int | None = Field(
        default=None, ge=1, le=MOST_CLIENTS, description="number of clients; null: one per document that qualifies"
    )
    partition: Partition = Field(default=Natural(), description="distribution of the training windows across clients")
    window: int = Field(default=64, ge=1, le=65_536, description="tokens of a window")
    stride: int = Field(default=64, ge=1, description="tokens between the starts of windows")
    tokenizer: Path | None = Field(
        default=None, description="file tokenizer.json of the library tokenizers, or a .gguf; null: tokens are bytes"
    )
    min_examples: int = Field(default=4, ge=1, description="documents with fewer training windows are left out")
    test_share: float = Field(default=0.2, ge=0, lt=1, description="share of each document held out for testing")

    def _windows(self, name: str, source: str, texts: Mapping[str, bytes]) -> Samples:
        """Return the windows of documents; raise `UserError` if they are too few, or too many for the memory."""
        tokens, n_tokens = self._tokens(list(texts.values()))
        cuts = [cuts_in_time(len(text), self.validation_share, self.test_share) for text in tokens]
        counts = np.array([len(self._starts(*cut[:2])) for cut in cuts], dtype=np.int64)
        kept = np.flatnonzero(counts >= self.min_examples)
        natural = self.partition.by_user
        clients = len(kept) if self.clients is None else self.clients
        if not len(kept) or (natural and clients > len(kept)):
            raise UserError(
                f"{self.kind}: {len(kept)} of {len(tokens)} documents have {self.min_examples} training windows, but "
                f"{max(clients, 1)} clients are requested; lower clients, min_examples, window or stride"
            )
        if natural:
            kept = np.sort(generator(self.seed or 0, "documents").choice(kept, clients, replace=False))
        if (total := int(counts[kept].sum()) * self.window) > MOST_TOKENS:
            raise UserError(
                f"{self.kind}: the windows have {total:,} tokens, at most {MOST_TOKENS:,} are allowed; raise stride"
            )
        parts: list[list[Labelled]] = [[], [], []]
        for document in kept:
            for part, (begin, end) in zip(parts, pairwise(cuts[document]), strict=True):
                part.append(self._labelled(tokens[document], self._starts(begin, end)))
        splits = Splits(*(_together(part) for part in parts))
        users, *held_out = (np.repeat(np.arange(len(kept)), [len(windows) for windows in part]) for part in parts)
        held_out_users = dict(zip(("validation", "test"), held_out, strict=True))
        return self._indexed(
            name, source, n_tokens, splits, clients=clients, users=users, held_out_users=held_out_users
        )

    def _tokens(self, texts: Sequence[bytes]) -> tuple[list[NDArray[Any]], int]:
        """Return the tokens of each text, without those that mark its ends, and how many there are to choose from."""
        if self.tokenizer is None:
            return [np.frombuffer(text, dtype=np.uint8) for text in texts], N_BYTES
        tokenizer = tokenizer_of(self.tokenizer)
        tokenizer.no_truncation()
        tokenizer.no_padding()
        encoded = tokenizer.encode_batch([text.decode(errors="replace") for text in texts], add_special_tokens=False)
        return [np.array(text.ids, dtype=np.int32) for text in encoded], tokenizer.get_vocab_size()

    def _starts(self, begin: int, end: int) -> IntArray:
        """Return the start of each window in a part; the token after the window's last is in it too."""
        return np.arange(begin, end - self.window, self.stride)

    def _labelled(self, tokens: NDArray[Any], starts: IntArray) -> Labelled:
        if not len(starts):
            return Labelled(*(np.empty((0, self.window), dtype=np.int64) for _ in range(2)))
        windows = sliding_window_view(tokens, self.window + 1)[starts].astype(np.int64)
        return Labelled(np.ascontiguousarray(windows[:, :-1]), np.ascontiguousarray(windows[:, 1:]))


def _together(parts: list[Labelled]) -> Labelled:
    return Labelled(np.concatenate([part.features for part in parts]), np.concatenate([part.labels for part in parts]))


class PythonDocs(Documents):
    """The pages of Python's language reference, 465 kB of English with code; each page has a client of its own.

    The text is that of the running Python's `help()`, which needs no download; its version is part of the data set's
    name.
    """

    kind: Literal["python-docs"] = "python-docs"

    def load(self) -> Samples:
        """Return the windows of the pages; raise `UserError` if this Python came without them."""
        try:
            from pydoc_data.topics import topics
        except ImportError as error:
            raise UserError(f"python-docs: {error}; use another build of Python, or data text_files") from error
        texts = {topic: text.encode() for topic, text in sorted(topics.items())}
        return self._windows(f"{self.kind}-{platform.python_version()}", "pydoc_data.topics", texts)


class TextFiles(Documents):
    """Next-token prediction on the text files below a folder; each file is a document and has a client of its own."""

    kind: Literal["text_files"] = "text_files"
    path: Path = Field(description="folder of the files, also in folders below it")
    pattern: str = Field("*.txt", min_length=1, description="names of the files, with * and ?")

    def load(self) -> Samples:
        """Return the windows of the files; raise `UserError` if there are none or one cannot be read."""
        folder = located(self.path, "path")
        if not folder.is_dir():
            raise UserError(f"data.path = {folder} is a file; give the folder that holds it")
        try:
            files = sorted(file for file in folder.rglob(self.pattern) if file.is_file())
        except (ValueError, NotImplementedError) as error:
            raise UserError(f"data.pattern = {self.pattern}: {error}; use a name with * or ?, such as *.txt") from error
        if not files:
            raise UserError(f"{folder} has no file {self.pattern}; give another path or pattern")
        texts = {}
        for file in files:
            try:
                texts[str(file.relative_to(folder))] = file.read_bytes()
            except OSError as error:
                raise UserError(f"{file}: {error.strerror}; make it readable, or leave it out by pattern") from error
        return self._windows(folder.name or str(folder), str(folder), texts)


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
        spans = [cuts_in_time(len(text), self.validation_share, self.test_share) for text in texts]
        cuts = np.array(spans, dtype=np.int64).reshape(-1, 4)
        kept = np.flatnonzero(_n_windows(cuts[:, 1] - cuts[:, 0], self.stride) >= self.min_examples)
        clients = len(kept) if self.clients is None else self.clients
        if len(kept) == 0 or (self.partition.by_user and clients > len(kept)):
            raise UserError(
                f"shakespeare: {len(kept)} characters have {self.min_examples} training windows, "
                f"but {max(clients, 1)} clients are requested; lower clients, min_examples or stride"
            )
        if self.partition.by_user:
            kept = np.sort(generator(self.seed or 0, "characters").choice(kept, clients, replace=False))
        offsets = np.cumsum([0, *(len(texts[user]) for user in kept)])[:-1, np.newaxis]
        windows = sliding_window_view(np.concatenate([texts[user] for user in kept]), WINDOW + 1)
        train, validation, test = (self._starts((offsets + cuts[kept])[:, part : part + 2]) for part in range(3))
        return self._indexed(
            self.kind,
            str(path),
            len(VOCABULARY),
            Splits(*(self._labelled(windows, np.concatenate(starts)) for starts in (train, validation, test))),
            clients=clients,
            users=_users(train),
            held_out_users={"validation": _users(validation), "test": _users(test)},
        )

    def _starts(self, spans: IntArray) -> list[IntArray]:
        """Return the start of each window that lies in the span of its user; spans [U, 2]."""
        return [np.arange(begin, end - WINDOW, self.stride) for begin, end in spans.tolist()]

    def _labelled(self, windows: IntArray, starts: IntArray) -> Labelled:
        following = windows[:, 1:] if self.predict == "every" else windows[:, WINDOW]
        return Labelled(windows[:, :WINDOW][starts], following[starts])


def tokens(text: str) -> IntArray:
    """Return the tokens of a text; runs of blanks and tabs count as one blank."""
    text = re.sub(r"[ \t]+", " ", text)
    numbers = _TOKENS[np.frombuffer(text.encode("utf-32-le", "surrogatepass"), "<u4")]
    return numbers[numbers >= 0]


def _users(starts: list[IntArray]) -> IntArray:
    """Return the user of each window, from the starts of the windows of each user."""
    return np.repeat(np.arange(len(starts)), [len(start) for start in starts])


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
