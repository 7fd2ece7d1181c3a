"""Libraries of the extras `he` and `paillier`, imported when they are needed."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from narrowcast.platform.errors import UserError

_PAILLIER = ("phe", "gmpy2")  # an extra of their own, since phe is under the GPL


def library(name: str, wanted_by: str) -> Any:
    """Import the module of this name; raise a `UserError` that names the extra if it is missing."""
    try:
        return import_module(name)
    except ImportError as error:
        package = name.split(".", maxsplit=1)[0]
        extra = "paillier" if package in _PAILLIER else "he"
        raise UserError(f"{wanted_by} needs {package}; pip install 'narrowcast[{extra}]'") from error
