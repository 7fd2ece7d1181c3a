"""Checks of a run's files: verdicts, differences, the rounds or iterations to repeat, and the sums of a journal.

A check compares what is there with what is expected and has the first difference. What a verification repeats is drawn
at random, within a budget. The sums of a journal are bits, times, clients and losses of rounds, and times of
iterations. `Verification` makes them in one order for runs of experiments and solves.
"""

from __future__ import annotations

import json
import math
import random
import re
import secrets
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import BaseModel

from narrowcast._version import __version__
from narrowcast.platform.config.files import plain_values
from narrowcast.platform.rounds.ledger import NO_RANK
from narrowcast.platform.rounds.plan import Plan
from narrowcast.platform.storage.checkpoint import Checkpoint
from narrowcast.platform.storage.journal import Journal, step_of
from narrowcast.platform.types import ITERATION, Arrays, KeptState, RunInput
from narrowcast.runs.folder import CONFIG, RESULT

_ROUNDING, _TINY = 1e-6, 1e-13
"""Relative and absolute differences of measured numbers that another kind of processor may make."""


@dataclass(frozen=True)
class Check:
    """One check of a run: its subject, what was compared, and the first problem, empty if there is none.

    Of a check that could not be made, `skipped` is the reason.
    """

    subject: str
    compared: str = ""
    problem: str = ""
    skipped: str = ""


def data_check(subject: str, recorded: Mapping[str, str], data: RunInput) -> Check:
    """Compare the data set or problem, as it is now, with the sha256 that each of a run's files has of it."""
    compared = f"sha256 against that in {', '.join(recorded)}"
    if not recorded:
        return Check(subject, skipped="the run's version kept no sha256 of the data")
    for file, sha256 in recorded.items():
        if sha256 != data.digest:
            return Check(
                subject, compared, f"different data: {data.source} has the sha256 {data.digest}, {file} says {sha256}"
            )
    return Check(subject, compared)


def difference(actual: Mapping[str, Any], expected: Mapping[str, Any], left_out: Collection[str] = ()) -> str:
    """Return the first of the expected entries that differs, in words; NaN is equal to itself."""
    for name, value in expected.items():
        if name not in left_out and json.dumps(actual.get(name)) != json.dumps(value):
            return f"{name} is {_shown(actual.get(name))}, not {_shown(value)}"
    return ""


def measured_check(subject: str, compared: str, measured: Mapping[str, Any], expected: Mapping[str, Any]) -> Check:
    """Compare numbers that were measured again with those recorded; they may differ by rounding, and it says so."""
    if not (problem := difference(measured, expected)):
        return Check(subject, compared)
    if all(_is_close(measured.get(name), value) for name, value in expected.items()):
        return Check(subject, f"{compared}; equal but for rounding, as on another kind of processor")
    return Check(subject, compared, problem)


def _is_close(actual: Any, value: Any) -> bool:
    if isinstance(value, list):
        return isinstance(actual, list) and len(actual) == len(value) and all(map(_is_close, actual, value))
    if isinstance(value, Mapping):
        return (
            isinstance(actual, Mapping)
            and actual.keys() == value.keys()
            and all(_is_close(actual[n], value[n]) for n in actual)
        )
    if not isinstance(actual, float) or not isinstance(value, float):
        return bool(actual == value)
    return math.isclose(actual, value, rel_tol=_ROUNDING, abs_tol=_TINY) or (math.isnan(actual) and math.isnan(value))


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:60]}..."


def table_problem(path: Path, expected: pa.Table) -> str:
    """Return how a Parquet file differs from a table, in words; empty if it does not."""
    try:
        table = pq.read_table(path, partitioning=None)
    except (OSError, pa.ArrowException) as error:
        return f"unreadable ({str(error).splitlines()[0]})"
    if table.column_names != expected.column_names or table.num_rows != expected.num_rows:
        return f"{table.num_rows} rows of {len(table.column_names)} columns, not {expected.num_rows} of the journal's"
    for name in expected.column_names:
        for row, (value, recorded) in enumerate(zip(table[name].to_pylist(), expected[name].to_pylist(), strict=True)):
            if value != recorded and not (value != value and recorded != recorded):  # noqa: PLR0124 - NaN
                return f"row {row + 1}: {name} is {value}, not {recorded}"
    return ""


def arrays_problem(actual: Arrays, expected: Arrays, of: str = "the last state") -> str:
    """Return how arrays differ from those of a state, the last one by default, in words; empty if they do not."""
    if actual.keys() != expected.keys():
        return f"it has the arrays {', '.join(sorted(actual)) or 'none'}, not {', '.join(sorted(expected))}"
    for name, values in expected.items():
        array = actual[name]
        if array.dtype != values.dtype or array.shape != values.shape or array.tobytes() != values.tobytes():
            return f"{name} is not that of {of}"
    return ""


