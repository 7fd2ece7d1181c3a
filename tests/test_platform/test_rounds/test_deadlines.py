"""Over-selection, deadlines and partial work: whom the server waits for, and what becomes of the others."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from narrowcast.algorithms.federated.aggregator import CoordinateMedian
from narrowcast.algorithms.federated.fedavg import FedAvg
from narrowcast.algorithms.federated.fedmf import FedMF
from narrowcast.algorithms.federated.fedprox import FedProx
from narrowcast.algorithms.federated.scaffold import Scaffold
from narrowcast.platform.contracts import Algorithm, Task
from narrowcast.platform.errors import UserError
from narrowcast.platform.rounds.fleet import Clock
from narrowcast.platform.rounds.loop import lockstep
from narrowcast.platform.rounds.opening import cutoff, epochs_in_time
from narrowcast.platform.rounds.plan import Plan
from narrowcast.platform.rounds.state import Run
from running import play, sha256
from small_tasks import Counting, network_task, rows_task

MEDIAN = FedAvg(aggregator=CoordinateMedian())
PLAN = Plan(rounds=5, clients_per_round=4, chunk_size=3, checkpoint_every=1, clock=Clock(compute_overhead_seconds=10.0))
CODED = FedAvg(codec=({"kind": "quantise"},))  # type: ignore[arg-type]
CASES = [
    pytest.param(FedAvg(), network_task(), id="fedavg"),
    pytest.param(MEDIAN, network_task(), id="median"),
    pytest.param(Scaffold(), network_task(), id="scaffold"),
    pytest.param(CODED, network_task(), id="fedavg-coded"),
    pytest.param(FedMF(), rows_task(), id="fedmf"),
]
every = pytest.mark.parametrize(("algorithm", "task"), CASES)


def test_the_first_uploads_count_and_ties_go_to_the_first_client() -> None:
    seconds, uploads = np.array([5.0, 2.0, 5.0, 1.0, 9.0]), np.array([True, True, True, False, True])
    late, until = cutoff(seconds, uploads, wanted=2)
    assert late.tolist() == [False, False, True, False, True]
    assert until == 5.0
    late, until = cutoff(seconds, uploads, wanted=4)
    assert not late[[0, 1, 2, 3, 4]].any()
    assert until == 9.0
    late, until = cutoff(seconds, uploads, wanted=5)
    assert not late.any()
    assert until == np.inf


def test_nobody_is_waited_for_beyond_the_deadline() -> None:
    seconds, uploads = np.array([5.0, 2.0, 7.0]), np.ones(3, dtype=bool)
    late, until = cutoff(seconds, uploads, wanted=3, deadline=5.0)
    assert late.tolist() == [False, False, True]
    assert until == 5.0
    assert cutoff(seconds, uploads, wanted=3, deadline=8.0)[1] == 7.0
    late, until = cutoff(seconds, uploads, wanted=1, deadline=1.0)
    assert late.all()
    assert until == 1.0
    late, until = cutoff(np.empty(0), np.empty(0, dtype=bool), wanted=3, deadline=5.0)
    assert len(late) == 0
    assert until == np.inf


def test_epochs_that_fit() -> None:
    step = np.array([1.0, 2.0, 4.0, 20.0])
    assert epochs_in_time(lambda epochs: 2 + step * epochs, 4, 5, deadline=10.0).tolist() == [5, 4, 2, 1]


@every
def test_over_selection_waits_for_the_first_and_pays_for_all(algorithm: Algorithm, task: Task) -> None:
    plan = PLAN.model_copy(update={"over_selection": 1.6})
    for outcome in play(plan, algorithm, task):
        record, ledger = outcome.record, outcome.ledger
        assert (record.clients, record.delivered, record.late) == (7, 4, 3)
        assert ledger.seconds[~ledger.late].max() == record.round_simulated_seconds < ledger.seconds[ledger.late].min()
        assert (ledger.delivered == ~ledger.late).all()
        assert (ledger.uplink_bits > 0).all()
        assert record.uplink_bits == ledger.uplink_bits.sum()
        assert record.loss == pytest.approx(ledger.loss[~ledger.late].mean())


@every
def test_a_round_with_stragglers_is_the_round_without_them(algorithm: Algorithm, task: Task) -> None:
    """Round 1 of the seven sampled gives the server what round 1 of the four in time gives it, to rounding."""
    plan = Plan(rounds=1, clients_per_round=4, over_selection=1.6, chunk_size=20)
    (some,) = play(plan, algorithm, task)
    in_time = some.ledger.client[~some.ledger.late]

    class OnlyThose:
        kind = "only"

        def check(self, n_clients: int) -> None: ...

        def free(self, n_clients: int, seed: int, round_index: int, seconds: float) -> Any:
            return np.isin(np.arange(n_clients), in_time)

    (alone,) = play(plan.model_copy(update={"over_selection": 1.0, "availability": OnlyThose()}), algorithm, task)
    assert alone.ledger.client.tolist() == in_time.tolist()
    assert alone.record.round_simulated_seconds == some.record.round_simulated_seconds
    assert some.state is not None
    assert alone.state is not None
    for name, values in algorithm.final(alone.state.server).items():
        np.testing.assert_allclose(algorithm.final(some.state.server)[name], values, rtol=1e-5, atol=1e-6)


@every
def test_a_deadline_ends_the_round(algorithm: Algorithm, task: Task) -> None:
    free = play(PLAN, algorithm, task)
    deadline = float(np.median(np.concatenate([outcome.ledger.seconds for outcome in free])))
    outcomes = play(PLAN.model_copy(update={"deadline_seconds": deadline}), algorithm, task)
    late = 0
    for outcome in outcomes:
        ledger, seconds = outcome.ledger, outcome.record.round_simulated_seconds
        assert (ledger.late == (ledger.seconds > deadline)).all()
        assert seconds == (deadline if ledger.late.any() else ledger.seconds.max())
        late += outcome.record.late
    assert 0 < late < 20
    assert sha256(algorithm, outcomes) != sha256(algorithm, free)


def test_where_everyone_is_late_the_model_stays() -> None:
    for algorithm, task in (
        (FedAvg(), network_task()),
        (MEDIAN, network_task()),
        (FedMF(), rows_task()),
    ):
        outcomes = play(PLAN.model_copy(update={"deadline_seconds": 1.0}), algorithm, task)
        assert [outcome.record.late for outcome in outcomes] == [4] * 5
        assert outcomes[-1].record.simulated_seconds == 5.0
        state, before = outcomes[-1].state, algorithm.init(task)
        assert state is not None
        for name, values in algorithm.final(state.server).items():
            np.testing.assert_array_equal(values, algorithm.final(before)[name])


@every
def test_what_nobody_exceeds_changes_nothing(algorithm: Algorithm, task: Task) -> None:
    free, bounded = (
        play(PLAN, algorithm, task),
        play(PLAN.model_copy(update={"deadline_seconds": 1e9}), algorithm, task),
    )
    assert sha256(algorithm, free) == sha256(algorithm, bounded)
    assert [outcome.record for outcome in free] == [outcome.record for outcome in bounded]


@every
def test_only_uploads_of_unknown_weight_are_trained_twice(algorithm: Algorithm, task: Task) -> None:
    executor = Counting(algorithm, task)
    play(PLAN.model_copy(update={"over_selection": 1.6}), algorithm, task, executor=executor)
    known = len(executor.calls) == PLAN.rounds
    assert known == (algorithm.kind != "fedmf" and algorithm is not CODED)
    if not known:
        assert len(executor.calls) == 2 * PLAN.rounds
        for first, second in zip(executor.calls[::2], executor.calls[1::2], strict=True):
            assert {chunk.index for chunk in second} <= {chunk.index for chunk in first}
            assert sum(int((~chunk.arrives()).sum()) for chunk in second) == 3


@every
@pytest.mark.parametrize("how", [{"over_selection": 1.6}, {"deadline_seconds": 12.0, "over_selection": 1.3}])
def test_a_resumed_run_is_the_straight_one(algorithm: Algorithm, task: Task, how: dict[str, float]) -> None:
    plan = PLAN.model_copy(update=how)
    straight = play(plan, algorithm, task)
    resumed = play(plan, algorithm, task, straight[1].state)
    assert sha256(algorithm, resumed) == sha256(algorithm, straight)
    assert [outcome.record for outcome in resumed] == [outcome.record for outcome in straight[2:]]


@every
def test_a_replica_is_as_if_played_alone(algorithm: Algorithm, task: Task) -> None:
    plans = [PLAN.model_copy(update={"over_selection": 1.6, "seed": seed}) for seed in (0, 1)]
    together = list(lockstep([Run(plan, algorithm, task) for plan in plans]))
    for place, plan in enumerate(plans):
        alone = play(plan, algorithm, task)
        assert [outcomes[place].record for outcomes in together] == [outcome.record for outcome in alone]  # type: ignore[union-attr]
        assert sha256(algorithm, [outcomes[place] for outcomes in together]) == sha256(algorithm, alone)  # type: ignore[misc]


@pytest.mark.parametrize("algorithm", [FedAvg(), FedProx(mu=0.1), Scaffold()], ids=lambda each: each.kind)
def test_partial_work_keeps_the_deadline(algorithm: Algorithm) -> None:
    task = network_task(epochs=4)
    clock = PLAN.clock.model_copy(update={"seconds_per_example": 0.05})
    free = play(PLAN.model_copy(update={"clock": clock}), algorithm, task)
    seconds = np.concatenate([outcome.ledger.seconds for outcome in free])
    plan = PLAN.model_copy(update={"clock": clock, "deadline_seconds": float(np.quantile(seconds, 0.5))})
    dropped = play(plan, algorithm, task)
    partial = play(plan.model_copy(update={"stragglers": "partial"}), algorithm, task)
    shortened = 0
    for before, after in zip(dropped, partial, strict=True):
        ledger, full = after.ledger, 4 * task.data.examples[after.ledger.client]
        epochs = ledger.examples // task.data.examples[ledger.client]
        assert (ledger.examples % task.data.examples[ledger.client] == 0).all()
        one_more = 7 * 0.05 * task.data.examples[ledger.client] / task.profiles.take(ledger.client).compute_speed
        in_time, part = ~ledger.late, (ledger.examples < full) & ~ledger.late
        assert (ledger.seconds[in_time] <= plan.deadline_seconds).all()
        assert (ledger.seconds + one_more > plan.deadline_seconds)[part].all()
        assert (epochs[ledger.late] == 1).all()
        assert (ledger.delivered == in_time).all()
        assert not (ledger.late & ~before.ledger.late).any()
        shortened += int(part.sum())
    assert shortened > 0
    assert sha256(algorithm, partial) != sha256(algorithm, dropped)


def test_partial_work_is_refused_where_its_uploads_are_not_known() -> None:
    plan = PLAN.model_copy(update={"stragglers": "partial", "deadline_seconds": 10.0})
    Run(plan, FedAvg(), network_task()).check_plan()
    for algorithm, task in ((CODED, network_task()), (FedMF(), rows_task())):
        with pytest.raises(UserError, match=f"how long the clients of {algorithm.kind} take here is known only after"):
            Run(plan, algorithm, task).check_plan()
    with pytest.raises(UserError, match="give deadline_seconds too"):
        Plan(stragglers="partial")
