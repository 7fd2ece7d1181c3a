"""Semidefinite programs by general solvers, Clarabel and SCS, beside the method of Burer and Monteiro and Mixing.

Objectives are those of <C, X>, seconds are CPU time of one thread from the loaded problem on, after a small problem. A
general solver gets the dual, max <b, y> with C - A*(y) >= 0, which has m variables; X is the multiplier of the cone. At
the end of `--seconds` it is asked for what it has, which a long iteration may delay.
`--cases` names random graphs `vertices:edges` for MAXCUT, graphs of Gset, or files in the sparse format of SDPA.

    pip install clarabel scs
    python benchmarks/general_sdp.py [--cases 50:150 G1] [--solvers clarabel scs ...] [--tolerance 1e-6] [--seconds 200]
"""

from __future__ import annotations

import argparse
import csv
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from scipy.sparse import csc_array, csc_matrix, csr_array, triu

from narrowcast.platform.compiled import one_thread
from narrowcast.solves.burer_monteiro import BurerMonteiro
from narrowcast.solves.max_cut import MaxCutFile, RandomMaxCut
from narrowcast.solves.mixing import Mixing
from narrowcast.solves.semidefinite import SDPAFile, SemidefiniteProgram, semidefinite_program_of

CSV = Path(__file__).parent.parent / "papers/narrowcast_papers/sdp/results/sdp-general.csv"
COLUMNS = ("case", "side", "constraints", "solver", "objective", "infeasibility", "gap", "cpu_seconds", "load")
ITERATIONS = 5000


def main() -> None:
    with one_thread():
        compare(_arguments())


def compare(arguments: argparse.Namespace) -> None:
    """Solve the cases that are named and put their rows in the CSV file."""
    for name in arguments.solvers:
        SOLVERS[name](load("6:9"), 1e-3, arguments.seconds)
    rows = [] if not arguments.csv.exists() else list(csv.DictReader(arguments.csv.open()))
    for case in arguments.cases:
        problem = load(case)
        program, label = semidefinite_program_of(problem), Path(case).stem
        for name in arguments.solvers:
            if name == "mixing" and program is problem:
                continue
            began = time.process_time()
            found = SOLVERS[name](problem, arguments.tolerance, arguments.seconds)
            seconds = time.process_time() - began
            row = {"case": label, "side": program.constraints.size, "constraints": program.constraints.count}
            row |= {"solver": name, **found, "cpu_seconds": f"{seconds:.2f}", "load": f"{os.getloadavg()[0]:.1f}"}
            print(row, flush=True)
            rows = [each for each in rows if (each["case"], each["solver"]) != (label, name)] + [row]
            with arguments.csv.open("w", newline="") as file:
                writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
                writer.writeheader()
                writer.writerows(rows)


def load(case: str) -> Any:
    """Return the problem of a case."""
    if ":" in case:
        vertices, edges = map(int, case.split(":"))
        return RandomMaxCut(vertices=vertices, edges=edges, roundings=0).load()
    if case.endswith(".dat-s"):
        return SDPAFile(path=Path(case)).load()
    return MaxCutFile(path=Path("gset") / case, roundings=0).load()


