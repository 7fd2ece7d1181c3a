"""The data set or problem that the trials of a worker share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

_MOST_OTHERS = 4


@dataclass(frozen=True)
class SharedSource:
    """The data that all workers share, and the source from which they were loaded.

    Other seeds and parameters may have other sources, of which a worker keeps what it loaded last.
    """

    source: Any
    data: Any
    others: list[tuple[Any, Any]] = field(default_factory=list, repr=False, compare=False)

    def loaded(self, source: Any) -> Any:
        """Return what is loaded from a source, which is loaded here unless it is known."""
        known = [(self.source, self.data), *self.others]
        found = next((data for its_source, data in known if its_source == source), None)
        if found is None:
            found = source.load()
            self.others[:] = [*self.others[1 - _MOST_OTHERS :], (source, found)]
        return found
