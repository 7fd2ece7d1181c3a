"""Table 2 of Nguyen et al., WWW 2024 (arXiv:2401.03748): minutes of 1000 rounds on MovieLens-1M.

Communication is S / B_down + S / B_up with B_down = 0.75 and B_up = 0.25 MiB/s, and S = 4 N r bytes per message in
either direction (8 N r for Top-K: value and index); bases, row masks and V of the SVD are not counted. Computation is
C_comp = 10 s per round plus R_comp = 7 times the slowest client plus the server, so that 166.67 of about 169 minutes
are constant. With these sizes the paper's model of section 5.2 gives all of its communication cells to 0.01 minutes.

Differs from the paper: 1. client and server times are those of compiled loops on the present machine. 2. every client
is trained and timed alone, including the drawing of negatives (`leaky`). 3. each client takes part once, in 101 rounds.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from narrowcast.platform.compiled import one_thread
from narrowcast.platform.rounds.closing import close_round
from narrowcast.platform.rounds.opening import open_round
from narrowcast.platform.rounds.state import LiveState, Run, start
from narrowcast.platform.tracking.figures import BLUE, VERMILLION, new_figure
from narrowcast.studies.spec import Results, RunSpec
from narrowcast.studies.verdicts import PaperVerdict, judge_mean, mean_and_spread
from narrowcast_papers.colr.accuracy import LEAKY, released_codec

ITEMS, ROUNDS = 3706, 1000
MIB = 2**20
DOWNLINK, UPLINK = 0.75 * MIB, 0.25 * MIB
"""Link rates in bytes per second."""
OVERHEAD_SECONDS, SLOWDOWN = 10.0, 7.0
CONSTANT_MINUTES = ROUNDS * OVERHEAD_SECONDS / 60
PAPER: dict[str, tuple[float, float]] = {
    "MF-64": (80.43, 169.07),
    "CoLR@1": (1.26, 169.18),
    "CoLR@2": (2.51, 169.21),
    "CoLR@4": (5.03, 169.27),
    "CoLR@8": (10.05, 169.29),
    "CoLR@16": (20.11, 169.30),
    "CoLR@32": (40.21, 169.38),
    "SVD@1": (1.26, 169.49),
    "SVD@2": (2.51, 169.50),
    "SVD@4": (5.03, 169.53),
    "SVD@8": (10.05, 169.59),
    "SVD@16": (20.11, 169.64),
    "SVD@32": (40.21, 169.60),
    "Top-K@1": (2.51, 169.76),
    "Top-K@2": (5.03, 169.79),
    "Top-K@4": (10.05, 169.82),
    "Top-K@8": (20.11, 169.92),
    "Top-K@16": (40.21, 170.14),
}
"""Method -> minutes of communication, minutes of computation."""


def communication_minutes(method: str) -> float:
    """Return the first column, from the sizes alone."""
    series, size = _split(method)
    message = 4 * ITEMS * size * (2 if series == "Top-K" else 1)
    return ROUNDS * (message / DOWNLINK + message / UPLINK) / 60


def computation_minutes(client_seconds: float, server_seconds: float) -> float:
    """Return the second column, from the mean seconds per round of the slowest client and of the server."""
    return ROUNDS * (OVERHEAD_SECONDS + SLOWDOWN * client_seconds + server_seconds) / 60


def timed_runs() -> tuple[RunSpec, ...]:
    """Return the timings of all methods, each over one pass of all clients."""
    return tuple(_run(method) for method in PAPER)


def _run(method: str) -> RunSpec:
    series, size = _split(method)
    if series == "MF":
        experiment, overrides = "fedmf-ml1m", []
    elif series == "CoLR":
        experiment, overrides = "colr-ml1m", [f"algorithm.rank={size}"]
    else:
        codec = released_codec(series, size)
        experiment, overrides = "fedmf-ml1m", [f"algorithm.codec={codec}", f"algorithm.downlink_codec={codec}"]
    label = f"times-{method.lower().replace('@', '-')}"
    return RunSpec(
        label,
        experiment,
        (*overrides, LEAKY, "rounds=101", "chunk_size=1", "evaluate_every=101"),
        "narrowcast_papers.colr.times:measure_times",
    )


def _split(method: str) -> tuple[str, int]:
    series, _, size = method.rpartition("@" if "@" in method else "-")
    return series, int(size)


def judge_times(results: Results) -> list[PaperVerdict]:
    """Compare both columns and their sum with the paper; only the first is independent of the machine."""
    verdicts = [
        judge_mean(f"communication, {method}", paper, [communication_minutes(method)], 0.1)
        for method, (paper, _) in PAPER.items()
    ]
    for method, (communication, paper) in PAPER.items():
        ours = _minutes(method, results)
        remainder = f"without the constant {CONSTANT_MINUTES:.2f}: {paper - CONSTANT_MINUTES:.2f} in the paper"
        remainder += f", {np.mean(ours) - CONSTANT_MINUTES:.2f} here"
        for what, published, values in (
            ("computation", paper, ours),
            ("total", communication + paper, [communication_minutes(method) + minutes for minutes in ours]),
        ):
            verdicts.append(
                PaperVerdict(
                    f"{what}, {method}",
                    f"{published:.2f}",
                    mean_and_spread(values),
                    remainder if what == "computation" else f"within {abs(np.mean(values) / published - 1):.1%}",
                    f"{np.mean(values) - published:+.2f}",
                    tuple(values),
                )
            )
    return verdicts


def _minutes(method: str, results: Results) -> list[float]:
    return [
        computation_minutes(result["client_seconds"], result["server_seconds"])
        for result in results[_run(method).label]
    ]


def plot_times(results: Results, path: Path) -> None:
    """Plot communication, and computation without the constant of 166.67 minutes."""
    figure, (left, right) = new_figure("Table 2: minutes of 1000 rounds on ml-1m", panels=2)
    positions = np.arange(len(PAPER))
    left.barh(positions, [communication_minutes(method) for method in PAPER], color=BLUE, height=0.6)
    left.plot([paper for paper, _ in PAPER.values()], positions, "o", color=VERMILLION, fillstyle="none")
    left.set(xlabel="communication (min); rings: paper")
    ours = [float(np.mean(_minutes(method, results))) - CONSTANT_MINUTES for method in PAPER]
    right.barh(positions, ours, color=BLUE, height=0.6)
    right.plot(
        [paper - CONSTANT_MINUTES for _, paper in PAPER.values()], positions, "o", color=VERMILLION, fillstyle="none"
    )
    right.set(xlabel=f"computation beyond the constant {CONSTANT_MINUTES:.2f} (min); rings: paper")
    for axes in (left, right):
        axes.set_yticks(positions, list(PAPER) if axes is left else [""] * len(PAPER), fontsize=8)
        axes.invert_yaxis()
    figure.set_figheight(5.5)
    figure.savefig(path, dpi=150)


def measure_times(run: Run) -> Mapping[str, Any]:
    """Return the seconds of the slowest client and of the server, mean over the rounds after the first."""
    plan, algorithm, task = run.plan, run.algorithm, run.task
    live = LiveState.of(run, start(run))
    slowest, server = [], []
    while live.rounds_left:
        with one_thread():
            opened = open_round(live)
            results, seconds = [], []
            for chunk in opened.chunks:
                began = time.thread_time()
                results.append(algorithm.train(opened.broadcast.arrays, chunk, task))
                seconds.append(time.thread_time() - began)
            began = time.thread_time()
            total = algorithm.fold([result.partial for result in results])
            algorithm.step(live.server, opened.broadcast.arrays, total, task, opened.round_index)
            server.append(time.thread_time() - began)
            slowest.append(max(seconds))
            close_round(live, opened, results)
    measured = slice(1 if plan.rounds > 1 else 0, None)
    return {"client_seconds": float(np.mean(slowest[measured])), "server_seconds": float(np.mean(server[measured]))}
