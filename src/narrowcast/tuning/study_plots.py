"""The figures of a study: PNG files, and one interactive HTML page."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import optuna
from matplotlib import colormaps
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from optuna import Study
from optuna.trial import FrozenTrial, TrialState
from plotly import graph_objects

from narrowcast.platform.storage.disk import disk, make_folders, write_atomically
from narrowcast.platform.tracking.figures import BLACK, BLUE, GREEN, ORANGE, VERMILLION, log_axis, new_figure
from narrowcast.platform.tracking.metrics import FractionMetrics, is_fraction, metric_label
from narrowcast.platform.tracking.units import BYTE_UNITS, TIME_UNITS, axis_unit
from narrowcast.platform.types import FloatArray
from narrowcast.tuning.result import is_logarithmic, pareto_front
from narrowcast.tuning.settings import COSTS
from narrowcast.tuning.space import Choice
from narrowcast.tuning.study_file import StudyFile
from narrowcast.tuning.trials import TrialRecord

_FEWEST_FOR_IMPORTANCE, _MANY_FOR_IMPORTANCE = 4, 20
_BLUES, _REDS = [[0.0, "#9ecae1"], [1.0, "#08306b"]], [[0.0, "#fcae91"], [1.0, "#67000d"]]
_MOST_TICKS, _LINE = 8, 16


@dataclass(frozen=True)
class _Column:
    """An axis of a parallel plot: the trials' positions on it from 0 to 1, and its ticks with their texts."""

    label: str
    positions: FloatArray
    ticks: list[float]
    texts: list[str]


def draw_study(study: Study, rows: Sequence[TrialRecord], file: StudyFile, chosen: TrialRecord, folder: Path) -> None:
    """Write the figures of a study in which at least one trial is complete."""
    make_folders(folder)
    objectives = file.settings.objectives
    done = [row for row in rows if row.state == "complete"]
    figures: dict[str, Figure | None] = {
        "history.png": _history(study.study_name, rows, file),
        "parallel.png": _parallel(study.study_name, done, file, chosen),
        "importance.png": _importance(study, objectives),
    }
    if len(objectives) == 2:
        figures["pareto.png"] = _pareto(study.study_name, done, file, chosen)
    for name, figure in figures.items():
        if figure is not None:
            disk().write_with(folder / name, partial(figure.savefig, dpi=150))
    _page(study, done, file, folder / "study.html")


def _scaled(name: str, values: FloatArray, shares: FractionMetrics) -> tuple[FloatArray, str]:
    """Return values in the unit of their axis, and the axis's label."""
    if name == "iterations":
        return values, metric_label(name)
    if name in COSTS:
        unit = axis_unit(BYTE_UNITS if name.endswith("bits") else TIME_UNITS, float(np.max(values, initial=0.0)))
        return values / unit.size, f"{metric_label(name)} ({unit.symbol})"
    if not is_fraction(name, shares) or not ((values >= 0) & (values <= 1)).all():
        return values, metric_label(name)
    return 100 * values, f"{metric_label(name)} (%)"


def _wrapped(path: str) -> str:
    """Return a dotted path in lines of about 16 characters, broken at its dots."""
    lines = [""]
    for part in path.split("."):
        joined = f"{lines[-1]}.{part}".removeprefix(".")
        if len(joined) > _LINE and lines[-1]:
            lines.append(part)
        else:
            lines[-1] = joined
    return ".\n".join(lines)


def _history(title: str, rows: Sequence[TrialRecord], file: StudyFile) -> Figure | None:
    objectives = file.settings.objectives
    figure, axes = new_figure(f"{title}: values by trial", panels=len(objectives))
    for panel, (name, direction) in zip(axes, objectives.items(), strict=True):
        shown = [row for row in rows if name in row.metrics and row.state in ("complete", "pruned")]
        values, label = _scaled(name, np.array([row.metrics[name] for row in shown]), file.shares)
        number, complete = np.array([row.number for row in shown]), np.array([row.state == "complete" for row in shown])
        panel.scatter(number[complete], values[complete], s=14, color=BLUE, label="complete")
        if not complete.all():
            panel.scatter(number[~complete], values[~complete], s=14, color=ORANGE, marker="x", label="pruned")
        best = np.maximum.accumulate if direction == "maximize" else np.minimum.accumulate
        panel.step(number[complete], best(values[complete]), where="post", color=VERMILLION, label="best so far")
        if is_logarithmic(name, shown):
            log_axis(panel, values, "y")
        panel.set(xlabel="trial", ylabel=label)
        panel.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
        panel.legend(frameon=False, fontsize=9)
    return figure


def _chosen(choice: Choice, values: Sequence[Any]) -> tuple[FloatArray, list[float], list[str]]:
    """Return the positions of a choice's values on an axis from 0 to 1, and the axis's ticks and labels."""
    labels = choice.grid()
    at = [index / max(1, len(labels) - 1) for index in range(len(labels))]
    return np.array([at[labels.index(value)] for value in values]), at, [str(name)[:24] for name in labels]


