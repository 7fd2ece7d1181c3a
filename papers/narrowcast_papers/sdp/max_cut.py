"""Timed solves of MAXCUT relaxations: sweeps and seconds to a proved gap, a row of a CSV file for each solve.

The clock is the processor time of `init` and `step` in one thread, so that work of other processes counts only as far
as it takes caches and memory bandwidth. Kernels are compiled before it starts.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, lru_cache
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from narrowcast.platform.compiled import one_thread
from narrowcast.platform.tracking.figures import COLOURS, new_figure
from narrowcast.platform.types import Arrays
from narrowcast.solves.burer_monteiro import BurerMonteiro
from narrowcast.solves.max_cut import MaxCut, MaxCutFile, RandomMaxCut, TorusMaxCut, unit_vectors
from narrowcast.solves.mixing import Mixing
from narrowcast.studies.results import Line, Lines
from narrowcast.studies.tables import MeasuredTable, Measurements
from narrowcast.studies.verdicts import PaperVerdict, mean_and_spread

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
Rows = dict[tuple[str, str, int], Mapping[str, str]]
"""The row of each solve by case, solver and seed."""


def methods_of(case: str) -> Mapping[str, Mixing | BurerMonteiro]:
    """Return the solvers by name that a graph is solved with."""
    return TORUS_METHODS if case == TORUS else {**MOMENTA, **SELECTIONS, **BASELINE}


@lru_cache(maxsize=1)
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


def rows_of(lines: Lines) -> Rows:
    """Return the line of each solve."""
    return {(line["case"], line["solver"], int(line["seed"])): line for line in lines}


def measured(case: str, solver: str, seed: int) -> Iterator[Line]:
    """Yield the line of a solve."""
    _compile()
    yield timed(methods_of(case)[solver], load_case(case, seed), seed)


@cache
def _compile() -> None:
    small = RandomMaxCut(vertices=20, edges=40).load()
    for solver in (*SELECTIONS.values(), *MOMENTA.values()):
        small.rounded(solver.step(small, solver.init(small, 0))[0]["vectors"], 1)


def solves(cases: Sequence[str], solvers: Sequence[str]) -> Measurements:
    """Return the solves of these cases by those of the solvers that solve them."""
    return Measurements(
        "sdp-gset.csv",
        ("case", "solver", "seed"),
        (
            *("sweeps_1e-4", "cpu_seconds_1e-4", "sweeps_1e-6", "cpu_seconds_1e-6"),
            *("relaxation", "rank", "cut", "mean_cut", "load"),
        ),
        lambda _: (
            (case, solver, seed)
            for seed in range(max(SEEDS.values()))
            for case in cases
            for solver in methods_of(case)
            if solver in solvers and seed < SEEDS[case]
        ),
        measured,
        digits=10,
    )


OPTIMA: Mapping[str, float] = {"G1": 12083.20, "G14": 3191.57, "G22": 14135.95, "G48": 6000.0, "G55": 11039.46}
"""Published optima of the relaxation, to two digits."""
BEST_CUTS: Mapping[str, int] = {"G1": 11624, "G14": 3064, "G22": 13359, "G48": 6000, "G55": 10299}
"""Best known cuts."""
MEAN_CUTS: Mapping[str, int] = {"G1": 11267, "G14": 2930, "G22": 12810, "G48": 6000, "G55": 9815}
"""Mean cuts of 100 hyperplanes, from vectors of the authors' code."""
C_CODE: Mapping[tuple[str, str], str] = {
    ("G1", "Mixing"): "516 sweeps, 0.39 s",
    ("G1", "Mixing++ 0.45"): "97 sweeps, 0.07 s",
    ("G22", "Mixing"): "684 sweeps, 0.94 s",
    ("G22", "Mixing++ 0.45"): "133 sweeps, 0.18 s",
    ("G48", "Mixing"): "1024 sweeps",
    ("G55", "Mixing"): "1151 sweeps, 2.3 s",
    ("G55", "Mixing++ 0.45"): "210 sweeps, 0.41 s",
}
"""The authors' code in C until a sweep gains less than 1e-5 in four times the cut, on a machine without other work."""
_METHODS = (*MOMENTA, *SELECTIONS, *BASELINE)
_COLOURS = (*COLOURS, "grey")


def judge_gset(rows: Rows) -> list[PaperVerdict]:
    """Return a row for the optimum, for every method and for the cuts of each graph that was solved."""
    verdicts = []
    for case in GRAPHS:
        solves = {name: found for name in _METHODS if (found := _of(rows, case, name))}
        if not solves:
            continue
        each = [row for found in solves.values() for row in found]
        verdicts.append(_judge_optimum(case, each))
        verdicts += [_judge_speed(case, name, solves) for name in solves]
        verdicts += _judge_cuts(case, each)
    return verdicts


def _of(rows: Rows, case: str, solver: str) -> list[Mapping[str, str]]:
    return [row for (graph, name, _), row in sorted(rows.items()) if (graph, name) == (case, solver)]


