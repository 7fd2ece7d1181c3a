"""Ratings of one's own, from CSV or Parquet files, as implicit feedback with one client per user."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Literal, Self

import numpy as np
from pydantic import Field, model_validator

from narrowcast.platform.data.given_split import given_split
from narrowcast.platform.data.interactions import Interactions
from narrowcast.platform.data.leave_one_out import NEGATIVES, Events, Validation, leave_one_out
from narrowcast.platform.data.numbered_ids import NumberedIds
from narrowcast.platform.data.own_files import located
from narrowcast.platform.data.rating_table import RatingTable, read_rating_table
from narrowcast.platform.data.table_content import Decimal, Delimiter, Dialect, Encoding
from narrowcast.platform.errors import UserError
from narrowcast.platform.section import Section

LEAST_INTERACTIONS = 3
"""A test, a validation and a training item."""

_log = logging.getLogger(__name__)


class Ratings(Section):
    """Interactions of users with items, one per row of a CSV or Parquet file; each user is a client.

    Ids are whole numbers or text. Each user's last item by `time` is its test item, the one before it its validation
    item, unless `test_path` gives the test items. A held-out item is ranked against `test_negatives` items, drawn once
    by `seed` from those that the user has no row of.
    """

    kind: Literal["ratings"] = "ratings"
    path: Path = Field(description="file of the ratings: .csv or .tsv, plain or compressed, or .parquet")
    user: str = Field("user", description="column of the users")
    item: str = Field("item", description="column of the items")
    time: str | None = Field(
        "timestamp", description="column of the times: numbers or ISO 8601 dates; null: rows are in order of time"
    )
    rating: str | None = Field(None, description="column of the ratings, which only min_rating reads")
    min_rating: float | None = Field(None, description="least rating that counts as an interaction; null: every row")
    header: bool = Field(True, description="whether a CSV file names its columns; if not, they are f0, f1, ...")
    delimiter: Delimiter = None
    encoding: Encoding = None
    decimal: Decimal = "."
    test_path: Path | None = Field(None, description="file of the same columns with one test item for every user")
    validation_path: Path | None = Field(
        None, description="file of the same columns with at most one validation item for a user; needs test_path"
    )
    validation: Validation = Field("second_last", description="choice of each user's validation item")
    min_interactions: int = Field(
        default=LEAST_INTERACTIONS, ge=2, description="users with fewer items are dropped; not with test_path"
    )
    test_negatives: int = Field(
        default=NEGATIVES, ge=1, le=10_000, description="number of items that a held-out item is ranked against"
    )
    seed: int | None = Field(
        None, ge=0, description="seed of the validation items and ranking negatives; null: that of the run"
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.min_rating is None) != (self.rating is None):
            raise ValueError("min_rating and rating go together: the least rating, and the column of the ratings")
        if self.validation_path is not None and self.test_path is None:
            raise ValueError("validation_path needs test_path; give the test items too, or neither")
        if self.validation_path is not None and self.validation != "second_last":
            raise ValueError("validation_path has the validation items, so omit validation")
        if self.test_path is not None and self.min_interactions != LEAST_INTERACTIONS:
            raise ValueError("test_path fixes the users, so omit min_interactions")
        return self

    def load(self) -> Interactions:
        """Return the interactions; raise `UserError` if a file is missing or a row cannot be used."""
        paths = {"path": self.path, "validation_path": self.validation_path, "test_path": self.test_path}
        tables = {
            field: self._read(located(path, field), timed=field == "path")
            for field, path in paths.items()
            if path is not None
        }
        users, items = (NumberedIds.of(tables, field) for field in ("user", "item"))
        table = tables["path"]
        liked = np.ones(len(table), dtype=bool)
        if self.min_rating is not None:
            liked = table.numbers("rating") >= self.min_rating
            if not liked.any():
                raise UserError(f"{table.path}: no row has a rating of {self.min_rating:g} or more; lower min_rating")
        times = np.arange(len(table)) if self.time is None else table.times("time")
        events = Events(users.numbers["path"][liked], items.numbers["path"][liked], times[liked])
        name = self.path.name.removesuffix(".gz")
        name = name.rpartition(".")[0] or name
        if self.test_path is None:
            return self._leave_one_out(name, str(table.path), events)
        return given_split(
            name,
            tables,
            events,
            users,
            items,
            validation=self.validation,
            seed=self.seed or 0,
            n_negatives=self.test_negatives,
        )

    def _read(self, path: Path, *, timed: bool) -> RatingTable:
        names = {"user": self.user, "item": self.item}
        if timed and self.time is not None:
            names["time"] = self.time
        if timed and self.rating is not None:
            names["rating"] = self.rating
        return read_rating_table(path, names, Dialect(self.delimiter, self.header, self.encoding, self.decimal))

    def _leave_one_out(self, name: str, source: str, events: Events) -> Interactions:
        data = leave_one_out(
            name,
            source,
            events,
            validation=self.validation,
            min_interactions=self.min_interactions,
            seed=self.seed or 0,
            n_negatives=self.test_negatives,
        )
        n_users = len(np.unique(events.users))
        if data.n_users < n_users:
            _log.warning(
                "%s: %d of %d users have fewer than %d items (data.min_interactions) and are left out",
                name, n_users - data.n_users, n_users, self.min_interactions,
            )  # fmt: skip
        return data