def _measured(values: Sequence[float], *, log: bool) -> tuple[FloatArray, list[float], list[str]]:
    """Return the same for numbers."""
    numbers = np.array(values, dtype=np.float64)
    scale = np.log(numbers) if log else numbers
    low, high = float(scale.min()), float(scale.max())
    ticks = np.linspace(low, high, 4)
    marks = np.exp(ticks) if log else ticks
    shown = [f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}" for value in marks]
    return (scale - low) / ((high - low) or 1), list(np.linspace(0, 1, 4)), shown


def _columns(rows: Sequence[TrialRecord], file: StudyFile) -> list[_Column]:
    """Return an axis for each dimension that all trials have, then for each objective; none for a single trial."""
    space, objectives = file.space, file.settings.objectives
    paths = [path for path in space.dimensions if all(path in row.params for row in rows)]
    if not paths or len(rows) < 2:
        return []
    columns = []
    for path in paths:
        dimension = space.dimensions[path]
        drawn = [row.params[path] for row in rows]
        placed = _chosen(dimension, drawn) if isinstance(dimension, Choice) else _measured(drawn, log=dimension.log)
        columns.append(_Column(_wrapped(path), *placed))
    for name in objectives:
        values, label = _scaled(name, np.array([row.metrics[name] for row in rows]), file.shares)
        placed = _measured(values.tolist(), log=is_logarithmic(name, rows))
        columns.append(_Column(label, *placed))
    return columns


def _parallel(title: str, rows: Sequence[TrialRecord], file: StudyFile, chosen: TrialRecord) -> Figure | None:
    """Draw a line for each complete trial across the dimensions that all have, coloured by the first objective."""
    if not (columns := _columns(rows, file)):
        return None
    figure, (axes,) = new_figure(f"{title}: the trials across the space", panels=1)
    figure.set_size_inches(max(7, 1.7 * len(columns)), 4.8)
    first = next(iter(file.settings.objectives))
    values, first_label = _scaled(first, np.array([row.metrics[first] for row in rows]), file.shares)
    scale = LogNorm if is_logarithmic(first, rows) else Normalize
    colours = ScalarMappable(scale(float(values.min()), float(values.max())), colormaps["viridis"])
    lines = np.stack([column.positions for column in columns], axis=1)
    for index in np.argsort(values):
        row = rows[int(index)]
        bold = row.number == chosen.number
        colour = VERMILLION if bold else colours.to_rgba(values[index])
        axes.plot(
            lines[index], color=colour, linewidth=2.5 if bold else 1, alpha=1 if bold else 0.6, zorder=3 if bold else 2
        )
    for position, column in enumerate(columns):
        axes.axvline(position, color="0.7", linewidth=0.8, zorder=1)
        stride = -(-len(column.ticks) // _MOST_TICKS)
        for tick, text in list(zip(column.ticks, column.texts, strict=True))[::stride]:
            axes.text(position + 0.03, tick, text, fontsize=7, va="center", color="0.25", zorder=4)
    axes.set_xticks(range(len(columns)), [column.label for column in columns], fontsize=8)
    axes.set_xlim(-0.1, len(columns) - 0.6)  # the last column's texts are on its right
    axes.set_yticks([])
    axes.grid(visible=False)
    figure.colorbar(colours, ax=axes, label=first_label, pad=0.02)
    axes.plot([], [], color=VERMILLION, linewidth=2.5, label=f"chosen: trial {chosen.number}")
    figure.legend(loc="outside lower center", frameon=False, fontsize=9)
    return figure


def _importance(study: Study, objectives: Mapping[str, str]) -> Figure | None:
    """Draw the importance of each dimension for each objective, by PED-ANOVA (Watanabe et al., IJCAI 2023)."""
    importances = {}
    for column, (name, direction) in enumerate(objectives.items()):
        target = _towards(column, direction) if len(objectives) > 1 else None
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)
                importances[name] = optuna.importance.get_param_importances(study, target=target)
        except (ValueError, RuntimeError):  # too few trials, or all alike
            continue
    importances = {name: values for name, values in importances.items() if values}
    complete = sum(trial.state == TrialState.COMPLETE for trial in study.get_trials(deepcopy=False))
    if not importances or complete < _FEWEST_FOR_IMPORTANCE:
        return None
    few = f"; unreliable below {_MANY_FOR_IMPORTANCE}" if complete < _MANY_FOR_IMPORTANCE else ""
    title = f"{study.study_name}: hyperparameter importance, from {complete} trials{few}"
    figure, axes = new_figure(title, panels=len(importances))
    for panel, (name, values), colour in zip(axes, importances.items(), (BLUE, GREEN, ORANGE, BLACK), strict=False):
        paths = list(values)[::-1]
        panel.barh(paths, [100 * values[path] for path in paths], color=colour)
        panel.set(xlabel=f"importance for {metric_label(name)} (%)")
        panel.tick_params(axis="y", labelsize=8)
    return figure


