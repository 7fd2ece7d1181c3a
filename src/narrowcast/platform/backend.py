"""The contract of a backend: where a whole run is executed."""

from __future__ import annotations

from collections.abc import Generator
from typing import Protocol

from narrowcast.platform.outcome import Outcome
from narrowcast.platform.run import Run
from narrowcast.platform.state import RunState


class Backend(Protocol):
    """Executes a run: in this process, or on a cluster that it starts or joins."""

    @property
    def kind(self) -> str:
        """The backend's name in the catalog."""
        ...

    def check(self, run: Run) -> None:
        """Raise `UserError` if the backend or the device is not available, before anything is written."""
        ...

    def run(self, run: Run, state: RunState) -> Generator[Outcome, None, None]:
        """Run the rounds after `state` and yield the outcome of each; clean up when the iterator ends or is closed."""
        ...
