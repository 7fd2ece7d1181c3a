"""The figure of a comparison: a metric against rounds, bits and time, with a band over seeds."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from narrowcast.platform.config.files import suggest
from narrowcast.platform.errors import UserError
from narrowcast.platform.tracking import figures as plots
from narrowcast.platform.tracking import units
from narrowcast.platform.tracking.figures import percentiles, shown_metric
from narrowcast.platform.tracking.metrics import (
    GLOBAL,
    NEW,
    ROUND,
    SUCCESS,
    TIME,
    TOTAL,
    UPLINK,
    chosen_costs,
    is_fraction,
    metric_label,
)
from narrowcast.runs.comparison_tables import SeedGroup, judged_by

AXES = {"round": ROUND, "uplink": UPLINK, "total": TOTAL, "time": TIME}
"""The horizontal axes by name: rounds, uplink bits, uplink and downlink bits, simulated time."""
_WORDS = {
    ROUND.column: "rounds",
    UPLINK.column: "uplink",
    TOTAL.column: "total traffic",
    TIME.column: "simulated time",
}
_DASHES = ("-", "--", ":")
_LEGEND_CHARACTERS = 130  # that fit in one row of the legend of three panels


def comparison_figure(groups: Sequence[SeedGroup], axes: Sequence[str] | None, metric: str | None) -> Figure:
    """Return a figure with a panel for each axis and a line for each group.

    The metric is that which each run is judged by, unless it is given. A band is one standard deviation over the seeds
    to both sides. A run without bits is a dotted line at its last value where bits are the axis.
    """
    if metric is not None:
        _check_metric(groups, metric)
    metrics = [metric or of_group or "test.hr@10" for of_group in judged_by(groups)]
    shown = " and ".join(dict.fromkeys(map(metric_label, metrics)))
    costs = chosen_costs(AXES, axes)
    percent = all(is_fraction(name, group.shares) for name, group in zip(metrics, groups, strict=True))
    title = f"{shown[0].upper()}{shown[1:]} against {_listed([_WORDS[value.column] for value in costs])}"
    if any(len(group.runs) > 1 for group in groups):
        title += "; bands: standard deviation over seeds"
    figure, panels = plots.new_figure(title, panels=len(costs))
    for cost, panel in zip(costs, panels, strict=True):
        curves = [group.curve(cost, of_group) for group, of_group in zip(groups, metrics, strict=True)]
        spent = [x[-1] for x, _, _ in curves if len(x)]
        if not spent:
            raise UserError(f"none of the runs measured {shown}; give at least one that was evaluated")
        logarithmic = cost in (UPLINK, TOTAL) and max(spent) > 0
        unit = units.axis_unit(cost.units, float(np.median(spent) if logarithmic else max(spent)))
        scale = 100 if percent else 1
        for index, (group, (x, y, spread)) in enumerate(zip(groups, curves, strict=True)):
            colour, dashes = plots.COLOURS[index % len(plots.COLOURS)], _DASHES[index // len(plots.COLOURS) % 3]
            if logarithmic and len(x) and not x[-1]:  # training alone sends nothing
                panel.axhline(scale * y[-1], color=colour, linestyle=":", linewidth=1.5, label=group.label)
                continue
            line = panel.plot(x / unit.size, scale * y, dashes, linewidth=1.5, label=group.label)[0]
            line.set(color=colour, marker=plots.marker(x), markersize=3)
            if len(group.runs) > 1:
                low, high = scale * (y - spread), scale * (y + spread)
                panel.fill_between(x / unit.size, low, high, color=colour, alpha=0.18, linewidth=0)
        if logarithmic:
            plots.log_axis(panel, np.concatenate([x[x > 0] for x, _, _ in curves]) / unit.size)
        else:
            panel.set_xlim(-0.02 * max(spent) / unit.size, 1.03 * max(spent) / unit.size or 1)
        if cost is ROUND:
            panel.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
        panel.set(xlabel=cost.axis_label(unit), ylabel=f"{shown} (%)" if percent else shown)
    _add_legend(figure, [group.label for group in groups])
    return figure


def clients_figure(groups: Sequence[SeedGroup], metric: str | None) -> Figure | None:
    """Return the distribution of a metric over clients after the last evaluation, a line for each group.

    A line gives the metric by percentile of the clients, the mean over the seeds; that of new clients is dotted. None
    if no run evaluated its clients.
    """
    tables = [run.client_metrics_table for group in groups for run in group.runs if run.evaluates_clients]
    known = list(dict.fromkeys(name for table in tables for name in table.column_names if "." in name))
    if metric is not None and metric not in known:
        measured = f"measured: {', '.join(known)}{suggest(metric, known)}" if known else "run it with evaluate_clients"
        raise UserError(f'no run has evaluated its clients by "{metric}"; {measured}')
    metric = metric or next((name for table in tables if (name := shown_metric(table))), None)
    if metric is None:
        return None
    at = np.linspace(0, 100, 101)
    shown = metric_label(metric)
    title = f"{shown[0].upper()}{shown[1:]} of the clients by percentile"
    if any(len(group.runs) > 1 for group in groups):
        title += "; mean over seeds"
    figure, (panel,) = plots.new_figure(title, panels=1)
    percent = all(is_fraction(metric, group.shares) for group in groups)
    labels, scale = [], 100 if percent else 1
    for index, group in enumerate(groups):
        colour, dashes = plots.COLOURS[index % len(plots.COLOURS)], _DASHES[index // len(plots.COLOURS) % 3]
        for name, style, label in (
            (metric, dashes, group.label),
            (f"{NEW}{metric}", ":", f"{group.label}, new clients"),
        ):
            curves = [percentiles(run.client_metrics_table, name, at) for run in group.runs if run.evaluates_clients]
            if lines := [curve for curve in curves if curve is not None]:
                panel.plot(at, scale * np.mean(lines, axis=0), style, color=colour, linewidth=1.5)
                labels.append(label)
    if not labels:
        return None
    panel.set(
        xlabel="percentile of the clients, from the lowest value",
        ylabel=f"{shown} of a client" + (" (%)" if percent else ""),
    )
    _add_legend(figure, labels)
    return figure


def _check_metric(groups: Sequence[SeedGroup], metric: str) -> None:
    columns = dict.fromkeys(name for group in groups for run in group.runs for name in run.history.column_names)
    known = [name for name in columns if name.startswith(("validation.", "test.", "train.", NEW, GLOBAL, SUCCESS))]
    if metric not in known:
        raise UserError(f'no run has the metric "{metric}"; measured: {", ".join(known)}{suggest(metric, known)}')


def _listed(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def _add_legend(figure: Figure, labels: Sequence[str]) -> None:
    room = _LEGEND_CHARACTERS * figure.get_figwidth() / 15.75
    columns = min(len(labels), max(1, int(room / (max(map(len, labels)) + 8))))
    figure.set_figheight(figure.get_figheight() + 0.2 * -(-len(labels) // columns))
    figure.legend(figure.axes[0].lines, labels, loc="outside lower center", ncols=columns, fontsize=9, frameon=False)