_LEAST = 10
_SEEDS = 10**6


@dataclass(frozen=True)
class Budget:
    """The steps, rounds or iterations, that may be repeated.

    Attributes:
        steps: their number; None for as many as took the run itself `seconds`, and at least ten.
        seconds: the time of the run, as it recorded that.
        seed: the seed of the draw, by default another one each time, so that nobody knows before what is repeated.

    """

    steps: int | None = None
    seconds: float = 20.0
    seed: int = field(default_factory=lambda: secrets.randbelow(_SEEDS))

    def count(self, steps: int, took_seconds: float) -> int:
        """Return how many steps of a run to repeat that has so many and took so long."""
        if self.steps is not None:
            return min(self.steps, steps)
        if not took_seconds > self.seconds:  # NaN too
            return steps
        return min(steps, max(_LEAST, int(steps * self.seconds / took_seconds)))

    def shared_by(self, runs: int) -> Budget:
        """Return the budget of each of several runs, which share the seconds; `steps` are those of each."""
        return Budget(self.steps, self.seconds / max(runs, 1), self.seed)

    def draws(self) -> random.Random:
        """Return the source of the draw."""
        return random.Random(self.seed)


@dataclass(frozen=True)
class Leg:
    """Steps to repeat: those after `origin`, a state that is kept or the start, up to `last`.

    `end` is the origin of the next leg, or the last step of the run: the leg is whole if it reaches that.
    """

    origin: int
    last: int
    end: int


def legs_of(recorded: Sequence[int], origins: Collection[int], count: int, draws: random.Random) -> list[Leg]:
    """Return what to repeat of a run: from each origin as far as the steps drawn lie, `count` steps in all at most.

    The first step and the last one go first if the budget allows that, then steps drawn from all that are recorded:
    each takes the steps since the origin before it. The budget is spent, whatever is drawn.

    Args:
        recorded: the steps of the journal, ascending.
        origins: the steps after which the state is known; 0 is the start.
        count: the most steps.
        draws: the source of the draw.

    """
    if not recorded or not origins:
        return []
    last = recorded[-1]
    bounds = [*sorted(origin for origin in origins if origin < last), last]
    reached = {origin: origin for origin in bounds[:-1]}
    ends = dict(pairwise(bounds))
    drawn = draws.sample(recorded, len(recorded))
    left = count
    for step in (recorded[0], last, *drawn):
        origin = max((origin for origin in reached if origin < step), default=None)
        if origin is not None and 0 < (cost := step - reached[origin]) <= left:
            reached[origin], left = step, left - cost
    return [Leg(origin, step, ends[origin]) for origin, step in reached.items() if step > origin]


def coverage(legs: Sequence[Leg], recorded: Sequence[int], what: str, budget: Budget) -> Check:
    """Return the check that says what was repeated: `9 of 60 rounds (15 %): 1, 51 to 58; drawn with --seed 8231`."""
    total, steps = recorded[-1], sum(leg.last - leg.origin for leg in legs)
    share = f"{steps} of {total} ({100 * steps / total:.0f} %)"
    if steps not in (0, total):
        share += f": {', '.join(_span(leg.origin + 1, leg.last) for leg in legs)}; drawn with --seed {budget.seed}"
    remainder = f"the other {total - steps} {what}; --rounds {total} repeats all" if steps < total else ""
    return Check(f"{what} repeated", share, skipped=remainder)


def _span(first: int, last: int) -> str:
    return str(first) if first == last else f"{first} to {last}"


Row = Mapping[str, Any]
_LINKS = ("uplink_bits", "downlink_bits")
_START: Row = {"wall_seconds": 0.0, "solver_seconds": 0.0, "simulated_seconds": 0.0} | {f"total_{n}": 0 for n in _LINKS}
_CLOSE = 1e-9
"""Relative; sums of measured times are rounded in another order."""


def rounds_problem(rows: Sequence[Row]) -> str:
    """Return the first round whose totals are not those of the round before and its own, in words."""
    for before, row in pairwise([_START, *rows]):
        expected: dict[str, Any] = {f"total_{name}": before[f"total_{name}"] + row[name] for name in _LINKS}
        for name, value in expected.items():
            if row[name] != value:
                return f"round {row['round']}: {name} is not the sum of the rounds' {name.removeprefix('total_')}"
        total = sum(expected.values())
        if row.get("total_bits", total) != total:
            return f"round {row['round']}: total_bits is {row['total_bits']}, not {total}, uplink and downlink together"
        for name in ("simulated_seconds", "wall_seconds"):
            if (of_round := f"round_{name}") in row and not _is_sum(row[name], before[name], row[of_round]):
                return f"round {row['round']}: {name} is not the sum of the rounds' {of_round}"
    return ""


