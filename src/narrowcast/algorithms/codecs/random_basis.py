"""Random low-rank bases, which every party regenerates from a seed."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from narrowcast.algorithms.codecs.message_header import FLOAT32
from narrowcast.platform.seeds import generator
from narrowcast.platform.types import Dtype

BasisKind = Annotated[Literal["orthonormal", "gaussian"], Field(description="distribution of the random basis")]
"""`orthonormal`: orthogonal rows of norm sqrt(d / r), the polar factor of a Gaussian matrix, as in the code released
with CoLR; `gaussian`: entries N(0, 1/r), as in the paper's theory (Nguyen et al., WWW 2024, appendix D)."""


def draw_basis(
    kind: BasisKind, rank: int, dimension: int, seed: int, name: str = "", dtype: Dtype = FLOAT32
) -> NDArray[Any]:
    """Return B [r, d] of the tensor `name`; E[B^T B] = I for both kinds."""
    gaussian = generator(seed, kind + name).standard_normal((rank, dimension))
    if kind == "gaussian":
        return (gaussian / rank**0.5).astype(dtype)
    left, _, right = np.linalg.svd(gaussian, full_matrices=False)
    return np.ascontiguousarray(left @ right * (dimension / rank) ** 0.5, dtype=dtype)
