"""The site of a benchmark: static pages with performance profiles, curves and tables, without network or server.

The pages are an index, one for each problem and one for each run; `benchmark_site.js` draws them.

Source of the profiles: Dolan and Moré, Math. Program. 91 (2002), section 2. Differs: a profile is over the problems
that every solver shown has run on, and solvers that are not shown are not compared with, since with more than two a
profile ranks only its best one (Gould and Scott, ACM TOMS 43(2), 2016).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np

from narrowcast.benchmarking.solve_grid import LIMITS, GridProblem, GridRun, SolveGrid
from narrowcast.platform.errors import UserError
from narrowcast.platform.tracking.metrics import metric_label
from narrowcast.runs.html_report import configuration, html_page, pairs, section, write_report

TOLERANCES, WITHIN = (1e-4, 1e-2, 1e-8), (0.01,)
"""Errors that are goals, and distances above the least error of any run, by default."""
_MOST_POINTS = 60
_INDEX = "index.html"
_MOST_CHARACTERS = 120
"""Of the name of a page."""


def write_site(
    benchmark: SolveGrid, folder: Path, tolerances: Sequence[float] = TOLERANCES, within: Sequence[float] = WITHIN
) -> Path:
    """Write the site to a folder and return its first page.

    Args:
        benchmark: the runs.
        folder: folder of the pages; pages of the same names are replaced.
        tolerances: errors that are goals; the first one is shown at first.
        within: goals relative to the least error of any run on the problem, such as 0.01 for 1 % above it; of a problem
            that is solved more exactly, the least of the tolerances is the goal.

    Raises:
        UserError: a goal that is not positive, or a folder that cannot be written.

    """
    if not tolerances or any(not 0 < tolerance < np.inf for tolerance in (*tolerances, *within)):
        raise UserError(f"goals are {(*tolerances, *within)}; give tolerances above 0, at least one")
    pages = [f"problems/{name}.html" for name in _file_names([problem.label for problem in benchmark.problems])]
    names = dict(zip(map(id, benchmark.runs), _file_names([run.name for run in benchmark.runs]), strict=True))
    for page, problem in zip(pages, benchmark.problems, strict=True):
        write_report(_problem_page(problem, benchmark.solvers, names), folder / page)
        for run in problem.runs.values():
            write_report(_run_page(run, page), folder / "runs" / f"{names[id(run)]}.html")
    goals = [f"error ≤ {_short(tolerance)}" for tolerance in tolerances]
    goals += [f"within {100 * goal:g} % of the least error of any run" for goal in within]
    data = {
        "view": "index",
        "solvers": benchmark.solvers,
        "goals": goals,
        "problems": [
            {
                "label": problem.label,
                "page": page,
                "metric": metric_label(problem.metric),
                "attributes": problem.attributes,
            }
            for page, problem in zip(pages, benchmark.problems, strict=True)
        ],
        "runs": [
            {
                "problem": index,
                "solver": benchmark.solvers.index(solver),
                "page": f"runs/{names[id(run)]}.html",
                "costs": [_cost(run, problem.metric, target) for target in _goals(problem, tolerances, within)],
                "ended": run.ended,
                "why": run.why(problem.metric),
            }
            for index, problem in enumerate(benchmark.problems)
            for solver, run in problem.runs.items()
        ],
    }
    counts = f"{len(benchmark.solvers)} solvers, {len(benchmark.problems)} problems, {len(benchmark.runs)} runs."
    about = f"<p>{escape(counts)} {escape(_limits(benchmark.runs))}</p>"
    return write_report(_page("Benchmark of solvers", [about, _drawn(data)]), folder / _INDEX)


def _goals(problem: GridProblem, tolerances: Sequence[float], within: Sequence[float]) -> list[float]:
    return [*tolerances, *(max((1 + goal) * problem.least, min(tolerances)) for goal in within)]


def _cost(run: GridRun, metric: str, goal: float) -> list[float] | None:
    cost = run.cost(metric, goal)
    return cost and [_rounded(cost[0]), cost[1]]


def _problem_page(problem: GridProblem, solvers: Sequence[str], names: Mapping[int, str]) -> str:
    pages = {solver: f"../runs/{names[id(run)]}.html" for solver, run in problem.runs.items()}
    lines = [
        {"look": solvers.index(solver), "label": solver, "page": pages[solver], **_curve(run, problem.metric)}
        for solver, run in problem.runs.items()
    ]
    rows = "".join(
        f'<tr><td><a href="{escape(pages[solver])}">{escape(solver)}</a></td>'
        f"<td>{escape(run.why(problem.metric))}</td></tr>"
        for solver, run in problem.runs.items()
    )
    table = f"<table><thead><tr><th>solver</th><th>end of its run</th></tr></thead><tbody>{rows}</tbody></table>"
    about = pairs((name, str(value)) for name, value in problem.attributes.items())
    drawn = _drawn({"view": "curves", "metric": metric_label(problem.metric), "lines": lines})
    links = f'<p><a href="../{_INDEX}">All problems</a></p>'
    return _page(problem.label, [links, drawn, section("Runs", table), section("Problem", about)])


def _run_page(run: GridRun, problem: str) -> str:
    links = (
        f'<p><a href="../{_INDEX}">All problems</a> · <a href="../{escape(problem)}">All solvers on this one</a></p>'
    )
    lines = [
        {"look": look, "label": metric_label(name), **_curve(run, name)}
        for look, name in enumerate(["residual", *run.metrics])
    ]
    drawn = section("Residual and errors", _drawn({"view": "curves", "metric": "value", "lines": lines}))
    if run.result is not None:
        return _page(f"Run {run.name}", [links, *run.result.report_parts([drawn])])
    end = f"<p>{escape(run.why('residual'))}</p>"
    return _page(f"Run {run.name}", [links, end, drawn, configuration(run.folder)])


def _page(title: str, parts: Sequence[str]) -> str:
    style, script = (
        files("narrowcast.benchmarking").joinpath(f"benchmark_site.{suffix}").read_text() for suffix in ("css", "js")
    )
    return html_page(title, parts, style=style, script=script)


def _drawn(data: Mapping[str, Any]) -> str:
    """Return the place of a drawing and its data, in which no text can end the element."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    return (
        "<noscript><p>The drawings need JavaScript.</p></noscript>"
        f'<div id="view"></div><script type="application/json" id="data">{text}</script>'
    )


