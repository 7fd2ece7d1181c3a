"""`narrowcast data show`: what a data set holds and how it is partitioned, before any run."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from PIL import Image

from command_line import assert_refused, narrowcast
from narrowcast.platform.tracking.partition import FIGURE, TABLE

EXAMPLES = Path(__file__).resolve().parents[2] / "docs" / "examples"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a file of each kind."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NARROWCAST_DATA", str(tmp_path))
    random = np.random.default_rng(0)
    rows = [f"{user},{item},{item}\n" for user in range(9) for item in random.choice(200, 6, replace=False)]
    (tmp_path / "shop.csv").write_text("user,item,timestamp\n" + "".join(rows))
    x, y = random.random((200, 3)), random.random(200)
    np.savez(tmp_path / "sensors.npz", x=x, y=y, devices=np.arange(200) % 8)
    for part in ("train", "test"):
        for kind in ("cat", "dog"):
            (tmp_path / "pets" / part / kind).mkdir(parents=True)
            Image.new("RGB", (4, 3)).save(tmp_path / "pets" / part / kind / "1.png")
    (tmp_path / "mine.yaml").write_text("name: mine\ndata: {kind: digits, clients: 7}\nmodel: mlp\nalgorithm: fedavg\n")
    return tmp_path


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["mine.yaml"], {"name": "digits", "clients": "7", "classes": "10", "features": "[n, 64] float32"}),
        (["fedavg-digits", "data.partition=shards"], {"clients": "200", "classes per client": r"\d to 2, median 2"}),
        (
            ["shop.csv", "data.test_negatives=20"],
            {"users": "9", "clients": "9", "training examples per client": "4 to 4, median 4"},
        ),
        (["sensors.npz", "data.clients=60", "data.partition=quantity"], {"targets": "numbers", "clients": "60"}),
        (["sensors.npz", "data.users=devices"], {"targets": "numbers", "clients": "8"}),
        (["pets", "data.clients=3", "data.validation_share=0"], {"name": "pets", "clients without examples": "1"}),
        ([f"{EXAMPLES}/own_everything.yaml", "data.clients=3", "--trust"], {"name": "two_moons", "clients": "3"}),
    ],
)
def test_data_are_described_and_drawn(words: list[str], expected: dict[str, str], folder: Path) -> None:
    said = narrowcast("data", "show", *words)
    assert said.status == 0, said.err
    for name, value in expected.items():
        pattern = re.escape(value) if value.startswith("[") else value
        assert re.search(rf"^{name} +{pattern} *$", said.out, re.MULTILINE), said.out
    drawn = [path.name for path in folder.glob("partition-*/*")]
    assert sorted(drawn) == sorted([FIGURE, TABLE])
    assert re.search(r"^figure  partition-.*/partition.png$", said.out, re.MULTILINE)


@pytest.mark.slow
def test_every_partition_is_drawn(folder: Path) -> None:
    said = narrowcast("data", "show", "digits", "--every-partition", "--output", "figures")
    assert said.status == 0, said.err
    drawn = ["dirichlet", "iid", "partitions.png", "quantity", "shards", "similarity"]
    assert sorted(path.name for path in (folder / "figures").iterdir()) == drawn
    with Image.open(folder / "figures" / "partitions.png") as overview:
        assert overview.size == (1155, 1485), "two panels for each of five partitions"
    assert "without natural: partition natural: the data set has no users" in said.out
    table = pq.read_table(folder / "figures" / "shards" / TABLE).to_pandas()
    assert ((table.filter(like="class_") > 0).sum(axis=1) <= 2).all()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nothing"], '"nothing" is not an experiment, a file, a folder or a kind of data; kinds: ml-100k, '),
        (["no.csv"], "data.path = no.csv does not exist (looked for "),
        (["digits", "data.clinets=3"], "data.clinets"),
        (["digits", "rounds=3"], "rounds"),
        (
            ["shop.csv", "data.time=when"],
            "has no column 'when', only user, item, timestamp; name the column with data.time=COLUMN",
        ),
        (
            ["shop.csv", "data.test_negatives=20", "--every-partition"],
            "ratings has a client for each user, and no other",
        ),
        (["ratings"], "data.path is missing"),
    ],
)
def test_what_is_no_data_is_refused(words: list[str], message: str, folder: Path) -> None:
    before = set(folder.iterdir())
    assert_refused(narrowcast("data", "show", *words), message)
    assert set(folder.iterdir()) <= {*before, folder / "partition-shop"}
