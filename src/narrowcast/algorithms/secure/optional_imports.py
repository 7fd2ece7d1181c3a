"""Libraries of the extra `he`, imported when they are needed."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from narrowcast.platform.errors import UserError


def library(name: str, wanted_by: str) -> Any:
    """Import the module of this name; raise a `UserError` that names the extra if it is missing."""
    try:
        return import_module(name)
    except ImportError as error:
        raise UserError(f"{wanted_by} needs {name.split('.', maxsplit=1)[0]}; pip install 'narrowcast[he]'") from error