def _towards(column: int, direction: str) -> Callable[[FrozenTrial], float]:
    """Return one of several objectives, negated if maximised: PED-ANOVA takes lower as better."""
    sign = -1 if direction == "maximize" else 1
    return lambda trial: sign * trial.values[column]


def _pareto(title: str, rows: Sequence[TrialRecord], file: StudyFile, chosen: TrialRecord) -> Figure:
    """Draw all complete trials, the front and the chosen trial; a cost is on the horizontal, logarithmic axis."""
    objectives = file.settings.objectives
    first, second = objectives
    down, across = (first, second) if second in COSTS else (second, first)
    front = pareto_front(rows, objectives)
    figure, (axes,) = new_figure(f"{title}: {len(front)} of {len(rows)} trials on the Pareto front", panels=1)
    x, x_label = _scaled(across, np.array([row.metrics[across] for row in rows]), file.shares)
    y, y_label = _scaled(down, np.array([row.metrics[down] for row in rows]), file.shares)
    indices = {row.number: index for index, row in enumerate(rows)}
    feasible = np.array([row.feasible for row in rows])
    axes.scatter(x[feasible], y[feasible], s=16, color="0.65", label="trial")
    if not feasible.all():
        axes.scatter(x[~feasible], y[~feasible], s=18, color=ORANGE, marker="x", label="violates a constraint")
    on_front = sorted((indices[row.number] for row in front), key=lambda index: x[index])
    axes.plot(x[on_front], y[on_front], "o-", color=BLUE, markersize=5, linewidth=1.2, label="Pareto front")
    if chosen.number in indices:
        star = indices[chosen.number]
        axes.scatter(
            x[star], y[star], s=130, color=VERMILLION, marker="*", zorder=4, label=f"chosen: trial {chosen.number}"
        )
    if is_logarithmic(across, rows):
        log_axis(axes, x)
    if is_logarithmic(down, rows):
        log_axis(axes, y, "y")
    axes.set(xlabel=x_label, ylabel=y_label)
    figure.legend(loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    return figure


def _parallel_page(columns: Sequence[_Column], rows: Sequence[TrialRecord], file: StudyFile, name: str) -> Any:
    """Return the parallel plot for a page, dark for trials that are good by one objective."""
    values, label = _scaled(name, np.array([row.metrics[name] for row in rows]), file.shares)
    axes = [
        {
            "label": column.label.replace("\n", "<br>"),
            "values": column.positions,
            "range": [0, 1],
            "tickvals": column.ticks,
            "ticktext": column.texts,
        }
        for column in columns
    ]
    line = {
        "color": values,
        "colorscale": _BLUES,
        "reversescale": file.settings.objectives[name] == "minimize",
        "showscale": True,
    }
    line["colorbar"] = {"title": label}
    figure = graph_objects.Figure(graph_objects.Parcoords(dimensions=axes, line=line, labelside="bottom"))
    return figure.update_layout(title="Trials across the space", margin={"l": 80, "r": 80, "b": 120})


def _page(study: Study, rows: Sequence[TrialRecord], file: StudyFile, path: Path) -> None:
    """Write interactive figures of a study on one page that needs no network."""
    objectives = file.settings.objectives
    several = len(objectives) > 1
    units = {name: f" ({name.rpartition('_')[2]})" if "_" in name else "" for name in COSTS}
    labels = [metric_label(name) + units.get(name, "") for name in objectives]
    pictures: list[Any] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        show = optuna.visualization
        if len(objectives) in (2, 3):
            front = show.plot_pareto_front(study, target_names=labels)
            for trace in front.data:  # the palest of Optuna's colours are lost on white
                on_front = "Best" in (trace.hovertemplate or "")
                trace.marker.update(colorscale=_REDS if on_front else _BLUES)
            if len(objectives) == 2:
                across, up = ("log" if is_logarithmic(name, rows) else "linear" for name in objectives)
                front.update_xaxes(type=across).update_yaxes(type=up)
            pictures.append(front)
        for column, (name, direction) in enumerate(objectives.items()):
            target = (lambda trial, column=column: trial.values[column]) if several else None
            history = show.plot_optimization_history(study, target=target, target_name=labels[column])
            history.update_xaxes(tickformat="d", dtick=max(1, len(study.trials) // 10))
            pictures.append(history.update_yaxes(type="log") if is_logarithmic(name, rows) else history)
            if columns := _columns(rows, file):
                pictures.append(_parallel_page(columns, rows, file, name))
            try:
                towards = _towards(column, direction) if several else None
                pictures.append(show.plot_param_importances(study, target=towards, target_name=labels[column]))
            except (ValueError, RuntimeError):  # too few trials, or all alike
                continue
        if not several:
            pictures.append(show.plot_intermediate_values(study))
    parts = [picture.to_html(full_html=False, include_plotlyjs=index == 0) for index, picture in enumerate(pictures)]
    name = escape(study.study_name)
    head = f'<!doctype html><meta charset="utf-8"><title>{name}</title><h1>{name}</h1>'
    write_atomically(path, (head + "\n".join(parts)).encode())
