"""The content of a table's file, known by its first bytes: text, plain or compressed, Parquet, or another format."""

from __future__ import annotations

import csv
import io
import zipfile
from codecs import getincrementaldecoder
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Annotated, Any, Literal

import pyarrow as pa
from pydantic import AfterValidator, Field

from narrowcast.platform.errors import UserError

_COMPRESSIONS = {b"\x1f\x8b": "gzip", b"BZh": "bz2", b"\x28\xb5\x2f\xfd": "zstd"}
_WORKBOOK = "is an Excel workbook; save the sheet as CSV UTF-8"
_OTHERS = {
    b"\xd0\xcf\x11\xe0": _WORKBOOK,
    b"ARROW1\0\0": "is an Arrow or Feather file; write the table as Parquet or CSV",
    b"Obj\x01": "is an Avro file; write the table as Parquet or CSV",
    b"\x89HDF": "is an HDF5 file; write the table as Parquet or CSV",
    b"SQLite format 3": "is an SQLite database; export the table as CSV or Parquet",
    b"\x93NUMPY": "is a NumPy array; write a table as CSV or Parquet",
    b"\x80\x02": "is a pickle, which may run code; write the table as CSV or Parquet",
    b"\x80\x03": "is a pickle, which may run code; write the table as CSV or Parquet",
    b"\x80\x04": "is a pickle, which may run code; write the table as CSV or Parquet",
    b"\x80\x05": "is a pickle, which may run code; write the table as CSV or Parquet",
    b"%PDF": "is a PDF document; export the table as CSV",
    b"\xfd7zXZ": "is compressed by xz; unpack it",
    b"7z\xbc\xaf": "is a 7z archive; unpack it",
    b"Rar!": "is a RAR archive; unpack it",
    b"<!doctype": "is a web page; download the file itself",
    b"<html": "is a web page; download the file itself",
    b"<?xml": "is XML; write the table as CSV or Parquet",
    b'{"': "is JSON; write the table as CSV or Parquet",
    b"[{": "is JSON; write the table as CSV or Parquet",
}
"""Files that are not read, by their first bytes in lower case, and what to do."""
_BYTE_ORDER_MARKS = {
    b"\xff\xfe\x00\x00": "utf-32",
    b"\x00\x00\xfe\xff": "utf-32",
    b"\xff\xfe": "utf-16",
    b"\xfe\xff": "utf-16",
}
_ZIP, _PARQUET, _TAR = b"PK\x03\x04", b"PAR1", b"ustar"
_HEAD_BYTES, _MOST_HEADER_BYTES = 4096, 1 << 20


def _text_encoding(value: str | None) -> str | None:
    if value is not None:
        try:
            "a".encode(value)
        except (LookupError, UnicodeError, ValueError):
            raise ValueError("is not an encoding of text; give one such as utf-16, cp1252 or shift_jis") from None
    return value


Delimiter = Annotated[
    str | None,
    Field(min_length=1, max_length=1, description="separator of a CSV file; null: a tab for .tsv, else a comma"),
]
Encoding = Annotated[
    str | None,
    AfterValidator(_text_encoding),
    Field(description="encoding of a CSV file, such as utf-16 or cp1252; null: UTF-8"),
]
Decimal = Annotated[Literal[".", ","], Field(description="decimal mark of the ratings in a CSV file")]


@dataclass(frozen=True)
class Dialect:
    """The dialect of a CSV file: its separator, header, encoding and decimal mark.

    `has_fields`: the experiment can set these, and the names of columns, as errors then say.
    """

    delimiter: str | None = None
    header: bool = True
    encoding: str | None = None
    decimal: str = "."
    has_fields: bool = True

    def advice(self, field: str) -> str:
        """Return the advice to set a field, or to write the file as it is read."""
        return f"set data.{field}" if self.has_fields else "write it in UTF-8, with commas between columns"