def clients_problem(rows: Sequence[Row], ledgers: Iterable[Mapping[str, Sequence[Any]]], plan: Plan | None) -> str:
    """Return the first round that is not the sum of its clients, in words.

    The duration of a round follows from those of its clients where the server waits for all of them; without a `plan`
    it is not looked at.
    """
    for row, ledger in zip(rows, ledgers, strict=False):
        columns = {name: np.asarray(values) for name, values in ledger.items()}
        for name, value in _of_clients(columns, plan).items():
            if name in row and not _same(row[name], value):
                return f"round {row['round']}: {name} is {row[name]}, not {value}, which its clients make"
        beside = row.get("allocation_bits", 0)
        extra = [row[name] - int(columns[name].sum()) for name in _LINKS if name in columns]
        if min(extra, default=0) < 0 or (len(extra) == len(_LINKS) and sum(extra) != beside):
            return f"round {row['round']}: its bits are not the sum of its clients' and of allocation_bits"
    return ""


def _of_clients(columns: Mapping[str, Any], plan: Plan | None) -> dict[str, Any]:
    clients = columns["client"]
    row: dict[str, Any] = {"clients": len(clients)}
    if "delivered" in columns:
        delivered = columns["delivered"].astype(bool)
        row |= {"delivered": int(delivered.sum()), "loss": _mean(columns["loss"].astype(float)[delivered])}
    if "late" in columns:
        row["late"] = int(columns["late"].sum())
    if "staleness" in columns:
        row["mean_staleness"] = _mean(columns["staleness"])
    if "rank" in columns:
        ranks = columns["rank"][columns["rank"] != NO_RANK]
        row["mean_rank"] = _mean(ranks) if len(ranks) else None
    if plan is not None and plan.waits_for_all and plan.schedule.kind == "synchronous":
        idle = 0.0 if len(clients) else plan.clock.idle_seconds
        row["round_simulated_seconds"] = plan.clock.round_seconds(columns["seconds"].astype(float)) + idle
    return row


def _mean(values: Any) -> float:
    return float(values.sum() / len(values)) if len(values) else math.nan


def _same(actual: Any, value: Any) -> bool:
    if actual is None or value is None:
        return actual is value
    return math.isclose(actual, value, rel_tol=_CLOSE) or (math.isnan(actual) and math.isnan(value))


def iterations_problem(rows: Sequence[Row]) -> str:
    """Return the first recorded iteration whose times are not those of the one before and its own, in words."""
    for before, row in pairwise([_START, *rows]):
        if not row["step_wall_seconds"] >= 0 or not row["evaluate_wall_seconds"] >= 0:
            return f"iteration {row[ITERATION]}: a time is negative"
        if not _is_sum(row["solver_seconds"], before["solver_seconds"], row["step_wall_seconds"]):
            return f"iteration {row[ITERATION]}: solver_seconds is not the sum of the rows' step_wall_seconds"
        seconds = row["step_wall_seconds"] + row["evaluate_wall_seconds"]
        if not _is_sum(row["wall_seconds"], before["wall_seconds"], seconds):
            return f"iteration {row[ITERATION]}: wall_seconds is not the sum of the rows' times"
    return ""


def _is_sum(total: float, *parts: float) -> bool:
    return math.isclose(total, sum(parts), rel_tol=_CLOSE, abs_tol=_CLOSE)


StateT = TypeVar("StateT", bound=KeptState)


