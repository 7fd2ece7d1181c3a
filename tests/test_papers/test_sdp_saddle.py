"""`reproduce sdp-saddle`: zero columns of the start hold the plain method, not the perturbed ones nor the control."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from narrowcast_papers.sdp.saddle import CONTROL, PLAIN, PROVED, SETTINGS, judge_saddles, plot_saddles, run_saddles
from papers import recorded


def test_one_seed_says_what_ten_do(tmp_path: Path) -> None:
    runs = run_saddles((20,))
    assert list(runs) == list(SETTINGS)
    for each in runs[PLAIN]:
        assert each.rank == 1
        assert each.gaps[-1] > 0.05
        assert each.residual <= 1e-5
        assert each.least_eigenvalue < -0.1
    for name in list(runs)[1:]:
        assert max(each.gaps[-1] for each in runs[name]) <= PROVED
        assert min(each.least_eigenvalue for each in runs[name]) >= -1e-5
    verdicts = judge_saddles(runs)
    assert [each.verdict for each in verdicts] == ["stays", *["reaches the optimum"] * 3, "saddle points", ""]
    assert verdicts[0].by_seed == tuple(each.gaps[-1] for each in runs[PLAIN])
    lost = 1 - np.array([each.relaxation for each in runs[PLAIN]]) / [each.relaxation for each in runs[CONTROL]]
    assert verdicts[-1].by_seed == pytest.approx(lost)
    wrong = judge_saddles({**runs, PLAIN: runs[CONTROL], CONTROL: runs[PLAIN]})
    assert wrong[0].verdict == "leaves at times"
    assert [each.verdict for each in wrong[3:5]] == ["misses the optimum at times", "not all are saddle points"]
    plot_saddles(runs, tmp_path / "x.png")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


def test_the_target_is_listed() -> None:
    assert recorded("sdp-saddle").runs == ()
