"""Timed solves of completion cases: error against time as rows of a CSV file, which a later call goes on with.

The clock runs in `init` and `step` alone: the start counts, measuring does not. Kernels are compiled before it starts;
they run on as many threads as OMP_NUM_THREADS says, by default on all processors.

    python -m narrowcast.reproduce.completion_runs --output FILE.csv [--cases n1000] [--solvers GLOB] [--seconds 60]
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import click

from narrowcast.algorithms.completion.alps import ALPS
from narrowcast.algorithms.completion.asd import ASD
from narrowcast.algorithms.completion.cgiht import CGIHT
from narrowcast.algorithms.completion.continuation import Continuation
from narrowcast.algorithms.completion.gauss_newton import GaussNewton
from narrowcast.algorithms.completion.lmafit import LMaFit
from narrowcast.algorithms.completion.matrix_irls import MatrixIRLS
from narrowcast.algorithms.completion.niht import NIHT
from narrowcast.algorithms.completion.observed import thread_count
from narrowcast.algorithms.completion.power_factorisation import PowerFactorisation
from narrowcast.algorithms.completion.r3mc import R3MC
from narrowcast.algorithms.completion.scaled_asd import ScaledASD
from narrowcast.algorithms.completion.scaled_gd import ScaledGD
from narrowcast.algorithms.completion.synthetic_completion import SyntheticCompletion
from narrowcast.platform.solver_contracts import Problem, Report, Solver
from narrowcast.platform.threads import one_thread
from narrowcast.reproduce.completion_cases import cases
from narrowcast.reproduce.csv_lines import append_lines, read_lines

SOLVERS: dict[str, Any] = {
    "scaled_asd+": ScaledASD(continuation=Continuation()),
    "gauss_newton+": GaussNewton(continuation=Continuation()),
    "r3mc+": R3MC(continuation=Continuation()),
    "lmafit+": LMaFit(continuation=Continuation()),
    "power_factorisation+": PowerFactorisation(continuation=Continuation()),
    "matrix_irls": MatrixIRLS(),
    "scaled_asd": ScaledASD(),
    "asd": ASD(),
    "scaled_gd": ScaledGD(),
    "lmafit": LMaFit(),
    "niht": NIHT(),
    "cgiht": CGIHT(),
    "alps": ALPS(),
    "r3mc": R3MC(),
}
"""The solvers of the benchmark; + is rank continuation."""
TARGET, FLOOR, SECONDS = 1e-4, 5e-15, 60.0
"""Error on unseen entries that solves a case; residual and seconds at which a solve ends."""
PUBLISHED = ("r3mc", "scaled_asd", "asd", "niht", "cgiht", "scaled_gd", "lmafit", "matrix_irls")
"""The solvers whose results Engels and Morse show."""
_SPACING = 1.25
_NEAR = 10
_EXPONENTS = (-15, 1)
METRICS = ("test.relative_error", "test.unseen_error", "test.column_sum_error")
Solves = dict[tuple[str, str, str], list[Mapping[str, Any]]]
"""The rows of solves by case, solver and seed."""
COLUMNS = ("case", "solver", "seed", "threads", "seconds", "start_seconds", "iteration", "residual", *METRICS, "status")


def timed(solver: Solver, problem: Problem, seed: int, seconds: float) -> Iterator[dict[str, Any]]:
    """Yield rows of a solve: seconds on its clock, the metrics there, and at the last row a status.

    It is measured whenever the clock has gone a quarter further, after every iteration near the target, and at the end:
    a status of the solver, `time`, or `floor`.
    """
    with one_thread():
        began = time.perf_counter()
        state = solver.init(problem, seed)
        spent = start = time.perf_counter() - began
        report, iteration, measured, status, error = Report(1.0), 0, 0.0, "", 1.0
        while not status:
            began = time.perf_counter()
            state, report = solver.step(problem, state)
            spent += time.perf_counter() - began
            iteration += 1
            if report.status != "running":
                status = report.status
            elif report.residual <= FLOOR:
                status = "floor"
            elif spent >= seconds:
                status = "time"
            near = error > TARGET and report.residual <= _NEAR * TARGET
            if status or near or spent >= _SPACING * measured:
                measured = spent
                metrics = problem.measure(solver.answer(state))
                found = {name: metrics[name] for name in METRICS}
                error = found["test.unseen_error"]
                row = {"seconds": spent, "start_seconds": start, "iteration": iteration, "residual": report.residual}
                yield {**row, **found, "status": status}


def seconds_to(rows: Sequence[Mapping[str, Any]], error: float, seconds: float) -> float | None:
    """Return the seconds at which unseen entries were first measured below the error, None if not in this time."""
    reached = (float(row["seconds"]) for row in rows if float(row["test.unseen_error"]) <= error)
    first = next(reached, None)
    return first if first is not None and first <= seconds else None


def milestones(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the rows at which an error is first below a power of ten, those of the least errors, and the last."""
    kept = {len(rows) - 1}
    for metric in METRICS[1:]:
        errors = [float(row[metric]) for row in rows]
        kept.add(min(range(len(rows)), key=errors.__getitem__))
        for exponent in range(*_EXPONENTS):
            kept.update([place for place, error in enumerate(errors) if error <= 10.0**exponent][:1])
    return [rows[place] for place in sorted(kept)]


