"""Files of ratings as programs write them: each is the same as plain CSV, or one line that says what to do."""

from __future__ import annotations

import bz2
import gzip
import io
import zipfile
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pydantic import ValidationError

from narrowcast.platform.data.rating_matrix import ExplicitRatings
from narrowcast.platform.data.ratings import Ratings
from narrowcast.platform.errors import UserError

RANDOM = np.random.default_rng(3)
N = 120
USERS = [f"Zoë {user}" for user in np.repeat(np.arange(12), 10)]
ITEMS = [f"i{item}" for item in np.concatenate([RANDOM.choice(40, 10, replace=False) for _ in range(12)])]
STARS = (RANDOM.integers(1, 11, N) / 2).tolist()
TIMES = (1_700_000_000 + RANDOM.permutation(N) * 86_400).tolist()
TABLE = pa.table({"user": USERS, "item": ITEMS, "stars": STARS, "timestamp": TIMES})
DATES = [datetime.fromtimestamp(each, UTC) for each in TIMES]
WITHOUT_ZONE = [each.replace(tzinfo=None) for each in DATES]
ISO = pa.array([each.isoformat() for each in DATES])


def text(delimiter: str = ",", mark: str = ".", title: str = "") -> str:
    rows = [
        delimiter.join([user, item, str(stars).replace(".", mark), str(time), *([title] if title else [])])
        for user, item, stars, time in zip(USERS, ITEMS, STARS, TIMES, strict=True)
    ]
    return "\n".join([delimiter.join([*TABLE.column_names, *(["title"] if title else [])]), *rows, ""])


def loaded(path: Path, **fields: Any) -> Any:
    return Ratings(path=path, test_negatives=5, rating="stars", min_rating=2, **fields).load()


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = tmp_path_factory.mktemp("plain") / "shop.csv"
    path.write_text(text(), encoding="utf-8")
    return loaded(path)


def test_the_plain_file_is_as_pandas_has_it(plain: Any) -> None:
    """The test item of each user is that of the last row with two stars or more."""
    frame = TABLE.to_pandas()
    kept = frame[frame["stars"] >= 2].sort_values("timestamp")
    numbers = {item: number for number, item in enumerate(sorted(set(kept["item"])))}
    last = kept.groupby("user")["item"].last()
    users = sorted(set(USERS))
    assert plain.test.tolist() == [numbers[last[user]] for user in users]


CSV_FILES: dict[str, tuple[str, bytes, dict[str, Any]]] = {
    "UTF-8 with a byte order mark": ("shop.csv", text().encode("utf-8-sig"), {}),
    "Windows line ends": ("shop.csv", text().replace("\n", "\r\n").encode(), {}),
    "old Mac line ends": ("shop.csv", text().replace("\n", "\r").encode(), {}),
    "no last line end": ("shop.csv", text().rstrip("\n").encode(), {}),
    "tabs": ("shop.tsv", text("\t").encode(), {}),
    "semicolons and decimal commas": ("shop.csv", text(";", ",").encode(), {"delimiter": ";", "decimal": ","}),
    "bars": ("shop.csv", text("|").encode(), {"delimiter": "|"}),
    "quotes": ("shop.csv", text().replace("Zoë", '"Zoë').replace(",i", '",i').replace('user",', "user,").encode(), {}),
    "values of several lines": ("shop.csv", text(title='"a ""b""\nc, d"').encode(), {}),
    "stray quotes within values": ("shop.csv", text(title='5" disk').encode(), {}),
    "UTF-16": ("shop.csv", text().encode("utf-16"), {"encoding": "utf-16"}),
    "UTF-16 without a mark": ("shop.csv", text().encode("utf-16-be"), {"encoding": "utf-16-be"}),
    "Latin-1": ("shop.csv", text().encode("latin-1"), {"encoding": "latin-1"}),
    "Windows-1252": (
        "shop.csv",
        text(";", ",").encode("cp1252"),
        {"encoding": "cp1252", "delimiter": ";", "decimal": ","},
    ),
    "gzip": ("shop.csv.gz", gzip.compress(text().encode()), {}),
    "gzip without its suffix": ("shop.csv", gzip.compress(text().encode()), {}),
    "plain with the suffix of gzip": ("shop.csv.gz", text().encode(), {}),
    "bzip2": ("shop.csv.bz2", bz2.compress(text().encode()), {}),
    "tabs in gzip": ("shop.tsv.gz", gzip.compress(text("\t").encode()), {}),
    "Zstandard": ("shop.csv.zst", pa.compress(text().encode(), codec="zstd", asbytes=True), {}),
}


