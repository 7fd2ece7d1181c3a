"""The data files that come with scikit-learn, found without the second that importing it takes."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from narrowcast.platform.errors import UserError


def bundled_table(name: str, delimiter: str | None) -> NDArray[np.float64]:
    """Return the numbers of a file that scikit-learn ships; raise `UserError` if that is not installed."""
    found = find_spec("sklearn")
    if found is None or found.origin is None:
        raise UserError(f"{name} comes with scikit-learn, which is not installed; pip install scikit-learn")
    path = Path(found.origin).parent / "datasets/data" / name
    try:
        return np.loadtxt(path, delimiter=delimiter)
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: {error}; install scikit-learn again") from error
