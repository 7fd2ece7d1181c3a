"""Measurements of the Mixing method's convergence: its rate beside the theory's, and the gap by sweep, in CSV files.

python -m narrowcast.reproduce.mixing_rates --output FOLDER [--cases G1]
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import click
import numpy as np

from narrowcast.algorithms.sdp.mixing import Mixing
from narrowcast.platform.threads import one_thread
from narrowcast.reproduce.csv_lines import Lines, append_lines, read_lines
from narrowcast.reproduce.max_cut_runs import GRAPHS, MOMENTA, TORUS, TORUS_METHODS, load_case
from narrowcast.reproduce.mixing_rate import linear_rate, observed_rate

RATES_FILE, CURVES_FILE = "sdp-mixing-rates.csv", "sdp-mixing-curves.csv"
MOMENTUM = (0.0, 0.45)
CURVES: Mapping[str, Mapping[str, Mixing]] = {"G1": MOMENTA, "G48": MOMENTA, TORUS: TORUS_METHODS}
"""Graphs and solvers whose gap is measured sweep by sweep, at one seed."""
RATE_COLUMNS = ("case", "momentum", "observed", "within", "across", "rank")
CURVE_COLUMNS = ("case", "solver", "sweep", "residual", "gap")
_MOST_SWEEPS, _CURVE_SWEEPS, _SPACING, _LEAST_GAP = 8000, 4000, 1.6, 1e-8


def measure_rate(case: str, momentum: float) -> dict[str, Any]:
    """Return the observed rate of a graph from seed 0, and the theoretical one at the solution with most momentum."""
    with one_thread():
        problem = load_case(case, 0)
        observed, vectors = observed_rate(Mixing(momentum=momentum), problem, 0, _MOST_SWEEPS)
        if momentum != MOMENTUM[-1]:  # plain sweeps may still be far from the solution
            _, vectors = observed_rate(Mixing(momentum=MOMENTUM[-1]), problem, 0, _MOST_SWEEPS)
        theory = linear_rate(problem, vectors, momentum)
    found = {"observed": observed, "within": theory.within, "across": theory.across, "rank": theory.rank}
    return {"case": case, "momentum": momentum, **found}


def measure_curve(case: str, name: str) -> Iterator[dict[str, Any]]:
    """Yield residual and proved gap at sweeps of a constant ratio, down to a gap of 1e-8."""
    with one_thread():
        problem, solver = load_case(case, 0), CURVES[case][name]
        state, due = solver.init(problem, 0), 4
        for sweep in range(1, _CURVE_SWEEPS + 1):
            state, report = solver.step(problem, state)
            if sweep < due:
                continue
            due = int(np.ceil(sweep * _SPACING))
            gap = problem.measure(solver.answer(state))["gap"]
            yield {"case": case, "solver": name, "sweep": sweep, "residual": report.residual, "gap": gap}
            if gap <= _LEAST_GAP:
                return


def measure_missing(output: Path, rates: Lines, curves: Lines, wanted: str = "*") -> Iterator[str]:
    """Measure the rates and curves that are not among these rows, append them in `output`, and yield a line of each."""
    known = {(row["case"], float(row["momentum"])) for row in rates}
    for case in GRAPHS:
        for momentum in MOMENTUM:
            if fnmatch(case, wanted) and (case, momentum) not in known:
                row = measure_rate(case, momentum)
                append_lines(output / RATES_FILE, RATE_COLUMNS, [row], digits=8)
                yield ", ".join(f"{name} {value}" for name, value in row.items())
    drawn = {(row["case"], row["solver"]) for row in curves}
    for case, methods in CURVES.items():
        for name in methods:
            if fnmatch(case, wanted) and (case, name) not in drawn:
                rows = list(measure_curve(case, name))
                append_lines(output / CURVES_FILE, CURVE_COLUMNS, rows, digits=8)
                yield f"{case}, {name}: gap {rows[-1]['gap']:.1e} after {rows[-1]['sweep']} sweeps"


@click.command()
@click.option("--output", type=click.Path(path_type=Path), required=True, help="folder of the CSV files")
@click.option("--cases", "wanted", default="*", help="pattern of the graphs' names")
def main(output: Path, wanted: str) -> None:
    """Measure what the files of this folder lack."""
    rates, curves = read_lines(output / RATES_FILE), read_lines(output / CURVES_FILE)
    for line in measure_missing(output, rates, curves, wanted):
        click.echo(line)


if __name__ == "__main__":
    main()
