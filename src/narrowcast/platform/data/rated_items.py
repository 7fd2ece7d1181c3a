"""Users' ratings of items as labelled samples, for networks that predict what a user gives an item."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from narrowcast.platform.data.classification import MOST_CLIENTS, Classification
from narrowcast.platform.data.partition import Natural, Partition
from narrowcast.platform.data.rating_matrix import Entries, ExplicitRatings
from narrowcast.platform.data.samples import Labelled, Samples
from narrowcast.platform.errors import UserError
from narrowcast.platform.seeds import generator
from narrowcast.platform.types import FloatArray, IntArray

_FIELDS_HERE = {"validation_share": 0.0, "validation_last": 0, "clients": None}
"""Fields of `ratings` with the values they keep: the data set has them itself."""


class RatedItems(Classification):
    """Ratings as samples: the feature is the item, the class is what the user gave it, and each user is a client.

    Features [n, 1] are items as int64, numbered from 0. Classes are the different ratings of the set, in ascending
    order, or with `liked_from` whether a rating is at least that. Test samples are those that `ratings` holds out;
    `validation_share` of the others is held out at random.
    """

    kind: Literal["rated_items"] = "rated_items"
    ratings: ExplicitRatings = Field(
        ExplicitRatings(set="ml-100k"), description="ratings and those held out for testing; see explicit_ratings"
    )
    liked_from: float | None = Field(
        None, description="least rating of the second of two classes; null: each rating is a class"
    )
    clients: int | None = Field(
        None, ge=1, le=MOST_CLIENTS, description="number of clients; null: all users with partition natural"
    )
    partition: Partition = Field(default=Natural(), description="distribution of the training samples across clients")

    @model_validator(mode="after")
    def _held_out_once(self) -> Self:
        for field, value in _FIELDS_HERE.items():
            if getattr(self.ratings, field) != value:
                here = "clients" if field == "clients" else "validation_share"
                raise ValueError(f"ratings.{field} is not for rated_items; give data.{here} instead")
        return self

    def load(self) -> Samples:
        """Return the samples; raise `UserError` if a file is missing, a row cannot be used, or a class is all."""
        ratings = self.ratings
        if ratings.seed is None:
            ratings = ratings.model_copy(update={"seed": self.seed})
        matrix = ratings.load()
        clients = matrix.n_users if self.clients is None else self.clients
        known = np.arange(matrix.n_users)
        if self.partition.by_user:
            if clients > matrix.n_users:
                raise UserError(
                    f"{matrix.name} has {matrix.n_users} users, but {clients} clients are requested; lower clients"
                )
            known = np.sort(generator(self.seed or 0, "users").choice(known, clients, replace=False))
        train, test = (_of_users(matrix.part(split), known) for split in ("train", "test"))
        classes = np.unique(self._graded(matrix.values))
        labelled = [
            Labelled(part.items[:, None], np.searchsorted(classes, self._graded(part.values))) for part in (train, test)
        ]
        if len(np.unique(np.concatenate([part.labels for part in labelled]))) < 2:
            raise UserError(f"{matrix.name}: all ratings are of one class; change data.liked_from")
        data = self._dealt(
            matrix.name,
            matrix.source,
            len(classes),
            *labelled,
            clients=clients,
            users=np.searchsorted(known, train.users),
            test_users=np.searchsorted(known, test.users),
        )
        return replace(data, n_items=matrix.n_items)

    def _graded(self, ratings: FloatArray) -> NDArray[Any]:
        """Return the ratings, or whether each is one of what a user likes, [n]."""
        return ratings if self.liked_from is None else ratings >= self.liked_from


def _of_users(part: Entries, known: IntArray) -> Entries:
    """Return the ratings of these users."""
    rows = np.isin(part.users, known)
    return Entries(part.users[rows], part.items[rows], part.values[rows])
