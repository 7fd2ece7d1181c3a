"""Where tensors live while clients train, and how arrays get there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Device = Literal["cpu", "cuda"]


def to_tensor(values: NDArray[Any], device: Device) -> Tensor:
    """The array as a tensor; on a CPU it shares the memory, unless nobody may write there."""
    tensor = torch.from_numpy(values.copy() if not values.flags.writeable else values)
    return tensor if device == "cpu" else tensor.to(device)


def to_array(tensor: Tensor) -> NDArray[Any]:
    """The tensor as an array in main memory."""
    return np.asarray(tensor.cpu().numpy())


@contextmanager
def float32_products() -> Iterator[None]:
    """Keep a GPU from rounding the factors of products to ten bits, which it would do in convolutions."""
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32 = before
