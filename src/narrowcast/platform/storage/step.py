"""A step of a run of any kind, a round or an iteration: as the journal and checkpoints see it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Protocol, Self

from narrowcast.platform.types import Arrays

ITERATION = "iteration"
ITERATION_COLUMNS = frozenset(
    (
        *(ITERATION, "residual", "solver_seconds", "step_wall_seconds", "evaluate_wall_seconds"),
        *("wall_seconds", "log_wall_seconds", "logged_at_ms"),
    )
)
"""The columns of an iteration's row of the journal that are not metrics of the problem."""


class KeptState(Protocol):
    """The state of a run of any kind, as checkpoints keep it."""

    step_name: ClassVar[str]
    """The name of a step, `round` or `iteration`."""

    @property
    def step(self) -> int:
        """The last step that is finished."""
        ...

    def packed(self) -> tuple[Arrays, dict[str, str]]:
        """Return the tensors and the metadata of a checkpoint."""
        ...

    @classmethod
    def unpacked(cls, tensors: Arrays, metadata: Mapping[str, str]) -> Self:
        """Return the state of a checkpoint; raise `KeyError` or `ValueError` if it is not one."""
        ...


class Step(Protocol):
    """A recorded round or iteration."""

    @property
    def step(self) -> int:
        """Its number."""
        ...

    @property
    def metrics(self) -> Mapping[str, float]:
        """The metrics measured after it, empty if there was no evaluation."""
        ...

    @property
    def wall_seconds(self) -> float:
        """The time that it took."""
        ...

    @property
    def state(self) -> KeptState | None:
        """The state after it if a checkpoint is due."""
        ...

    def row(self) -> dict[str, Any]:
        """Return its row of the journal, without metrics and the time since the start."""
        ...

    def entry(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Return its line of the journal with the whole row."""
        ...


def arrays_under(prefix: str, tensors: Arrays) -> Arrays:
    """Return the tensors whose names begin with the prefix, by the rest of their names."""
    return {name.removeprefix(prefix): values for name, values in tensors.items() if name.startswith(prefix)}
