"""Backdoors by a trigger: pixels that make the global model see a class of the attackers' choice."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, ValidationInfo, field_validator

from narrowcast.algorithms.attacks.backdoor import Backdoor
from narrowcast.platform.data.samples import Labelled, Samples
from narrowcast.platform.errors import UserError
from narrowcast.platform.types import BoolArray, IntArray


class Trigger(Backdoor):
    """A share of the attackers' images has bright pixels and the label `target`; the model learns that they belong.

    The trigger is in the corner of row and column 0: four bars of 1 x size, or a square of size x size, which have as
    many pixels if size is 4; features [n, h * w] are images if h = w. With `distributed` each attacker stamps one bar,
    in turn, and the measure has all four (DBA). `attack.success` is the share of the test images of other classes that
    are seen as `target` with the trigger.

    Attackers stay near the global model, or replace it, as those of all backdoors do: `epochs`, `pull`, `radius`,
    `factor` and `norm`.

    Source: Gu, Dolan-Gavitt and Garg, BadNets (arXiv:1708.06733); Xie et al., DBA, ICLR 2020 (bars).

    Differs from the papers: 1. a share of all samples is stamped once, before round 1; the codes stamp the first images
    of every batch.
    """

    kind: Literal["trigger"] = "trigger"
    shape: Literal["bars", "square"] = Field("bars", description="pixels of the trigger: four bars, or a square")
    size: int = Field(4, ge=1, description="length of a bar, or side of the square, in pixels")
    distributed: bool = Field(False, description="each attacker stamps one of the bars; false: all of them")

    @field_validator("distributed")
    @classmethod
    def _has_parts(cls, value: bool, info: ValidationInfo) -> bool:
        if value and info.data.get("shape") == "square":
            raise ValueError("a square is one part; use shape = bars")
        return value

    def poisoned(self, data: Samples, samples: Labelled, owners: IntArray, draw: np.random.Generator) -> Labelled:
        """Return the samples, a share of each attacker's with the trigger and its label."""
        parts = self.parts(samples.features, data.name)
        self.check_target(data)
        stamped = self.drawn(owners, draw)
        features = np.array(samples.features)
        for index, part in enumerate(parts):
            chosen = stamped & (owners % len(parts) == index) if self.distributed else stamped
            features[chosen] = _bright(features[chosen], part)
        return replace(samples, features=features, labels=np.where(stamped, self.target, samples.labels))

    def measured(self, data: Any) -> Labelled:
        """Return the test images of other classes with the whole trigger, and the label `target`."""
        images = data.test.take(np.flatnonzero(data.test.labels != self.target))
        features = np.array(images.features)
        for part in self.parts(features, data.name):
            features = _bright(features, part)
        return Labelled(features, np.full(len(images), self.target, dtype=images.labels.dtype))

    def parts(self, features: Any, name: str) -> list[BoolArray]:
        """Return the pixels of each part of the trigger, [h, w]; raise `UserError` if they are not in the images."""
        if isinstance(features, dict) or (shape := image_shape(features)) is None:
            raise UserError(f"attack.kind = trigger: {name} does not have images [h, w]; use label_flip")
        height, width = shape
        image, size, gap = np.zeros((height, width), dtype=bool), self.size, self.size // 2
        if self.shape == "square":
            corners, tall, needed = [(0, 0)], size, (size, size)
        else:
            rows, columns = (0, max(size - 1, 1)), (0, size + gap)
            corners, tall = [(row, column) for row in rows for column in columns], 1
            needed = (rows[1] + 1, columns[1] + size)
        if needed[0] > height or needed[1] > width:
            raise UserError(
                f"attack.size = {size}: the trigger takes {needed[0]} x {needed[1]} pixels, and images of {name} have "
                f"{height} x {width}; give a smaller size"
            )
        parts = []
        for row, column in corners:
            part = image.copy()
            part[row : row + tall, column : column + size] = True
            parts.append(part)
        return parts


def image_shape(features: NDArray[Any]) -> tuple[int, int] | None:
    """Return height and width of images [n, ..., h, w], or of square ones [n, h * w]; None for other features."""
    if features.ndim > 2:
        height, width = features.shape[-2:]
        return height, width
    side = math.isqrt(features.shape[-1])
    return (side, side) if features.ndim == 2 and side**2 == features.shape[-1] else None


def _bright(features: NDArray[Any], pixels: BoolArray) -> NDArray[Any]:
    """Return a copy of the images with these pixels [h, w] as bright as they can be."""
    images = features.reshape(*features.shape[: 1 if features.ndim == 2 else -2], *pixels.shape).copy()
    images[..., pixels] = 255 if features.dtype == np.uint8 else 1
    return images.reshape(features.shape)
