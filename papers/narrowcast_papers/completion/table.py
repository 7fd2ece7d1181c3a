"""Tables of the completion benchmark: which of the 63 cases are solved, and the classes of the report's table 1."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from narrowcast.studies.tables import MeasuredTable
from narrowcast.studies.verdicts import PaperVerdict
from narrowcast_papers.completion.solves import (
    MEASUREMENTS,
    PUBLISHED,
    SECONDS,
    TARGET,
    Class,
    CompletionCase,
    Solves,
    cases,
    seconds_to,
    solves_of,
)

_CLASSES: Mapping[Class, tuple[str, float]] = {
    "S": ("distance below 1e-9", 1e-9),
    "M": ("distance from 1e-9 to 1", 1.0),
    "F": ("distance of 1 or more", math.inf),
}


_ENDS = {"time": "out of time", "floor": "fits all that it sees"}
"""The words for ends that the clock and the residual decide; all others are statuses of the solver."""


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
            rows = _rows_of(solves, case)
            least = min(rows, key=lambda row: float(row["test.unseen_error"]))
            ends = ", ".join(dict.fromkeys(_ENDS.get(row["status"], row["status"]) for row in rows if row["status"]))
            ours = f"error {float(least['test.unseen_error']):.1e}"
            verdict = f"not solved: {ends}, with {case.oversampling:.2f} entries for a degree of freedom"
        else:
            continue
        verdicts.append(PaperVerdict(case.name, _CLASSES[case.published][0], ours, verdict))
    if not verdicts:
        return []
    known = "36 of 63 below 1e-9 by the report's distance"
    total = PaperVerdict("cases solved", known, f"{solved} of {tried}", f"of 63 cases, {tried} were tried")
    return [total, *verdicts]


def judge_report(solves: Solves) -> list[PaperVerdict]:
    """Return the counts of table 1 by the report's distance, of its own solvers and of all, and the class of each case.

    A row has the cases of a size, a rank and a share of entries in the order of their condition numbers.
    """
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
    return [*verdicts, *_class_rows(solves)] if verdicts else []


def _class_rows(solves: Solves) -> Iterator[PaperVerdict]:
    for (n, rank, fraction), of_row in groupby(cases(), lambda case: (case.n, case.rank, case.fraction)):
        pairs = [(case.published, _class_of(solves, case)) for case in of_row]
        changes = Counter(_change(theirs, found) for theirs, found in pairs if found)
        verdict = ", ".join(f"{count} {change}" for change, count in changes.items()) or "not tried"
        paper, ours = " ".join(theirs for theirs, _ in pairs), " ".join(found or "-" for _, found in pairs)
        yield PaperVerdict(f"n = {n}, r = {rank}, {100 * fraction:g} %", paper, ours, verdict)


def _change(theirs: Class, ours: Class) -> str:
    places = [*_CLASSES]
    step = places.index(ours) - places.index(theirs)
    return "better" if step < 0 else "worse" if step else "the same"


def _class_of(solves: Solves, case: CompletionCase, solvers: Sequence[str] | None = None) -> Class | None:
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


COMPLETION = MeasuredTable((MEASUREMENTS,), lambda lines: judge_solved(solves_of(lines)))
COMPLETION_REPORT = MeasuredTable((MEASUREMENTS,), lambda lines: judge_report(solves_of(lines)))
