"""The common part of finished runs of any kind: their folder, the content of `result.json`, figures and a report."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Generic, TypeVar

import pyarrow as pa
from pydantic import BaseModel, ConfigDict

from narrowcast.platform.errors import UserError, printable
from narrowcast.platform.tracking.metric_direction import relation
from narrowcast.platform.tracking.metric_labels import format_metric, is_share, metric_label
from narrowcast.platform.tracking.targets import TargetCost

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class RunFile(BaseModel):
    """The entries of `result.json` that every kind of run has.

    `final` are the metrics of the last evaluation, `baselines` those of predictions that take no training and no
    solver, by their names. `lower_is_better` and `shares` are None where they follow from the names of the metrics.
    """

    model_config = ConfigDict(frozen=True)

    name: str
    seed: int
    final: Mapping[str, float]
    baselines: Mapping[str, Mapping[str, float]] = {}
    lower_is_better: tuple[str, ...] | None = None
    shares: tuple[str, ...] | None = None
    wall_seconds: float
    mlflow_run_id: str | None = None
    git_commit: str | None = None

    def goal(self, target: TargetCost) -> str:
        """Return a target of the run as text, such as `test accuracy ≥ 80 %`."""
        percent = is_share(target.metric, self.shares) and target.value <= 1
        value = f"{100 * target.value:g} %" if percent else f"{target.value:g}"
        return f"{metric_label(target.metric)} {relation(target.metric, self.lower_is_better)} {value}"


FileT_co = TypeVar("FileT_co", bound=RunFile, covariant=True)


@dataclass(frozen=True, repr=False)
class FinishedRun(ABC, Generic[FileT_co]):
    """A finished run.

    Attributes:
        folder: the run's folder.
        file: the content of `result.json`.
        history: the rounds or recorded iterations as an Arrow table, one row each.

    """

    folder: Path
    file: FileT_co
    history: pa.Table

    main_figure: ClassVar[str]
    """The figure that `plot` returns if none is named."""

    @property
    def name(self) -> str:
        """The run's name."""
        return self.file.name

    @property
    def final(self) -> Mapping[str, float]:
        """The metrics of the last evaluation; of an experiment the training loss of the last round too."""
        return self.file.final

    @property
    def baselines(self) -> Mapping[str, Mapping[str, float]]:
        """The metrics of predictions that take no training, by their names, such as the mean of each user's ratings."""
        return self.file.baselines

    @property
    def wall_seconds(self) -> float:
        """Measured duration of the rounds or iterations."""
        return self.file.wall_seconds

    @property
    def seed(self) -> int:
        """The run's seed."""
        return self.file.seed

    @property
    def mlflow_run_id(self) -> str | None:
        """The id of the run in MLflow."""
        return self.file.mlflow_run_id

    @property
    @abstractmethod
    def heading(self) -> str:
        """The run in a few words, such as `fedavg on digits, 20 rounds`."""

    @abstractmethod
    def figures(self) -> dict[str, Figure]:
        """Return the figures of the run by name."""

    @abstractmethod
    def summary(self) -> list[tuple[str, str]]:
        """Return the summary as pairs of a label and a formatted value."""

    def baseline_rows(self) -> list[tuple[str, str]]:
        """Return the baselines as pairs of a label and their metrics."""
        shares = self.file.shares
        return [
            (
                f"baseline: {name}",
                ", ".join(
                    f"{metric_label(each)} {format_metric(each, value, shares)}" for each, value in found.items()
                ),
            )
            for name, found in self.baselines.items()
        ]

    @abstractmethod
    def provenance(self) -> list[tuple[str, str]]:
        """Return where the run comes from, as pairs of a label and a value."""

    def plot(self, figure: str | None = None) -> Figure:
        """Return one of the `figures`, `main_figure` by default."""
        known, wanted = self.figures(), figure or self.main_figure
        if wanted not in known:
            raise UserError(f"{self.name} has no figure {wanted}; it has {', '.join(known)}")
        return known[wanted]

    def report(self, path: str | Path) -> Path:
        """Write the run's results, figures and configuration to one HTML file and return its path."""
        from narrowcast.runs.html_report import run_report, write_report

        return write_report(run_report(self), path)

    def __repr__(self) -> str:
        head = f"{self.name}: {self.heading}, in {self.folder}"
        lines = [head, *(f"  {label:<20} {value}" for label, value in self.summary())]
        return "\n".join(map(printable, lines))

    def _repr_html_(self) -> str:
        body = "".join(
            f"<tr><th style='text-align:left'>{escape(label)}</th><td style='text-align:left'>{escape(value)}</td></tr>"
            for label, value in self.summary()
        )
        return f"<table><caption>{escape(f'{self.name}: {self.heading}')}</caption>{body}</table>"