def read(path: Path) -> Solves:
    """Return the rows of the finished solves of a file."""
    found: Solves = {}
    for row in read_lines(path):
        rows = found.setdefault((row["case"], row["solver"], row["seed"]), [])
        if rows and int(row["iteration"]) <= int(rows[-1]["iteration"]):
            rows.clear()  # an earlier solve that was cut
        rows.append(row)
    return {key: rows for key, rows in found.items() if rows[-1]["status"]}


@click.command()
@click.option("--output", type=click.Path(path_type=Path), required=True, help="CSV file, which is gone on with")
@click.option("--cases", "wanted", default="*", help="pattern of the cases' names, such as n1000-r2-*")
@click.option("--solvers", "chosen", default="*", help="pattern of the solvers' names")
@click.option("--seconds", default=SECONDS, help="time for a solve")
@click.option("--seed", default=1, help="seed of matrices, patterns and starts")
def main(output: Path, wanted: str, chosen: str, seconds: float, seed: int) -> None:
    """Solve the chosen cases with the chosen solvers, one after the other."""
    for line in solve_missing(output, read(output), wanted, chosen, seconds, seed):
        click.echo(line)


def solve_missing(
    output: Path, done: Solves, wanted: str = "*", chosen: str = "*", seconds: float = SECONDS, seed: int = 1
) -> Iterator[str]:
    """Solve each case with each solver unless that is done, append the rows to the file, and yield a line of each."""
    solvers = {name: solver for name, solver in SOLVERS.items() if fnmatch(name, chosen)}
    small = SyntheticCompletion(rows=50, rank=2, fraction=0.5).load()
    for solver in solvers.values():  # compiles
        for _ in zip(range(3), timed(solver, small, 0, 1.0), strict=False):
            pass
    for case in cases():
        left = [name for name in solvers if (case.name, name, str(seed)) not in done]
        if not fnmatch(case.name, wanted) or not left:
            continue
        problem = case.source(seed).load()
        for name in left:
            rows = [
                {"case": case.name, "solver": name, "seed": seed, "threads": thread_count(), **row}
                for row in timed(solvers[name], problem, seed, seconds)
            ]
            append_lines(output, COLUMNS, milestones(rows))
            reached = seconds_to(rows, TARGET, seconds)
            shown = "not solved" if reached is None else f"solved in {reached:.2f} s"
            yield (
                f"{case.name:24} {name:22} {shown:18} {rows[-1]['iteration']:5} iterations, unseen error "
                f"{rows[-1]['test.unseen_error']:.1e}, column sums {min(row[METRICS[2]] for row in rows):.1e}"
            )


if __name__ == "__main__":
    main()
