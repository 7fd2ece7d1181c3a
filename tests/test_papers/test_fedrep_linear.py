"""FedRep on the linear representation: Algorithm 1 as a loop, its factor near the solution, and the platform's runs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from narrowcast.cli.many_runs import reproduce
from narrowcast_papers.fedrep import table as fedrep_table
from narrowcast_papers.fedrep.problem import ExactHeads, LinearRepresentation, distances
from narrowcast_papers.fedrep.table import ALONE, EXACT, FEDREP, METHODS, bodies, fitted_factor
from papers import PAPERS, targets

SMALL = LinearRepresentation(clients=12, samples=8, features=5, components=2, seed=3)
ROUNDS = 6


def test_solutions_lie_in_the_subspace() -> None:
    data, basis = SMALL.load(), SMALL.basis()
    assert basis.T @ basis == pytest.approx(np.eye(2), abs=1e-12)
    for part in (data.train, data.test):
        features, targets = np.asarray(part.features).reshape(12, 8, 5), part.labels.reshape(12, 8)
        solutions = np.stack([np.linalg.lstsq(*pair)[0] for pair in zip(features, targets, strict=True)])
        assert np.linalg.matrix_rank(solutions, tol=1e-9) == 2
        assert solutions @ basis @ basis.T == pytest.approx(solutions, abs=1e-9)
    assert ExactHeads.of(data).error(basis.T, data) < 1e-12
    assert distances(basis.T, basis) == pytest.approx(0, abs=1e-7)


def test_a_round_is_a_gradient_step_of_the_loss_at_its_best_heads() -> None:
    problem, body = ExactHeads.of(SMALL.load()), np.random.default_rng(0).standard_normal((2, 5))
    features, targets = torch.from_numpy(problem.features), torch.from_numpy(problem.targets)
    values = torch.from_numpy(body.copy()).requires_grad_()
    seen = features @ values.T
    solved = torch.linalg.solve(seen.mT @ seen, (seen.mT @ targets[..., None]))  # differentiated too
    (((seen @ solved)[..., 0] - targets).square().mean() / 2).backward()
    assert values.grad is not None
    assert problem.step(body, 0.3) == pytest.approx(body - 0.3 * values.grad.numpy(), abs=1e-12)


def test_near_the_solution_the_distance_falls_by_the_factor() -> None:
    problem, basis = ExactHeads.of(SMALL.load()), SMALL.basis()
    turned = np.array([[2.0, 0.3], [0.1, 0.7]])  # the factor depends on the norms of the rows
    body = turned @ basis.T + 1e-4 * np.random.default_rng(1).standard_normal((2, 5))
    expected = problem.factor(turned @ basis.T, 0.5)
    assert expected < 0.95
    for _ in range(150):
        before, body = body, problem.step(body, 0.5)
    assert distances(body, basis)[0] / distances(before, basis)[0] == pytest.approx(expected, abs=1e-4)


def _sines(head_epochs: int, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    phases = [{"trained": "head", "epochs": head_epochs}, {"trained": "body"}]
    fedrep = {"kind": "partial", "kept": "head", "phases": phases}
    monkeypatch.setattr(fedrep_table, "METHODS", {FEDREP: (fedrep, head_epochs + 1)})
    return [distances(body, SMALL.basis())[0] for _, body, _ in bodies(FEDREP, SMALL, ROUNDS)]


@pytest.mark.slow
def test_the_platforms_fedrep_is_algorithm_1_as_far_as_its_heads_are_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fedrep_table, "EVERY", 1)
    exact = [distances(body, SMALL.basis())[0] for _, body, _ in bodies(EXACT, SMALL, ROUNDS)]
    assert exact[-1] < exact[0]
    few, many = _sines(2, monkeypatch), _sines(300, monkeypatch)
    assert many == pytest.approx(exact, abs=1e-6)
    assert np.abs(np.subtract(few, exact)).max() > 1e-3


def test_a_factor_is_that_of_the_rounds_near_the_solution() -> None:
    sines = dict.fromkeys(range(10), 1.0) | {10 + index: 5e-3 * 0.9**index for index in range(20)}
    assert fitted_factor(sines) == pytest.approx(0.9, abs=1e-12)


@pytest.mark.slow
def test_the_table_is_measured_once_and_says_which_method_finds_the_subspace(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name, value in {"ROUNDS": 2, "SEEDS": 2, "EVERY": 1, "LinearRepresentation": _of_seed}.items():
        monkeypatch.setattr(fedrep_table, name, value)
    command = ["fedrep-linear", "--papers", str(PAPERS), "--results", str(tmp_path), "--output", str(tmp_path)]
    CliRunner().invoke(reproduce, command, catch_exceptions=False)
    table, rows = (tmp_path / "fedrep-linear.md").read_text(), (tmp_path / "fedrep-linear.csv").read_bytes()
    assert all(method in table for method in (EXACT, *METHODS))
    assert (tmp_path / "fedrep-linear.png").read_bytes().startswith(b"\x89PNG")
    CliRunner().invoke(reproduce, command, catch_exceptions=False)
    assert (tmp_path / "fedrep-linear.csv").read_bytes() == rows
    assert rows.count(ALONE.encode()) == 2


def _of_seed(seed: int) -> LinearRepresentation:
    return SMALL.of_seed(seed).model_copy(update={"seed": seed})


def test_the_kept_runs_show_a_linear_rate_of_fedrep_alone() -> None:
    found = targets()["fedrep-linear"]
    table = found.table()
    assert isinstance(table, fedrep_table.MeasuredTable)
    lines = table.parts[0].read([found.results])
    verdicts = {each.what: each for each in table.judge(lines)}
    for method in (EXACT, FEDREP):
        assert max(verdicts[f"{method}: sine of the largest angle"].by_seed) < 1e-4
        assert verdicts[f"{method}: factor of a round"].verdict.startswith("a linear rate")
    averaged = [what for what in verdicts if what.startswith("FedAvg")]
    assert len(averaged) == 3
    assert min(min(verdicts[what].by_seed) for what in averaged) > 0.05
