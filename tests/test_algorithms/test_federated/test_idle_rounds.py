"""Rounds in which nobody delivers: the server goes on as if they had not been, whatever it remembers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np
import pytest

from narrowcast.algorithms.federated.aggregator import Krum
from narrowcast.algorithms.federated.fairness import AFL, QFFL
from narrowcast.algorithms.federated.fedavg import FedAvg
from narrowcast.algorithms.federated.feddyn import FedDyn
from narrowcast.algorithms.federated.fednova import FedNova
from narrowcast.algorithms.federated.fedpara import FedPara
from narrowcast.algorithms.federated.fedprox import FedProx
from narrowcast.algorithms.federated.server_optimizer import Adam, Momentum
from narrowcast.experiment import load_experiment
from narrowcast.platform.config.catalog import SERVER_OPTIMIZERS
from narrowcast.platform.contracts import Executor, Task
from narrowcast.platform.rounds.ledger import ChunkResult
from narrowcast.platform.rounds.loop import rounds
from narrowcast.platform.rounds.outcome import Outcome
from narrowcast.platform.rounds.plan import Plan
from narrowcast.platform.rounds.state import Run
from narrowcast.platform.types import Arrays, Chunk, LocalTerms
from quadratics import quadratics
from running import local
from secure_rounds import experiment, run_rounds
from small_tasks import network_task

EVERYONE = np.arange(6)


@dataclass(frozen=True)
class LosingRounds(Executor):
    """Loses all uploads of these rounds."""

    executor: Any
    lost: tuple[int, ...]

    def train(self, broadcast: Arrays, chunks: Sequence[Chunk]) -> list[ChunkResult]:
        gone = [replace(chunk, lost=np.ones(len(chunk.clients), dtype=bool)) for chunk in chunks]
        results: list[ChunkResult] = self.executor.train(
            broadcast, gone if chunks[0].round_index in self.lost else list(chunks)
        )
        return results


def play(algorithm: Any, task: Task, lost: tuple[int, ...], n_rounds: int = 6) -> list[Outcome]:
    plan = Plan(rounds=n_rounds, clients_per_round=6, chunk_size=4, checkpoint_every=1)
    return list(rounds(Run(plan, algorithm, task), LosingRounds(local(algorithm, task), lost)))


def server_after(outcome: Outcome) -> Arrays:
    assert outcome.state is not None
    return outcome.state.server


def test_momentum_and_adam_take_no_step_by_loops_in_numpy() -> None:
    task, _ = quadratics(steps=3)
    ways: dict[str, Any] = {"momentum": Momentum(momentum=0.9), "adam": Adam(beta1=0.9, beta2=0.99, tau=0.1)}
    for name, optimizer in ways.items():
        x, m, v = np.zeros(3), np.zeros(3), np.full(3, 0.1**2 if name == "adam" else 0.0)
        for _ in range(4):  # of six rounds, two without deliveries
            delta = np.asarray(
                task.training.train({"x": x}, Chunk(1, 0, EVERYONE, {}), task, LocalTerms()).changes["x"]
            )
            delta = delta.mean(axis=0)
            if name == "momentum":
                m = 0.9 * m + delta
                x = x + 0.5 * m
            else:
                m, v = 0.9 * m + 0.1 * delta, 0.99 * v + 0.01 * delta**2
                x = x + 0.5 * m / (np.sqrt(v) + 0.1)
        algorithm = FedAvg(server_optimizer=optimizer, server_learning_rate=0.5)
        outcomes = play(algorithm, task, lost=(3, 4))
        assert [each.record.delivered for each in outcomes] == [6, 6, 0, 0, 6, 6]
        assert np.abs(server_after(outcomes[-1])["x"] - x).max() <= 1e-14


FAMILY = (FedAvg, FedProx, FedNova, QFFL, AFL, FedPara)


@pytest.mark.parametrize(("kind", "optimizer"), [*product(FAMILY, (None, *SERVER_OPTIMIZERS)), (FedDyn, None)], ids=str)
def test_no_array_of_the_server_moves(kind: Any, optimizer: str | None) -> None:
    fields = {"server_optimizer": {"kind": optimizer}} if optimizer else {}
    outcomes = play(kind.model_validate(fields), network_task(6), lost=(3,), n_rounds=3)
    before, after = server_after(outcomes[1]), server_after(outcomes[2])
    assert before.keys() == after.keys()
    assert all(np.array_equal(values, after[name]) for name, values in before.items())
    assert any((values != 0).any() for name, values in before.items() if name.startswith("optimizer/")) or not optimizer


def test_a_cohort_that_is_too_small_for_its_aggregator_moves_no_momentum() -> None:
    algorithm = FedAvg(aggregator=Krum(byzantine=1), server_optimizer=Momentum())
    draw, server = np.random.default_rng(0), algorithm.init(network_task())
    for clients, moves in ((5, True), (4, False)):
        sums = {f"each/sum/{name}": draw.normal(size=(clients, *values.shape)) for name, values in server.items()
                if not name.startswith("optimizer/")}  # fmt: skip
        after = algorithm.step(
            server, {}, algorithm.fold([{**sums, "each/weight": np.ones(clients)}]), network_task(), 1
        )
        assert all(np.array_equal(values, server[name]) != moves for name, values in after.items())
        server = after


def test_a_masked_sum_that_is_not_opened_moves_no_momentum() -> None:
    momentum = "algorithm={kind: fedavg, server_optimizer: momentum}"
    chosen = experiment("{kind: masked, bits: 16}", momentum, "rounds=4", "checkpoint_every=1", name="fedavg-digits")
    outcomes = run_rounds(chosen, lose_clients={3: np.arange(1000)})
    assert [each.record.delivered for each in outcomes] == [10, 10, 0, 10]
    second, third, fourth = (server_after(each) for each in outcomes[1:])
    assert all(np.array_equal(values, third[name]) for name, values in second.items())
    assert not all(np.array_equal(values, fourth[name]) for name, values in second.items())


def test_a_round_whose_clients_are_all_late_moves_no_momentum() -> None:
    """Rounds 3 and 4 have a deadline that nobody meets."""
    settings = ["algorithm={kind: fedavg, server_optimizer: momentum}", "clients_per_round=10", "checkpoint_every=1"]
    chosen = load_experiment("fedavg-digits", [*settings, "rounds=2"])
    task = chosen.task(chosen.data.load())
    *_, second = rounds(Run(chosen, chosen.algorithm, task), local(chosen.algorithm, task))
    late = load_experiment("fedavg-digits", [*settings, "rounds=4", "deadline_seconds=1e-9", "stragglers=drop"])
    outcomes = list(rounds(Run(late, late.algorithm, task), local(late.algorithm, task), second.state))
    assert [(each.record.delivered, each.record.late) for each in outcomes] == [(0, 10), (0, 10)]
    for outcome in outcomes:
        after = server_after(outcome)
        assert all(np.array_equal(values, after[name]) for name, values in server_after(second).items())
