"""The libraries of the extra `he`, or one line that says how to get them."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from narrowcast.platform.errors import UserError


def library(name: str, wanted_by: str) -> Any:
    """The module of this name, or a `UserError` that names the extra."""
    try:
        return import_module(name)
    except ImportError as error:
        raise UserError(f"{wanted_by} needs {name.split('.', maxsplit=1)[0]}; pip install 'narrowcast[he]'") from error
