"""Images as the columns of a complete matrix, dealt to clients: data of clustering by factorisation."""

from __future__ import annotations

from typing import Literal

import numpy as np
from pydantic import Field

from narrowcast.platform.data.digits import Digits
from narrowcast.platform.data.idx import MNIST, FashionMNIST
from narrowcast.platform.data.partition import Partition, Shards
from narrowcast.platform.data.rating_matrix import TRAIN, RatingMatrix
from narrowcast.platform.errors import UserError
from narrowcast.platform.section import Section
from narrowcast.platform.seeds import generator

_SETS = {"digits": Digits, "mnist": MNIST, "fashion-mnist": FashionMNIST}


class SampleColumns(Section):
    """The pixels of training images, 0 to 1, as the columns of a matrix of which every entry is observed.

    Classes are never trained on: they tell how well clusters agree with them. By default each client has images of one
    class.
    """

    kind: Literal["sample_columns"] = "sample_columns"
    set: Literal["digits", "mnist", "fashion-mnist"] = Field("digits", description="data set of the images")
    columns: int | None = Field(None, ge=1, description="number of images, drawn at random; null: all for training")
    clients: int = Field(10, ge=1, description="number of clients")
    partition: Partition = Field(Shards(classes_per_client=1), description="distribution of the images across clients")
    seed: int | None = Field(
        None, ge=0, description="seed of the images drawn and of the partition; null: that of the run"
    )

    def load(self) -> RatingMatrix:
        """Return the matrix; raise `UserError` if the set is missing or the partition does not fit it."""
        samples = _SETS[self.set](validation_share=0.0, clients=1).load().train
        seed, count = self.seed or 0, len(samples) if self.columns is None else self.columns
        if count > len(samples):
            raise UserError(f"data.columns = {count}: {self.set} has {len(samples)} training images; use at most these")
        chosen = samples.take(np.sort(generator(seed, "columns").permutation(len(samples))[:count]))
        pixels = chosen.features.reshape(count, -1).astype(np.float64)
        if chosen.features.dtype == np.uint8:
            pixels /= 255
        order, indptr = self.partition.deal(chosen.labels, self.clients, seed)
        owners = np.empty(count, dtype=np.int64)
        owners[order] = np.repeat(np.arange(self.clients), np.diff(indptr))
        if (np.diff(indptr) == 0).any():
            raise UserError(f"data.clients = {self.clients}: a client has no image; use fewer clients")
        n_pixels = pixels.shape[1]
        return RatingMatrix(
            name=f"{self.set} columns",
            source=self.set,
            n_users=count,
            n_items=n_pixels,
            users=np.repeat(np.arange(count), n_pixels),
            items=np.tile(np.arange(n_pixels), count),
            values=pixels.ravel(),
            split=np.full(pixels.size, TRAIN, dtype=np.int8),
            owners=owners,
            labels=chosen.labels,
        )