def is_parquet(path: Path) -> bool:
    """Return whether a file is Parquet, and not text, by its content.

    Raise `UserError` for a folder, and for a file that is neither.
    """
    if path.is_dir():
        raise UserError(f"{path} is a folder; give the file of the table")
    with path.open("rb") as file:
        start = file.read(len(_PARQUET))
        file.seek(max(0, path.stat().st_size - len(_PARQUET)))
        end = file.read()
    if start == end == _PARQUET:
        return True
    if start.startswith(_ZIP):
        raise UserError(f"{path}: {_of_zip(path)}")
    return False


def _of_zip(path: Path) -> str:
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError):
        return "is a damaged zip archive; write the file again"
    if any(name.startswith("xl/") for name in names):
        return _WORKBOOK
    if "content.xml" in names:
        return "is an OpenDocument spreadsheet; save the sheet as CSV in UTF-8"
    return f"is a zip archive of {', '.join(names[:3]) or 'nothing'}; unpack it"


@contextmanager
def text_stream(path: Path) -> Iterator[Any]:
    """Open a text file, decompressed by its content, as a binary stream of Arrow."""
    with path.open("rb") as file:
        start = file.read(4)
    kind = next((compression for magic, compression in _COMPRESSIONS.items() if start.startswith(magic)), None)
    with pa.input_stream(str(path), compression=kind) as stream:
        yield stream


def check_text(path: Path, dialect: Dialect) -> None:
    """Raise `UserError` if a file is not text in the encoding of the dialect, as far as its first bytes tell."""
    with text_stream(path) as stream:
        head = stream.read(_HEAD_BYTES)
    for magic, advice in _OTHERS.items():
        if head.startswith(magic) or (magic.islower() and head.lstrip().lower().startswith(magic)):
            raise UserError(f"{path}: {advice}")
    if head[257:262] == _TAR:
        raise UserError(f"{path}: is a tar archive; unpack it")
    if dialect.encoding is not None:
        return
    marked = next((encoding for mark, encoding in _BYTE_ORDER_MARKS.items() if head.startswith(mark)), None)
    if marked is None and b"\0" in head:
        even, odd = head[::2].count(0), head[1::2].count(0)
        if 4 * max(even, odd) < len(head) or min(even, odd) > 0:
            raise UserError(f"{path}: has NUL bytes, so it is not text in UTF-8; give a CSV or Parquet file")
        marked = "utf-16-be" if even else "utf-16-le"
    if marked is not None:
        raise UserError(f"{path}: its text is {marked.upper()}, not UTF-8; {dialect.advice(f'encoding={marked}')}")


def header(path: Path, dialect: Dialect, delimiter: str) -> list[str]:
    """Return the names in the first line that is not empty; raise `UserError` if there is none, `UnicodeError`."""
    with text_stream(path) as stream:
        head = stream.read(_MOST_HEADER_BYTES)
    text = getincrementaldecoder(dialect.encoding or "utf-8-sig")().decode(head)
    try:
        names = next((row for row in csv.reader(io.StringIO(text, newline=""), delimiter=delimiter) if row), None)
    except csv.Error as error:
        raise UserError(f"{path}: its header cannot be read ({error}); correct the file") from error
    if names is None:
        raise UserError(f"{path}: is empty; give a file with a header and rows")
    return names


def check_quotes(path: Path, dialect: Dialect, delimiter: str, n_rows: int) -> None:
    """Raise `UserError` if a quote is not closed, so that a value has swallowed the rows after it.

    Arrow does not notice that. Only a file with more lines than rows is read again.
    """
    with text_stream(path) as stream:
        lines = sum(block.count(b"\n") for block in iter(lambda: stream.read(1 << 20), b""))
    if lines <= n_rows + dialect.header:
        return
    with text_stream(path) as stream:
        text = io.TextIOWrapper(stream, dialect.encoding or "utf-8", errors="replace", newline="")
        reader, rows = csv.reader(text, delimiter=delimiter, strict=True), count(1)
        row = 0
        try:
            for row, _ in zip(rows, reader, strict=False):  # noqa: B007 - the row is that of an error
                pass
        except csv.Error as error:
            raise UserError(
                f"{path}: row {row + 1}: {error}; close each quote, and double those within values"
            ) from error