def cone_rows(matrix: Any, lower: bool) -> Any:
    """Return the triangle of a symmetric matrix as a cone's column: columns in turn, sqrt(2) off the diagonal.

    Clarabel takes the upper triangle by columns, SCS the lower one.
    """
    found = triu(csr_array(matrix), format="coo")
    low, high = (each.astype(np.int64) for each in found.coords)
    size = matrix.shape[0]
    rows = low * size - low * (low - 1) // 2 + high - low if lower else high * (high + 1) // 2 + low
    values = np.where(low == high, 1.0, math.sqrt(2)) * found.data
    return csc_array((values, (rows, np.zeros_like(rows))), shape=(size * (size + 1) // 2, 1))


def cone_form(program: SemidefiniteProgram, lower: bool) -> tuple[csc_matrix, np.ndarray, np.ndarray]:
    """Return A, b and q of min <q, y> with A y + s = b and s in the cone."""
    from scipy.sparse import hstack

    columns = [cone_rows(program.constraints.adjoint(unit), lower) for unit in np.eye(program.constraints.count)]
    offsets = cone_rows(program.cost, lower).toarray()[:, 0]
    return csc_matrix(hstack(columns)), offsets, -program.targets


def by_clarabel(problem: Any, tolerance: float, seconds: float) -> Mapping[str, Any]:
    """Solve with the interior-point method of Clarabel."""
    import clarabel

    program = semidefinite_program_of(problem)
    matrix, offsets, linear = cone_form(program, lower=False)
    settings = clarabel.DefaultSettings()
    settings.verbose, settings.max_threads, settings.time_limit = False, 1, seconds
    settings.tol_gap_abs = settings.tol_gap_rel = settings.tol_feas = tolerance
    cones = [clarabel.PSDTriangleConeT(program.constraints.size)]
    nothing = csc_matrix((len(linear), len(linear)))
    found = clarabel.DefaultSolver(nothing, linear, matrix, offsets, cones, settings).solve()
    return measured(program, np.array(found.x), np.array(found.z), lower=False)


def by_scs(problem: Any, tolerance: float, seconds: float) -> Mapping[str, Any]:
    """Solve with the operator splitting of SCS."""
    import scs

    program = semidefinite_program_of(problem)
    matrix, offsets, linear = cone_form(program, lower=True)
    data, cone = {"A": matrix, "b": offsets, "c": linear}, {"s": [program.constraints.size]}
    limits = {"max_iters": 100_000, "time_limit_secs": seconds}
    solver = scs.SCS(data, cone, verbose=False, eps_abs=tolerance, eps_rel=tolerance, **limits)
    found = solver.solve()
    return measured(program, found["x"], found["y"], lower=True)


def measured(program: SemidefiniteProgram, dual: np.ndarray, triangle: np.ndarray, lower: bool) -> Mapping[str, Any]:
    """Return the metrics of a dual point and a matrix, the latter as its nearest positive semidefinite one."""
    size = program.constraints.size
    whole = np.zeros((size, size))
    if lower:
        column, row = np.triu_indices(size)
    else:
        column, row = np.tril_indices(size)
    whole[row, column] = whole[column, row] = triangle / np.where(row == column, 1.0, math.sqrt(2))
    values, vectors = np.linalg.eigh(whole)
    return shown(program.measure({"vectors": vectors * np.sqrt(np.maximum(values, 0)), "dual": dual}))


def by_burer_monteiro(problem: Any, tolerance: float, seconds: float) -> Mapping[str, Any]:
    """Solve with `burer_monteiro`."""
    del seconds
    solver = BurerMonteiro()
    state = solver.init(problem, 0)
    for _ in range(60):
        state, report = solver.step(problem, state)
        if report.residual <= tolerance:
            break
    return shown(semidefinite_program_of(problem).measure(solver.answer(state)))


def by_mixing(problem: Any, tolerance: float, seconds: float) -> Mapping[str, Any]:
    """Solve with `mixing`; the dual point is that of its certificate."""
    del seconds
    solver = Mixing(momentum="adaptive")
    state = solver.init(problem, 0)
    for _ in range(ITERATIONS):
        state, report = solver.step(problem, state)
        if report.residual <= tolerance:
            break
    sums = np.linalg.norm(problem.program.cost @ state["vectors"], axis=1)
    return shown(problem.program.measure({"vectors": state["vectors"], "dual": -sums}))


def shown(metrics: Mapping[str, float]) -> dict[str, str]:
    """Return the metrics as the file has them."""
    gap = f"{metrics['gap']:.1e}" if "gap" in metrics else ""
    return {"objective": f"{metrics['objective']:.8f}", "infeasibility": f"{metrics['infeasibility']:.1e}", "gap": gap}


SOLVERS = {"clarabel": by_clarabel, "scs": by_scs, "burer_monteiro": by_burer_monteiro, "mixing": by_mixing}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--cases", nargs="+", default=["50:150", "100:300"])
    parser.add_argument("--solvers", nargs="+", choices=SOLVERS, default=list(SOLVERS))
    parser.add_argument("--tolerance", type=float, default=1e-6)
    parser.add_argument("--seconds", type=float, default=1e6, help="most seconds of a general solver")
    parser.add_argument("--csv", type=Path, default=CSV)
    return parser.parse_args()


if __name__ == "__main__":
    main()