@pytest.mark.parametrize("kind", CSV_FILES)
def test_csv_files_are_read(tmp_path: Path, plain: Any, kind: str) -> None:
    name, content, fields = CSV_FILES[kind]
    (tmp_path / name).write_bytes(content)
    data = loaded(tmp_path / name, **fields)
    for field in ("indptr", "items", "validation", "test", "negatives"):
        assert (getattr(data, field) == getattr(plain, field)).all(), field


def column(name: str, values: Any) -> pa.Table:
    return TABLE.set_column(
        TABLE.column_names.index(name), name, values if isinstance(values, pa.Array) else pa.array(values)
    )


def coded(values: list[str], index: pa.DataType = pa.int32()) -> pa.Array:  # noqa: B008 - a value
    names = sorted(set(values), reverse=True)
    return pa.DictionaryArray.from_arrays(pa.array([names.index(each) for each in values], index), pa.array(names))


PARQUET_FILES: dict[str, pa.Table] = {
    "plain": TABLE,
    "views, as Polars writes text": column("user", pa.array(USERS).cast(pa.string_view())),
    "large text": column("user", pa.array(USERS, pa.large_string())),
    "categories": column("item", coded(ITEMS)),
    "unsigned codes, as Polars' Enum": column("item", coded(ITEMS, pa.uint8())),
    "pandas' categories": pa.Table.from_pandas(TABLE.to_pandas().astype({"user": "category"})),
    "time stamps": column("timestamp", pa.array(DATES, pa.timestamp("us", "UTC"))),
    "time stamps of a zone": column("timestamp", pa.array(DATES, pa.timestamp("ms", "Asia/Tokyo"))),
    "time stamps in seconds": column("timestamp", pa.array(WITHOUT_ZONE, pa.timestamp("s"))),
    "nanoseconds": column("timestamp", pa.array(DATES, pa.timestamp("ns", "UTC"))),
    "dates": column("timestamp", pa.array([each.date() for each in DATES], pa.date32())),
    "dates of 64 bits": column("timestamp", pa.array([each.date() for each in DATES], pa.date64())),
    "times since the first": column("timestamp", pa.array([timedelta(seconds=each - min(TIMES)) for each in TIMES])),
    "unsigned times": column("timestamp", pa.array(TIMES, pa.uint32())),
    "float times": column("timestamp", [each + 0.5 for each in TIMES]),
    "decimal times": column("timestamp", [Decimal(each) for each in TIMES]),
    "text of dates": column("timestamp", ISO),
    "text of dates as views": column("timestamp", ISO.cast(pa.string_view())),
    "decimal stars": column("stars", [Decimal(str(each)) for each in STARS]),
    "float32 stars": column("stars", pa.array(STARS, pa.float32())),
    "text of stars": column("stars", pa.array(list(map(str, STARS))).cast(pa.string_view())),
}


@pytest.mark.parametrize("kind", PARQUET_FILES)
def test_parquet_types_are_read(tmp_path: Path, plain: Any, kind: str) -> None:
    for name in ("shop.parquet", "shop.csv"):  # the content decides
        pq.write_table(PARQUET_FILES[kind], tmp_path / name)
        data = loaded(tmp_path / name)
        assert data.digest == plain.digest


