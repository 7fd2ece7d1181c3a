"""The pins of Pinterest's users as implicit feedback, in the files of Neural Collaborative Filtering."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from narrowcast.platform.data.fetch import find
from narrowcast.platform.data.interactions import Interactions
from narrowcast.platform.data.leave_one_out import Validation
from narrowcast.platform.data.ncf import NEGATIVE, TEST, TRAIN, is_ncf, read_ncf
from narrowcast.platform.data.sets import PINTEREST
from narrowcast.platform.errors import UserError
from narrowcast.platform.section import Section


class Pinterest(Section):
    """55,187 users, 9916 items, 1,500,809 interactions without times, with NCF's fixed test items and negatives."""

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
