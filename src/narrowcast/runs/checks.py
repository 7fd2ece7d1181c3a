"""A check of a run's files with its verdict, and the first difference between what is there and what is expected."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from narrowcast.platform.described import Described
from narrowcast.platform.types import Arrays


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


def difference(found: dict[str, Any], expected: dict[str, Any], left_out: Collection[str] = ()) -> str:
    """Return the first of the expected entries that differs, in words; NaN is equal to itself."""
    for name, value in expected.items():
        if name not in left_out and json.dumps(found.get(name)) != json.dumps(value):
            return f"{name} is {_shown(found.get(name))}, not {_shown(value)}"
    return ""


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


def arrays_problem(found: Arrays, expected: Arrays) -> str:
    """Return how arrays differ from those of the last state, in words; empty if they do not."""
    if found.keys() != expected.keys():
        return f"it has the arrays {', '.join(sorted(found)) or 'none'}, not {', '.join(sorted(expected))}"
    for name, values in expected.items():
        its = found[name]
        if its.dtype != values.dtype or its.shape != values.shape or its.tobytes() != values.tobytes():
            return f"{name} is not that of the last state"
    return ""
