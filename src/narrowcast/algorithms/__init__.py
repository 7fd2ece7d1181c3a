"""Algorithms, codecs, channels, secure aggregation and local training."""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    if not name[:1].isupper():  # a submodule that is not imported yet
        raise AttributeError(f"module 'narrowcast.algorithms' has no attribute '{name}'")
    import narrowcast  # the room of the API stands above this one, so it is reached through the package

    return getattr(narrowcast.namespace("algorithms"), name)


def __dir__() -> list[str]:
    import narrowcast

    return sorted({*globals(), *dir(narrowcast.namespace("algorithms"))})
