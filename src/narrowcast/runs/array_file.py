"""Writing arrays by name to a file of the user's choice, in a format whose loading executes no code."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import numpy as np

from narrowcast.platform.errors import UserError
from narrowcast.platform.types import Arrays

ModelFormat = Literal["safetensors", "torch"]


def write_arrays(
    arrays: Arrays, path: str | Path, model_format: ModelFormat, metadata: Mapping[str, str] | None = None
) -> Path:
    """Write arrays as safetensors or as a torch state_dict and return the path; raise `UserError` if it fails.

    A state_dict has no place for metadata.
    """
    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if model_format == "safetensors":
            from narrowcast.runs.outputs import write_model

            write_model(arrays, path, metadata)
        else:
            import torch

            torch.save({name: torch.from_numpy(np.array(each)) for name, each in arrays.items()}, path)
    except OSError as error:
        raise UserError(f"cannot write {path} ({error.strerror}); give another file") from error
    return path
