"""Verification of a benchmark: each of its solves, and what its files say of them."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Mapping
from pathlib import Path

from narrowcast.benchmarking.file import ENDS, FILE, TABLE, Benchmark, BenchmarkFolder, Instance, load_benchmark
from narrowcast.benchmarking.result import as_csv, result_of
from narrowcast.benchmarking.run import WorkerMemory
from narrowcast.platform.config.trust import is_looking, remedy
from narrowcast.platform.errors import UserError
from narrowcast.platform.storage.journal import read_locked
from narrowcast.runs.checks import Budget, Check, difference
from narrowcast.runs.folder import CONFIG, saved_config
from narrowcast.runs.run_verification import UNPROVABLE
from narrowcast.runs.verification import code_in, guarded, verify_folder, verify_solve
from narrowcast.solve_run import load_solve

_UNPROVABLE = f"milliseconds of the solvers, beyond their sums; why instances failed; {UNPROVABLE}"


def verify_benchmark(folder: Path, budget: Budget) -> Iterator[Check]:
    """Yield the checks of a benchmark, one for each solve; they share the seconds of the budget."""
    if is_looking() and (code := code_in(folder / FILE)):
        for run in sorted(path.parent for path in folder.glob(f"*/{CONFIG}")):
            yield _as_one(run.name, list(verify_folder(run, budget)))
        reason = f"{code} is code of the benchmark's own, which looking does not run; {remedy(folder)}"
        yield Check("everything else", skipped=reason)
        return
    yield from guarded(_checks(BenchmarkFolder(folder), load_benchmark(str(folder / FILE)), budget))


def _checks(folder: BenchmarkFolder, benchmark: Benchmark, budget: Budget) -> Iterator[Check]:
    states, memory = folder.states(), WorkerMemory()
    yield _ends(folder, benchmark, states)
    recorded = [run for run in benchmark.whole if (folder.path / run.name / CONFIG).is_file()]
    for instance in benchmark.whole:
        entry = states.get(instance.name, {"state": "waiting", "reason": ""})
        if instance in recorded:
            share = budget.shared_by(len(recorded))
            yield _as_one(instance.name, list(guarded(_of_instance(folder.path, instance, share, memory))))
        elif entry["state"] == "skipped":
            yield _skipped(instance, memory)
        else:
            yield Check(instance.name, skipped=f"{entry['state']}, and there is no folder of its run")
    yield _table(folder, benchmark)
    yield Check("the rest", skipped=_UNPROVABLE)


def _ends(folder: BenchmarkFolder, benchmark: Benchmark, states: Mapping[str, Mapping[str, str]]) -> Check:
    compared = f"names and settings of the instances against {FILE}; finished ones have a result"
    known = {run.name: run for run in benchmark.whole}
    for name, entry in states.items():
        if name not in known:
            return Check(ENDS, compared, f"{name} is not an instance of {FILE}")
        if entry.get("digest") != known[name].digest():
            return Check(ENDS, compared, f"{name} was solved with other settings than those of {FILE}")
    ended = [run for run in benchmark.whole if folder.is_finished(run)]
    for instance in ended:
        state = states.get(instance.name, {}).get("state")
        if state not in ("finished", "begun"):  # begun: the benchmark was killed before it noted the end
            return Check(ENDS, compared, f"{instance.name} has a result, and is {state or 'not there'}")
    return Check(ENDS, compared)


def _of_instance(folder: Path, instance: Instance, budget: Budget, memory: WorkerMemory) -> Iterator[Check]:
    run = folder / instance.name
    solve = load_solve(saved_config(run))
    is_instance = (
        Instance(instance.problem, instance.solver, solve).digest() == instance.digest() and solve.name == run.name
    )
    yield Check(CONFIG, problem="" if is_instance else f"it is not the instance of {FILE}")
    with read_locked(run):
        yield from verify_solve(run, budget, memory.problem_of)


def _as_one(name: str, checks: list[Check]) -> Check:
    """Return the checks of a solve as one: their number, what was repeated, and the first problem."""
    count = sum(not check.skipped for check in checks)
    repeated = next((check.compared for check in checks if check.subject == "iterations repeated"), "none")
    failed = next((f"{check.subject}: {check.problem}" for check in checks if check.problem), "")
    return Check(name, f"{count} checks; iterations repeated: {repeated}", failed)


def _skipped(instance: Instance, memory: WorkerMemory) -> Check:
    """Check that the solver of a skipped instance does not take its problem."""
    compared = "its solver does not take the problem"
    try:
        instance.solve.solver.check(memory.problem_of(instance.solve))
    except UserError:
        return Check(instance.name, compared)
    return Check(instance.name, compared, "it was skipped, and its solver takes the problem")


def _table(folder: BenchmarkFolder, benchmark: Benchmark) -> Check:
    """Compare the table with the solves; that of an interrupted benchmark may be older than its last solves."""
    path, compared = folder.path / TABLE, f"each value against {ENDS} and the results of the solves"
    if not path.is_file():
        return Check(TABLE, skipped="the benchmark is not finished")
    text, right = path.read_text(), as_csv(result_of(folder, benchmark.whole).rows)
    written, expected = _rows_of(text), _rows_of(right)
    waiting = {name for name, row in expected.items() if row["state"] == "waiting"}
    if is_older := bool(waiting) and text != right:
        compared += " that had ended before; the benchmark has not ended"
        waiting |= {name for name, row in written.items() if row["state"] == "waiting"}
        written, expected = (
            {name: row for name, row in rows.items() if name not in waiting} for rows in (written, expected)
        )
    for name in expected | written:
        cells = written.get(name, {})
        if wrong := difference(cells, dict.fromkeys(cells) | expected.get(name, {})):
            return Check(TABLE, compared, f"{name}: {wrong}")
    twice = sum(1 for _ in csv.reader(io.StringIO(text))) > 1 + len(_rows_of(text))
    return Check(TABLE, compared, "it has other lines" if twice or (text != right and not is_older) else "")


def _rows_of(table: str) -> dict[str, dict[str, str]]:
    """Return the cells of each instance by column, without the empty ones."""
    rows = csv.DictReader(io.StringIO(table, newline=""))
    return {row["instance"]: {column: cell for column, cell in row.items() if cell} for row in rows}
