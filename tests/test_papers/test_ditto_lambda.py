"""Ditto on point estimation: closed forms beside draws, runs of the platform beside closed forms, and the table."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from scipy.optimize import minimize_scalar

from narrowcast.cli.many_runs import reproduce
from narrowcast.platform.config.files import validate
from narrowcast.platform.errors import UserError
from narrowcast_papers.ditto import table as ditto_table
from narrowcast_papers.ditto.table import SETTINGS, best_pulls, judge_pulls, run_ditto
from narrowcast_papers.ditto.theory import PersonalError, Points
from papers import PAPERS, targets

HONEST = Points(clients=6, samples=4, noise=1.5, spread=0.8, seed=1)
ATTACKED = Points(clients=6, samples=4, noise=1.5, spread=0.8, attackers=2, attacker_spread=5, seed=1)


@pytest.mark.parametrize("points", [HONEST, ATTACKED])
@pytest.mark.parametrize("pull", [0.0, 0.4, 3.0])
def test_the_expected_error_is_that_of_many_draws(points: Points, pull: float) -> None:
    error = PersonalError(points.model_copy(update={"dimensions": 40_000}))
    shared = error.points.draw()[1].mean(axis=(0, 1))
    assert error.drawn(pull, shared) == pytest.approx(error.expected(pull), rel=0.02)


@pytest.mark.parametrize("points", [HONEST, ATTACKED, *(points for points, _ in SETTINGS.values())])
def test_the_best_pull_is_where_the_expected_error_is_least(points: Points) -> None:
    error = PersonalError(points)
    least = minimize_scalar(lambda share: error.expected(share / (1 - share)), bounds=(0, 0.99), method="bounded")
    assert least.x / (1 - least.x) == pytest.approx(error.best_pull, rel=1e-3)


def test_the_best_pull_is_the_noise_over_the_spread_and_attackers_lower_it() -> None:
    assert PersonalError(HONEST).best_pull == pytest.approx(1.5**2 / (4 * 0.8**2))
    assert PersonalError(ATTACKED).best_pull < PersonalError(HONEST).best_pull / 2
    with pytest.raises(UserError, match="all 6 clients attack; lower attackers"):
        validate(Points, {**ATTACKED.model_dump(), "attackers": 6}, "points")


@pytest.mark.parametrize("aggregator", ["mean", "median"])
def test_the_platforms_own_models_are_the_closed_forms(aggregator: str) -> None:
    points = ATTACKED.model_copy(update={"dimensions": 3})
    error, centres = PersonalError(points), points.draw()[1].mean(axis=1)
    shared = centres.mean(axis=0) if aggregator == "mean" else np.median(centres, axis=0)
    assert run_ditto(points, aggregator, 1.3, 1) == pytest.approx(error.drawn(1.3, shared), rel=1e-9)
    own, means = (1.3 * shared + centres) / 2.3, points.draw()[0]
    assert error.drawn(1.3, shared) == pytest.approx(np.mean((own[:4] - means[:4]) ** 2), rel=1e-12)


def _lines(setting: str, best: float, seeds: int = 3) -> list[dict[str, str]]:
    shares = {pull: pull / (1 + pull) for pull in (0.0, 0.5, 1.0, 2.0)}
    return [
        {
            "setting": setting,
            "seed": str(seed),
            "lambda": str(pull),
            "apart": "1e-12",
            "error": str(0.1 + (share - best / (1 + best) - 1e-4 * seed) ** 2),
        }
        for seed in range(seeds)
        for pull, share in shares.items()
    ]


def test_the_best_pull_of_a_seed_is_that_of_the_parabola_and_a_wrong_one_is_said() -> None:
    setting = next(iter(SETTINGS))
    assert best_pulls(_lines(setting, 0.7)) == pytest.approx([0.7] * 3, rel=2e-3)
    best, error = judge_pulls(_lines(setting, 0.7))
    assert best.ours.startswith("0.7003 (")
    assert best.verdict.startswith("off by -71.99")
    assert error.verdict == "off by more than 2%"
    assert judge_pulls(_lines(setting, 2.51))[0].difference.startswith("+0.4 %")
    assert judge_pulls(_lines(setting, 0.7, seeds=1)) == judge_pulls([]) == []


def test_the_table_is_measured_once_and_drawn(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    small = HONEST.model_copy(update={"seed": None, "dimensions": 50})
    monkeypatch.setattr(ditto_table, "SETTINGS", {"small": (small, "mean")})
    for name, value in {"FACTORS": (0.0, 1.0, 2.0), "SEEDS": 2, "_ROUNDS": 2}.items():
        monkeypatch.setattr(ditto_table, name, value)
    command = ["ditto-lambda", "--papers", str(PAPERS), "--results", str(tmp_path), "--output", str(tmp_path)]
    CliRunner().invoke(reproduce, command, catch_exceptions=False)
    rows = (tmp_path / "ditto-lambda.csv").read_bytes()
    assert "small: best lambda" in (tmp_path / "ditto-lambda.md").read_text()
    assert (tmp_path / "ditto-lambda.png").read_bytes().startswith(b"\x89PNG")
    CliRunner().invoke(reproduce, command, catch_exceptions=False)
    assert (tmp_path / "ditto-lambda.csv").read_bytes() == rows and rows.count(b"\n") == 1 + 2 * 3


def test_the_kept_runs_have_the_theorems_pull_and_error() -> None:
    found = targets()["ditto-lambda"]
    table = found.table()
    assert isinstance(table, ditto_table.MeasuredTable)
    lines = table.parts[0].read([found.results])
    assert max(float(line["apart"]) for line in lines) < 1e-9
    verdicts = {each.what: each.verdict for each in table.judge(lines)}
    exact = [name for name, (_, aggregator) in SETTINGS.items() if aggregator == "mean"]
    plain = [name for name in exact if not SETTINGS[name][0].attackers]
    assert all(verdicts[f"{name}: best lambda"].startswith("level") for name in plain)
    assert not any("off by" in verdicts[f"{name}: best lambda"] for name in exact)
    errors = [verdict for what, verdict in verdicts.items() if ": error at lambda" in what]
    assert len(errors) == len(exact)
    assert all(verdict.startswith("within 2%") for verdict in errors)