def _curve(run: GridRun, metric: str) -> dict[str, list[float]]:
    """Return a metric and its costs, thinned to points that are spread evenly over the logarithm of the iteration."""
    iterations, seconds, values = run.errors(metric)
    last = len(values) - 1
    indices = np.unique(np.geomspace(1, max(last, 0) + 1, _MOST_POINTS).round().astype(int) - 1)[: last + 1]
    return {
        "iterations": [int(iterations[index]) for index in indices],
        "seconds": [_rounded(seconds[index]) for index in indices],
        "values": [_rounded(values[index]) for index in indices],
    }


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")


def _short(value: float) -> str:
    """Return 0.0001 as 1e-4."""
    return min(f"{value:g}", re.sub(r"(\.0+)?e([+-])0*", r"e\2", f"{value:e}"), key=len)


def _limits(runs: Sequence[GridRun]) -> str:
    """Return the limits of the runs, and those in which they differ."""
    values = {name: list(dict.fromkeys(run.limits.get(name) for run in runs)) for name in LIMITS}
    limits = [f"{name} {' or '.join(map(str, distinct))}" for name, distinct in values.items() if distinct != [None]]
    differ = any(len(distinct) > 1 for distinct in values.values())
    return f"Limits of a run{', which differ between runs' if differ else ''}: {', '.join(limits)}."


def _file_names(labels: Sequence[str]) -> list[str]:
    """Return a file name for each label, without characters that a link or a file system would need to escape."""
    names = [re.sub(r"[^A-Za-z0-9._-]+", "-", name)[:_MOST_CHARACTERS].strip("-.") or "page" for name in labels]
    return [name if names.count(name) == 1 else f"{name}-{number}" for number, name in enumerate(names, start=1)]