def _judge_optimum(case: str, solves: Sequence[Mapping[str, str]]) -> PaperVerdict:
    values = [float(row["relaxation"]) for row in solves]
    proved = sum(bool(row["sweeps_1e-6"]) for row in solves)
    # the bound is at most the millionth part above; published values are rounded to two digits
    agrees = all(value - 0.005 <= OPTIMA[case] <= value * (1 + 1e-6) + 0.005 for value in values)
    return PaperVerdict(
        f"{case}, relaxation",
        f"{OPTIMA[case]:.2f}",
        f"{max(values):.4f}",
        f"{'agrees' if agrees else 'differs'}; gap of 1e-6 proved in {proved} of {len(solves)} solves",
        f"{max(values) - OPTIMA[case]:+.4f}",
    )


def _judge_speed(case: str, name: str, solves: Mapping[str, Sequence[Mapping[str, str]]]) -> PaperVerdict:
    found = [row for row in solves[name] if row["sweeps_1e-6"]]
    if not found:
        return PaperVerdict(f"{case}, {name}, to 1e-6", C_CODE.get((case, name), ""), "", "not proved")
    sweeps, seconds = ([float(row[f"{each}_1e-6"]) for row in found] for each in ("sweeps", "cpu_seconds"))
    reference = [row for row in solves.get("Mixing", ()) if row["sweeps_1e-6"]]
    faster = ""
    if reference and name != "Mixing":
        fewer, less = (
            median(own) / median(float(row[f"{each}_1e-6"]) for row in reference)
            for each, own in (("sweeps", sweeps), ("cpu_seconds", seconds))
        )
        faster = (
            f"{less:.2g} times the time" if name in BASELINE else f"{fewer:.2g} of the sweeps, {less:.2g} of the time"
        )
    loads, seeds = [float(row["load"]) for row in found], f"{len(found)} seed{'s' * (len(found) > 1)}"
    return PaperVerdict(
        f"{case}, {name}, to 1e-6",
        C_CODE.get((case, name), ""),
        f"{median(sweeps):.0f} {'iterations' if name in BASELINE else 'sweeps'}, {median(seconds):.3g} s",
        f"{min(seconds):.3g} to {max(seconds):.3g} s, {seeds}, load {min(loads):.0f} to {max(loads):.0f}",
        faster,
        tuple(sweeps),
    )


def _judge_cuts(case: str, solves: Sequence[Mapping[str, str]]) -> list[PaperVerdict]:
    means, best = [float(row["mean_cut"]) for row in solves], max(float(row["cut"]) for row in solves)
    bound = max(float(row["relaxation"]) for row in solves) * (1 + 1e-6)
    mean = PaperVerdict(
        f"{case}, mean cut of 100 hyperplanes",
        f"{MEAN_CUTS[case]}",
        mean_and_spread(means, 0),
        f"{np.mean(means) / bound:.4f} of the bound",
        f"{np.mean(means) - MEAN_CUTS[case]:+.0f}",
    )
    known = BEST_CUTS[case]
    return [
        mean,
        PaperVerdict(
            f"{case}, best of {100 * len(solves)} hyperplanes, beside the best known cut",
            f"{known}",
            f"{best:.0f}",
            f"{best / bound:.4f} of the bound, {best / known:.4f} of the best known",
            f"{best - known:+.0f}",
        ),
    ]


def plot_gset(rows: Rows, path: Path) -> None:
    """Plot median sweeps, which `BASELINE` has none of, and processor seconds to a proved gap of 1e-6, by graph."""
    figure, panels = new_figure("Relaxations of MAXCUT on Gset: to a proved gap of 1e-6", panels=2)
    for axes, column, label in zip(panels, ("sweeps", "cpu_seconds"), ("sweeps", "processor seconds"), strict=True):
        for place, name in enumerate(_METHODS):
            for at, case in enumerate(GRAPHS):
                values = [float(row[f"{column}_1e-6"]) for row in _of(rows, case, name) if row["sweeps_1e-6"]]
                if values and (name not in BASELINE or column != "sweeps"):
                    middle = median(values)
                    spread = [[middle - min(values)], [max(values) - middle]]
                    x = at + 0.1 * (place - (len(_METHODS) - 1) / 2)
                    axes.errorbar(
                        x, middle, spread, color=_COLOURS[place], marker="osD^v<P"[place], capsize=2, linestyle=""
                    )
            axes.plot([], [], color=_COLOURS[place], marker="osD^v<P"[place], linestyle="", label=name)
        axes.set_yscale("log")
        axes.set_xticks(range(len(GRAPHS)), GRAPHS)
        axes.set(ylabel=label)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=7, fontsize=8, frameon=False)
    figure.savefig(path, dpi=100)


GSET = MeasuredTable(
    (solves(GRAPHS, _METHODS),),
    lambda lines: judge_gset(rows_of(lines)),
    lambda lines, path: plot_gset(rows_of(lines), path),
)
