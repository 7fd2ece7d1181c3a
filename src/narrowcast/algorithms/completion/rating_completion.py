"""Explicit ratings as a completion problem: the matrix that federated factorisations are trained on, in one place."""

from __future__ import annotations

import re
from typing import ClassVar, Literal

from pydantic import Field

from narrowcast.algorithms.completion.completion_problem import LOWER_IS_BETTER, Completion, HeldOut
from narrowcast.algorithms.completion.observed import observe
from narrowcast.platform.data.explicit_ratings import ExplicitRatings
from narrowcast.platform.errors import UserError
from narrowcast.platform.models.rating_baselines import biases_of
from narrowcast.platform.section import Section

_FIELD_OF_DATA = re.compile(rf"\bdata\.(?=(?:{'|'.join(ExplicitRatings.model_fields)})\b)")


class RatingCompletion(Section):
    """Ratings of items by users: the training ratings are observed, less their mean, and the test ratings held out.

    Ratings for validation are held out too, where the split has some. Rows are items and columns users. Predictions are
    clipped to the range of the training ratings.
    """

    lower_is_better: ClassVar[tuple[str, ...]] = LOWER_IS_BETTER

    kind: Literal["rating_completion"] = "rating_completion"
    ratings: ExplicitRatings = Field(
        ExplicitRatings(set="ml-100k"), description="ratings and their split, as an experiment's data section has them"
    )
    bias_decay: float | None = Field(
        None,
        ge=0,
        allow_inf_nan=False,
        description="ridge, in ratings, of biases of items and users, which are subtracted too; null: the mean alone",
    )
    seed: int | None = Field(
        None, ge=0, description="seed of the split, unless `ratings` has its own; null: that of the run"
    )

    def load(self) -> Completion:
        """Return the ratings' problem; raise `UserError` if they cannot be read."""
        ratings = self.ratings
        if ratings.seed is None:
            ratings = ratings.model_copy(update={"seed": self.seed})
        try:
            matrix = ratings.load()
        except UserError as error:  # which names the fields as an experiment has them
            raise UserError(_FIELD_OF_DATA.sub("problem.ratings.", str(error))) from error
        train, test, validation = (matrix.part(split) for split in ("train", "test", "validation"))
        mean = matrix.training_mean
        values, biases, shape = train.values - mean, None, (matrix.n_items, matrix.n_users)
        if self.bias_decay is not None:
            biases = biases_of(train.items, train.users, values, shape, self.bias_decay)
            values = values - biases[0][train.items] - biases[1][train.users]
        return Completion(
            matrix.name,
            matrix.source,
            observe(*shape, train.items, train.users, values),
            held_out=HeldOut(test.items, test.users, test.values) if len(test.values) else None,
            validation=HeldOut(validation.items, validation.users, validation.values)
            if len(validation.values)
            else None,
            offset=mean,
            biases=biases,
            bounds=matrix.training_range,
            ratings=matrix,
        )
