"""The Mixing method on a sparse random graph of 10^5 vertices: seconds, peak memory and the proved gap.

    python benchmarks/large_max_cut.py [--vertices 100000] [--degree 6] [--rank 64] [--seconds 120] [--csv FILE]

Columns are fewer than sqrt(2 n): the certificate, which does not depend on their number, says whether they suffice.
Seconds are processor time of one thread; the peak is that of the whole process before the certificate, and after it.
"""

from __future__ import annotations

import argparse
import csv
import os
import resource
import time
from pathlib import Path

from narrowcast.platform.compiled import one_thread
from narrowcast.solves.max_cut import RandomMaxCut
from narrowcast.solves.mixing import Mixing


def peak_mib() -> float:
    """Return the largest resident memory of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def measure(vertices: int, degree: int, rank: int, residual: float, seconds: float) -> dict[str, float]:
    """Solve a graph to a residual, or for so many seconds, and return what it took and what is proved."""
    small, solver = RandomMaxCut(vertices=20, edges=40).load(), Mixing(rank=rank, momentum="adaptive")
    solver.step(small, Mixing(rank=3, momentum="adaptive").init(small, 0))  # compiles
    began = time.process_time()
    problem = RandomMaxCut(vertices=vertices, edges=vertices * degree // 2, seed=1, roundings=10).load()
    drawn, began = time.process_time() - began, time.process_time()
    state, sweeps, found = solver.init(problem, 0), 0, 1.0
    while found > residual and time.process_time() - began < seconds:
        state, report = solver.step(problem, state)
        sweeps, found = sweeps + 1, report.residual
    solved, before, began = time.process_time() - began, peak_mib(), time.process_time()
    metrics = problem.measure(solver.answer(state))
    return {
        "vertices": vertices,
        "edges": problem.graph.edges,
        "rank": rank,
        "sweeps": sweeps,
        "residual": found,
        "draw_seconds": drawn,
        "solve_seconds": solved,
        "certificate_seconds": time.process_time() - began,
        "solve_peak_mib": before,
        "peak_mib": peak_mib(),
        **{name: metrics[name] for name in ("relaxation", "bound", "gap", "cut", "mean_cut")},
        "load": os.getloadavg()[0],
    }


def main() -> None:
    """Measure once, print the figures, and append them to a CSV file if one is named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vertices", type=int, default=100_000)
    parser.add_argument("--degree", type=int, default=6)
    parser.add_argument("--rank", type=int, default=64)
    parser.add_argument("--residual", type=float, default=1e-4)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--csv", type=Path)
    given = parser.parse_args()
    with one_thread():
        row = measure(given.vertices, given.degree, given.rank, given.residual, given.seconds)
    print("\n".join(f"{name:20} {value:.8g}" for name, value in row.items()))
    if given.csv:
        new = not given.csv.exists()
        with given.csv.open("a", newline="") as file:
            writer = csv.DictWriter(file, list(row), lineterminator="\n")
            if new:
                writer.writeheader()
            writer.writerow({name: f"{value:.8g}" for name, value in row.items()})


if __name__ == "__main__":
    main()
