"""The common part of finished runs of any kind: folder, content of `result.json`, figures, report, tables and files.

Tables of formatted cells are for a terminal, a page or a paper. Arrays are written in formats whose loading executes no
code.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Generic, Literal, Self, TypeVar

import numpy as np
import pyarrow as pa
from pydantic import BaseModel, ConfigDict
from rich import box
from rich.cells import cell_len
from rich.table import Table
from rich.text import Text

from narrowcast.platform.config.files import validate_result
from narrowcast.platform.config.trust import own_file, read_json
from narrowcast.platform.errors import UserError, printable
from narrowcast.platform.tracking import metrics, units
from narrowcast.platform.tracking.metrics import (
    FractionMetrics,
    TargetCost,
    format_metric,
    is_fraction,
    metric_label,
    relation,
)
from narrowcast.platform.types import Arrays
from narrowcast.runs import html_report
from narrowcast.runs.folder import CONFIG, RESULT, finish_advice, read_table

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

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read `result.json` of a folder; raise `UserError` if it is damaged."""
        path = folder / RESULT
        return validate_result(cls, read_json(path, finish_advice(folder)), str(path))

    def goal(self, target: TargetCost) -> str:
        """Return a target of the run as text, such as `test accuracy ≥ 80 %`."""
        percent = is_fraction(target.metric, self.shares) and target.value <= 1
        value = f"{100 * target.value:g} %" if percent else f"{target.value:g}"
        return f"{metric_label(target.metric)} {relation(target.metric, self.lower_is_better)} {value}"


