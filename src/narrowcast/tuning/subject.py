"""The subject of a study: the kind of run whose settings it searches, experiments or solves."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Generator, Mapping
from typing import Any, ClassVar

from pydantic import BaseModel

from narrowcast.cluster.ray_backend import RayBackend
from narrowcast.platform.overrides import Defaults
from narrowcast.platform.tracking.metric_direction import Declared, declared_by
from narrowcast.platform.tracking.metric_labels import shares_of


class Subject(ABC):
    """The kind of run of a study: its section, costs and checks, and its trials on a worker."""

    section: ClassVar[str]
    """The section of a study file that has the run."""
    steps: ClassVar[str]
    """The field of the run with its largest number of steps, and their name."""
    costs: ClassVar[Mapping[str, str]]
    """The costs of a trial, and the column of its rows with the cost so far."""
    model: ClassVar[type[BaseModel]]
    """The model of a run."""

    @staticmethod
    @abstractmethod
    def run_trials(batch: Any, shared: Any) -> Generator[Any, Any, None]:
        """Run trials on a worker."""

    @abstractmethod
    def defaults(self, origin: str) -> Defaults:
        """Return the defaults of a run that is read from a file."""

    @abstractmethod
    def build(self, values: dict[str, Any], origin: str) -> Any:
        """Return the validated run."""

    @abstractmethod
    def of_worker(self, run: Any) -> Any:
        """Return the run as a worker runs it, in its own process and without checkpoints to resume from."""

    @abstractmethod
    def identity(self, run: Any) -> dict[str, Any]:
        """Return the dotted values that the results of a trial depend on."""

    @abstractmethod
    def source(self, run: Any) -> Any:
        """Return the data source or the problem of a run, with the run's seed."""

    @abstractmethod
    def load(self, run: Any) -> Any:
        """Read what all workers share; its `data` is the data set or problem."""

    @abstractmethod
    def check(self, run: Any, shared: Any) -> None:
        """Raise `UserError` if the parts of a run do not fit together, as far as that is quick to find out."""

    @abstractmethod
    def check_place(self, run: Any, shared: Any, backend: RayBackend | None, together: int) -> None:
        """Raise `UserError` if workers cannot run trials where they are to, or not so many together."""

    @abstractmethod
    def selectable(self, run: Any, shared: Any) -> tuple[list[str], Collection[str]]:
        """Return the metrics that trials may be chosen by, and all that are measured."""

    @abstractmethod
    def measures(self, run: Any) -> Any:
        """Return the model or problem, which declares its metrics."""

    def declared(self, run: Any) -> Declared:
        """Return the metrics that are declared as better when lower."""
        return declared_by(self.measures(run))

    def shares(self, run: Any) -> Declared:
        """Return the metrics that are declared as shares."""
        return shares_of(self.measures(run))

    @abstractmethod
    def timed(self, run: Any, shared: Any) -> tuple[float, float]:
        """Return the seconds of a step and of an evaluation, from a few of them."""
