"""Comparison of series at equal bits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from narrowcast.reproduce.frontier import Frontier, Series, band, judge_rates
from narrowcast.reproduce.paper_results import TARGETS
from narrowcast.reproduce.reproduction import in_short
from narrowcast.reproduce.run_spec import RunSpec

OURS = Series("ours", "scolr-channel-ml1m", (), band("min_error", 1.0, (4, 16)), {"4": 1.0, "16": 0.5}, "k")
RIVAL = Series("rival", "fedmf-ml1m", (), {"a": (), "b": (), "c": ()}, dict.fromkeys("abc", 1.0), "r")
STUDY = Frontier("t", "test.hr@10", 1000, (4, 16), {4: 60.0}, RunSpec("full", "fedmf-ml1m"), OURS, (RIVAL,), 55.0)


def run(share: float, *accuracies: float) -> list[dict[str, Any]]:
    return [{"rounds": 2, "uplink_bits": 2000 * share, "final": {"test.hr@10": value / 100}} for value in accuracies]


def results(**changes: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    labels = {"full": run(1.0, 65, 66)}
    for series, setting, value in (
        (OURS, "4", run(1 / 4, 62, 64)),
        (OURS, "16", run(1 / 16, 51, 51)),
        (RIVAL, "a", run(1 / 2, 59, 61)),
        (RIVAL, "b", run(1 / 8, 55, 57)),
        (RIVAL, "c", run(1 / 8, 54, 56)),
    ):
        labels[series.run(setting).label] = changes.get(setting, value)
    return labels


def test_rivals_are_read_at_the_bits_that_were_taken() -> None:
    verdicts = {verdict.what: verdict for verdict in STUDY.judge(results())}
    at_4 = verdicts["1/4: ours, took 1/4"]
    assert at_4.verdict == "above the next best, rival with 58.00: +5.00 ± 0.00"  # half way between 1/8 and 1/2
    assert (at_4.paper, at_4.difference, at_4.by_seed) == ("60.00", "+3.00", (62.0, 64.0))
    at_16 = verdicts["1/16: ours, took 1/16"]
    assert at_16.verdict == "above the next best, rival with 0.00: +51.00 ± 0.00"  # it cannot send so little
    assert verdicts["rival, a"].verdict == "for 1/2"


def test_scolr_is_no_rival_of_itself() -> None:
    name = replace(RIVAL, name="SCoLR otherwise")
    judged = replace(STUDY, others=(RIVAL, name)).judge(
        {
            **results(),
            name.run("a").label: run(1 / 2, 90, 90),
            **{name.run(each).label: run(1 / 9, 80, 80) for each in "bc"},
        }
    )
    assert any(verdict.verdict == "above the next best, rival with 58.00: +5.00 ± 0.00" for verdict in judged)
    assert any(verdict.what == "SCoLR otherwise, a" for verdict in judged)


def test_losing_and_being_level_are_said() -> None:
    lost = STUDY.judge(results(**{"4": run(1 / 4, 50, 51)}))
    assert any(verdict.verdict == "below the next best, rival with 58.00: -7.50 ± 6.35" for verdict in lost)
    level = STUDY.judge(results(**{"4": run(1 / 4, 56, 61)}))
    assert any(verdict.verdict == "level with the next best, rival with 58.00: +0.50 ± 19.06" for verdict in level)
    more = STUDY.judge(results(**{"a": run(1 / 2, 40, 40)}))  # more bits that serve worse need not be sent
    assert any(verdict.verdict == "above the next best, rival with 56.00: +7.00 ± 0.00" for verdict in more)


def test_the_differences_of_the_same_seeds_decide() -> None:
    ours = replace(OURS, settings={"4": OURS.settings["4"]}, rates={"4": 1.0})
    rival = replace(RIVAL, settings={"a": ()}, rates={"a": 1.0})
    study = replace(STUDY, budgets=(4,), best=ours, others=(rival,))

    def said(*accuracies: float) -> str:
        values = {ours.run("4").label: run(1 / 4, *accuracies), rival.run("a").label: run(1 / 4, 50, 60, 70)}
        return study.judge({"full": run(1.0, 65, 65, 65), **values})[1].verdict

    # Student's t at two degrees of freedom is 4.303; the differences' standard deviation is 0.1, and then 10.
    assert said(51.0, 61.1, 70.9) == "above the next best, rival with 60.00: +1.00 ± 0.25"
    assert said(71.0, 61.0, 51.0) == "level with the next best, rival with 60.00: +1.00 ± 49.68"


def test_the_plot_is_drawn(tmp_path: Path) -> None:
    STUDY.plot(results(), tmp_path / "t.png")
    assert (tmp_path / "t.png").stat().st_size > 10_000


def test_the_best_rate_is_named() -> None:
    tried = ((OURS, "4", (0.5, 1.0)),)
    values = {
        OURS.at_rate("4", 0.5).label: [{"final": {"validation.hr@10": 0.4}}],
        OURS.at_rate("4", 1.0).label: [{"final": {"validation.hr@10": 0.3}}],
    }
    verdicts = judge_rates(tried, values, "validation.hr@10")
    assert [verdict.verdict for verdict in verdicts] == ["best of these", ""]
    assert "data.validation=random" in OURS.at_rate("4", 0.5).overrides


@pytest.mark.parametrize("series", [OURS, RIVAL])
def test_labels_can_be_folders(series: Series) -> None:
    for setting in series.settings:
        assert set(series.run(setting).label) <= set("abcdefghijklmnopqrstuvwxyz0123456789.-")


def test_a_run_is_shown_by_the_metric_that_it_measured() -> None:
    """Networks have no HR@10, which the line of a finished run of `frontier-mnist` once required."""
    assert in_short({"final": {"test.accuracy": 0.9123}, "wall_seconds": 12.3}) == "accuracy 91.23 %, 12.3 s"
    ranked = {"final": {"test.ndcg@10": 0.3, "test.hr@10": 0.5}, "wall_seconds": 1.0}
    assert in_short(ranked) == "HR@10 50.00 %, 1.0 s"
    assert in_short({"final": {"test.loss": 1.5}, "wall_seconds": 1.0}) == "1.0 s"
    assert in_short({"client_seconds": 0.1}) == "measured"
    assert in_short(ValueError("no space")) == "failed: no space"


def test_the_frontier_of_a_network_is_judged_by_its_accuracy(tmp_path: Path) -> None:
    target = TARGETS["frontier-mnist"]
    values = {
        spec.label: [{"rounds": 2, "uplink_bits": 10**6 * place, "final": {"test.accuracy": 0.9 + place / 1000}}]
        for place, spec in enumerate(target.runs, 1)
    }
    verdicts, files = target.finish(values, tmp_path / "frontier-mnist")
    assert (verdicts[0].what, verdicts[0].ours) == ("full updates in float32", "90.10")
    assert [file.name for file in files] == ["frontier-mnist.png"]
