"""Finished runs read back from their folders, side by side."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from matplotlib.figure import Figure
from pydantic import BaseModel, ConfigDict
from rich import box
from rich.table import Table
from rich.text import Text

from narrowcast.platform.config import validate
from narrowcast.platform.errors import UserError
from narrowcast.platform.tracking import run_plots as plots
from narrowcast.platform.tracking import units
from narrowcast.platform.tracking.metric_direction import relation
from narrowcast.platform.tracking.targets import Reached

_COLOURS = (plots.BLUE, plots.VERMILLION, plots.GREEN, plots.PURPLE, plots.ORANGE, plots.BLACK)
_DASHES = ("-", "--", ":")
_NUMBER_HEADERS = (
    "uplink",
    "of full\nmodel",
    "downlink",
    "simulated\ntime",
    "wall\ntime",
)
_LEGEND_CHARACTERS = 130  # what one row of the figure's legend holds


class Best(BaseModel):
    """The best value of a metric and the round that had it."""

    model_config = ConfigDict(frozen=True)

    value: float
    round: int


class RunResult(BaseModel):
    """What is read of `result.json`; `full_uplink_bits` is what the whole model in float32 would have weighed."""

    model_config = ConfigDict(frozen=True)

    name: str
    algorithm: str
    data: str
    seed: int
    rounds: int
    final: Mapping[str, float]
    best: Mapping[str, Best]
    targets: tuple[Reached, ...] = ()
    uplink_bits: int
    downlink_bits: int
    full_uplink_bits: int
    simulated_seconds: float
    wall_seconds: float
    model_sha256: str


@dataclass(frozen=True)
class RunSummary:
    """A finished run: its folder, its result and its rows of `rounds.parquet`."""

    folder: Path
    result: RunResult
    history: pa.Table


def load_run(folder: Path) -> RunSummary:
    """Read a finished run, or raise one `UserError` that says what is wrong with its folder."""
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder; give the folder of a run, the one with result.json in it")
    for name in ("result.json", "rounds.parquet"):
        if not (folder / name).is_file():
            raise UserError(f"{folder}: has no {name}, so it is no finished run; {_finish(folder)}")
    result = _read_result(folder / "result.json")
    history = _read_history(folder / "rounds.parquet")
    played = int(plots.column(history, "round").max(initial=0))
    if played != result.rounds:
        raise UserError(
            f"{folder}: rounds.parquet ends at round {played} and result.json at round {result.rounds}, "
            f"so it is no finished run; {_finish(folder)}"
        )
    return RunSummary(folder, result, history)


def _read_result(path: Path) -> RunResult:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: unreadable ({_first_line(error)}); {_finish(path.parent)}") from error
    return validate(RunResult, content, str(path))


def _read_history(path: Path) -> pa.Table:
    try:
        # Without partitioning=None a folder called lr=0.1 would become a column.
        history = pq.read_table(path, partitioning=None)
    except (OSError, pa.ArrowException) as error:
        raise UserError(f"{path}: unreadable ({_first_line(error)}); run the experiment again") from error
    needed = ("round", plots.UPLINK.column, plots.TIME.column)
    if missing := [name for name in needed if name not in history.column_names]:
        raise UserError(f"{path}: has no column {', '.join(missing)}; run the experiment again")
    return history


def _finish(folder: Path) -> str:
    return f"let it finish or go on with: narrowcast run --resume {folder.name} --output {folder.parent}"


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


@dataclass(frozen=True)
class Comparison:
    """Runs as the rows of a table and the lines of a figure."""

    runs: tuple[RunSummary, ...]

    def labels(self) -> list[str]:
        """The runs' names, with the folder where two runs share a name."""
        names = [run.result.name for run in self.runs]
        return [
            name if names.count(name) == 1 else f"{name} ({run.folder})"
            for name, run in zip(names, self.runs, strict=True)
        ]

    def table(self) -> Table:
        """One row a run, with the best accuracy on each data set in bold."""
        table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0), caption_justify="left")
        table.add_column("run", overflow="fold")
        for header in ("algorithm", "data"):
            table.add_column(header, no_wrap=True)
        measured = self._measured()
        headers = ["rounds", *(f"test\n{plots.METRICS[metric][0]}" for metric in measured), *_NUMBER_HEADERS]
        for header in headers:  # left to wrap: in a narrow terminal a number must not be cut
            table.add_column(header, justify="right", overflow="fold")
        best: dict[str, float] = {}
        for run in self.runs:
            best[run.result.data] = max(best.get(run.result.data, 0.0), _accuracy(run))
        for label, run in zip(self.labels(), self.runs, strict=True):
            result = run.result
            table.add_row(
                Text(label),
                Text(result.algorithm),
                Text(result.data),
                str(result.rounds),
                *(
                    Text(
                        units.format_percent(result.final.get(f"test.{metric}")),
                        style="bold" if metric == _primary(run) and 0 < _accuracy(run) == best[result.data] else "",
                    )
                    for metric in measured
                ),
                units.format_bits(result.uplink_bits),
                units.format_ratio(result.uplink_bits, result.full_uplink_bits),
                units.format_bits(result.downlink_bits),
                units.format_seconds(result.simulated_seconds),
                units.format_seconds(result.wall_seconds),
            )
        if len(best) > 1:
            table.caption = Text(f"Different data sets ({', '.join(best)}): accuracy compares only within one.")
        return table

    def targets_table(self) -> Table | None:
        """One row a run and target, with what it took to get there; None where no run had one."""
        if not any(run.result.targets for run in self.runs):
            return None
        table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
        table.add_column("run", overflow="fold")
        for header in ("target", "rounds", "uplink", "simulated\ntime"):
            table.add_column(header, justify="right", overflow="fold")
        for label, run in zip(self.labels(), self.runs, strict=True):
            for target in run.result.targets:
                table.add_row(Text(label), Text(_goal(target)), *_costs(target))
        return table

    def _measured(self) -> list[str]:
        """The metrics that some run has, the first where none has any."""
        known = list(plots.METRICS)
        return [each for each in known if any(f"test.{each}" in run.result.final for run in self.runs)] or known[:1]

    def draw(self, path: Path) -> None:
        """Write the figure of the runs to a file, in the format that its suffix names."""
        figure = self.figure()
        known = sorted(figure.canvas.get_supported_filetypes())
        if path.suffix.removeprefix(".").lower() not in known:
            raise UserError(f"{path}: not the name of a figure; end it in one of .{', .'.join(known)}")
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=150)

    def figure(self) -> Figure:
        """Test HR@10 or accuracy of each run against its cumulative uplink and against its simulated time."""
        names = list(dict.fromkeys(plots.METRICS[_primary(run)][0] for run in self.runs))
        shown = f"test {' and '.join(names)}"
        figure, panels = plots.new_figure(f"{shown[0].upper()}{shown[1:]} against uplink and simulated time", panels=2)
        labels = self.labels()
        for cost, axes in zip((plots.UPLINK, plots.TIME), panels, strict=True):
            curves = [plots.curve(run.history, cost, f"test.{_primary(run)}") for run in self.runs]
            spent = [x[-1] for x, _ in curves if len(x)]
            if not spent:
                raise UserError(f"none of the runs measured {shown}; give at least one that was evaluated")
            logarithmic = cost is plots.UPLINK
            unit = units.axis_unit(cost.units, float(np.median(spent) if logarithmic else max(spent)))
            for index, (x, y) in enumerate(curves):
                dashes = _DASHES[index // len(_COLOURS) % len(_DASHES)]
                line = axes.plot(x / unit.size, 100 * y, dashes, linewidth=1.5, label=labels[index])[0]
                line.set(color=_COLOURS[index % len(_COLOURS)], marker=plots.marker(x), markersize=3)
            if logarithmic:
                plots.log_axis(axes, np.concatenate([x[x > 0] for x, _ in curves]) / unit.size)
            else:
                axes.set_xlim(-0.02 * max(spent) / unit.size, 1.03 * max(spent) / unit.size or 1)
            axes.set(xlabel=f"{cost.label} ({unit.symbol})", ylabel=f"{shown} (%)")
        columns = min(len(labels), max(1, _LEGEND_CHARACTERS // (max(map(len, labels)) + 8)))
        figure.set_figheight(figure.get_figheight() + 0.2 * -(-len(labels) // columns))
        legend = figure.legend(
            panels[0].lines, labels, loc="outside lower center", ncols=columns, fontsize=9, frameon=False
        )
        for text in legend.get_texts():
            text.set_parse_math(False)
        return figure


def compare(folders: Sequence[Path]) -> Comparison:
    """Read the runs of some folders, in the order given."""
    if not folders:
        raise UserError("no runs to compare; give the folder of at least one finished run")
    return Comparison(tuple(load_run(folder) for folder in folders))


def _primary(run: RunSummary) -> str:
    """The metric that a run is judged by: the first that it measured."""
    return next((metric for metric in plots.METRICS if f"test.{metric}" in run.result.final), "hr@10")


def _accuracy(run: RunSummary) -> float:
    return run.result.final.get(f"test.{_primary(run)}", 0.0)


def _goal(target: Reached) -> str:
    return f"{target.metric} {relation(target.metric)} {target.value:g}"


def _costs(target: Reached) -> tuple[str, str, str]:
    """Rounds, uplink and simulated time to a target; dashes where it was not reached."""
    if target.rounds_to is None or target.uplink_bits_to is None or target.simulated_seconds_to is None:
        return (units.NOT_KNOWN,) * 3
    return (
        str(target.rounds_to),
        units.format_bits(target.uplink_bits_to),
        units.format_seconds(target.simulated_seconds_to),
    )


def result_table(summary: RunSummary) -> Table:
    """What `narrowcast run` prints at its end, in two columns."""
    result = summary.result
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for split in ("test", "validation"):
        for metric, (label, _) in plots.METRICS.items():
            name = f"{split}.{metric}"
            if name in result.final:
                best = result.best.get(name)
                beside = f" (best {units.format_percent(best.value)} in round {best.round})" if best else ""
                table.add_row(f"{split} {label}", units.format_percent(result.final[name]) + beside)
    for target in result.targets:
        rounds, uplink, time = _costs(target)
        cost = "not reached" if target.rounds_to is None else f"after {time}, {uplink} uplink, {rounds} rounds"
        table.add_row(_goal(target), cost)
    share = units.format_ratio(result.uplink_bits, result.full_uplink_bits)
    table.add_row("uplink", f"{units.format_bits(result.uplink_bits)} ({result.uplink_bits:,} bits)")
    table.add_row("of full model", f"{share} of {units.format_bits(result.full_uplink_bits)}")
    table.add_row("downlink", units.format_bits(result.downlink_bits))
    table.add_row("simulated time", units.format_seconds(result.simulated_seconds))
    table.add_row("wall time", units.format_seconds(result.wall_seconds))
    table.add_row("seed", str(result.seed))
    table.add_row("model sha256", result.model_sha256[:12])
    return table
