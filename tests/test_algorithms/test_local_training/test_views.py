"""Views of images are what their draws say, pixel by pixel, and the same in any batch."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from narrowcast.algorithms.local_training.views import MOST_DRAWS, Views
from narrowcast.platform.seeds import stream_keys, uniform_unit

KEYS = stream_keys(3, "views of a test", 1, np.arange(4))[:, None]
PLACES = np.arange(6)[None]
IMAGES = torch.from_numpy(np.random.default_rng(0).random((4, 6, 2, 9, 8)).astype(np.float32))


def reference(views: Views, client: int, sample: int, *, strong: bool) -> Any:
    """Return a view by loops over pixels, with the angle in place of its half's tangent."""
    draws = uniform_unit(KEYS[client], PLACES[0, sample] * MOST_DRAWS + np.arange(6 + 2 * views.operations))
    image = IMAGES[client, sample].double().numpy()
    _, height, width = image.shape
    across, along = (math.floor(draw * (2 * views.shift + 1)) - views.shift for draw in draws[:2])
    operations = range(views.operations if strong else 0)
    steps = [(int(draws[6 + 2 * step] * 5), 2 * draws[7 + 2 * step] - 1) for step in operations]
    view = np.zeros_like(image)
    for row in range(height):
        for column in range(width):
            y, x = row - (height - 1) / 2 + along, column - (width - 1) / 2 + across
            for operation, strength in steps:
                if operation == 0:
                    angle = 2 * math.atan(math.tan(math.radians(7.5)) * strength)
                    y, x = math.cos(angle) * y + math.sin(angle) * x, math.cos(angle) * x - math.sin(angle) * y
                x += 0.3 * strength * y if operation == 1 else 0
                y += 0.3 * strength * x if operation == 2 else 0
            x = -x if views.flip and draws[2] < 0.5 else x
            source = math.floor(y + height / 2), math.floor(x + width / 2)
            if 0 <= source[0] < height and 0 <= source[1] < width:
                view[:, row, column] = image[:, source[0], source[1]]
    for operation, strength in steps:
        if operation in (3, 4):
            middle = 0.5 * (operation == 4)
            view = middle + (view - middle) * (1 + 0.9 * strength)
    if strong:
        side = math.floor(draws[3] * (views.cutout * min(height, width) + 1))
        top, left = (math.floor(draws[draw] * length) - side // 2 for draw, length in ((5, height), (4, width)))
        view[:, max(top, 0) : max(top + side, 0), max(left, 0) : max(left + side, 0)] = 0.5
    return view


def test_views_are_those_of_a_loop_over_pixels() -> None:
    views = Views(shift=2, flip=True, operations=2, cutout=0.6)
    for strong in (False, True):
        got = (views.strong if strong else views.weak)(IMAGES, KEYS, PLACES)
        wanted = [[reference(views, client, sample, strong=strong) for sample in range(6)] for client in range(4)]
        torch.testing.assert_close(got.double(), torch.from_numpy(np.array(wanted)), rtol=1e-5, atol=1e-6)
        assert (got != IMAGES).flatten(2).any(2).float().mean() > 0.8


def test_a_view_does_not_depend_on_the_batch() -> None:
    views = Views(flip=True)
    for view in (views.weak, views.strong):
        whole = view(IMAGES, KEYS, PLACES)
        alone = [view(IMAGES[c : c + 1, m : m + 1], KEYS[c : c + 1], PLACES[:, m : m + 1]) for c, m in ((0, 0), (3, 5))]
        assert torch.equal(torch.cat(alone), torch.stack([whole[0, :1], whole[3, 5:]]))


def test_without_changes_a_view_is_the_image() -> None:
    still = Views(shift=0, operations=0, cutout=0)
    assert torch.equal(still.weak(IMAGES, KEYS, PLACES), IMAGES)
    assert torch.equal(still.strong(IMAGES, KEYS, PLACES), IMAGES)
