"""Leases of the processes of a study, which need no clock that agrees with another."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Literal

State = Literal["alive", "unsure", "over"]


class Leases:
    """Observes the heartbeats of other processes: a lease is over once its beat has not changed for so many seconds.

    Only this process's own monotonic clock is read. A beat is any value that its process changes every few seconds.
    """

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds, self._clock = seconds, clock
        self._seen: dict[str, tuple[Any, float, bool]] = {}

    def state(self, holder: str, beat: Any) -> State:
        """Return `alive` if the beat has changed within the last seconds, `unsure` if only its first value was seen."""
        now = self._clock()
        before, since, changed = self._seen.get(holder, (beat, now, False))
        if beat != before:
            since, changed = now, True
        self._seen[holder] = beat, since, changed
        if now - since >= self._seconds:
            return "over"
        return "alive" if changed else "unsure"