def test_whole_number_ids_of_any_width_are_in_numeric_order(tmp_path: Path) -> None:
    users = [9 + number // 10 * 91 for number in range(N)]  # 9, 100, 191, ...
    digests = set()
    for kind in (pa.int16(), pa.uint32(), pa.int64(), pa.string()):
        pq.write_table(column("user", pa.array(users).cast(kind)), tmp_path / "shop.parquet")
        digests.add(loaded(tmp_path / "shop.parquet").digest)
    assert len(digests) == 1


def missing(name: str, kind: pa.DataType | None = None) -> pa.Table:
    values = TABLE[name].to_pylist()
    values[7] = None
    return column(name, pa.array(values, kind) if kind else pa.array(values))


def dates_with_one_missing() -> pa.Table:
    return column(
        "timestamp", pa.array([None if row == 7 else date for row, date in enumerate(DATES)], pa.timestamp("us"))
    )


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (missing("timestamp"), "row 8 has no time in column timestamp .it has None"),
        (missing("timestamp", pa.float64()), "row 8 has no time"),
        (dates_with_one_missing(), "row 8 has no time"),
        (missing("user"), "row 8 has no id in column user"),
        (missing("stars"), "row 8 has no number in column stars"),
        (
            column("user", list(np.repeat(np.arange(12.0), 10))),
            "column user holds double, but ids are whole",
        ),
        (column("timestamp", pa.array([0] * N).cast(pa.time64("us"))), "holds time64.us., which is not a time; give"),
        (column("timestamp", [True] * N), "holds bool, which is not a time"),
        (column("timestamp", [[1]] * N), "row 1 has no time"),
        (column("user", [b"x"] * N), "column user holds binary"),
    ],
)
def test_other_parquet_columns_are_one_line(tmp_path: Path, table: pa.Table, message: str) -> None:
    pq.write_table(table, tmp_path / "shop.parquet")
    with pytest.raises(UserError, match=message) as caught:
        loaded(tmp_path / "shop.parquet")
    assert "\n" not in str(caught.value)


