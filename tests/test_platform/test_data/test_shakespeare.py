import json
import lzma
import re
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from narrowcast.platform.data import download
from narrowcast.platform.data.partition import IID
from narrowcast.platform.data.samples import Samples
from narrowcast.platform.data.sources import BY_CHARACTER, by_character
from narrowcast.platform.data.text import NAME, VOCABULARY, WINDOW, Shakespeare, tokens
from narrowcast.platform.errors import UserError
from small_sets import spoken, write_plays


def text(values: Any) -> str:
    return "".join(VOCABULARY[token] for token in values)


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder where three characters' texts are looked for: 400, 300 and 90 characters."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv(download.VARIABLE, str(tmp_path))
    write_plays(tmp_path / NAME, {"p_A": spoken(400, 0), "p_B": spoken(300, 1), "p_C": spoken(90, 2)})
    return tmp_path


def parts(data: Samples) -> list[list[str]]:
    """The windows with their next character of every client."""
    rows = np.split(data.order, data.indptr[1:-1])
    return [[text([*data.train.features[row], data.train.labels[row]]) for row in client] for client in rows]


def test_windows_are_cut_in_time_and_never_cross_a_cut(root: Path) -> None:
    data = Shakespeare(stride=1, validation_share=0.3, test_share=0.4).load()
    a, b = spoken(400, 0), spoken(300, 1)
    # 400: test from 240, validation from 168; 300: test from 180, validation from 126.
    want = [[a[i : i + 81] for i in range(168 - 80)], [b[i : i + 81] for i in range(126 - 80)]]
    assert parts(data) == want
    test = {text([*x, y]) for x, y in zip(data.test.features, data.test.labels, strict=True)}
    assert test == {a[i : i + 81] for i in range(240, 320)} | {b[i : i + 81] for i in range(180, 220)}
    # 72 and 54 characters of validation hold no window.
    assert len(data.validation) == 0
    assert data.validation.features.shape == (0, WINDOW)
    assert (data.n_clients, data.n_classes, data.source) == (2, 80, str(root / NAME / BY_CHARACTER))


@pytest.mark.usefixtures("root")
def test_every_character_may_be_predicted() -> None:
    last, every = Shakespeare(stride=1).load(), Shakespeare(stride=1, predict="every").load()
    assert (last.targets, every.targets) == ("classes", "tokens")
    assert np.array_equal(last.train.features, every.train.features)
    assert np.array_equal(every.train.labels[:, :-1], every.train.features[:, 1:])
    assert np.array_equal(every.train.labels[:, -1], last.train.labels)


@pytest.mark.parametrize("stride", [1, 2, 3, 7, 80])
@pytest.mark.usefixtures("root")
def test_every_stride_th_place_begins_a_window(stride: int) -> None:
    data = Shakespeare(stride=stride, validation_share=0, test_share=0, min_examples=1).load()
    texts = [spoken(n, salt) for salt, n in enumerate((400, 300, 90))]
    want = [[each[i : i + 81] for i in range(0, len(each) - 80, stride)] for each in texts]
    assert parts(data) == want
    assert Shakespeare(stride=stride, validation_share=0, test_share=0, min_examples=len(want[1])).load().n_clients == 2


@pytest.mark.usefixtures("root")
def test_clients_are_chosen_by_the_seed_or_dealt_anew() -> None:
    chosen = {parts(Shakespeare(clients=1, stride=1, seed=seed).load())[0][0][:5] for seed in range(10)}
    assert chosen == {spoken(400, 0)[:5], spoken(300, 1)[:5]}
    dealt = Shakespeare(clients=7, partition=IID(), stride=1).load()
    assert dealt.n_clients == 7
    assert np.ptp(dealt.examples) <= 1
    natural = Shakespeare(stride=1).load()
    assert len(natural.train) == len(dealt.train)
    assert Shakespeare(partition=IID()).load().n_clients == 2


def test_tokens_are_those_of_leaf() -> None:
    assert len(set(VOCABULARY)) == len(VOCABULARY) == 80
    assert tokens(VOCABULARY).tolist() == list(range(80))
    assert text(tokens("a \t b\n\u00e9$c\U0001f3ad")) == "a b\nc"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "Compressed file ended"),
        (b"no xz", "Input format not supported"),
        (lzma.compress(b"{"), "Expecting property name"),
        (lzma.compress(b"[1]"), r'expected {"PLAY_CHARACTER": "text", ...}'),
        (lzma.compress(b'{"a": 1}'), r'expected {"PLAY_CHARACTER": "text", ...}'),
        (lzma.compress(b"\xff\xfe\xff"), "codec can't decode"),
    ],
)
def test_malformed_files_are_user_errors(root: Path, content: bytes, message: str) -> None:
    (root / NAME / BY_CHARACTER).write_bytes(content)
    with pytest.raises(UserError, match=f"{BY_CHARACTER}: .*{message}.*; download the file again") as caught:
        Shakespeare().load()
    assert "\n" not in str(caught.value)


def test_too_few_characters_are_a_user_error(root: Path) -> None:
    with pytest.raises(UserError, match="2 characters have 10 training windows, but 3 clients are requested; lower"):
        Shakespeare(clients=3).load()
    write_plays(root / NAME, {})
    with pytest.raises(UserError, match="0 characters have 10 training windows"):
        Shakespeare().load()
    (root / NAME / BY_CHARACTER).unlink()
    with pytest.raises(UserError, match="run: narrowcast data fetch mit-shakespeare"):
        Shakespeare().load()


@pytest.mark.data(NAME)
def test_the_plays() -> None:
    with lzma.open(download.find(NAME, (BY_CHARACTER,)) / BY_CHARACTER) as file:
        texts = json.load(file)
    assert (len(texts), sum(map(len, texts.values()))) == (1340, 4_322_901)
    lengths = [len([c for c in re.sub(r"[ \t]+", " ", each) if c in VOCABULARY]) for each in texts.values()]
    known = [n - int(0.2 * n) for n in lengths]
    windows = [len(range(0, n - int(0.1 * n) - 80, 8)) for n in known]
    data = Shakespeare(min_examples=100).load()
    assert data.examples.tolist() == [n for n in windows if n >= 100]
    assert data.n_clients == 580
    assert data.train.features.shape == (len(data.train), WINDOW)
    assert data.train.features.dtype == data.train.labels.dtype == np.int64
    assert data.train.features.flags.c_contiguous
    assert np.array_equal(np.sort(data.order), np.arange(len(data.train)))
    first = text(data.train.features[0])
    assert first == "So shaken as we are, so wan with care,\nFind we a time for frighted peace to pant"
    # A blank is the most common character of English text.
    assert VOCABULARY[np.bincount(data.train.labels).argmax()] == " "


@pytest.mark.data(f"{NAME}/full-html.tar.xz")
def test_the_pages_give_the_published_texts() -> None:
    folder = download.find(NAME, (BY_CHARACTER,))
    texts: dict[str, str] = {}
    with tarfile.open(folder / "full-html.tar.xz") as archive:
        for name in sorted(name for name in archive.getnames() if name.endswith("full.html")):
            page = archive.extractfile(name)
            assert page is not None
            texts |= by_character(Path(name).parent.name, page.read().decode("latin-1"))
    with lzma.open(folder / BY_CHARACTER) as file:
        assert texts == json.load(file)
