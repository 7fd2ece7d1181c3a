"""Figure 5: SCoLR against CoLR at the same payload, as the runs counted it."""

from __future__ import annotations

from math import log2
from pathlib import Path
from typing import Any

import pytest

from narrowcast_papers.colr.accuracy import COLR, FEDMF, TABLE_4
from narrowcast_papers.colr.payload import POINTS, judge_payloads, payload_kib, plot_payloads

COMPONENT = 60 * 3706 * 32
"""Bits of one component from 60 clients."""


def results(ahead: float = 0.0, seeds: tuple[float, ...] = (-0.1, 0.0, 0.1)) -> dict[str, list[dict[str, Any]]]:
    """Accuracy grows by 4 points with each doubling of the uplink; SCoLR is `ahead` of that, and noisier."""
    made = {}
    for point in POINTS:
        up = (point.size + 1) / 2 if point.series == "SCoLR" else point.size
        spread = 1.001 if point.series == "SCoLR" else 1.0
        level = {"FedMF": 40, "CoLR": 40, "SCoLR": 40 + ahead}[point.series] + 4 * log2(up)
        made[point.run.label] = [
            {
                "rounds": 7,
                "uplink_bits": 7 * COMPONENT * up,
                "downlink_bits": 7 * COMPONENT * point.size,
                "final": {"test.hr@10": (level + spread * noise) / 100, "test.ndcg@10": 0.3},
            }
            for noise in seeds
        ]
    return made


def test_payloads_are_what_the_runs_counted() -> None:
    made = results()
    assert payload_kib(COLR[0], "uplink", made) == pytest.approx(3706 * 32 * 4 / 1024)
    assert payload_kib(COLR[0], "total", made) == pytest.approx(2 * 3706 * 32 * 4 / 1024)
    assert payload_kib(TABLE_4[-1], "total", made) == pytest.approx(3706 * 3.5 * 4 / 1024)
    assert payload_kib(FEDMF[0], "uplink", made) == pytest.approx(3706 * 64 * 4 / 1024)


@pytest.mark.parametrize(("ahead", "verdict"), [(0.0, "level"), (0.29, "level"), (-0.5, "off by -0.50")])
def test_scolr_is_compared_with_colr_at_its_own_uplink(ahead: float, verdict: str) -> None:
    judged = judge_payloads(results(ahead))
    assert [row.what for row in judged[:2]] == [
        "HR@10, SCoLR r_g = 64 minus CoLR at the same uplink",
        "HR@10, SCoLR r_g = 32 minus CoLR at the same uplink",
    ]
    assert all(row.verdict.startswith(verdict) for row in judged[:6]), judged[:6]
    assert [row.paper for row in judged[6:12]] == [""] * 6
    assert [row.what.split(" same ")[1] for row in judged[12:]] == [
        "uplink, mean over 6 sizes",
        "total, mean over 6 sizes",
    ]
    assert judged[12].verdict.startswith(verdict) and judged[12].difference == f"{ahead:+.2f}"


def test_at_the_same_total_scolr_pays_for_its_downlink() -> None:
    """At r_g = 2, CoLR of rank 1.75 sends as much both ways; it is log2(1.75 / 1.5) doublings ahead."""
    row = judge_payloads(results())[11]
    assert row.what == "HR@10, SCoLR r_g = 2 minus CoLR at the same total"
    assert row.by_seed == pytest.approx([-4 * log2(1.75 / 1.5)] * 3, abs=2e-4)
    assert row.verdict.startswith("off by -0.89")


def test_the_papers_difference_is_that_of_its_own_numbers() -> None:
    """Table 4 has 57.84 at r_g = 2; between the 57.2 and 59.2 of CoLR at 1 and 2, 1.5 is at 58.37."""
    assert judge_payloads(results())[5].paper == "-0.53"


def test_the_figure_is_drawn(tmp_path: Path) -> None:
    plot_payloads(results(seeds=(0.0,)), tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 10_000
