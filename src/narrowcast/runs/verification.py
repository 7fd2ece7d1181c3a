"""Verification of a run's folder: what its files say of one another, and what a repetition says of them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from narrowcast.packaged import names_solve
from narrowcast.platform import plugins
from narrowcast.platform.config import read_yaml
from narrowcast.platform.errors import UserError
from narrowcast.platform.plugins import said
from narrowcast.platform.tracking.journal import ROUNDS, Journal, read_locked
from narrowcast.platform.trust import is_looking, looking, remedy
from narrowcast.platform.yaml_limits import read_limited
from narrowcast.runs.checks import Check, difference, table_problem
from narrowcast.runs.journal_sums import clients_problem, iterations_problem, rounds_problem
from narrowcast.runs.repetition import Budget
from narrowcast.runs.run_folder import CONFIG, ITERATIONS, RESULT
from narrowcast.runs.run_verification import verify_run
from narrowcast.runs.solve_verification import verify_solve

_OF_FILES = (ArithmeticError, AttributeError, LookupError, OSError, TypeError, ValueError)
"""Errors of comparisons with files that are missing, or that the platform does not write."""


def verify(folder: Path, rounds: int | None = None, *, trust: bool = False, seed: int | None = None) -> list[Check]:
    """Return the checks of a run, whose files are only read; repeat `rounds` rounds or iterations, drawn with `seed`.

    By default as many as took the run 20 seconds. Code of the run's own runs only with `trust`, or in a trusted folder;
    without, the checks that need none are made. Raise `UserError` if there is no run, if its configuration or data
    cannot be read, or if it is being written.
    """
    budget = Budget(rounds) if seed is None else Budget(rounds, seed=seed)
    with looking(folder, trust=trust):  # so that all checks are made before it ends
        return list(verify_folder(folder, budget))


def verify_folder(folder: Path, budget: Budget) -> Iterator[Check]:
    """Yield the checks of a run that is looked at, see `verify`."""
    if not (folder / CONFIG).is_file():
        raise UserError(f"no run at {folder}; give the name of a run, a study or a benchmark, or its folder")
    with read_locked(folder):
        if is_looking() and (code := code_in(folder / CONFIG)):
            yield from guarded(_without_code(folder, code))
        elif names_solve(str(folder / CONFIG)):
            yield from guarded(verify_solve(folder, budget))
        else:
            yield from guarded(verify_run(folder, budget))


def guarded(checks: Iterator[Check]) -> Iterator[Check]:
    """Yield the checks; an error in between, of files that are damaged in some other way, is a failed check."""
    try:
        yield from checks
    except UserError:
        raise
    except _OF_FILES as error:
        yield Check("everything else", problem=f"the files cannot be compared ({said(error)})")


def code_in(file: Path) -> str:
    """Return what a configuration names that would run as code, if anything."""
    values = read_yaml(read_limited(file), str(file))
    return next((f"the program {each}" for each in _programs_in(values)), "") or next(plugins.specs_in(values), "")


def _programs_in(values: Any) -> Iterator[str]:
    if isinstance(values, Mapping):
        if values.get("kind") == "program":
            yield " ".join(map(str, values.get("command") or ()))
        values = list(values.values())
    if isinstance(values, list):
        yield from (each for part in values for each in _programs_in(part))


def _without_code(folder: Path, code: str) -> Iterator[Check]:
    """Yield the checks that need no class of the configuration."""
    journal = Journal.read(folder)
    yield Check("journal", "the checksum of each line", journal.lines.problem)
    of_solve = journal.step_name != "round"
    if of_solve:
        problem = iterations_problem(journal.rounds)
    else:
        problem = rounds_problem(journal.rounds) or clients_problem(journal.rounds, journal.ledgers(), None)
    yield Check("sums", "bits and times of the rows", problem)
    if journal.rounds and (folder / RESULT).is_file():
        table = ITERATIONS if of_solve else ROUNDS
        yield Check(table, "each value against the journal", table_problem(folder / table, journal.rounds_table()))
        result: dict[str, Any] = json.loads((folder / RESULT).read_bytes())
        last, lower = journal.rounds[-1], result.get("lower_is_better")
        its = {"final": journal.final_metrics(), "best": journal.best_metrics(lower)}
        its |= {name: last[name] for name in ("solver_seconds", "simulated_seconds", "residual") if name in last}
        its |= {name: last[f"total_{name}"] for name in ("uplink_bits", "downlink_bits") if f"total_{name}" in last}
        yield Check(RESULT, "metrics, bits and times against the journal", difference(result, its))
    rest = f"{code} is code of the run's own, which looking does not run; {remedy(folder)}"
    yield Check("everything else", skipped=rest)
