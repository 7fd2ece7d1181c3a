"""Algorithms, codecs, channels, secure aggregation and local training."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any


class _Algorithms(ModuleType):
    """The package, which stands for the namespace of algorithms too, as `nc.algorithms`."""

    def __getattr__(self, name: str) -> Any:
        if not name[:1].isupper():  # a submodule that is not imported yet
            raise AttributeError(f"module 'narrowcast.algorithms' has no attribute '{name}'")
        return getattr(_namespace(), name)

    def __dir__(self) -> list[str]:
        return sorted({*vars(self), *dir(_namespace())})

    def __repr__(self) -> str:
        return repr(_namespace())


def _namespace() -> Any:
    import narrowcast  # the room of the API stands above this one, so it is reached through the package

    return narrowcast.namespace("algorithms")


sys.modules[__name__].__class__ = _Algorithms
