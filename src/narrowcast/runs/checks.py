"""A check of a run's files with its verdict, and the first difference between what is there and what is expected."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from narrowcast.platform.described import Described
from narrowcast.platform.types import Arrays

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


def data_check(recorded: Mapping[str, str], data: Described) -> Check:
    """Compare the data set or problem, as it is now, with the sha256 that each of a run's files has of it."""
    subject, compared = "data", f"sha256 against that in {', '.join(recorded)}"
    if not recorded:
        return Check(subject, skipped="the run's version kept no sha256 of the data")
    for file, sha256 in recorded.items():
        if sha256 != data.digest:
            return Check(
                subject, compared, f"different data: {data.source} has the sha256 {data.digest}, {file} says {sha256}"
            )
    return Check(subject, compared)


def difference(found: Mapping[str, Any], expected: Mapping[str, Any], left_out: Collection[str] = ()) -> str:
    """Return the first of the expected entries that differs, in words; NaN is equal to itself."""
    for name, value in expected.items():
        if name not in left_out and json.dumps(found.get(name)) != json.dumps(value):
            return f"{name} is {_shown(found.get(name))}, not {_shown(value)}"
    return ""


def measured_check(subject: str, compared: str, found: Mapping[str, Any], expected: Mapping[str, Any]) -> Check:
    """Compare numbers that were measured again with those recorded; they may differ by rounding, and it says so."""
    if not (problem := difference(found, expected)):
        return Check(subject, compared)
    if all(_is_close(found.get(name), value) for name, value in expected.items()):
        return Check(subject, f"{compared}; equal but for rounding, as on another kind of processor")
    return Check(subject, compared, problem)


def _is_close(its: Any, value: Any) -> bool:
    if isinstance(value, list):
        return isinstance(its, list) and len(its) == len(value) and all(map(_is_close, its, value))
    if isinstance(value, Mapping):
        return isinstance(its, Mapping) and its.keys() == value.keys() and all(_is_close(its[n], value[n]) for n in its)
    if not isinstance(its, float) or not isinstance(value, float):
        return bool(its == value)
    return math.isclose(its, value, rel_tol=_ROUNDING, abs_tol=_TINY) or (math.isnan(its) and math.isnan(value))


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
        for row, (its, there) in enumerate(zip(table[name].to_pylist(), expected[name].to_pylist(), strict=True)):
            if its != there and not (its != its and there != there):  # noqa: PLR0124 - NaN
                return f"row {row + 1}: {name} is {its}, not {there}"
    return ""


def arrays_problem(found: Arrays, expected: Arrays, of: str = "the last state") -> str:
    """Return how arrays differ from those of a state, the last one by default, in words; empty if they do not."""
    if found.keys() != expected.keys():
        return f"it has the arrays {', '.join(sorted(found)) or 'none'}, not {', '.join(sorted(expected))}"
    for name, values in expected.items():
        its = found[name]
        if its.dtype != values.dtype or its.shape != values.shape or its.tobytes() != values.tobytes():
            return f"{name} is not that of {of}"
    return ""
