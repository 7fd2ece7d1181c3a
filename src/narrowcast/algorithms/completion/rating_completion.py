"""Explicit ratings as a completion problem: the matrix that federated factorisations are trained on, in one place."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from narrowcast.algorithms.completion.completion_problem import LOWER_IS_BETTER, Completion, HeldOut
from narrowcast.algorithms.completion.observed import observe
from narrowcast.platform.data.explicit_ratings import ExplicitRatings


class RatingCompletion(BaseModel):
    """Ratings of items by users: the training ratings are observed, less their mean, and the test ratings held out.

    Ratings for validation are held out too, where the split has some. Rows are items and columns users. Predictions are
    clipped to the range of the training ratings.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    lower_is_better: ClassVar[tuple[str, ...]] = LOWER_IS_BETTER

    kind: Literal["rating_completion"] = "rating_completion"
    ratings: ExplicitRatings = Field(
        ExplicitRatings(set="ml-100k"), description="ratings and their split, as an experiment's data section has them"
    )
    seed: int | None = Field(
        None, ge=0, description="seed of the split, unless `ratings` has its own; null: that of the run"
    )

    def load(self) -> Completion:
        """Return the ratings' problem; raise `UserError` if they cannot be read."""
        ratings = self.ratings
        if ratings.seed is None:
            ratings = ratings.model_copy(update={"seed": self.seed})
        matrix = ratings.load()
        train, test, validation = (matrix.part(split) for split in ("train", "test", "validation"))
        mean = matrix.training_mean
        return Completion(
            matrix.name,
            matrix.source,
            observe(matrix.n_items, matrix.n_users, train.items, train.users, train.values - mean),
            held_out=HeldOut(test.items, test.users, test.values) if len(test.values) else None,
            validation=HeldOut(validation.items, validation.users, validation.values)
            if len(validation.values)
            else None,
            offset=mean,
            bounds=(float(train.values.min()), float(train.values.max())),
        )
