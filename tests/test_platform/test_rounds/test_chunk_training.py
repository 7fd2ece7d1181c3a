"""Replicas in lockstep: each gives what it gives alone, to the last bit where learning rates are the same."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from digits import digits, make_task, relative_error
from narrowcast.algorithms.federated.aggregator import CoordinateMedian
from narrowcast.algorithms.federated.fedavg import FedAvg
from narrowcast.algorithms.federated.fedpara import FedPara
from narrowcast.algorithms.federated.fedprox import FedProx
from narrowcast.algorithms.federated.low_rank import CoLR, SCoLR
from narrowcast.algorithms.federated.scaffold import Scaffold
from narrowcast.algorithms.local_training.calls import program_key
from narrowcast.algorithms.local_training.sgd import SGD
from narrowcast.platform.contracts import Algorithm, LocalCall
from narrowcast.platform.errors import RunFailed
from narrowcast.platform.models.networks import CNN
from narrowcast.platform.rounds.evaluation import model_sha256
from narrowcast.platform.rounds.loop import LocalExecutor, lockstep, rounds
from narrowcast.platform.rounds.outcome import Outcome
from narrowcast.platform.rounds.plan import Plan
from narrowcast.platform.rounds.state import Run
from narrowcast.platform.types import Chunk, LocalTerms, LocalUpdates

COUNTS = [21, 8, 40, 3, 17, 8, 0, 30, 12, 9]
ALGORITHMS: list[Algorithm] = [
    FedAvg(),
    FedProx(mu=0.1, partial_share=0.5),
    Scaffold(),
    Scaffold(control="gradient"),
    FedAvg(aggregator=CoordinateMedian()),
    CoLR(rank=3),
    SCoLR(rank=4),
    FedPara(),
]


def replica(algorithm: Algorithm, seed: int, *, n_rounds: int = 3, images: bool = False, **training: Any) -> Run:
    task = replace(make_task(digits(COUNTS, images=images), CNN(hidden=16) if images else None, **training), seed=seed)
    algorithm.check(task)
    plan = Plan(seed=seed, rounds=n_rounds, clients_per_round=6, chunk_size=4, sampling="uniform")
    return Run(plan, algorithm, task)


def alone(each: Run) -> list[Outcome]:
    return list(rounds(each, LocalExecutor(each)))


def together(replicas: list[Run]) -> list[list[Outcome]]:
    """The outcomes of every replica, none of which may fail."""
    played: list[list[Outcome]] = [[] for _ in replicas]
    for outcomes in lockstep(replicas):
        for place, outcome in outcomes.items():
            assert isinstance(outcome, Outcome)
            played[place].append(outcome)
    return played


def sharing_data(replicas: list[Run]) -> list[Run]:
    data = replicas[0].task.data
    return [replace(each, task=replace(each.task, data=data)) for each in replicas]


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda each: each.kind)
@pytest.mark.parametrize("training", [{}, {"momentum": 0.9, "epochs": 2, "weight_decay": 0.01, "clip_norm": 1.0}])
def test_seeds_in_one_program_give_what_each_gives_alone(algorithm: Algorithm, training: dict[str, Any]) -> None:
    replicas = sharing_data([replica(algorithm, seed, **training) for seed in (0, 1, 7)])
    for each, played in zip(replicas, together(replicas), strict=True):
        wanted = alone(each)
        assert [outcome.record for outcome in played] == [
            replace(outcome.record, loss=got.record.loss) for outcome, got in zip(wanted, played, strict=True)
        ]
        assert played[-1].state is not None and wanted[-1].state is not None
        assert model_sha256(algorithm, played[-1].state) == model_sha256(algorithm, wanted[-1].state)


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda each: each.kind)
def test_learning_rates_in_one_program_give_what_each_gives_alone(algorithm: Algorithm) -> None:
    replicas = sharing_data([replica(algorithm, 3, learning_rate=rate) for rate in (0.01, 0.1, 0.3)])
    for each, played in zip(replicas, together(replicas), strict=True):
        got, wanted = played[-1].state, alone(each)[-1].state
        assert got is not None and wanted is not None
        assert relative_error(algorithm.final(got.server), algorithm.final(wanted.server)) < 1e-5


def test_ranks_and_batch_sizes_that_do_not_fit_in_one_program_are_several(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    train_together = SGD.train_together

    def counted(self: SGD, calls: list[LocalCall]) -> list[LocalUpdates]:
        sizes.append(len(calls))
        return train_together(self, calls)

    monkeypatch.setattr(SGD, "train_together", counted)
    replicas = sharing_data(
        [replica(CoLR(rank=2), 0), replica(CoLR(rank=5), 0), replica(CoLR(rank=2), 1, batch_size=5)]
    )
    for each, played in zip(replicas, together(replicas), strict=True):
        got, wanted = played[-1].state, alone(each)[-1].state
        assert got is not None and wanted is not None
        assert model_sha256(each.algorithm, got) == model_sha256(each.algorithm, wanted)
    assert set(sizes) == {3}


@dataclass(frozen=True)
class Scaled:
    """Parameters that are trained at a scale of their own."""

    scale: float

    def __call__(self, trained: Any, frozen: Any) -> Any:
        return {name: self.scale * values for name, values in trained.items()}


class Rescaling(FedAvg):
    scale: float = 1.0

    def terms(self, chunk: Any, task: Any) -> LocalTerms:
        return LocalTerms(rebuild=Scaled(self.scale))


def test_what_is_rebuilt_in_another_way_is_a_program_of_its_own() -> None:
    replicas = sharing_data([replica(Rescaling(scale=scale), 0) for scale in (1.0, 0.5, 1.0)])
    for each, played in zip(replicas, together(replicas), strict=True):
        got, wanted = played[-1].state, alone(each)[-1].state
        assert got is not None and wanted is not None
        assert model_sha256(each.algorithm, got) == model_sha256(each.algorithm, wanted)
    keys = [program_key(each) for each in calls_of(replicas)]
    assert keys[0] == keys[2] != keys[1]


def test_slices_that_read_other_features_are_programs_of_their_own() -> None:
    (call,) = calls_of([replica(FedAvg(), 0)])
    first, other, again = (
        program_key(replace(call, terms=LocalTerms(columns=np.array(columns)))) for columns in ([0, 3], [0, 4], [0, 3])
    )
    assert first == again != other and first != program_key(call)


def calls_of(replicas: list[Run]) -> list[LocalCall]:
    """Return the training of clients 0 and 1 in round 1 of each replica."""
    calls = []
    for each in replicas:
        broadcast = each.algorithm.broadcast(each.algorithm.init(each.task), each.task, 1).arrays
        calls += each.algorithm.local_calls(broadcast, Chunk(1, 0, np.arange(2), {}), each.task) or []
    return calls


def test_clients_that_train_one_by_one_do_so_in_replicas_too() -> None:
    replicas = sharing_data([replica(FedAvg(), seed, n_rounds=1, images=True) for seed in (0, 1)])
    for each, played in zip(replicas, together(replicas), strict=True):
        got, wanted = played[-1].state, alone(each)[-1].state
        assert got is not None and wanted is not None
        assert model_sha256(each.algorithm, got) == model_sha256(each.algorithm, wanted)


def test_a_replica_that_fails_or_is_done_leaves_the_others_playing() -> None:
    class Explodes(FedAvg):
        def step(self, server: Any, broadcast: Any, total: Any, task: Any, round_index: int) -> Any:
            return {
                name: values * np.inf
                for name, values in super().step(server, broadcast, total, task, round_index).items()
            }

    replicas = sharing_data([replica(FedAvg(), 0), replica(Explodes(), 1), replica(FedAvg(), 2, n_rounds=1)])
    seen = list(lockstep(replicas))
    assert [sorted(outcomes) for outcomes in seen] == [[0, 1, 2], [0], [0]]
    failed = seen[0][1]
    assert isinstance(failed, RunFailed) and "no longer finite" in str(failed)


def test_nothing_is_played_where_all_rounds_are() -> None:
    each = replica(FedAvg(), 0, n_rounds=1)
    state = alone(each)[-1].state
    assert state is not None
    assert list(lockstep([each], [state])) == []


def test_replicas_on_other_data_are_a_program_of_their_own() -> None:
    replicas = [replica(FedAvg(), 0), replica(FedAvg(), 1)]
    other = digits(COUNTS[::-1])
    replicas[1] = replace(replicas[1], task=replace(replicas[1].task, data=other))
    got, wanted = together(replicas)[1][-1].state, alone(replicas[1])[-1].state
    assert got is not None and wanted is not None
    assert model_sha256(FedAvg(), got) == model_sha256(FedAvg(), wanted)
