"""The contract of what a run is recorded with: the name, source, digest and sizes of its data set or problem."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol


class Described(Protocol):
    """The loaded input of a run, a data set or a problem."""

    @property
    def name(self) -> str:
        """The name of the data set or problem."""
        ...

    @property
    def source(self) -> str:
        """The file, site or generator that it comes from."""
        ...

    @property
    def digest(self) -> str:
        """The sha256 of everything that a run can see of it."""
        ...

    @property
    def sizes(self) -> Mapping[str, int]:
        """The sizes to report with a run, such as the number of items, classes or observed entries."""
        ...
