"""The figures of a metric's distribution over clients: by round, after the last evaluation, and by percentile."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from narrowcast.platform.client_statistics import SPLITS
from narrowcast.platform.tracking.curves import column
from narrowcast.platform.tracking.metric_direction import Declared
from narrowcast.platform.tracking.metric_labels import is_share, metric_label, metrics_of
from narrowcast.platform.tracking.run_plots import BLUE, VERMILLION, marker, new_figure
from narrowcast.platform.types import FloatArray

_BANDS = ((10, 90, 0.15), (25, 75, 0.3))
_MOST_BINS = 20


def client_metrics_figures(metrics: pa.Table, title: str, shares: Declared = None) -> dict[str, Figure]:
    """Return the figure `client_metrics` of the rows of `client_metrics.parquet`; none if no client has samples."""
    name = shown_metric(metrics)
    if name is None:
        return {}
    rounds, values = column(metrics, "round"), column(metrics, name)
    evaluated = np.unique(rounds[np.isfinite(values)])
    panels = 2 if len(evaluated) > 1 else 1
    figure, axes = new_figure(f"{title}: {metric_label(name)} of the clients", panels=panels)
    percent = is_share(name, shares)
    scale = 100 if percent else 1
    if panels == 2:
        by_round = [scale * values[(rounds == each) & np.isfinite(values)] for each in evaluated]
        _draw_bands(axes[0], evaluated, by_round)
        axes[0].set(xlabel="round", ylabel=_axis_label(name, percent))
    last = scale * values[(rounds == evaluated[-1]) & np.isfinite(values)]
    _draw_histogram(axes[-1], last, bounded=percent)
    axes[-1].set(xlabel=f"{_axis_label(name, percent)}, round {evaluated[-1]:.0f}", ylabel="number of clients")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    return {"client_metrics": figure}


def shown_metric(metrics: pa.Table) -> str | None:
    """Return the metric, named `split.metric`, whose distribution is shown; None if no client has samples.

    The first metric of test, else of validation or train, that has more than two values: the HR of a single held-out
    item is 0 or 1. Without one, the first.
    """
    names = [
        f"{split}.{each}" for split in SPLITS for each in metrics_of(metrics.column_names, split) if each != "loss"
    ]
    names += [f"{split}.loss" for split in SPLITS if f"{split}.loss" in metrics.column_names]
    counts = {name: len(np.unique(values[np.isfinite(values)])) for name in names for values in [column(metrics, name)]}
    measured = [name for name in names if counts[name]]
    return next((name for name in measured if counts[name] > 2), next(iter(measured), None))


def percentiles(metrics: pa.Table, name: str, at: FloatArray) -> FloatArray | None:
    """Return percentiles of a metric over the clients in the last round that evaluated it; None if none did."""
    if name not in metrics.column_names:
        return None
    rounds, values = column(metrics, "round"), column(metrics, name)
    finite = np.isfinite(values)
    if not finite.any():
        return None
    found: FloatArray = np.percentile(values[finite & (rounds == rounds[finite].max())], at)
    return found


def _axis_label(name: str, percent: bool) -> str:
    return f"{metric_label(name)} of a client" + (" (%)" if percent else "")


def _draw_bands(axes: Axes, rounds: FloatArray, by_round: list[FloatArray]) -> None:
    for low, high, alpha in _BANDS:
        edges = np.array([np.percentile(each, [low, high]) for each in by_round])
        label = f"{low}th to {high}th percentile"
        axes.fill_between(rounds, edges[:, 0], edges[:, 1], color=BLUE, alpha=alpha, linewidth=0, label=label)
    median, mean = (np.array([of(each) for each in by_round]) for of in (np.median, np.mean))
    dots = marker(rounds)
    axes.plot(rounds, median, color=BLUE, linewidth=1.8, marker=dots, markersize=3, label="median")
    axes.plot(rounds, mean, "--", color=VERMILLION, linewidth=1.5, marker=dots, markersize=3, label="mean")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))


def _draw_histogram(axes: Axes, values: FloatArray, *, bounded: bool) -> None:
    bins = min(_MOST_BINS, max(5, int(np.sqrt(len(values)) * 2)))
    axes.hist(values, bins=bins, range=(0, 100) if bounded else None, color=BLUE, alpha=0.7)
    axes.axvline(float(values.mean()), color=VERMILLION, linestyle="--", linewidth=1.5, label="mean")
    axes.yaxis.set_major_locator(MaxNLocator(5, integer=True, min_n_ticks=1))
