"""A published number, ours, and what to make of the two."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Verdict:
    """One row of a reproduction's table."""

    what: str
    paper: str
    ours: str
    verdict: str