@dataclass
class Verification(ABC, Generic[StateT]):
    """The checks of a folder, made in the order of a call."""

    folder: Path
    digest: str
    """The digest of the configuration."""
    data: RunInput
    """The data set or the problem, as it is now."""
    journal: Journal
    saved: Sequence[Checkpoint[StateT]]
    last: StateT | None = field(default=None, init=False)
    """The state after the last step, once it is known."""

    run_kind: ClassVar[str]
    step_name: ClassVar[str]
    data_kind: ClassVar[str]
    result_file: ClassVar[type[BaseModel]]
    state_figures: ClassVar[str]
    """The figures of a state that the journal has, in words."""
    unprovable: ClassVar[str]
    """Entries of the folder that follow from nothing else there."""

    def __call__(self, budget: Budget) -> Iterator[Check]:
        """Yield the checks; repeat steps within the budget."""
        yield from self.journal_checks()
        yield from map(self._checkpoint, self.saved)
        result, problem = read_result(self.folder, self.result_file)
        yield (its_data := self._data(result))
        if its_data.problem:
            yield Check(f"{self.step_name}s and outputs", skipped="they cannot be repeated with different data")
            return
        self.last = self.states.get(self.journal.last_step)
        yield from self.repetitions(budget)
        if result is None:
            yield Check(RESULT, skipped="" if problem else f"the {self.run_kind} is not finished", problem=problem)
        else:
            yield from self.outputs(result)
        yield Check("the rest", skipped=self.unprovable)

    @abstractmethod
    def journal_checks(self) -> Iterator[Check]:
        """Yield the checks of the journal by itself."""

    @abstractmethod
    def state_problem(self, state: StateT, row: Mapping[str, Any]) -> str:
        """Return how the figures of a checkpoint's state differ from its row of the journal, in words."""

    @abstractmethod
    def repeated(self, leg: Leg) -> Check:
        """Repeat steps in this process and compare them; set `last` where it becomes known."""

    @abstractmethod
    def outputs(self, result: Mapping[str, Any]) -> Iterator[Check]:
        """Yield the checks of the files of a finished run."""

    @cached_property
    def rows(self) -> dict[int, Mapping[str, Any]]:
        """The rows of the journal by step."""
        return {step_of(row): row for row in self.journal.rounds}

    @cached_property
    def states(self) -> dict[int, StateT]:
        """The states of the checkpoints by step."""
        return {checkpoint.state.step: checkpoint.state for checkpoint in self.saved if checkpoint.state is not None}

    def repetitions(self, budget: Budget) -> Iterator[Check]:
        """Repeat steps within the budget, and say which part of all that is."""
        if not (recorded := list(self.rows)):
            return
        count = budget.count(recorded[-1], self.journal.rounds[-1]["wall_seconds"])
        legs = legs_of(recorded, {0, *self.states} if count else (), count, budget.draws())
        yield from map(self.repeated, legs)
        yield coverage(legs, recorded, f"{self.step_name}s", budget)

    def _data(self, result: Mapping[str, Any] | None) -> Check:
        recorded = {
            f"the checkpoint of {self.step_name} {checkpoint.step}": checkpoint.data_sha256 for checkpoint in self.saved
        }
        recorded |= {} if result is None else {RESULT: result[f"{self.data_kind}_sha256"]}
        recorded = {file: sha256 for file, sha256 in recorded.items() if sha256}
        return data_check(self.data_kind, recorded, self.data)

    def _checkpoint(self, saved: Checkpoint[StateT]) -> Check:
        if saved.state is None:
            problem = saved.problem
        elif saved.digest != self.digest:
            problem = f"its configuration is not that of {CONFIG}"
        elif saved.state.step != saved.step:
            problem = f"its state is that of {self.step_name} {saved.state.step}"
        elif saved.step > self.journal.last_step:
            problem = f"the journal ends at {self.step_name} {self.journal.last_step}"
        else:
            problem = self.state_problem(saved.state, self.rows.get(saved.step, {}))
        compared = f"sha256 of the file; configuration, {self.state_figures} against {CONFIG} and the journal"
        return Check(f"checkpoint of {self.step_name} {saved.step}", compared, problem)


def read_result(folder: Path, kind: type[BaseModel]) -> tuple[dict[str, Any] | None, str]:
    """Return the content of `result.json`, or why it cannot be read; neither if the run is not finished."""
    path = folder / RESULT
    if not path.is_file():
        return None, ""
    try:
        values: dict[str, Any] = json.loads(path.read_bytes())
        return {**values, **plain_values(kind.model_validate(values))}, ""
    except (ValueError, RecursionError) as error:
        return None, f"unreadable ({str(error).splitlines()[0]})"


def label_checks(
    result: Mapping[str, Any], name: str, expected: Mapping[str, Any], baselines: Mapping[str, Any], of: str
) -> Iterator[Check]:
    """Yield the checks of the labels in `result.json`, which follow from `of`, and of its baselines, measured again.

    The run's name is that of its configuration, with a number where that was taken.
    """
    if result.get("narrowcast_version") != __version__:  # another version may have other labels, or none
        expected = {label: value for label, value in expected.items() if result.get(label)}
        baselines = baselines if result["baselines"] else {}
    is_named = re.fullmatch(rf"{re.escape(name)}(-\d+)?", result["name"])
    wrong = difference(result, expected) if is_named else f"name is {result['name']}, not {name}"
    yield Check("labels", f"name and all else that follows from {of}", wrong)
    if baselines:
        yield measured_check("baselines", f"measured again, against {RESULT}", result, baselines)
