"""Tables of the completion benchmark: which of the 63 cases are solved, and the classes of the report's table 1."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from narrowcast.reproduce.completion_cases import Class, CompletionCase, cases
from narrowcast.reproduce.completion_runs import PUBLISHED, SECONDS, TARGET, Solves, read, seconds_to, solve_missing
from narrowcast.reproduce.measured_target import MeasuredTarget
from narrowcast.reproduce.verdict import PaperVerdict

FILE = "completion.csv"
_REPORT = "Engels and Morse, Benchmarking Low-Rank Matrix Completion Algorithms"
_CLASSES: Mapping[Class, tuple[str, float]] = {
    "S": ("distance below 1e-9", 1e-9),
    "M": ("distance from 1e-9 to 1", 1.0),
    "F": ("distance of 1 or more", math.inf),
}


def judge_solved(solves: Solves) -> list[PaperVerdict]:
    """Return how many cases are solved, and of each one the quickest solver or the reason why there is none."""
    verdicts, solved, tried = [], 0, 0
    for case in cases():
        times = {
            solver: seconds_to(rows, TARGET, SECONDS) for (name, solver, _), rows in solves.items() if name == case.name
        }
        tried += bool(times)
        reached = [(found, solver) for solver, found in times.items() if found is not None]
        solved += bool(reached)
        if reached:
            found, solver = min(reached)
            ours, verdict = f"{found:.2f} s, {solver}", f"solved by {len(reached)} of {len(times)}"
        elif times:
            least = min(float(row["test.unseen_error"]) for row in _rows_of(solves, case))
            ours, verdict = f"error {least:.1e}", f"not solved, {case.oversampling:.2f} entries for a degree of freedom"
        else:
            continue
        verdicts.append(PaperVerdict(case.name, _CLASSES[case.published][0], ours, verdict))
    if not verdicts:
        return []
    known = "36 of 63 below 1e-9 by the report's distance"
    total = PaperVerdict("cases solved", known, f"{solved} of {tried}", f"of 63 cases, {tried} were tried")
    return [total, *verdicts]


def judge_report(solves: Solves) -> list[PaperVerdict]:
    """Return the counts of table 1 by the report's distance, of its own solvers and of all."""
    published = Counter(case.published for case in cases())
    verdicts = []
    for label, solvers in (("the report's solvers", PUBLISHED), ("all solvers", None)):
        found = Counter(each for case in cases() if (each := _class_of(solves, case, solvers)))
        if not (tried := found.total()):
            continue
        for letter, (what, _) in _CLASSES.items():
            same = "the same" if found[letter] == published[letter] else "differs"
            if tried < published.total():
                same = f"{tried} of {published.total()} cases tried"
            verdicts.append(PaperVerdict(f"{what}, {label}", str(published[letter]), str(found[letter]), same))
    return verdicts


def _class_of(solves: Solves, case: CompletionCase, solvers: Sequence[str] | None) -> Class | None:
    distances = [float(row["test.column_sum_error"]) for row in _rows_of(solves, case, solvers)]
    if not distances:
        return None
    least = min(distance if math.isfinite(distance) else math.inf for distance in distances)
    return next((letter for letter, (_, bound) in _CLASSES.items() if least < bound), "F")


def _rows_of(solves: Solves, case: CompletionCase, solvers: Sequence[str] | None = None) -> list[Mapping[str, Any]]:
    return [
        row
        for (name, solver, _), rows in solves.items()
        if name == case.name and (solvers is None or solver in solvers)
        for row in rows
    ]


def _read_all(paths: Sequence[Path]) -> Solves:
    return {key: rows for path in paths for key, rows in read(path).items()}


COMPLETION = MeasuredTarget(
    "63 synthetic completion cases: seconds to an error of 1e-4 on unseen entries, start included",
    "882 solves of at most 60 s, up to 15 h",
    FILE,
    _read_all,
    solve_missing,
    judge_solved,
    None,
    ("A solver with + has rank continuation. The clock runs in the start and the iterations, not in measuring.",),
    _REPORT,
)
COMPLETION_REPORT = MeasuredTarget(
    "classes of the same cases by the report's distance, as in its table 1",
    "the same solves",
    FILE,
    _read_all,
    solve_missing,
    judge_report,
    None,
    (
        "The report's distance is the norm of the errors of column sums, at the best iteration of the best solver "
        "within 60 s; it is absolute, and matrices have norms of 2 to 60,000.",
    ),
    _REPORT,
)
