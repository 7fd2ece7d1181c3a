"""Weak and strong views of images: what a model should not see as another image, drawn from keyed streams.

A view of an image follows from its key and the place of its draws alone, whatever the other images of a batch. Pixels
are taken from the nearest place and no value is a sum over pixels, so that it is the same bit for bit in any batch.

References: Sohn et al., FixMatch, NeurIPS 2020 (arXiv:2001.07685), section 2.3; Cubuk et al., RandAugment, 2020
(arXiv:1909.13719); DeVries and Taylor, Improved Regularization with Cutout, 2017 (arXiv:1708.04552).
"""

from __future__ import annotations

from typing import Literal, get_args

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from narrowcast.platform.config.files import Section
from narrowcast.platform.seeds import Words, uniform_unit
from narrowcast.platform.types import IntArray

Operation = Literal["rotate", "shear_x", "shear_y", "brightness", "contrast"]
_OPERATIONS = get_args(Operation)
_TURN, _SHEAR, _LIGHT = 0.13165249758739583, 0.3, 0.9
"""The largest tangent of half an angle, of 15 degrees in all; the largest shear; the largest change of a factor."""
_GREY = 0.5
MOST_DRAWS = 32
"""The draws that are set aside for a view."""
_SHIFT_X, _SHIFT_Y, _FLIP, _SIDE, _CENTRE_X, _CENTRE_Y, _FIRST = 0, 1, 2, 3, 4, 5, 6
MOST_OPERATIONS = (MOST_DRAWS - _FIRST) // 2


class Views(Section):
    """A weak view is shifted and, if `flip`, mirrored at random; a strong one is changed by operations besides.

    Both are shifted by up to `shift` pixels along each side; where no pixel comes to lie, the image is 0. The strong
    view is also changed by `operations` of five, drawn with replacement, each of a strength drawn up to its largest:
    rotation (15 degrees), shear along either side (0.3), brightness and contrast (factors 0.1 to 1.9). Then a square of
    a drawn side, up to `cutout` of the image's shorter one, is made grey. Values are those of images from 0 to 1, and
    may leave that range.
    """

    shift: int = Field(2, ge=0, description="most pixels by which a view is shifted along each side")
    flip: bool = Field(False, description="mirror half of the views from left to right")
    operations: int = Field(2, ge=0, le=MOST_OPERATIONS, description="operations on a strong view")
    cutout: float = Field(0.5, ge=0, le=1, description="largest side of the grey square, as a share of the image's")

    def weak(self, images: Tensor, keys: Words, places: IntArray) -> Tensor:
        """Return a weak view of images [a, m, channels, height, width] from the keys [a, 1] at `places` [a, m]."""
        return self._moved(images, *self._drawn(images, keys, places), strong=False)

    def strong(self, images: Tensor, keys: Words, places: IntArray) -> Tensor:
        """Return a strong view of images [a, m, channels, height, width] from the keys [a, 1] at `places` [a, m]."""
        draws, operations = self._drawn(images, keys, places)
        moved = self._moved(images, draws, operations, strong=True)
        for place in range(self.operations):
            chosen, strength = operations[..., place], draws[..., _FIRST + 2 * place + 1] * 2 - 1
            for name, around in (("brightness", 0.0), ("contrast", _GREY)):
                factor = torch.where(chosen == _OPERATIONS.index(name), 1 + _LIGHT * strength, 1.0)
                factor = factor.to(moved.dtype)[..., None, None, None]
                # adding and subtracting rounds: images that are not chosen stay as they are
                moved = torch.where(factor == 1, moved, around + (moved - around) * factor)
        return self._with_square(moved, draws)

    def _drawn(self, images: Tensor, keys: Words, places: IntArray) -> tuple[Tensor, Tensor]:
        """Return the draws of each view, [a, m, n] from 0 to 1, and its operations by number, [a, m, operations]."""
        used = _FIRST + 2 * self.operations
        draws = uniform_unit(keys[..., None], places[..., None] * MOST_DRAWS + np.arange(used))
        operations = (draws[..., _FIRST::2] * len(_OPERATIONS)).astype(np.int64)
        return torch.from_numpy(draws).to(images.device), torch.from_numpy(operations).to(images.device)

    def _moved(self, images: Tensor, draws: Tensor, operations: Tensor, *, strong: bool) -> Tensor:
        """Return images whose pixels are taken from the nearest of where they come from; 0 from outside."""
        height, width = images.shape[-2:]
        rows = torch.arange(height, dtype=torch.float64, device=images.device)[:, None] - (height - 1) / 2
        columns = torch.arange(width, dtype=torch.float64, device=images.device) - (width - 1) / 2
        across, along = (
            torch.floor(draws[..., draw] * (2 * self.shift + 1)) - self.shift for draw in (_SHIFT_X, _SHIFT_Y)
        )
        y, x = rows + along[..., None, None], columns + across[..., None, None]
        y, x = torch.broadcast_tensors(y, x)
        for place in range(self.operations if strong else 0):
            chosen, strength = operations[..., place], draws[..., _FIRST + 2 * place + 1] * 2 - 1
            amount = {
                name: torch.where(chosen == _OPERATIONS.index(name), largest * strength, 0.0)[..., None, None]
                for name, largest in (("rotate", _TURN), ("shear_x", _SHEAR), ("shear_y", _SHEAR))
            }
            # cosine and sine by the tangent of half the angle: products and quotients round alike at any place
            squares = amount["rotate"] * amount["rotate"]
            cosine, sine = (1 - squares) / (1 + squares), 2 * amount["rotate"] / (1 + squares)
            y, x = cosine * y + sine * x, cosine * x - sine * y
            x = x + amount["shear_x"] * y
            y = y + amount["shear_y"] * x
        if self.flip:
            x = torch.where(draws[..., _FLIP, None, None] < _GREY, -x, x)
        row, column = torch.floor(y + height / 2).long(), torch.floor(x + width / 2).long()
        inside = (row >= 0) & (row < height) & (column >= 0) & (column < width)
        pixels = (row.clamp(0, height - 1) * width + column.clamp(0, width - 1)).flatten(-2)[..., None, :]
        taken = images.flatten(-2).gather(-1, pixels.expand(*images.shape[:-2], -1)).view(images.shape)
        return torch.where(inside.unsqueeze(-3), taken, 0.0)

    def _with_square(self, images: Tensor, draws: Tensor) -> Tensor:
        height, width = images.shape[-2:]
        side = torch.floor(draws[..., _SIDE] * (self.cutout * min(height, width) + 1))
        inside = []
        for draw, length in ((_CENTRE_Y, height), (_CENTRE_X, width)):
            first = torch.floor(draws[..., draw] * length) - torch.floor(side / 2)
            places = torch.arange(length, dtype=torch.float64, device=images.device)
            inside.append((places >= first[..., None]) & (places < (first + side)[..., None]))
        square = inside[0].unsqueeze(-1) & inside[1].unsqueeze(-2)
        return torch.where(square.unsqueeze(-3), _GREY, images)
