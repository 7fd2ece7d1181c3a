"""Finished runs compared with each other: one table and one figure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.figure import Figure

from narrowcast.platform.config import flatten, read_yaml
from narrowcast.platform.errors import UserError
from narrowcast.platform.tracking import run_plots as plots
from narrowcast.platform.tracking import units
from narrowcast.platform.yaml_limits import read_limited
from narrowcast.runs.result import Result
from narrowcast.runs.run_folder import CONFIG

if TYPE_CHECKING:
    from pandas import DataFrame

_COLOURS = (plots.BLUE, plots.VERMILLION, plots.GREEN, plots.PURPLE, plots.ORANGE, plots.BLACK)
_DASHES = ("-", "--", ":")
_LEGEND_CHARACTERS = 130  # that fit in one row of the figure's legend
_BASELINES = ("fedmf", "fedavg")
LEVEL = 0.003
"""Largest distance below the float32 baseline at which an accuracy counts as level with it."""
_NOT_SETTINGS = ("name", "tracking", "backend")


@dataclass(frozen=True)
class Comparison:
    """Finished runs, in the order given."""

    runs: tuple[Result, ...]

    def __post_init__(self) -> None:
        if not self.runs:
            raise UserError("no runs to compare; give at least one finished run")

    def labels(self) -> list[str]:
        """Return the runs' names, with the folder if two runs share a name."""
        names = [run.name for run in self.runs]
        return [
            name if names.count(name) == 1 else f"{name} ({run.folder})"
            for name, run in zip(names, self.runs, strict=True)
        ]

    @cached_property
    def table(self) -> DataFrame:
        """One row per run: what it is, the settings that differ, final metrics, bits, seconds, costs of targets.

        Bits and seconds are those of the whole run; `uplink_ratio` is uplink over that of the whole model in float32,
        `touched_ratio` over that of the changed rows in float32, `coded_ratio` over that of `coded_reference`.
        """
        from pandas import DataFrame

        settings = [_settings(run.folder) for run in self.runs]
        differing = differing_settings(settings)
        rows = []
        for run, its_settings in zip(self.runs, settings, strict=True):
            targets = {f"rounds_to/{each.metric}/{each.value:g}": each.rounds_to for each in run.targets}
            rows.append(
                {
                    "algorithm": run.file.algorithm,
                    "data": run.file.data,
                    **{path: its_settings.get(path) for path in differing},
                    "rounds": run.file.rounds,
                    **run.final,
                    "uplink_bits": run.uplink_bits,
                    "uplink_ratio": run.uplink_bits / run.full_uplink_bits if run.full_uplink_bits else np.nan,
                    "touched_ratio": run.uplink_bits / run.touched_uplink_bits if run.touched_uplink_bits else np.nan,
                    "coded_ratio": self.coded_ratio(run),
                    "downlink_bits": run.downlink_bits,
                    "total_bits": run.total_bits,
                    "simulated_seconds": run.simulated_seconds,
                    "wall_seconds": run.wall_seconds,
                    **targets,
                    "model_sha256": run.model_sha256,
                }
            )
        return DataFrame(rows, index=self.labels())

    def coded_reference(self, run: Result) -> Result | None:
        """Return the entropy-coded baseline of a run's data: lossy coding that is level with float32, and no more.

        Of the runs of `fedmf` and `fedavg` on the same data whose codec ends in `entropy`, it is the one with the
        fewest uplink bits of those at most `LEVEL` below the float32 run of the same algorithm. None without such runs.
        """
        of_data = [each for each in self.runs if each.file.data == run.file.data and each.file.algorithm in _BASELINES]
        plain = [each for each in of_data if not _codec(each.folder)]
        least = {each.file.algorithm: _primary(each) - LEVEL for each in plain}
        coded = [each for each in of_data if _codec(each.folder)[-1:] == ["entropy"]]
        level = [each for each in coded if _primary(each) >= least.get(each.file.algorithm, np.inf)]
        return min(level, key=_share_of_full, default=None)

    def coded_ratio(self, run: Result) -> float:
        """Return a run's uplink for each upload over that of its `coded_reference`; NaN if there is none."""
        reference = self.coded_reference(run)
        return np.nan if reference is None else _share_of_full(run) / _share_of_full(reference)

    def plot(self, path: str | Path | None = None) -> Figure:
        """Return `figure()`, written to a file too if a path is given, in the format that its suffix names."""
        figure = self.figure()
        if path is not None:
            path = Path(path)
            known = sorted(figure.canvas.get_supported_filetypes())
            if path.suffix.removeprefix(".").lower() not in known:
                raise UserError(f"{path}: not the name of a figure; end it in one of .{', .'.join(known)}")
            path.parent.mkdir(parents=True, exist_ok=True)
            figure.savefig(path, dpi=150)
        return figure

    def figure(self) -> Figure:
        """Return test HR@10 or accuracy of each run against its cumulative uplink, total traffic and simulated time.

        Runs of version 0.1 have no total traffic, and a comparison with one of them no such panel.
        """
        names = list(dict.fromkeys(plots.METRICS[primary_metric(run)][0] for run in self.runs))
        shown = f"test {' and '.join(names)}"
        costs = [plots.UPLINK, plots.TOTAL, plots.TIME]
        if any(plots.TOTAL.column not in run.history.column_names for run in self.runs):
            costs.remove(plots.TOTAL)
        against = {2: "uplink and simulated time", 3: "uplink, total traffic and simulated time"}[len(costs)]
        title = f"{shown[0].upper()}{shown[1:]} against {against}"
        figure, panels = plots.new_figure(title, panels=len(costs))
        labels = self.labels()
        for cost, axes in zip(costs, panels, strict=True):
            curves = [plots.curve(run.history, cost, f"test.{primary_metric(run)}") for run in self.runs]
            spent = [x[-1] for x, _ in curves if len(x)]
            if not spent:
                raise UserError(f"none of the runs measured {shown}; give at least one that was evaluated")
            logarithmic = cost is not plots.TIME
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

    def _repr_html_(self) -> str:
        return str(self.table.drop(columns="model_sha256").to_html())


def _primary(run: Result) -> float:
    return run.final.get(f"test.{primary_metric(run)}", -np.inf)


def _share_of_full(run: Result) -> float:
    return run.uplink_bits / run.full_uplink_bits if run.full_uplink_bits else np.nan


def _codec(folder: Path) -> list[str]:
    """Return the kinds of the codec's stages."""
    settings = _settings(folder)
    kinds = list(settings.get("algorithm.codec") or ())
    while kind := settings.get(f"algorithm.codec.{len(kinds)}.kind", settings.get(f"algorithm.codec.{len(kinds)}")):
        kinds.append(kind)
    return kinds


def primary_metric(run: Result) -> str:
    """Return the metric that a run is compared by: the first of those it measured, of HR@10, NDCG@10, accuracy."""
    return next((metric for metric in plots.METRICS if f"test.{metric}" in run.final), "hr@10")


def differing_settings(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the dotted paths whose values are not the same in all runs."""
    paths = dict.fromkeys(path for each in settings for path in each)
    return [path for path in paths if len({str(each.get(path)) for each in settings}) > 1]


def _settings(folder: Path) -> dict[str, Any]:
    """Return the run's settings by dotted path, read as they are written, without importing what they name."""
    path = folder / CONFIG
    values = read_yaml(read_limited(path), str(path)) if path.is_file() else {}
    if not isinstance(values, Mapping):
        raise UserError(f"{path}: expected keys and values at the top, got {type(values).__name__}")
    return flatten({name: value for name, value in values.items() if name not in _NOT_SETTINGS})
