"""All figures of one run, from its tables."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from matplotlib.figure import Figure

from narrowcast.platform.tracking.client_plots import client_metrics_figures
from narrowcast.platform.tracking.curves import ROUND, TIME, TOTAL, UPLINK
from narrowcast.platform.tracking.journal import CLIENT_METRICS, CLIENTS, ROUNDS
from narrowcast.platform.tracking.metric_direction import Declared
from narrowcast.platform.tracking.run_plots import accuracy_figure, as_png, client_figure, loss_figure
from narrowcast.platform.tracking.solve_figures import solve_figures


def run_figures(
    rounds: pa.Table,
    clients: pa.Table,
    title: str,
    client_metrics: pa.Table | None = None,
    shares: Declared = None,
) -> dict[str, Figure]:
    """Return the figures of a run by name, without those for which nothing was measured.

    `shares` are the metrics that the model declares as such.
    """
    figures = {
        "accuracy_round": accuracy_figure(rounds, ROUND, f"{title}: test metrics by round", shares),
        "accuracy_uplink": accuracy_figure(rounds, UPLINK, f"{title}: test metrics against uplink", shares),
        "accuracy_total": accuracy_figure(rounds, TOTAL, f"{title}: test metrics against total traffic", shares),
        "accuracy_time": accuracy_figure(rounds, TIME, f"{title}: test metrics against simulated time", shares),
        "client_bits_ranks": client_figure(clients, title),
        "loss_time": loss_figure(rounds, f"{title}: training loss"),
        **({} if client_metrics is None else client_metrics_figures(client_metrics, title, shares)),
    }
    return {name: figure for name, figure in figures.items() if figure is not None}


def figures_of_files(tables: Mapping[str, Path], title: str, shares: Declared = None) -> dict[str, bytes]:
    """Return the figures of a run as PNG files by name, given the files of its tables."""
    read = {name: pq.read_table(path) for name, path in tables.items()}
    figures = run_figures(read[ROUNDS], read[CLIENTS], title, read.get(CLIENT_METRICS), shares)
    return {name: as_png(figure) for name, figure in figures.items()}


def solve_figures_of_file(path: Path, title: str) -> dict[str, bytes]:
    """Return the figures of a solve as PNG files by name, given the file of its iterations."""
    return {name: as_png(figure) for name, figure in solve_figures(pq.read_table(path), title).items()}
