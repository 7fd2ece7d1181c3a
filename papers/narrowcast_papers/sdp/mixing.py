"""The linear rate of the Mixing method: the spectral radius of a sweep's derivative at the solution.

At a solution g_i = -y_i v_i. To first order a sweep is, on perturbations x_i of the vectors that are orthogonal to v_i,

    x_i <- (1 - w) x_i - (w / y_i) P_i sum_j w_ij x_j,    P_i = I - v_i v_i',  w = 1 / (1 - momentum),

vertex after vertex: overrelaxation of the Hessian P (W + diag(y)) P, and Gauss-Seidel without momentum. Rotations of
all vectors change nothing and are left out. In coordinates in which only the first r columns of the vectors are not
zero, the other columns are perturbed independently, by overrelaxation of W + diag(y) itself, whose kernel are these r
columns.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from narrowcast.platform.compiled import compiled, one_thread
from narrowcast.platform.seeds import generator
from narrowcast.platform.tracking.figures import COLOURS, new_figure
from narrowcast.platform.types import FloatArray
from narrowcast.solves.max_cut import MaxCut
from narrowcast.solves.mixing import Mixing
from narrowcast.solves.vector_kernels import weighted_sums
from narrowcast.solves.weighted_graph import WeightedGraph
from narrowcast.studies.results import Line, Lines
from narrowcast.studies.tables import MeasuredTable, Measurements
from narrowcast.studies.verdicts import PaperVerdict
from narrowcast_papers.sdp.max_cut import GRAPHS, MOMENTA, SEEDS, TORUS, TORUS_METHODS, Rows, load_case, rows_of, solves

_RANK = 1e-4
"""Of the largest singular value, below which a direction of a converged solution counts as none."""
_TOLERANCE = 1e-5


@compiled(reorder=True)
def linearised_sweep(
    indptr: Any, indices: Any, weights: Any, vectors: Any, norms: Any, change: Any, relaxation: float
) -> None:
    """Replace a perturbation [n, c] by that after a sweep, in place; `vectors` [n, c], or zeros, `norms` y [n]."""
    sums = np.empty(change.shape[1])
    for i in range(change.shape[0]):
        sums[:] = 0.0
        for e in range(indptr[i], indptr[i + 1]):
            for c in range(change.shape[1]):
                sums[c] += weights[e] * change[indices[e], c]
        along = 0.0
        for c in range(change.shape[1]):
            along += sums[c] * vectors[i, c]
        for c in range(change.shape[1]):
            turned = sums[c] - along * vectors[i, c]
            change[i, c] = (1.0 - relaxation) * change[i, c] - relaxation * turned / norms[i]


@dataclass(frozen=True)
class LinearRate:
    """The spectral radius of a sweep within the columns that the solution uses, and in the others; its rank."""

    within: float
    across: float
    rank: int

    @property
    def rate(self) -> float:
        """The factor of the error by a sweep."""
        return max(self.within, self.across)


def linear_rate(problem: MaxCut, vectors: FloatArray, momentum: float) -> LinearRate:
    """Return the rate at a converged solution [n, k], by Arnoldi's method on the perturbations without rotations.

    It is that of the largest connected component: others rotate on their own, and an isolated vertex keeps its vector.
    """
    graph, vectors = _largest_component(problem.graph, vectors)
    _, spread, axes = np.linalg.svd(vectors, full_matrices=False)
    rank = int(np.count_nonzero(spread > _RANK * spread[0]))
    reduced = vectors @ axes[:rank].T
    reduced = np.ascontiguousarray(reduced / np.linalg.norm(reduced, axis=1, keepdims=True))
    norms = np.asarray(np.linalg.norm(weighted_sums(graph.indptr, graph.indices, graph.weights, reduced), axis=1))
    relaxation = 1 / (1 - momentum)
    across = [column[:, None] for column in reduced.T]
    rotations = []
    for first in range(rank):
        for second in range(first):
            turned = np.zeros_like(reduced)
            turned[:, first], turned[:, second] = reduced[:, second], -reduced[:, first]
            rotations.append(turned)
    within = _radius(graph, reduced, norms, relaxation, rotations) if rank > 1 else 0.0
    return LinearRate(within, _radius(graph, np.zeros((len(norms), 1)), norms, relaxation, across), rank)


def _largest_component(graph: WeightedGraph, vectors: FloatArray) -> tuple[WeightedGraph, FloatArray]:
    """Return the component with most vertices, and their vectors."""
    from scipy.sparse import csr_array
    from scipy.sparse.csgraph import connected_components

    weights = csr_array((graph.weights, graph.indices, graph.indptr), shape=(graph.vertices, graph.vertices))
    _, labels = connected_components(weights, directed=False)
    inside = np.flatnonzero(labels == np.bincount(labels).argmax())
    part = csr_array(weights[inside][:, inside])
    part.sort_indices()
    indptr, indices = part.indptr.astype(np.int64), part.indices.astype(np.int32)
    return WeightedGraph(indptr, indices, part.data), vectors[inside]


def _radius(
    graph: WeightedGraph, vectors: FloatArray, norms: FloatArray, relaxation: float, kernel: Sequence[FloatArray]
) -> float:
    """Return the spectral radius on perturbations [n, c] without the directions that a sweep keeps, `kernel`.

    A sweep is I - M^-1 H with the lower triangle M of the Hessian H, so that its projector onto the kernel N of H is
    N (N' M N)^-1 N' M.
    """
    from scipy.sparse import csr_array, triu
    from scipy.sparse.linalg import LinearOperator, eigs

    shape = vectors.shape
    weights = csr_array((graph.weights, graph.indices, graph.indptr), shape=(shape[0], shape[0]))
    upper = csr_array(triu(weights, 1))

    def tangent(change: FloatArray) -> FloatArray:
        turned: FloatArray = change - np.einsum("ic,ic->i", change, vectors)[:, None] * vectors
        return turned

    kept = np.array([each.ravel() for each in kernel])
    functionals = np.array(
        [(norms[:, None] / relaxation * each + tangent(np.asarray(upper @ each))).ravel() for each in kernel]
    )
    inner = np.linalg.pinv(functionals @ kept.T)

    def swept(flat: FloatArray) -> FloatArray:
        change = np.ascontiguousarray(tangent(np.real(flat).reshape(shape)))
        change -= (kept.T @ (inner @ (functionals @ change.ravel()))).reshape(shape)
        linearised_sweep(graph.indptr, graph.indices, graph.weights, vectors, norms, change, relaxation)
        return change.ravel()

    size = shape[0] * shape[1]
    start = swept(generator(0, "perturbation").standard_normal(size))
    operator = LinearOperator((size, size), matvec=swept, dtype=np.float64)
    found = eigs(operator, k=2, which="LM", v0=start, ncv=40, tol=_TOLERANCE, return_eigenvectors=False)
    return float(np.abs(found).max())


def observed_rate(solver: Mixing, problem: MaxCut, seed: int, most: int) -> tuple[float, FloatArray]:
    """Return the factor of the residual by a sweep at the end of a solve, and its vectors.

    The solve ends at a residual of 1e-11, or after `most` sweeps; the factor is the geometric mean over the last half
    of the digits gained since 1e-3.
    """
    state, residuals = solver.init(problem, seed), []
    for _ in range(most):
        state, report = solver.step(problem, state)
        residuals.append(report.residual)
        if report.residual <= 1e-11:
            break
    logs = np.log(np.array(residuals))
    middle = (np.log(1e-3) + logs[-1]) / 2
    begin = int(np.argmax(logs <= middle))
    last = len(logs) - 1
    return float(np.exp((logs[last] - logs[begin]) / max(1, last - begin))), state["vectors"]


MOMENTUM = (0.0, 0.45)
CURVES: Mapping[str, Mapping[str, Mixing]] = {"G1": MOMENTA, "G48": MOMENTA, TORUS: TORUS_METHODS}
"""Graphs and solvers whose gap is measured sweep by sweep, at one seed."""
_MOST_SWEEPS, _CURVE_SWEEPS, _SPACING, _LEAST_GAP = 8000, 4000, 1.6, 1e-8


def measure_rate(case: str, momentum: float) -> Iterator[Line]:
    """Yield the observed rate of a graph from seed 0, and the theoretical one at the solution with most momentum."""
    with one_thread():
        problem = load_case(case, 0)
        observed, vectors = observed_rate(Mixing(momentum=momentum), problem, 0, _MOST_SWEEPS)
        if momentum != MOMENTUM[-1]:  # plain sweeps may still be far from the solution
            _, vectors = observed_rate(Mixing(momentum=MOMENTUM[-1]), problem, 0, _MOST_SWEEPS)
        theory = linear_rate(problem, vectors, momentum)
    yield {"observed": observed, "within": theory.within, "across": theory.across, "rank": theory.rank}


def measure_curve(case: str, name: str) -> Iterator[Line]:
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
            yield {"sweep": sweep, "residual": report.residual, "gap": gap}
            if gap <= _LEAST_GAP:
                return


_AGREES = 0.02
"""Relative difference of the sweeps for a digit that counts as the same rate."""
_TORUS_IN_C: Mapping[str, str] = {
    "Mixing": "15463 sweeps",
    "Mixing++ 0.45": "3333 sweeps",
    "Mixing++ 0.495": "724 sweeps",
}
"""The authors' code on G67, another such torus, until a sweep gains less than 1e-5 in four times the cut."""


def judge_sweeps(solves: Rows) -> list[PaperVerdict]:
    """Return the median sweeps to both gaps of each graph and momentum, beside those without momentum."""
    verdicts = []
    for case in SEEDS:
        for name in TORUS_METHODS:
            rows = [row for (graph, solver, _), row in solves.items() if (graph, solver) == (case, name)]
            plain = [row for (graph, solver, _), row in solves.items() if (graph, solver) == (case, "Mixing")]
            for gap in ("1e-4", "1e-6"):
                own, reference = (
                    [int(row[f"sweeps_{gap}"]) for row in each if row[f"sweeps_{gap}"]] for each in (rows, plain)
                )
                if not own:
                    continue
                fewer = f"1/{median(reference) / median(own):.2g}" if reference and name != "Mixing" else ""
                verdicts.append(
                    PaperVerdict(
                        f"{case}, {name}, sweeps to {gap}",
                        _TORUS_IN_C.get(name, "") if case == TORUS and gap == "1e-6" else "",
                        f"{median(own):.0f}",
                        f"{min(own)} to {max(own)}, {len(own)} seed{'s' * (len(own) > 1)}",
                        fewer,
                        tuple(map(float, own)),
                    )
                )
    return verdicts


def judge_rates(rates: Lines) -> list[PaperVerdict]:
    """Return observed and theoretical factors of the error by a sweep; they agree if the sweeps for a digit do."""
    verdicts = []
    for case in GRAPHS:
        for row in (each for each in rates if each["case"] == case):
            observed, theory = float(row["observed"]), max(float(row["within"]), float(row["across"]))
            off = math.log(theory) / math.log(observed) - 1
            verdicts.append(
                PaperVerdict(
                    f"{case}, momentum {float(row['momentum']):g}, factor of the residual by a sweep",
                    f"{theory:.5f}",
                    f"{observed:.5f}",
                    f"{'agrees' if abs(off) <= _AGREES else 'differs'}: {off:+.1%} sweeps a digit, rank {row['rank']}",
                    f"{observed - theory:+.5f}",
                )
            )
    return verdicts


def plot_curves(curves: Lines, path: Path) -> None:
    """Plot the proved gap by sweep of each graph and solver."""
    drawn = [case for case in CURVES if any(row["case"] == case for row in curves)]
    figure, panels = new_figure("Proved gap by sweep: the Mixing method with and without momentum", max(1, len(drawn)))
    for axes, case in zip(panels, drawn, strict=False):
        for place, name in enumerate(CURVES[case]):
            rows = [row for row in curves if (row["case"], row["solver"]) == (case, name)]
            places, gaps = ([float(row[column]) for row in rows] for column in ("sweep", "gap"))
            axes.plot(places, gaps, color=COLOURS[place], marker="osD^"[place], markersize=4, label=name)
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set(title=case, xlabel="sweeps", ylabel="proved gap")
        axes.legend(fontsize=8, frameon=False)
    figure.savefig(path, dpi=100)


MIXING_RATES = MeasuredTable(
    (
        Measurements(
            "sdp-mixing-rates.csv",
            ("case", "momentum"),
            ("observed", "within", "across", "rank"),
            lambda _: product(GRAPHS, MOMENTUM),
            measure_rate,
            digits=8,
        ),
        Measurements(
            "sdp-mixing-curves.csv",
            ("case", "solver"),
            ("sweep", "residual", "gap"),
            lambda _: ((case, solver) for case, solvers in CURVES.items() for solver in solvers),
            measure_curve,
            digits=8,
        ),
        solves(tuple(SEEDS), tuple(TORUS_METHODS)),
    ),
    lambda rates, _, lines: [*judge_sweeps(rows_of(lines)), *judge_rates(rates)],
    lambda _, curves, __, path: plot_curves(curves, path),
)