def zipped(*names: str) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name in names:
            archive.writestr(name, "x")
    return file.getvalue()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (zipped("[Content_Types].xml", "xl/workbook.xml"), "is an Excel workbook; save the sheet as CSV UTF-8"),
        (b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + bytes(600), "is an Excel workbook"),
        (zipped("mimetype", "content.xml"), "is an OpenDocument spreadsheet"),
        (zipped("ratings.csv", "README"), "is a zip archive of ratings.csv, README; unpack it"),
        (zipped("a.csv")[:40], "is a damaged zip archive"),
        (b"ARROW1\0\0" + bytes(100), "is an Arrow or Feather file; write the table as Parquet or CSV"),
        (b"SQLite format 3\0" + bytes(100), "is an SQLite database"),
        (b"\x80\x04\x95" + bytes(100), "is a pickle, which may run code"),
        (b"  <!DOCTYPE html><html>", "is a web page; download the file itself"),
        (b'{"user": [1]}', "is JSON"),
        (gzip.compress(b'[{"user": 1}]'), "is JSON"),
        (gzip.compress(bytes(257) + b"ustar" + bytes(600)), "is a tar archive; unpack it"),
        (text().encode("utf-16"), "its text is UTF-16, not UTF-8; set data.encoding=utf-16"),
        (text().encode("utf-16-le"), "its text is UTF-16-LE, not UTF-8; set data.encoding=utf-16-le"),
        (text().encode("utf-32"), "its text is UTF-32, not UTF-8; set data.encoding=utf-32"),
        (text().encode("latin-1"), "its text is not UTF-8; set data.encoding, such as data.encoding=cp1252"),
        (text().replace("user", "usér").encode("latin-1"), "its text is not UTF-8; set data.encoding"),
        (b"user,item\n\0\0\0,\0\0", "has NUL bytes, so it is not text"),
        (text().encode() + b"Zo\0e,i1,3,1700000000\n", "an id with a NUL byte in column user|has NUL bytes"),
        (text(";").encode(), "separate its columns with data.delimiter=';', or name the column with data.user=COLUMN"),
        (text("\t").encode(), r'separate its columns with data.delimiter="\\t", or name'),
        (b"sep=;\n" + text(";").encode(), "remove its first line, .* and set data.delimiter=';'"),
        (
            text().replace("user", "User").encode(),
            "no column 'user', only User, .*; name the column with data.user=User",
        ),
        (text().replace(",item", ", item").encode(), "name the column with data.item=' item'"),
        (text(";", ",").encode(), "separate its columns with data.delimiter=';'"),
        (text().replace(",i3,", ',"i3,', 1).encode(), "Expected 4 columns"),
        (text(title="x").replace(",x", ',"x', 1).encode(), "row .*: unexpected end of data; close each quote"),
        (text().replace("Zoë 3,", "1.23457E+12,").encode(), "has an id that a spreadsheet has rounded in column user"),
        (text().rpartition(",")[0].encode(), "Expected 4 columns, got 3"),
        (b"", "(?i)empty"),
    ],
    ids=lambda value: value if isinstance(value, str) else "content",  # archives have the time that they were made
)
def test_other_files_are_one_line(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "shop.csv").write_bytes(content)
    with pytest.raises(UserError, match=message) as caught:
        loaded(tmp_path / "shop.csv")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "content", "message"),
    [
        ({"delimiter": ";"}, text(";", ","), r"row 2 has no number \(set data.decimal=','\) in column stars"),
        ({"delimiter": ";", "decimal": ","}, text(";", "."), "has no number in column stars"),
        ({"encoding": "ascii"}, text(), "its text is not ascii; set data.encoding, such as data.encoding=utf-8"),
    ],
)
def test_fields_that_do_not_fit_are_one_line(
    tmp_path: Path, fields: dict[str, Any], content: str, message: str
) -> None:
    (tmp_path / "shop.csv").write_text(content, encoding="utf-8")
    with pytest.raises(UserError, match=message):
        loaded(tmp_path / "shop.csv", **fields)


@pytest.mark.parametrize("encoding", ["utf-99", "base64", "rot13", ""])
def test_an_encoding_is_one_of_text(encoding: str) -> None:
    with pytest.raises((ValidationError, UserError), match="is not an encoding of text"):
        Ratings(path=Path("a.csv"), encoding=encoding)


def test_a_folder_is_no_table(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is a folder; give the file of the table"):
        loaded(tmp_path)


@pytest.mark.parametrize(
    ("users", "n_users"),
    [
        (["1", "01", "1.0", " 1"], 4),
        (["Ann", "ann", "ANN"], 3),
        (["a b", "a  b", "a b "], 3),
        (["\u00e9", "e\u0301"], 2),
        ([str(2**70), str(2**70 + 1)], 2),
    ],
)
def test_ids_are_compared_as_they_are_written(tmp_path: Path, users: list[str], n_users: int) -> None:
    rows = [f"{user},{item},{item}" for user in users for item in range(5)] + [
        f"other,{item},1" for item in range(5, 9)
    ]
    (tmp_path / "ids.csv").write_text("\n".join(["user,item,timestamp", *rows]), encoding="utf-8")
    assert Ratings(path=tmp_path / "ids.csv", test_negatives=1).load().n_users == n_users + 1


def test_explicit_ratings_have_the_same_fields(tmp_path: Path) -> None:
    (tmp_path / "shop.csv").write_bytes(text(";", ",").encode("utf-16"))
    matrix = ExplicitRatings(
        path=tmp_path / "shop.csv", rating="stars", delimiter=";", decimal=",", encoding="utf-16", test_share=0
    ).load()
    frame = pd.DataFrame({"user": USERS, "stars": STARS, "time": TIMES}).sort_values(["user", "time"])
    assert matrix.values.tolist() == frame["stars"].tolist()
