"""Ratings with their stars as a partly observed matrix: sources, splits, clients, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from narrowcast.platform.data.rating_matrix import TEST, TRAIN, VALIDATION, ExplicitRatings, SampleColumns
from narrowcast.platform.errors import UserError
from small_sets import write_inter

ROWS = "user,item,rating,timestamp\nb,7,3.5,30\na,7,1,20\na,9,2,10\nb,9,4,40\na,3,5,30\nb,3,2.5,40\n"


def written(folder: Path, text: str = ROWS) -> Path:
    path = folder / "own.csv"
    path.write_text(text)
    return path


def test_entries_are_in_the_order_of_users_and_times(tmp_path: Path) -> None:
    data = ExplicitRatings(path=written(tmp_path), split="last").load()
    assert data.users.tolist() == [0, 0, 0, 1, 1, 1]
    assert data.items.tolist() == [2, 1, 0, 1, 2, 0]  # of the times 40 and 40 the later row is later
    assert data.values.tolist() == [2, 1, 5, 3.5, 4, 2.5]
    assert data.split.tolist() == [TRAIN, TRAIN, TEST] * 2
    held = ExplicitRatings(path=written(tmp_path), split="last", validation_last=1).load()
    assert held.split.tolist() == [TRAIN, VALIDATION, TEST] * 2


def test_parquet_gives_the_same_matrix(tmp_path: Path) -> None:
    columns = list(zip(*(line.split(",") for line in ROWS.splitlines()[1:]), strict=True))
    table = {"user": columns[0], "item": columns[1], "rating": [float(each) for each in columns[2]]}
    table["timestamp"] = [int(each) for each in columns[3]]
    pq.write_table(pa.table(table), tmp_path / "own.parquet")
    one, other = (
        ExplicitRatings(path=tmp_path / name, seed=3).load() for name in (written(tmp_path).name, "own.parquet")
    )
    for name in ("users", "items", "values", "split", "owners"):
        assert np.array_equal(getattr(one, name), getattr(other, name))


@pytest.mark.data("ml-latest-small")
def test_movielens_by_random_shares() -> None:
    data = ExplicitRatings(set="ml-latest-small", validation_share=0.1, clients=50, seed=1).load()
    assert (data.n_users, data.n_items, data.n_clients, len(data.values)) == (610, 9724, 50, 100_836)
    assert np.bincount(data.split).tolist() == [70_585, 10_084, 20_167]
    assert set(data.values.tolist()) == {each / 2 for each in range(1, 11)}
    assert np.bincount(data.owners).tolist() == [12] * 40 + [13] * 10 or set(np.bincount(data.owners)) == {12, 13}
    assert data.examples.sum() == 70_585
    other = ExplicitRatings(set="ml-latest-small", validation_share=0.1, clients=50, seed=2).load()
    assert other.digest != data.digest


@pytest.mark.data("ml-100k")
def test_ml_100k_has_its_stars() -> None:
    data = ExplicitRatings(set="ml-100k", split="last", test_last=2).load()
    assert (data.n_users, data.n_items, len(data.values)) == (943, 1682, 100_000)
    assert data.values.mean() == pytest.approx(3.52986)
    assert (data.examples_of("test") == 2).all()


@pytest.mark.data("ml-latest-small")
def test_the_excerpt_of_the_released_code_of_sfmf() -> None:
    fields: dict[str, Any] = {"first_users": 10, "top_items": 40, "min_ratings": 5, "split": "last", "test_last": 3}
    data = ExplicitRatings(set="ml-latest-small", **fields).load()
    assert (data.n_users, data.n_items) == (7, 40)
    assert np.bincount(data.split).tolist() == [109, 0, 21]


def test_rows_of_clients_are_their_entries(root: Path) -> None:
    rated, n_items, _ = write_inter(root / "ml-100k").max(axis=0)
    data = ExplicitRatings(set="ml-100k", clients=40, seed=0).load()
    assert (data.n_users, data.n_items) == (rated, n_items)
    assert np.bincount(data.split)[TEST] == round(0.2 * len(data.values))
    entries, (users, items, values) = data.of_clients, data.part("train")
    for client in (0, 17, 39):
        own = slice(int(entries.starts[client]), int(entries.starts[client + 1]))
        rows = entries.items[entries.row_starts[client] : entries.row_starts[client + 1]]
        columns = np.flatnonzero(data.owners == client)
        mine = {(int(u), int(i), float(v)) for u, i, v in zip(users, items, values, strict=True) if u in columns}
        got = zip(columns[entries.columns[own]], rows[entries.rows[own]], entries.values[own], strict=True)
        assert {(int(u), int(i), float(v)) for u, i, v in got} == mine
        assert (np.diff(entries.columns[own]) >= 0).all()


@pytest.mark.parametrize(
    ("text", "fields", "said"),
    [
        (ROWS + "a,7,2,50\n", {}, "user a has several ratings of item 7, the first in row 3; keep one"),
        (ROWS + "a,8,nan,50\n", {}, "row 8 has no number in column rating"),
        (ROWS + "a,8,,50\n", {}, "row 8 has no number in column rating"),
        ("user,item,rating,timestamp\n", {}, "has no ratings"),
        ("user,item,rating,timestamp\na,1,2,3\n", {"split": "last"}, "no rating is left for training"),
        (ROWS, {"min_ratings": 4}, "no user has 4 ratings of the kept items; lower data.min_ratings"),
        (ROWS, {"clients": 3}, "data.clients = 3: there are 2 users"),
        (ROWS, {"rating": "stars"}, "has no column 'stars'"),
        ("%%MatrixMarket", {}, "has no column .user., only %%MatrixMarket"),
        ("5,3\n1,2\n", {}, "has no column 'user', only 5, 3"),
    ],
)
def test_bad_files_are_one_line(tmp_path: Path, text: str, fields: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said) as error:
        ExplicitRatings(path=written(tmp_path, text), **fields).load()
    assert "\n" not in str(error.value)


def test_placeholder_stars_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ml-1m").mkdir()
    (tmp_path / "ml-1m" / "ml-1m.train.rating").write_text("0\t32\t4\t978824330\n")
    monkeypatch.setenv("NARROWCAST_DATA", str(tmp_path))
    with pytest.raises(UserError, match="NCF's files, which hold no stars; move the folder away and run"):
        ExplicitRatings(set="ml-1m").load()
    (tmp_path / "ml-1m" / "ratings.dat").write_text("1::1193::5::978300760\n1::661::3::978302109\n2::661::4::9783\n")
    data = ExplicitRatings(set="ml-1m", test_share=0).load()
    assert sorted(data.values.tolist()) == [3, 4, 5]


def test_one_source_is_asked_for() -> None:
    for fields in ({}, {"set": "ml-100k", "path": "x.csv"}):
        with pytest.raises(ValueError, match="give either set"):
            ExplicitRatings.model_validate(fields)
    with pytest.raises(ValueError, match="leave no training ratings"):
        ExplicitRatings(set="ml-100k", test_share=0.6, validation_share=0.5)


def test_columns_of_digits_are_of_one_class_a_client() -> None:
    data = SampleColumns(columns=300, seed=1).load()
    assert data.labels is not None
    assert (data.n_users, data.n_items, data.is_complete) == (300, 64, True)
    assert all(len(np.unique(data.labels[data.owners == client])) == 1 for client in range(data.n_clients))
    with pytest.raises(UserError, match="has 1437 training images"):
        SampleColumns(columns=2000).load()
