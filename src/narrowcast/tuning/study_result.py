"""What a study came to: `result.json`, the metrics of its MLflow run, and what is said where nothing came of it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from narrowcast.platform.atomic_files import write_atomically
from narrowcast.tuning.holdout import Retested
from narrowcast.tuning.study_progress import settings_line, shown
from narrowcast.tuning.summary import TrialRow


@dataclass(frozen=True)
class StudyResult:
    """What a study came to; `tested` is empty where other processes are still at it."""

    rows: Sequence[TrialRow]
    best: Sequence[TrialRow]
    front: Sequence[TrialRow]
    tested: Sequence[Retested]
    elsewhere: int
    files: Sequence[Path]


def write_result(
    folder: Path,
    objectives: Iterable[str],
    storage: str,
    rows: Sequence[TrialRow],
    result: StudyResult | None,
    wall_seconds: float,
) -> dict[str, float]:
    """Write `result.json`, of a study that failed too; what of it goes to the parent run as metrics."""
    states = Counter(row.state for row in rows)
    rounds = sum(row.rounds for row in rows)
    metrics: dict[str, float] = {f"trials_{state}": float(count) for state, count in states.items()}
    metrics |= {"rounds_played": float(rounds), "wall_seconds": wall_seconds}
    chosen = result.best[0] if result and result.best else None
    if chosen is not None:
        metrics |= {f"best.{name}": chosen.amounts[name] for name in objectives} | {"best.trial": float(chosen.number)}
    if result and result.tested:
        metrics |= {f"best.{name}": value for name, value in result.tested[0].means().items()}
    content = {
        "name": folder.name,
        "storage": storage,
        "trials": dict(states),
        "rounds_played": rounds,
        "wall_seconds": wall_seconds,
        "chosen": chosen.number if chosen else None,
        "best": [_plain(row) for row in result.best] if result else [],
        "pareto_front": [_plain(row) for row in result.front] if result else [],
        "tested": [each.plain() for each in result.tested] if result else [],
    }
    write_atomically(folder / "result.json", json.dumps(content, indent=2).encode())
    return metrics


def in_words(objectives: Mapping[str, str], rows: Sequence[TrialRow], result: StudyResult | None) -> str:
    """What the page of the study's run in MLflow says of it, in Markdown."""
    states = Counter(row.state for row in rows)
    lines = [
        f"A study that looks for {' and '.join(f'{name} ({direction})' for name, direction in objectives.items())}: "
        + ", ".join(f"{count} {state}" for state, count in states.items())
        + " trials. Its figures are under Artifacts, in `plots`; `best.yaml` there is what `narrowcast run` takes."
    ]
    if result and result.best:
        chosen = result.best[0]
        reached = ", ".join(f"{name} {shown(name, chosen.amounts[name])}" for name in objectives)
        lines.append(f"Chosen: **trial {chosen.number}** with {reached}; `{settings_line(chosen.drawn)}`")
    if result and result.tested:
        first = result.tested[0]
        on_test = ", ".join(f"{name} {shown(name, value)}" for name, value in first.means().items())
        lines.append(f"Played again with {len(first.seeds)} new seeds: {on_test} on average.")
    return "\n\n".join(lines)


def _plain(row: TrialRow) -> dict[str, Any]:
    return {"trial": row.number, "values": row.drawn, **row.amounts}


def why_none(name: str, rows: Sequence[TrialRow]) -> str:
    """What to say of a study in which no trial is complete."""
    states = Counter(row.state for row in rows if row.state != "lost")
    reasons = Counter(row.reason for row in rows if row.state == "failed")
    if set(states) == {"failed"}:
        reason, times = reasons.most_common(1)[0]
        return (
            f"all {states['failed']} trials of {name} failed, {times} of them so: {reason}; "
            "narrow the space, and give the study another name"
        )
    counted = ", ".join(f"{count} {state}" for state, count in states.items()) or "none"
    return f"{name}: no trial came to its end ({counted}); give it more trials or time, or a milder pruner"
