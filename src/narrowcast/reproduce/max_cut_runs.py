"""Timed solves of MAXCUT relaxations: sweeps and seconds to a proved gap, a row of a CSV file for each solve.

The clock is the processor time of `init` and `step` in one thread, so that work of other processes counts only as far
as it takes caches and memory bandwidth. Kernels are compiled before it starts.

    python -m narrowcast.reproduce.max_cut_runs --output FILE.csv [--cases G1] [--solvers GLOB] [--seeds 5]
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import click
import numpy as np

from narrowcast.algorithms.sdp.burer_monteiro import BurerMonteiro
from narrowcast.algorithms.sdp.max_cut import MaxCutFile, RandomMaxCut, TorusMaxCut
from narrowcast.algorithms.sdp.max_cut_problem import MaxCut, unit_vectors
from narrowcast.algorithms.sdp.mixing import Mixing
from narrowcast.platform.threads import one_thread
from narrowcast.platform.types import Arrays
from narrowcast.reproduce.csv_lines import append_lines, read_lines

GRAPHS, TORUS = ("G1", "G14", "G22", "G48", "G55"), "torus"
"""Graphs of Gset; a torus of 10,000 vertices with weights +1 and -1, drawn anew for every seed."""
MOMENTA: Mapping[str, Mixing] = {
    "Mixing": Mixing(),
    "Mixing++ 0.45": Mixing(momentum=0.45),
    "adaptive": Mixing(momentum="adaptive"),
}
SELECTIONS: Mapping[str, Mixing] = {
    "uniform": Mixing(selection="uniform"),
    "importance": Mixing(selection="importance"),
    "greedy": Mixing(selection="greedy"),
}
BASELINE: Mapping[str, BurerMonteiro] = {"Burer-Monteiro": BurerMonteiro()}
"""Its sweeps are iterations, of up to 300 steps of L-BFGS; the rows of its vectors are scaled to unit norm."""
TORUS_METHODS: Mapping[str, Mixing] = {**MOMENTA, "Mixing++ 0.495": Mixing(momentum=0.495)}
GAPS: Mapping[float, float] = {1e-4: 5e-2, 1e-6: 5e-3}
"""Gaps that are to be proved, descending, and residuals of `Mixing` above which no proof is tried."""
MOST_SWEEPS, MOST_ITERATIONS = 8000, 40
"""Of `Mixing` and of `BASELINE`."""
ROUNDINGS = 100
SEEDS: Mapping[str, int] = {**dict.fromkeys(GRAPHS, 5), TORUS: 3}
_FIRST, _SPACING, _EXACT = 8, 1.5, 0.02
COLUMNS = (
    *("case", "solver", "seed", "sweeps_1e-4", "cpu_seconds_1e-4", "sweeps_1e-6", "cpu_seconds_1e-6"),
    *("relaxation", "rank", "cut", "mean_cut", "load"),
)
Rows = dict[tuple[str, str, int], Mapping[str, str]]
"""The row of each solve by case, solver and seed."""


def methods_of(case: str) -> Mapping[str, Mixing | BurerMonteiro]:
    """Return the solvers by name that a graph is solved with."""
    return TORUS_METHODS if case == TORUS else {**MOMENTA, **SELECTIONS, **BASELINE}


def load_case(case: str, seed: int) -> MaxCut:
    """Return the problem of a graph; only the torus depends on the seed, and hyperplanes do."""
    if case == TORUS:
        return TorusMaxCut(seed=seed, roundings=0, proof="factorisation").load()
    return MaxCutFile(path=Path("gset", case), seed=seed, roundings=0, proof="factorisation").load()


def timed(solver: Mixing | BurerMonteiro, problem: MaxCut, seed: int) -> dict[str, Any]:
    """Return the row of a solve that ends when the last of `GAPS` is proved, or at its most sweeps without it.

    A proof is tried at sweeps of a constant ratio, the first of them 8 of `Mixing` and 1 of others. Between the last
    failure and the first success the sweep at which it begins to succeed is searched for by bisection, to 2 % of its
    number.
    """
    with one_thread():
        began = time.process_time()
        state = solver.init(problem, seed)
        spent, row = [time.process_time() - began], dict[str, Any]()
        before, left = (0, _copied(state)), list(GAPS)
        swept = isinstance(solver, Mixing)
        due, last, most = (_FIRST, MOST_SWEEPS, GAPS) if swept else (1, MOST_ITERATIONS, dict.fromkeys(GAPS, math.inf))
        for sweep in range(1, last + 1):
            began = time.process_time()
            state, report = solver.step(problem, state)
            spent.append(spent[-1] + time.process_time() - began)
            if sweep < due and report.residual > 0:
                continue
            due, now = max(sweep + 1, int(sweep * _SPACING)), (sweep, _copied(state))
            while left and report.residual <= most[left[0]] and problem.proves(_unit(now[1]), left[0]):
                first, before = _first_proof(problem, solver, before, now, left[0])
                row |= {f"sweeps_{_named(left[0])}": first[0], f"cpu_seconds_{_named(left[0])}": spent[first[0]]}
                left.pop(0)
                if not left:
                    return row | _ending(problem, first[1])
            before = now
        return row | _ending(problem, state)


def _first_proof(
    problem: MaxCut, solver: Mixing | BurerMonteiro, low: tuple[int, Arrays], high: tuple[int, Arrays], gap: float
) -> tuple[tuple[int, Arrays], tuple[int, Arrays]]:
    """Return a sweep between with a proof and its state, and one shortly before it without a proof."""
    while high[0] - low[0] > max(1, int(_EXACT * high[0])):
        middle, state = (low[0] + high[0]) // 2, _copied(low[1])
        for _ in range(middle - low[0]):
            state, _ = solver.step(problem, state)
        found = (middle, _copied(state))
        low, high = (low, found) if problem.proves(_unit(state), gap) else (found, high)
    return high, low


def _named(gap: float) -> str:
    """Return 1e-4 for 0.0001."""
    return f"{gap:.0e}".replace("e-0", "e-")


def _copied(state: Arrays) -> Arrays:
    """Return the state with arrays of its own, since a sweep changes its vectors in place."""
    return {name: np.array(values) for name, values in state.items()}


def _unit(state: Arrays) -> Arrays:
    """Return the vectors of a state, of unit norm."""
    return {"vectors": unit_vectors(state["vectors"])}


def _ending(problem: MaxCut, state: Arrays) -> dict[str, Any]:
    """Return what is measured of the last state, and the load of the machine in the last minute."""
    vectors = _unit(state)["vectors"]
    cuts, spread = problem.rounded(vectors, ROUNDINGS).cuts, np.linalg.svd(vectors, compute_uv=False)
    return {
        "relaxation": problem.relaxation(vectors),
        "rank": int(np.count_nonzero(spread > 1e-3 * spread[0])),
        "cut": float(cuts.max()),
        "mean_cut": float(cuts.mean()),
        "load": os.getloadavg()[0],
    }


def read(*paths: Path) -> Rows:
    """Return the rows of these files that have all columns."""
    whole = [row for row in read_lines(*paths) if row["load"] is not None]
    return {(row["case"], row["solver"], int(row["seed"])): row for row in whole}


@click.command()
@click.option("--output", type=click.Path(path_type=Path), required=True, help="CSV file, which is gone on with")
@click.option("--cases", "wanted", default="*", help="pattern of the graphs' names: G1, G14, G22, G48, G55 or torus")
@click.option("--solvers", "chosen", default="*", help="pattern of the solvers' names")
@click.option("--seeds", default=5, help="most seeds of starts, hyperplanes and tori")
def main(output: Path, wanted: str, chosen: str, seeds: int) -> None:
    """Solve the chosen graphs with the chosen solvers, one after the other."""
    for line in solve_missing(
        output, read(output), lambda case, name: fnmatch(case, wanted) and fnmatch(name, chosen), seeds
    ):
        click.echo(line)


def solve_missing(output: Path, done: Rows, is_wanted: Callable[[str, str], bool], seeds: int = 5) -> Iterator[str]:
    """Solve each wanted graph by each solver and seed unless that is done, append its row, and yield a line of it."""
    small = RandomMaxCut(vertices=20, edges=40).load()
    for solver in (*SELECTIONS.values(), *MOMENTA.values()):  # compiles
        small.rounded(solver.step(small, solver.init(small, 0))[0]["vectors"], 1)
    for seed in range(seeds):
        for case in SEEDS:
            missing = [name for name in methods_of(case) if is_wanted(case, name) and (case, name, seed) not in done]
            if not missing or seed >= SEEDS[case]:
                continue
            problem = load_case(case, seed)
            for name in missing:
                row = {"case": case, "solver": name, "seed": seed, **timed(methods_of(case)[name], problem, seed)}
                append_lines(output, COLUMNS, [row], digits=10)
                yield ", ".join(f"{column} {row.get(column, '')}" for column in COLUMNS)


if __name__ == "__main__":
    main()
