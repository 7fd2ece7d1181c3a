"""When checkpoints are due, and where they may go."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from narrowcast.platform.errors import UserError
from narrowcast.platform.rounds.plan import Plan


@pytest.mark.parametrize(
    ("settings", "round_index", "seconds", "due"),
    [
        ({}, 7, 9.9, False),
        ({}, 7, 10.0, True),
        ({}, 100, 0.0, True),  # the last round
        ({"checkpoint_every": 3}, 7, 0.0, False),
        ({"checkpoint_every": 3}, 6, 0.0, True),
        ({"checkpoint_every": 3}, 7, 10.0, True),  # whichever comes first
        ({"checkpoint_seconds": 0}, 7, 0.0, True),
        ({"checkpoint_seconds": 600}, 7, 599.0, False),
    ],
)
def test_a_checkpoint_is_due_by_round_or_by_time(
    settings: dict[str, Any], round_index: int, seconds: float, due: bool
) -> None:
    assert Plan(**settings).keeps(round_index, seconds) is due


def test_a_checkpoint_path_lasts_and_holds_no_password() -> None:
    assert Plan(checkpoint_path="here").checkpoint_path == str(Path("here").absolute())
    assert Plan(checkpoint_path="s3://bucket/runs/").checkpoint_path == "s3://bucket/runs"
    with pytest.raises(UserError, match="names a user or password"):
        Plan(checkpoint_path="ftp://me:secret@host/runs")
