"""Images of which some classes are mostly grey in training and the others mostly coloured, and half of each in testing.

Reference: the experiment on data bias of Wang et al., Federated Learning with Matched Averaging, ICLR 2020
(arXiv:2002.06440): grey images are on one client and coloured ones on the other.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from narrowcast.platform.data.image_sets import ImageFolder
from narrowcast.platform.data.partition import index_of_owners
from narrowcast.platform.data.samples import Labelled, Samples, one_array
from narrowcast.platform.seeds import generator
from narrowcast.platform.types import BoolArray, IntArray

_LUMA = np.array([0.299, 0.587, 0.114])
"""Weights of red, green and blue in ITU-R BT.601."""


class GreyImages(ImageFolder):
    """Images of a folder, some of them in grey; features [n, 3, height, width] are uint8.

    Half of the classes, which the seed draws, have the share `grey` of their `samples` training images in grey, the
    others the share 1 - `grey`; of the validation and test images of each class it is a half. Client 0 has the grey
    training images and client 1 the others, or one client has all.
    """

    kind: Literal["narrowcast_papers.fedma.grey_images:GreyImages"] = "narrowcast_papers.fedma.grey_images:GreyImages"  # type: ignore[assignment]
    clients: Literal[1, 2] = 2
    samples: int = Field(3000, ge=1, description="training images, drawn by the seed; others are left out")
    grey: float = Field(0.95, ge=0.5, le=1, description="share of grey images in half of the classes")

    def load(self) -> Samples:
        """Return the images with their colours, dealt to the clients."""
        data, random = super().load(), generator(self.seed or 0, "grey images")
        shares = np.full(data.n_classes, 1 - self.grey)
        shares[random.choice(data.n_classes, data.n_classes // 2, replace=False)] = self.grey
        train = data.train.take(np.sort(random.permutation(len(data.train))[: self.samples]))
        grey = _grey_of_classes(train.labels, shares, random)
        validation, test = (
            _with_grey(each, _grey_of_classes(each.labels, np.full(data.n_classes, 0.5), random))
            for each in (data.validation, data.test)
        )
        order, indptr = index_of_owners(np.where(grey, 0, self.clients - 1), self.clients)
        train = _with_grey(train, grey)
        return replace(data, train=train, validation=validation, test=test, order=order, indptr=indptr)


def _grey_of_classes(labels: IntArray, shares: NDArray[np.float64], random: np.random.Generator) -> BoolArray:
    """Return which images are grey, [n]: of each class its share, rounded."""
    grey = np.zeros(len(labels), dtype=bool)
    for label, share in enumerate(shares):
        rows = random.permutation(np.flatnonzero(labels == label))
        grey[rows[: round(share * len(rows))]] = True
    return grey


def _with_grey(images: Labelled, grey: BoolArray) -> Labelled:
    """Return the images with some of them in grey, which three equal channels hold."""
    features = one_array(images.features).copy()
    luma = np.einsum("c,nchw->nhw", _LUMA, features[grey])
    features[grey] = np.rint(luma).astype(np.uint8)[:, None]
    return Labelled(features, images.labels)
