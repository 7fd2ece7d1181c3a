"""Placement of tensors on a device during local training."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

Device = Literal["cpu", "cuda"]
ARRAY_TYPES: Mapping[torch.dtype, type[np.floating[Any]]] = {torch.float32: np.float32, torch.float64: np.float64}
"""numpy's type for each type of parameters."""


def to_tensor(values: NDArray[Any], device: Device) -> Tensor:
    """Return the array as a tensor on the device.

    On a CPU it shares the array's memory unless the array is read-only.
    """
    tensor = torch.from_numpy(values.copy() if not values.flags.writeable else values)
    return tensor if device == "cpu" else tensor.to(device)


def to_array(tensor: Tensor) -> NDArray[Any]:
    """Return the tensor as an array in main memory."""
    return np.asarray(tensor.cpu().numpy())


def batched_attention(device: Device) -> AbstractContextManager[None]:
    """Return a context in which attention is computed from its products.

    The fused kernels of a GPU refuse the strides that clients trained together give them in the backward pass.
    """
    return sdpa_kernel(SDPBackend.MATH) if device == "cuda" else nullcontext()


@contextmanager
def float32_products(device: Device) -> Iterator[None]:
    """Disable TF32 in cuDNN convolutions, which would round the factors of products to ten bits."""
    if device == "cpu":
        yield
        return
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32 = before