_FIGURE_TITLES = {
    "accuracy_round": "Test metrics by round",
    "accuracy_uplink": "Test metrics against uplink",
    "accuracy_total": "Test metrics against total traffic",
    "accuracy_time": "Test metrics against simulated time",
    "client_bits_ranks": "Uplink of the clients",
    "loss_time": "Training loss",
    "client_metrics": "Metrics of the clients",
    "error_iteration": "Metrics by iteration",
    "error_time": "Metrics against the time of the solver",
}
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
    run_kind: ClassVar[str]
    step_name: ClassVar[str]
    table: ClassVar[str]
    """The file of the history."""
    columns: ClassVar[tuple[str, ...]]
    """Columns that the history has."""

    @classmethod
    @abstractmethod
    def read_file(cls, folder: Path) -> FileT_co:
        """Read `result.json` alone; raise `UserError` if it is damaged."""

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Read a finished run, or raise one `UserError` that says what is wrong with its folder."""
        if not folder.is_dir():
            raise UserError(f"{folder}: no such folder; give the folder of a run, the one with {RESULT} in it")
        for name in (RESULT, cls.table):
            if not (folder / name).is_file():
                advice = finish_advice(folder) if (folder / CONFIG).is_file() else "give the folder of a run"
                raise UserError(f"{folder}: has no {name}, so it is not a finished {cls.run_kind}; {advice}")
        run = cls(folder, cls.read_file(folder), read_table(folder / cls.table, (cls.step_name, *cls.columns)))
        last = int(metrics.column(run.history, cls.step_name).max(initial=0))
        if last != run.steps:
            raise UserError(
                f"{folder}: {cls.table} ends at {cls.step_name} {last} and {RESULT} at {cls.step_name} {run.steps}, "
                f"so it is not a finished {cls.run_kind}; {finish_advice(folder)}"
            )
        return run

    @property
    @abstractmethod
    def steps(self) -> int:
        """The rounds or iterations that `result.json` has."""

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
                    f"{metric_label(metric)} {format_metric(metric, value, shares)}"
                    for metric, value in metrics.items()
                ),
            )
            for name, metrics in self.baselines.items()
        ]

    @abstractmethod
    def inputs_and_outputs(self) -> list[tuple[str, str]]:
        """Return what the run came from and made, by sha256 or by name, as pairs of a label and a value."""

    def provenance(self) -> list[tuple[str, str]]:
        """Return seed, inputs and outputs, commit and MLflow run, as pairs of a label and a value."""
        origin = [("git commit", self.file.git_commit), ("MLflow run", self.mlflow_run_id)]
        known = [("seed", str(self.seed)), *self.inputs_and_outputs(), *origin]
        return [(label, value) for label, value in known if value]

    def plot(self, figure: str | None = None) -> Figure:
        """Return one of the `figures`, `main_figure` by default."""
        known, wanted = self.figures(), figure or self.main_figure
        if wanted not in known:
            raise UserError(f"{self.name} has no figure {wanted}; it has {', '.join(known)}")
        return known[wanted]

    def report(self, path: str | Path, beside: Iterable[str] = ()) -> Path:
        """Write the run's results, figures and configuration to one HTML file and return its path.

        The parts `beside`, which are HTML, stand between results and figures.
        """
        figures = [
            html_report.section(_FIGURE_TITLES[name], html_report.image(figure, _FIGURE_TITLES[name]))
            for name, figure in self.figures().items()
        ]
        page = html_report.html_page(f"Run {self.name}", self.report_parts([*beside, *figures]))
        return html_report.write_report(page, path)

    def report_parts(self, figures: Iterable[str]) -> list[str]:
        """Return the parts of the report, with these figures, which are HTML."""
        results = html_report.section("Results", html_report.pairs(self.summary()))
        parts = [f"<p>{escape(self.heading)}</p>", results, *figures]
        partition = own_file(self.folder, "partition/partition.png")
        if partition.is_file():
            drawn = html_report.picture(partition.read_bytes(), "data of the clients")
            parts.append(html_report.section("Data of the clients", drawn))
        provenance = html_report.section("Provenance", html_report.pairs(self.provenance()))
        return [*parts, provenance, html_report.configuration(self.folder)]

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


_GAP = 2  # columns of a terminal between two of a table
_LATEX = {
    "\\": r"\textbackslash{}",
    **{character: f"\\{character}" for character in "&%$#_{}"},
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "±": r"$\pm$",
    "≥": r"$\ge$",
    "≤": r"$\le$",
}


@dataclass(frozen=True)
class TextTable:
    """Rows of text under their heads. The first `words` columns are words, the rest numbers; `bold` has (row, column).

    A line break in a head is a hint.
    """

    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    words: int = 1
    bold: frozenset[tuple[int, int]] = field(default_factory=frozenset)
    caption: str = ""

    def fitting(self, width: int) -> Iterator[Table]:
        """Yield tables for a terminal of so many columns, side by side cut into some that fit below each other.

        Each begins with the first column, the names of the rows. No cell is cut; one that is wider alone is folded.
        """
        widths = [
            max(map(_width, (head, *(row[column] for row in self.rows)))) for column, head in enumerate(self.heads)
        ]
        parts: list[list[int]] = [[]]
        for column in range(1, len(self.heads)):
            taken = sum(widths[index] + _GAP for index in (0, *parts[-1], column))
            if parts[-1] and taken - _GAP > width:
                parts.append([])
            parts[-1].append(column)
        for part in parts:
            yield self._terminal_table([0, *part], caption=self.caption if part is parts[-1] else "")

    def _terminal_table(self, columns: Sequence[int], caption: str) -> Table:
        table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0), caption_justify="left")
        for column in columns:
            justify: Literal["left", "right"] = "left" if column < self.words else "right"
            table.add_column(self.heads[column], justify=justify, overflow="fold")
        for row, cells in enumerate(self.rows):
            shown = (Text(cells[column], style="bold" if (row, column) in self.bold else "") for column in columns)
            table.add_row(*shown)
        table.caption = Text(caption) if caption else None
        return table

    def html(self) -> str:
        """Return an HTML table, all text escaped."""
        kinds = ["word" if column < self.words else "number" for column in range(len(self.heads))]
        heads = "".join(f"<th class='{kind}'>{escape(head)}</th>" for kind, head in zip(kinds, self.heads, strict=True))
        rows = []
        for row, cells in enumerate(self.rows):
            shown = [
                f"<td class='{kinds[column]}'>"
                + (f"<b>{escape(cell)}</b>" if (row, column) in self.bold else escape(cell))
                + "</td>"
                for column, cell in enumerate(cells)
            ]
            rows.append(f"<tr>{''.join(shown)}</tr>")
        caption = f"<caption>{escape(self.caption)}</caption>" if self.caption else ""
        return f"<table>{caption}<thead><tr>{heads}</tr></thead><tbody>{''.join(rows)}</tbody></table>"

    def latex(self) -> str:
        """Return a LaTeX tabular for the package booktabs."""
        columns = "l" * self.words + "r" * (len(self.heads) - self.words)
        body = [
            [
                rf"\textbf{{{_latex(cell)}}}" if (row, column) in self.bold else _latex(cell)
                for column, cell in enumerate(cells)
            ]
            for row, cells in enumerate(self.rows)
        ]
        lines = [" & ".join(cells) + r" \\" for cells in (list(map(_latex, self.heads)), *body)]
        head = [rf"\begin{{tabular}}{{{columns}}}", r"\toprule", lines[0], r"\midrule"]
        return "\n".join([*head, *lines[1:], r"\bottomrule", r"\end{tabular}", ""])


@dataclass(frozen=True)
class Column:
    """A column of a table of runs: its head, a cell for each row, and the rows in which it is bold.

    One that is not `usual` is shown only if it is asked for.
    """

    head: str
    cells: Sequence[str]
    word: bool = False
    bold: frozenset[int] = frozenset()
    usual: bool = True


def table_of(columns: Sequence[Column], caption: str = "") -> TextTable:
    """Return a table of these columns, words before numbers."""
    ordered = [*(column for column in columns if column.word), *(column for column in columns if not column.word)]
    bold = frozenset((row, index) for index, column in enumerate(ordered) for row in column.bold)
    rows = list(zip(*(column.cells for column in ordered), strict=True))
    return TextTable([column.head for column in ordered], rows, sum(column.word for column in ordered), bold, caption)


def with_spread(name: str, mean: float, spread: float, shares: FractionMetrics = None) -> str:
    """Return a metric's mean with its standard deviation, if that is known: `68.41 ± 0.30 %`."""
    if not math.isfinite(spread) or not math.isfinite(mean):
        return format_metric(name, mean, shares)
    if is_fraction(name, shares) and 0 <= mean <= 1:
        return f"{100 * mean:.2f} ± {units.format_percent(spread)}"
    return f"{format_metric(name, mean, shares)} ± " + (f"{spread:.2g}" if spread < 99.5 else f"{spread:,.0f}")


def _width(text: str) -> int:
    return max(map(cell_len, text.split("\n")))


def _latex(text: str) -> str:
    return "".join(_LATEX.get(character, character) for character in text.replace("\n", " "))


ModelFormat = Literal["safetensors", "torch"]


def write_arrays(
    arrays: Arrays, path: str | Path, model_format: ModelFormat, metadata: Mapping[str, str] | None = None
) -> Path:
    """Write arrays as safetensors or as a torch state_dict and return the path; raise `UserError` if it fails.

    A state_dict has no place for metadata.
    """
    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if model_format == "safetensors":
            from narrowcast.runs.outputs import write_model

            write_model(arrays, path, metadata)
        else:
            import torch

            torch.save({name: torch.from_numpy(np.array(values)) for name, values in arrays.items()}, path)
    except OSError as error:
        raise UserError(f"cannot write {path} ({error.strerror}); give another file") from error
    return path
