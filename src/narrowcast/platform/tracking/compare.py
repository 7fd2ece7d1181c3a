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
from narrowcast.platform.tracking.plots import (
    BLACK,
    BLUE,
    GREEN,
    METRICS,
    ORANGE,
    PURPLE,
    TIME,
    UPLINK,
    VERMILLION,
    column,
    curve,
    log_axis,
    marker,
    new_figure,
)
from narrowcast.platform.tracking.units import (
    axis_unit,
    format_bits,
    format_percent,
    format_ratio,
    format_seconds,
)

_COLOURS = (BLUE, VERMILLION, GREEN, PURPLE, ORANGE, BLACK)
_DASHES = ("-", "--", ":")
_LEGEND_CHARACTERS = 130  # what a legend row of the figure holds


class Best(BaseModel):
    """The best value of a metric and the round that had it."""

    model_config = ConfigDict(frozen=True)

    value: float
    round: int


class RunResult(BaseModel):
    """What `result.json` holds; `full_uplink_bits` is what FedMF in fp32 would have sent in the same participations."""

    model_config = ConfigDict(frozen=True)

    name: str
    algorithm: str
    data: str
    seed: int
    rounds: int
    final: Mapping[str, float]
    best: Mapping[str, Best]
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
            raise UserError(
                f"{folder}: has no {name}, so it is no finished run; let the run finish or resume it"
            )
    path = folder / "result.json"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(
            f"{path}: unreadable ({_first_line(error)}); resume the run to write it anew"
        ) from error
    result = validate(RunResult, content, str(path))
    path = folder / "rounds.parquet"
    try:
        history = pq.read_table(path)
        played = int(column(history, "round").max(initial=0))
        curve(history, UPLINK, "test.hr@10")
        curve(history, TIME, "test.hr@10")
    except (OSError, KeyError, pa.ArrowException) as error:
        raise UserError(f"{path}: unreadable ({_first_line(error)}); run the experiment again") from error
    if played != result.rounds:
        raise UserError(
            f"{folder}: rounds.parquet ends at round {played} and result.json at round {result.rounds}, so it is no "
            "finished run; let the run finish or resume it"
        )
    return RunSummary(folder, result, history)


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def compare(folders: Sequence[Path]) -> Comparison:
    """Read the runs of some folders, in the order given."""
    if not folders:
        raise UserError("no runs to compare; give the folder of at least one finished run")
    return Comparison(tuple(load_run(folder) for folder in folders))


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
        """One row a run, with the best HR@10 on each data set in bold."""
        table = Table(box=box.SIMPLE_HEAD, caption_justify="left")
        for header in ("run", "algorithm", "data"):
            table.add_column(header, overflow="fold")
        for header in (
            "rounds",
            "HR@10",
            "NDCG@10",
            "uplink",
            "of full FedMF",
            "downlink",
            "simulated",
            "wall",
        ):
            table.add_column(header, justify="right")
        best: dict[str, float] = {}
        for run in self.runs:
            hit_rate = run.result.final.get("test.hr@10", 0.0)
            best[run.result.data] = max(hit_rate, best.get(run.result.data, 0.0))
        for label, run in zip(self.labels(), self.runs, strict=True):
            result = run.result
            hit_rate = result.final.get("test.hr@10")
            table.add_row(
                Text(label),
                Text(result.algorithm),
                Text(result.data),
                str(result.rounds),
                Text(format_percent(hit_rate), style="bold" if hit_rate == best[result.data] else ""),
                format_percent(result.final.get("test.ndcg@10")),
                format_bits(result.uplink_bits),
                format_ratio(result.uplink_bits, result.full_uplink_bits),
                format_bits(result.downlink_bits),
                format_seconds(result.simulated_seconds),
                format_seconds(result.wall_seconds),
            )
        if len(best) > 1:
            table.caption = (
                f"Different data sets ({', '.join(best)}): accuracy compares only within one of them."
            )
        return table

    def draw(self, path: Path) -> None:
        """Write the figure of the runs to a file, in the format that its suffix names."""
        figure = self.figure()
        known = sorted(figure.canvas.get_supported_filetypes())
        if path.suffix.removeprefix(".").lower() not in known:
            raise UserError(
                f'{path}: "{path.suffix}" is no kind of figure; name a file in one of {", ".join(known)}'
            )
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=150)

    def figure(self) -> Figure:
        """Test HR@10 of each run against its cumulative uplink and against its simulated time."""
        figure, panels = new_figure("Test HR@10 against uplink and simulated time", panels=2)
        labels = self.labels()
        for cost, axes in zip((UPLINK, TIME), panels, strict=True):
            curves = [curve(run.history, cost, "test.hr@10") for run in self.runs]
            unit = axis_unit(cost.units, max(x.max(initial=0.0) for x, _ in curves))
            for index, (label, (x, y)) in enumerate(zip(labels, curves, strict=True)):
                drawn = x > 0 if cost is UPLINK else x >= 0
                axes.plot(
                    x[drawn] / unit.size,
                    100 * y[drawn],
                    color=_COLOURS[index % len(_COLOURS)],
                    linestyle=_DASHES[index // len(_COLOURS) % len(_DASHES)],
                    linewidth=1.5,
                    marker=marker(x),
                    markersize=3,
                    label=label,
                )
            if cost is UPLINK:
                log_axis(axes, np.concatenate([x[x > 0] for x, _ in curves]) / unit.size)
            else:
                axes.set_xlim(left=0)
            axes.set(xlabel=cost.axis_label(unit), ylabel="test HR@10 (%)")
        columns = min(len(labels), max(1, _LEGEND_CHARACTERS // (max(map(len, labels)) + 8)))
        rows = -(-len(labels) // columns)
        figure.set_figheight(figure.get_figheight() + 0.2 * rows)
        figure.legend(
            panels[0].lines, labels, loc="outside lower center", ncols=columns, frameon=False, fontsize=9
        )
        return figure


def result_table(summary: RunSummary) -> Table:
    """What `narrowcast run` prints at its end, in two columns."""
    result = summary.result
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="dim")
    table.add_column(overflow="fold")
    for split in ("test", "validation"):
        for metric, (label, _) in METRICS.items():
            name = f"{split}.{metric}"
            if name in result.final:
                best = result.best.get(name)
                beside = f" (best {format_percent(best.value)} in round {best.round})" if best else ""
                table.add_row(f"{label}, {split}", f"{format_percent(result.final[name])}{beside}")
    share = format_ratio(result.uplink_bits, result.full_uplink_bits)
    table.add_row("uplink", f"{format_bits(result.uplink_bits)} ({result.uplink_bits:,} bits)")
    table.add_row("of full FedMF", f"{share} of {format_bits(result.full_uplink_bits)}")
    table.add_row("downlink", format_bits(result.downlink_bits))
    table.add_row("simulated time", format_seconds(result.simulated_seconds))
    table.add_row("wall time", format_seconds(result.wall_seconds))
    table.add_row("seed", str(result.seed))
    table.add_row("model sha256", result.model_sha256[:12])
    return table
