"""Ratings of one's own: equal to the built-in sets where they hold the same, and every bad row named."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from pydantic import ValidationError

from narrowcast.laws.data_laws import DATA_LAWS, DataCase
from narrowcast.platform.data import download
from narrowcast.platform.data.interactions import NO_ITEM, Interactions
from narrowcast.platform.data.movielens import MovieLens1M
from narrowcast.platform.data.ratings import Ratings
from narrowcast.platform.errors import UserError


def frame(n_users: int = 12, n_items: int = 150, per_user: int = 8) -> pd.DataFrame:
    """Rows of users 3, 6, ... with distinct items and distinct times, in random order."""
    random = np.random.default_rng(1)
    items = [7 * random.choice(n_items, per_user, replace=False) for _ in range(n_users)]
    times = random.permutation(n_users * per_user) + 1_000_000
    return pd.DataFrame(
        {
            "user": np.repeat(3 * np.arange(1, n_users + 1), per_user),
            "item": np.concatenate(items),
            "stars": random.integers(1, 6, n_users * per_user),
            "timestamp": times,
        }
    )


@pytest.fixture
def ratings(root: Path) -> Path:
    path = root / "shop.csv"
    frame().to_csv(path, index=False)
    return path


def small(path: Path, **fields: Any) -> Ratings:
    return Ratings(path=path, test_negatives=20, **fields)


def check_laws(source: Ratings) -> Interactions:
    case = DataCase(source)
    for law in DATA_LAWS:
        law(case)
    return case.data


def test_ratings_equal_the_built_in_set_of_the_same_content(root: Path) -> None:
    rows = frame(n_users=30, n_items=400, per_user=25)
    (root / "ml-1m").mkdir()
    lines = rows.astype(str).agg("::".join, axis=1)
    (root / "ml-1m" / "ratings.dat").write_text("\n".join(lines) + "\n")
    rows.to_csv(root / "ml-1m.csv", index=False)
    rows.to_csv(root / "ml-1m.tsv", index=False, sep="\t", header=False)
    with gzip.open(root / "ml-1m.csv.gz", "wt") as file:
        rows.to_csv(file, index=False, sep=";")
    rows.assign(user=rows["user"].astype(str)).to_parquet(root / "ml-1m.parquet")
    for fields in ({}, {"validation": "random", "seed": 4}, {"validation": "none"}):
        expected = MovieLens1M.model_validate({"validation": "second_last", **fields, "layout": "ratings"}).load()
        for name, how in (
            ("ml-1m.csv", {}),
            ("ml-1m.tsv", {"header": False, "user": "f0", "item": "f1", "time": "f3"}),
            ("ml-1m.csv.gz", {"delimiter": ";"}),
            ("ml-1m.parquet", {}),
        ):
            assert Ratings.model_validate({"path": root / name, **how, **fields}).load().digest == expected.digest


@pytest.mark.parametrize("kind", ["fractions", "dates", "datetimes"])
def test_times_of_every_form_give_the_same_split(ratings: Path, root: Path, kind: str) -> None:
    rows = frame()
    seconds = rows["timestamp"]
    if kind == "fractions":
        rows["timestamp"] = seconds / 10
    else:
        rows["timestamp"] = pd.to_datetime(seconds * 60, unit="s")
    expected = small(ratings).load()
    rows.to_csv(root / "other.csv", index=False, date_format="%Y-%m-%dT%H:%M:%S" if kind == "dates" else None)
    rows.to_parquet(root / "other.parquet")
    for name in ("other.csv", "other.parquet"):
        assert small(root / name).load().test.tolist() == expected.test.tolist()


def test_ids_are_whole_numbers_if_all_are_and_text_else(ratings: Path, root: Path) -> None:
    data = check_laws(small(ratings))
    assert (data.n_users, data.name, data.negatives.shape) == (12, "shop", (12, 20))
    rows = frame()
    rows["user"] = rows["user"].map("u{:03d}".format)
    rows["item"] = rows["item"].map("{:04d}".format)
    rows.to_csv(root / "text.csv", index=False)
    assert small(root / "text.csv").load().test.tolist() == data.test.tolist()
    row = rows["item"].duplicated(keep=False).idxmax()
    rows.loc[row, "item"] = rows["item"][row].lstrip("0")  # another item than with zeros
    rows.to_csv(root / "text.csv", index=False)
    assert small(root / "text.csv").load().n_items == data.n_items + 1


def test_low_ratings_do_not_count_and_rows_may_be_in_order_of_time(ratings: Path, root: Path) -> None:
    rows = frame()
    liked = rows[rows["stars"] >= 3]
    liked.sort_values("timestamp").to_csv(root / "shop.tsv", index=False, sep="\t", columns=["user", "item"])
    data = check_laws(small(ratings, rating="stars", min_rating=3))
    assert data.digest == small(root / "shop.tsv", time=None).load().digest
    assert len(data.items) == len(liked) - 2 * data.n_users


def test_users_with_few_items_are_left_out_aloud(ratings: Path, caplog: pytest.LogCaptureFixture) -> None:
    with ratings.open("a") as file:
        file.write("99,1001,5,1\n99,1002,5,2\n")
    assert small(ratings).load().n_users == 12
    assert caplog.messages == ["shop: 1 of 13 users have fewer than 3 items (data.min_interactions) and are left out"]
    assert check_laws(small(ratings, min_interactions=2)).n_users == 13


def write_split(root: Path) -> pd.DataFrame:
    """Write train.csv, test.csv and validation.csv: by user, the last row, the one before it, and the others."""
    rows = frame().sort_values(["user", "timestamp"]).reset_index(drop=True)
    from_last = rows.groupby("user").cumcount(ascending=False)
    for name, part in (("test", from_last == 0), ("validation", from_last == 1), ("train", from_last > 1)):
        rows[part].to_csv(root / f"{name}.csv", index=False)
    return rows


def given(root: Path, **fields: Any) -> Ratings:
    return small(root / "train.csv", test_path=root / "test.csv", **fields)


def test_a_given_split_is_kept(root: Path, ratings: Path) -> None:
    write_split(root)
    left_out = small(ratings).load()
    data = check_laws(given(root, validation_path=root / "validation.csv"))
    for name in ("test", "validation", "items", "indptr", "negatives"):
        assert np.array_equal(getattr(data, name), getattr(left_out, name)), name
    assert (check_laws(given(root)).examples == data.examples - 1).all()
    assert (check_laws(given(root, validation="none")).validation == NO_ITEM).all()
    shuffled = pd.read_csv(root / "test.csv").sample(frac=1, random_state=1)
    shuffled[["item", "user"]].to_csv(root / "test.csv", index=False)
    assert given(root, validation_path=root / "validation.csv").load().digest == data.digest


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        ("test", lambda rows: rows.iloc[1:], r"test.csv: has no row of user 3, one of 1 without a test item"),
        ("test", lambda rows: pd.concat([rows, rows.iloc[2:3]]), "user 9 has 2 rows; keep one row for each user"),
        ("validation", lambda rows: rows.assign(user=rows["user"] + 1), "user 4 has no training row, nor .* 12 of 12"),
        ("train", lambda rows: rows.iloc[6:], r"test.csv: user 3 has no training row, nor have the users of 1 of 12"),
    ],
)
def test_bad_splits_are_user_errors(root: Path, file: str, change: Any, message: str) -> None:
    write_split(root)
    path = root / f"{file}.csv"
    change(pd.read_csv(path)).to_csv(path, index=False)
    with pytest.raises(UserError, match=f"^{root}.*{message}"):
        given(root, **({"validation_path": root / "validation.csv"} if file == "validation" else {})).load()


def test_held_out_items_that_are_trained_on_are_refused(root: Path) -> None:
    rows = write_split(root)
    rows.to_csv(root / "train.csv", index=False)
    with pytest.raises(UserError, match=r"test.csv: item \d+ of user 3 is in the training rows too, as are 12 in all"):
        given(root).load()
    write_split(root)
    with pytest.raises(UserError, match=r"test.csv: the item of user 3 is its test item too"):
        given(root, validation_path=root / "test.csv").load()


@pytest.mark.parametrize(
    ("change", "fields", "message"),
    [
        (None, {"user": "buyer"}, r"no column 'buyer', only user, item, stars, timestamp; name .* data.user=COLUMN$"),
        (None, {"time": "when"}, "data.time=COLUMN, or say data.time=null if its rows are in order of time$"),
        (("user,item", "user,user"), {}, "has 2 columns 'user'; rename all but one"),
        (("3,", ",", 5), {}, r"row \d+ has no id in column user \(it has ''\)"),
        ((",1000003", ",soon"), {}, r"row \d+ has no time in column timestamp \(it has 'soon'\); correct or remove"),
        ((",1000003", ","), {}, r"row \d+ has no time in column timestamp \(it has ''\)"),
        ((",1000003", ",1,2"), {}, r"CSV parse error: Row #\d+: Expected 4 columns, got 5"),
        ((",1,1000", ",good,1000"), {"rating": "stars", "min_rating": 2}, r"row \d+ has no number .*\(it has 'good'\)"),
        (None, {"rating": "stars", "min_rating": 9}, "no row has a rating of 9 or more; lower min_rating"),
        (
            None,
            {"delimiter": ";"},
            "no column 'user', only user,item,stars,timestamp; separate .* with data.delimiter=',', or name",
        ),
        (None, {"min_interactions": 30}, r"no user has 30 interactions \(the most is 8\); lower min_interactions"),
        (
            None,
            {"test_negatives": 500},
            r"leaves \d+ of \d+ items to rank against, but 500 are needed.*test_negatives",
        ),
        ("", {}, "is empty; give a file with a header"),
        ("user,item,timestamp\n", {}, "no user has 3 interactions"),
    ],
)
def test_bad_ratings_are_user_errors(ratings: Path, change: Any, fields: dict[str, Any], message: str) -> None:
    if change is not None:
        ratings.write_text(change if isinstance(change, str) else ratings.read_text().replace(*change))
    with pytest.raises(UserError, match=message) as caught:
        Ratings.model_validate({"path": ratings, "test_negatives": 20, **fields}).load()
    assert "\n" not in str(caught.value)
    assert str(ratings) in str(caught.value) or "shop: " in str(caught.value)


def test_bad_parquet_files_are_user_errors(root: Path) -> None:
    path = root / "shop.parquet"
    rows = frame()
    rows.assign(user=rows["user"] / 2).to_parquet(path)
    with pytest.raises(UserError, match=r"column user holds double, but ids are whole numbers or text; convert it"):
        small(path).load()
    rows.astype({"timestamp": "Int64"}).replace({"timestamp": {1_000_003: pd.NA}}).to_parquet(path)
    with pytest.raises(UserError, match=r"row \d+ has no time in column timestamp \(it has None\)"):
        small(path).load()
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(UserError, match=r"shop.parquet: .*; correct the file"):
        small(path).load()


def test_a_missing_file_names_the_folders_searched(root: Path) -> None:
    with pytest.raises(UserError, match=rf"data.path = no.csv does not exist \(looked for .*{root}/no.csv, .*\); give"):
        Ratings(path=Path("no.csv")).load()


def test_files_are_found_below_the_data_folder(ratings: Path) -> None:
    assert small(Path("shop.csv")).load().source == str(ratings)
    assert download.roots()[0] == ratings.parent


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"min_rating": 4}, "min_rating and rating go together"),
        ({"validation_path": "v.csv"}, "validation_path needs test_path"),
        ({"test_path": "t.csv", "validation_path": "v.csv", "validation": "none"}, "so omit validation"),
        ({"test_path": "t.csv", "min_interactions": 5}, "so omit min_interactions"),
        ({"delimiter": "::"}, "at most 1 character"),
    ],
)
def test_fields_that_contradict_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        Ratings.model_validate({"path": "x.csv", **fields})
