"""Comparisons of adapters: what is chosen and tested, seconds to a target, experiments of each method, kept results."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from command_line import narrowcast
from narrowcast.studies.results import as_text
from narrowcast.studies.tables import MeasuredTable
from narrowcast_papers.adapters import mails, table
from narrowcast_papers.adapters.comparison import TEST_SEEDS, TUNING_SEEDS, Comparison, Method
from narrowcast_papers.adapters.settings import PRESIDENTS
from papers import PAPERS, targets

COMPARISONS = {
    **{"lora-sotu": table.BY_SGD, "lora-sotu-more": table.MORE_BY_SGD, "lora-sotu-adamw": table.BY_ADAMW},
    **{"lora-bits": table.IN_FEW_BITS, "lora-links": table.OVER_LINKS},
    **{"lora-ranks": table.OF_RANKS, "lora-channel": table.OVER_A_CHANNEL},
    **{"lora-spam": mails.BY_MAILS, "lora-spam-domains": mails.BY_DOMAINS, "lora-personal": table.WITH_OWN},
}
SMALL = Comparison(
    PRESIDENTS,
    "",
    "small.csv",
    {"a": Method({"kind": "lora"}, 4), "b": Method({"kind": "fedavg"}, first_rate=0.01)},
    "a",
    {"kind": "sgd"},
    (0.001, 0.01, 0.1, 1.0),
    0.1,
    target=6.0,
)


def line(seed: int, method: str, rate: float, round_index: int, perplexity: float, seconds: float) -> dict[str, str]:
    values = {"seed": seed, "method": method, "rate": rate, "round": round_index}
    both = {"validation": perplexity, "test": perplexity}
    return {
        name: as_text(value) for name, value in {**values, **both, "up": 1.0, "down": 2.0, "seconds": seconds}.items()
    }


def measured() -> list[dict[str, str]]:
    """The lines of all runs that are planned, whose perplexity is least at 0.1 for a and at 0.01 for b."""
    lines: list[dict[str, str]] = []
    best = {"a": 0.1, "b": 0.01}
    for seed, method, rate in SMALL.table.parts[0].missing(lines):
        last = 5.5 + abs(np.log10(rate / best[method]))
        for round_index, perplexity in ((2, 6.4), (4, 5.9 if method == "a" else 6.2), (PRESIDENTS.rounds, last)):
            lines.append(line(seed, method, rate, round_index, perplexity, 10.0 * round_index + seed))
    return lines


def test_a_method_is_tested_at_the_rate_whose_neighbours_are_worse() -> None:
    lines = measured()
    tested = {(each["method"], each["rate"]) for each in lines if int(each["seed"]) in TEST_SEEDS}
    assert tested == {("a", "0.1"), ("b", "0.01")}
    assert {int(each["seed"]) for each in lines} == {*TEST_SEEDS, *TUNING_SEEDS}
    assert [(choice.value, choice.at_edge) for choice in SMALL.choices(lines)] == [(0.1, False), (0.01, False)]


def test_the_seconds_to_a_target_are_those_of_the_first_round_below_it() -> None:
    lines = measured()
    assert SMALL.needed(lines, "a") == [40.0 + seed for seed in TEST_SEEDS]
    assert SMALL.needed(lines, "b") == [10.0 * PRESIDENTS.rounds + seed for seed in TEST_SEEDS]
    assert replace(SMALL, target=5.0).needed(lines, "a") == [np.inf] * len(TEST_SEEDS)
    bases = [line(0, method, 0.1, 0, base, 0.0) for method, base in (("a", 6.4), ("b", 6.37))]
    assert SMALL.judge([*lines, bases[0]])[0].verdict == "0 MB"
    assert "several bases" in SMALL.judge([*lines, *bases])[0].verdict
    verdicts = {verdict.what: verdict for verdict in SMALL.judge(lines)}
    assert "1 MB up, 2 MB down; 6.0 after 42 s (5 of 5 seeds)" in verdicts["a"].verdict


@pytest.mark.parametrize(
    ("name", "method"), [(name, method) for name, comparison in COMPARISONS.items() for method in comparison.methods]
)
def test_each_method_is_an_experiment_from_the_same_base(name: str, method: str, tmp_path: Path) -> None:
    comparison, base = COMPARISONS[name], str(tmp_path / "base.safetensors")
    experiment = comparison.experiment(method, comparison.first_rate, 0, base)
    its = experiment.model if comparison.methods[method].rank else None
    assert getattr(its, "weights", experiment.start_from) == base


@pytest.mark.parametrize("name", COMPARISONS)
def test_the_published_table_has_every_run(name: str, tmp_path: Path) -> None:
    measured_table = targets()[name].table()
    assert isinstance(measured_table, MeasuredTable)
    for part in measured_table.parts:
        assert next(part.missing(part.read([targets()[name].results])), None) is None
    words = ("reproduce", name, "--papers", PAPERS, "--time-limit", 0, "--output", tmp_path)
    assert narrowcast(*words).status == 0
    assert (tmp_path / f"{name}.png").stat().st_size > 10_000
