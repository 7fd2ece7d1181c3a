"""CSV files that a section names by its field `path`: whether there is one, when it changed, and its numbers."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

from pydantic import model_validator

from narrowcast.platform.config.files import Section
from narrowcast.platform.errors import UserError

Columns = Mapping[str, type[int] | type[float]]
"""The type of the numbers of each column, by its name."""


class CSVFile(Section):
    """A section whose field `path` is a CSV file of numbers, which has to be there.

    The file needs all `columns` and one of the `clocks`, and may have the `optional` ones; `number_advice` is about a
    value that is no number.
    """

    if TYPE_CHECKING:
        path: Path

    columns: ClassVar[Columns]
    clocks: ClassVar[Columns] = {}
    optional: ClassVar[Columns] = {}
    number_advice: ClassVar[str] = "every column must hold a number"

    @model_validator(mode="after")
    def _file_is_there(self) -> Self:
        if not self.path.is_file():
            raise ValueError(f"no file {self.path}; give the path of a CSV file with the columns {self.needed()}")
        return self

    @property
    def stamp(self) -> tuple[int, ...]:
        """The time and the size of the file, a key of its content; raise `UserError` if it is gone."""
        try:
            status = self.path.stat()
        except OSError as error:
            raise UserError(f"{self.path}: cannot be read as a CSV file: {error}") from error
        return status.st_mtime_ns, status.st_size

    @classmethod
    def needed(cls) -> str:
        """Return the names of the columns, as errors give them."""
        return ", ".join(filter(None, [" or ".join(cls.clocks), *cls.columns]))

    @classmethod
    def rows(cls, path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield the place of each row, as `FILE, line N`, and its numbers by column.

        Raise `UserError` for a file that is not a CSV file, lacks a column, or has a value that is no number.
        """
        try:
            with path.open(newline="", encoding="utf-8") as lines:
                reader = csv.DictReader(lines)
                names = {*(reader.fieldnames or ())}
                types = {name: number for name, number in cls.clocks.items() if name in names} | {**cls.columns}
                missing = sorted(cls.columns.keys() - names)
                if cls.clocks and len(types) != len(cls.columns) + 1:
                    missing = [", or no column ".join(cls.clocks) + ", or both of them"]
                if missing:
                    raise UserError(f"{path} has no column {', '.join(missing)}; needed: {cls.needed()}")
                types |= {name: number for name, number in cls.optional.items() if name in names}
                for row in reader:
                    where = f"{path}, line {reader.line_num}"
                    try:
                        numbers = {name: number(row[name]) for name, number in types.items()}
                    except (TypeError, ValueError) as error:
                        raise UserError(f"{where}: {error}; {cls.number_advice}") from error
                    yield where, numbers
        except (OSError, UnicodeDecodeError, csv.Error) as error:
            raise UserError(f"{path}: cannot be read as a CSV file: {error}") from error
