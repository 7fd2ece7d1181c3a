from __future__ import annotations

from typing import Any

import pytest

from narrowcast.runs.progress import ProgressDisplay


def row(run: str, index: int, **metrics: float | None) -> dict[str, Any]:
    bits = {"total_uplink_bits": 8_000 * index, "total_downlink_bits": 16_000 * index}
    return {"run": run, "round": index, "loss": 2.5, "simulated_seconds": 10.0 * index, **bits, **metrics}


def test_a_metric_has_its_name_and_the_round_that_it_was_measured_in(capsys: pytest.CaptureFixture[str]) -> None:
    with ProgressDisplay({"digits": (0, 4)}) as display:
        for index, measured in enumerate((None, 0.25, None, 0.5), start=1):
            display.show(row("digits", index, **{"test.accuracy": measured, "test.loss": measured}))
    assert [line.split("  ")[:3] for line in capsys.readouterr().out.splitlines()[1:]] == [
        ["round 1/4", "loss 2.500", "up 1.00 kB"],
        ["round 2/4", "test accuracy 25.00 %", "loss 2.500"],
        ["round 3/4", "test accuracy 25.00 % (round 2)", "loss 2.500"],
        ["round 4/4", "test accuracy 50.00 %", "loss 2.500"],
    ]


def test_replicas_have_lines_of_their_own_with_their_own_rounds(capsys: pytest.CaptureFixture[str]) -> None:
    with ProgressDisplay({"lr-0.1": (0, 100), "lr-1": (90, 100)}) as display:
        for index in range(1, 101):
            display.show(row("lr-0.1", index, **{"test.rmse": 1.5}))
            if index > 90:
                display.show(row("lr-1", index))
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["lr-0.1: 100 rounds", "lr-1: 100 rounds, resuming after round 90"]
    assert len(lines) == 13
    assert lines[-2].startswith("lr-0.1  round 100/100  test RMSE 1.5  loss 2.500")
    assert lines[-1].startswith("lr-1    round 100/100  loss 2.500")
