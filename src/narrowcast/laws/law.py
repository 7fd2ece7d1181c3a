"""The trial of a law on a case, and its verdict.

Every file of laws imports this module, which imports no class that has laws, so that there is no import cycle.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from narrowcast.platform.compiled import one_thread
from narrowcast.platform.errors import UserError, described

CaseT = TypeVar("CaseT")
DataT = TypeVar("DataT")
Cases = Mapping[str, CaseT]
"""The cases on which a law is tried, by a label that says how they differ; empty for the only one."""


class LawBrokenError(AssertionError):
    """A law does not hold; the text says in one line what is wrong."""


@dataclass(frozen=True)
class Verdict:
    """One law over all its cases: `reason` is None if it holds in each, and `note` may say how."""

    law: str
    cases: int
    reason: str | None
    note: str = ""


def require(condition: object, reason: str) -> None:
    """Raise `LawBrokenError` with this reason unless the condition is true."""
    if not condition:
        raise LawBrokenError(reason)


def title(law: Callable[..., object]) -> str:
    """Return the name of a law as a sentence."""
    return law.__name__.replace("_", " ")


def only_case(value: CaseT) -> dict[str, CaseT]:
    """Return a value itself as the only case."""
    return {"": value}


def on_each(sets: Mapping[str, DataT], cases_on: Callable[[DataT, str], Mapping[str, CaseT]]) -> dict[str, CaseT]:
    """Return the cases on each small data set that a class takes; raise `UserError` with its reasons if on none."""
    cases: dict[str, CaseT] = {}
    reasons: dict[str, list[str]] = {}
    for name, data in sets.items():
        try:
            cases |= cases_on(data, name)
        except UserError as error:
            reasons.setdefault(str(error), []).append(name)
    if cases:
        return cases
    listed = "; ".join(f"{', '.join(names)}: {reason}" for reason, names in reasons.items())
    raise UserError(f"it refuses every small data set; test it on yours with --data. {listed}")


def evaluate_laws(laws: Sequence[Callable[[CaseT], object]], cases: Cases[CaseT]) -> Iterator[Verdict]:
    """Try each law on every case, up to the first that breaks it; any exception of the class breaks the law too.

    A law may return a text, which is the note of its verdict.
    """
    for law in laws:
        notes: list[str] = []
        yield Verdict(title(law), len(cases), _first_reason(law, cases, notes), "; ".join(dict.fromkeys(notes)))


def _first_reason(law: Callable[[CaseT], object], cases: Cases[CaseT], notes: list[str]) -> str | None:
    for label, case in cases.items():
        prefix = f"{label}: " if label else ""
        try:
            with one_thread():  # as in a run; on small tensors two threads mostly wait for one another
                note = law(case)
            if isinstance(note, str):
                notes.append(note)
        except (LawBrokenError, UserError) as broken:
            return f"{prefix}{broken}"
        except (Exception, SystemExit) as error:
            return f"{prefix}{described(error)}"
    return None
