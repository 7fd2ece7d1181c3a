"""Implicit feedback of published data sets: MovieLens of GroupLens, split leave-last-one-out, and pins on Pinterest."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from narrowcast.platform.config.files import Section
from narrowcast.platform.data.dataset import DataSource
from narrowcast.platform.data.download import find
from narrowcast.platform.data.interactions import Events, Interactions, Validation, leave_one_out
from narrowcast.platform.data.ncf import MOVIELENS, NEGATIVE, TEST, TRAIN, is_ncf, read_columns, read_ncf
from narrowcast.platform.data.sets import PINTEREST
from narrowcast.platform.errors import UserError

MIN_INTERACTIONS = 20
"""Interactions that GroupLens and the published protocol require of every user."""


class _MovieLens(DataSource, Section):
    """Fields shared by the MovieLens sets; three interactions are a test, a validation and a training item."""

    validation: Validation = Field("second_last", description="choice of each user's validation item")
    min_interactions: int = Field(default=MIN_INTERACTIONS, ge=3, description="users with fewer items are dropped")
    seed: int | None = Field(
        None, ge=0, description="seed of the validation items and ranking negatives; null: that of the run"
    )

    def _split(self, name: str, path: Path) -> Interactions:
        layout = MOVIELENS[path.name]
        user, item, _, time = layout.columns
        columns = read_columns(path, (user, item, time), delimiter=layout.delimiter, header=layout.header)
        return leave_one_out(
            name,
            str(path),
            Events(*columns),
            validation=self.validation,
            min_interactions=self.min_interactions,
            seed=self.seed or 0,
        )


class MovieLens100K(_MovieLens):
    """943 users, 1682 items, 100,000 ratings, from `ml-100k.inter` (RecBole) or `u.data` (GroupLens)."""

    kind: Literal["ml-100k"] = "ml-100k"

    def load(self) -> Interactions:
        """Return the interactions; raise `UserError` if the set is missing or malformed."""
        folder = find(self.kind, ("ml-100k.inter", "u.data"))
        recbole = folder / "ml-100k.inter"
        return self._split(self.kind, recbole if recbole.is_file() else folder / "u.data")


class MovieLens1M(_MovieLens):
    """6040 users, 3706 items, 1,000,209 ratings, with NCF's fixed test items and negatives if they are available.

    `layout` "ncf" reads NCF's files, "ratings" splits `ratings.dat`, "auto" takes the first that is found.
    """

    kind: Literal["ml-1m"] = "ml-1m"
    layout: Literal["auto", "ncf", "ratings"] = Field("auto", description="files to read")
    validation: Validation = Field("random", description="choice of each user's validation item")

    def load(self) -> Interactions:
        """Return the interactions; raise `UserError` if the set is missing, malformed or lacks the layout."""
        folder = find(self.kind, (f"{self.kind}{TRAIN}", f"{self.kind}{TRAIN}.gz", "ratings.dat"))
        prefix, ratings = folder / self.kind, folder / "ratings.dat"
        complete = {"ncf": is_ncf(prefix), "ratings": ratings.is_file()}
        layout = next((name for name in complete if complete[name] and self.layout in (name, "auto")), None)
        if layout is None:
            files = sorted(path.name for path in folder.iterdir())
            raise UserError(
                f'{folder} has {", ".join(files)}, which is not the complete layout "{self.layout}"; '
                f"use another layout, or move the folder away and run: narrowcast data fetch {self.kind}"
            )
        if layout == "ratings":
            return self._split(self.kind, ratings)
        if self.min_interactions != MIN_INTERACTIONS:
            raise UserError(
                f"min_interactions is {self.min_interactions}, but NCF's files fix the users; "
                'omit it, or use layout "ratings"'
            )
        return read_ncf(self.kind, prefix, validation=self.validation, seed=self.seed or 0)


class MovieLensLatestSmall(_MovieLens):
    """610 users, 9724 rated items, 100,836 ratings, from `ratings.csv`."""

    kind: Literal["ml-latest-small"] = "ml-latest-small"

    def load(self) -> Interactions:
        """Return the interactions; raise `UserError` if the set is missing or malformed."""
        return self._split(self.kind, find(self.kind, ("ratings.csv",)) / "ratings.csv")


class Pinterest(DataSource, Section):
    """55,187 users, 9916 items, 1,500,809 interactions without times, with NCF's fixed test items and negatives.

    The interactions are pins of users, in the files of Neural Collaborative Filtering.
    """

    kind: Literal["pinterest"] = "pinterest"
    validation: Validation = Field("random", description="choice of each user's validation item")
    seed: int | None = Field(None, ge=0, description="seed of a random validation item; null: that of the run")

    def load(self) -> Interactions:
        """Return the interactions; raise `UserError` if the set is missing or malformed."""
        folder = find(self.kind, (f"{PINTEREST}{TRAIN}", f"{PINTEREST}{TRAIN}.gz"))
        if not is_ncf(folder / PINTEREST):
            files = ", ".join(f"{PINTEREST}{end}" for end in (TRAIN, TEST, NEGATIVE))
            raise UserError(
                f"{folder} lacks one of {files} (plain or .gz); "
                f"move the folder away and run: narrowcast data fetch {self.kind}"
            )
        return read_ncf(self.kind, folder / PINTEREST, validation=self.validation, seed=self.seed or 0)
