"""What a study's folder holds: a folder for each trial, and the results of the best ones on test."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from narrowcast.platform.atomic_files import write_atomically
from narrowcast.platform.config import write_yaml
from narrowcast.tuning.summary import TrialRow

RESULT = "result.json"


def trial_folder(study: Path, number: int) -> Path:
    """The folder of a trial."""
    return study / "trials" / f"{number:05d}"


def write_trial(
    study: Path, row: TrialRow, config: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], digests: Sequence[str]
) -> None:
    """Write what `narrowcast run` would take to play the trial, its evaluations, and what came of it."""
    folder = trial_folder(study, row.number)
    result = {
        "trial": row.number,
        "state": row.state,
        "values": row.drawn,
        "amounts": dict(row.amounts),
        "rounds": row.rounds,
        "feasible": row.feasible,
        "reason": row.reason,
        "retry_of": row.retry_of,
        "model_sha256": list(digests),
    }
    write_plain_yaml(config, folder / "config.yaml")
    write_atomically(folder / "rounds.jsonl", "".join(json.dumps(each) + "\n" for each in rows).encode())
    write_atomically(folder / RESULT, json.dumps(result, indent=2).encode())


def read_rounds(study: Path, number: int) -> tuple[Mapping[str, Any], ...]:
    """The evaluations of a trial, where this folder has them."""
    try:
        return tuple(map(json.loads, (trial_folder(study, number) / "rounds.jsonl").read_text().splitlines()))
    except OSError:
        return ()


def write_plain_yaml(values: Mapping[str, Any], path: Path) -> None:
    """Write nested plain values, wholly or not at all."""
    text = io.StringIO()
    write_yaml(values, text)
    write_atomically(path, text.getvalue().encode())
