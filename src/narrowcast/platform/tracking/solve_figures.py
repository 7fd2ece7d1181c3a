"""The figures of one solve, from its table of iterations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pyarrow as pa
from matplotlib.figure import Figure

from narrowcast.platform.step import ITERATION_COLUMNS
from narrowcast.platform.tracking.curves import ITERATIONS, SOLVER_TIME, Cost, curve
from narrowcast.platform.tracking.metric_labels import metric_label
from narrowcast.platform.tracking.run_plots import COLOURS, marker, new_figure
from narrowcast.platform.tracking.units import axis_unit

_MOST_METRICS = 5
_DASHES = ("-", "--", ":")


def solve_figures(table: pa.Table, title: str) -> dict[str, Figure]:
    """Return the figures of a solve by name: residual and metrics by iteration and against the time of the solver."""
    return {
        "error_iteration": error_figure(table, ITERATIONS, f"{title}: by iteration"),
        "error_time": error_figure(table, SOLVER_TIME, f"{title}: against the time of the solver"),
    }


def error_figure(table: pa.Table, cost: Cost, title: str) -> Figure:
    """Return the residual and the metrics against a cost, on a logarithmic axis if all values are positive."""
    figure, (axes,) = new_figure(title, panels=1)
    metrics = [name for name in table.column_names if name not in ITERATION_COLUMNS]
    curves = {name: curve(table, cost, name) for name in ("residual", *metrics[:_MOST_METRICS])}
    drawn = {name: (x, y) for name, (x, y) in curves.items() if len(x)}
    unit = axis_unit(cost.units, max(x[-1] for x, _ in drawn.values()))
    for (name, (x, y)), colour in zip(drawn.items(), COLOURS, strict=False):
        faint = name == "residual"  # it has a value in every row, and the solver's own scale
        line = axes.plot(x / unit.size, y, color=colour, linewidth=1 if faint else 1.8)[0]
        line.set(marker="" if faint else marker(x), markersize=4, label=metric_label(name))
    if min(y.min() for _, y in drawn.values()) > 0:
        axes.set_yscale("log")
    axes.set_xlabel(cost.axis_label(unit))
    figure.legend(handles=list(axes.lines), loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    return figure


def comparison_of_solves(tables: Mapping[str, pa.Table], costs: Sequence[Cost], name: str) -> Figure:
    """Return a metric of several solves, given their tables by label, with a panel for each cost."""
    shown = metric_label(name)
    figure, panels = new_figure(f"{shown[0].upper()}{shown[1:]} of the solves", panels=len(costs))
    for cost, axes in zip(costs, panels, strict=True):
        curves = {label: curve(table, cost, name) for label, table in tables.items()}
        drawn = {label: (x, y) for label, (x, y) in curves.items() if len(x)}
        unit = axis_unit(cost.units, max((x[-1] for x, _ in drawn.values()), default=1.0))
        for place, (label, (x, y)) in enumerate(drawn.items()):
            dashes = _DASHES[place // len(COLOURS) % len(_DASHES)]
            line = axes.plot(x / unit.size, y, dashes, color=COLOURS[place % len(COLOURS)], linewidth=1.5)[0]
            line.set(marker=marker(x), markersize=3, label=label)
        if drawn and min(y.min() for _, y in drawn.values()) > 0:
            axes.set_yscale("log")
        axes.set(xlabel=cost.axis_label(unit), ylabel=shown)
    handles = list(panels[0].lines)
    figure.legend(handles=handles, loc="outside lower center", ncols=min(4, len(handles)), frameon=False, fontsize=9)
    return figure
