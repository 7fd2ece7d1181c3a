"""The base of prepared runs of any kind: what the recorder needs of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from narrowcast.platform.described import Described
from narrowcast.platform.tracking.journal import Journal
from narrowcast.platform.tracking.store_address import StoreAddress, Tracking

WriteOutputs = Callable[[Journal, Any, str], dict[str, Any]]
"""Writes the outputs of a finished run from its journal, its state and the id of its MLflow run.

Returns the content of `result.json`, which is written last; raises `LearnedNothing` for a run without a result.
"""


class RunConfig(Protocol):
    """The model of a whole run, such as an experiment."""

    @property
    def name(self) -> str:
        """The name of the run."""
        ...

    @property
    def tracking(self) -> Tracking:
        """The MLflow store of the run."""
        ...

    @property
    def checkpoints_kept(self) -> int:
        """The number of checkpoints kept."""
        ...

    @property
    def checkpoint_path(self) -> str | None:
        """The folder of the checkpoints, None for that of the run."""
        ...

    def plain(self) -> dict[str, Any]:
        """Nested plain values, without secrets."""
        ...

    def identity(self) -> dict[str, Any]:
        """Return the dotted values that results depend on."""
        ...

    def digest(self) -> str:
        """Return the sha256 of `identity`."""
        ...


@dataclass(frozen=True, kw_only=True)
class PreparedRun(ABC):
    """A run that has passed every check and has written nothing yet.

    Attributes:
        folder: the folder of the run.
        store: the address of the MLflow store.
        state: the `KeptState` from which the run goes on.
        resuming: True if the folder has a run to go on with.

    """

    folder: Path
    store: StoreAddress
    state: Any
    resuming: bool = False

    @property
    @abstractmethod
    def config(self) -> RunConfig:
        """The model of the whole run."""

    @property
    @abstractmethod
    def input(self) -> Described:
        """The data set or problem."""

    @abstractmethod
    def tags(self) -> dict[str, str]:
        """Return the tags of the run in MLflow."""

    def keep_inputs(self) -> None:
        """Write to the run's folder what a resume needs besides checkpoints: nothing if all follows from `config`."""
        return

    @abstractmethod
    def steps(self) -> Generator[Any, None, None]:
        """Run from `state` on and yield each `Step`."""

    @abstractmethod
    def watch(self, journal: Journal) -> Callable[[Any], None]:
        """Return a function to be called after each step, which logs it and raises `LearnedNothing` for a vain run."""

    @abstractmethod
    def begin_outputs(self) -> WriteOutputs:
        """Begin to draw what does not depend on the run; return the function that writes the outputs."""
