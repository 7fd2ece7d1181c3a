"""The sums of a journal: bits, times, clients and losses of rounds, and times of iterations."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from narrowcast.platform.plan import Plan
from narrowcast.platform.step import ITERATION
from narrowcast.platform.types import NO_RANK

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
            if (own := f"round_{name}") in row and not _is_sum(row[name], before[name], row[own]):
                return f"round {row['round']}: {name} is not the sum of the rounds' {own}"
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
    found: dict[str, Any] = {"clients": len(clients)}
    if "delivered" in columns:
        delivered = columns["delivered"].astype(bool)
        found |= {"delivered": int(delivered.sum()), "loss": _mean(columns["loss"].astype(float)[delivered])}
    if "late" in columns:
        found["late"] = int(columns["late"].sum())
    if "staleness" in columns:
        found["mean_staleness"] = _mean(columns["staleness"])
    if "rank" in columns:
        ranks = columns["rank"][columns["rank"] != NO_RANK]
        found["mean_rank"] = _mean(ranks) if len(ranks) else None
    if plan is not None and plan.waits_for_all and plan.schedule.kind == "synchronous":
        idle = 0.0 if len(clients) else plan.clock.idle_seconds
        found["round_simulated_seconds"] = plan.clock.round_seconds(columns["seconds"].astype(float)) + idle
    return found


def _mean(values: Any) -> float:
    return float(values.sum() / len(values)) if len(values) else math.nan


def _same(its: Any, value: Any) -> bool:
    if its is None or value is None:
        return its is value
    return math.isclose(its, value, rel_tol=_CLOSE) or (math.isnan(its) and math.isnan(value))


def iterations_problem(rows: Sequence[Row]) -> str:
    """Return the first recorded iteration whose times are not those of the one before and its own, in words."""
    for before, row in pairwise([_START, *rows]):
        if not row["step_wall_seconds"] >= 0 or not row["evaluate_wall_seconds"] >= 0:
            return f"iteration {row[ITERATION]}: a time is negative"
        if not _is_sum(row["solver_seconds"], before["solver_seconds"], row["step_wall_seconds"]):
            return f"iteration {row[ITERATION]}: solver_seconds is not the sum of the rows' step_wall_seconds"
        own = row["step_wall_seconds"] + row["evaluate_wall_seconds"]
        if not _is_sum(row["wall_seconds"], before["wall_seconds"], own):
            return f"iteration {row[ITERATION]}: wall_seconds is not the sum of the rows' times"
    return ""


def _is_sum(total: float, *parts: float) -> bool:
    return math.isclose(total, sum(parts), rel_tol=_CLOSE, abs_tol=_CLOSE)
