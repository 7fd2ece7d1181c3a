"""The round loop: who is sampled, what is charged, what is committed, and what stops a run."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from narrowcast.algorithms.federated.fedmf import FedMF
from narrowcast.algorithms.federated.low_rank import CoLR, SCoLR
from narrowcast.algorithms.local_training.factorisation import FactorisationSGD
from narrowcast.platform.contracts import Algorithm, Broadcast, Executor, Task
from narrowcast.platform.data.interactions import Interactions
from narrowcast.platform.errors import RunFailed
from narrowcast.platform.models.factorisation import MatrixFactorisation
from narrowcast.platform.models.model import ITEM_FACTORS, USER_FACTORS
from narrowcast.platform.rounds.evaluation import model_sha256
from narrowcast.platform.rounds.fleet import Clock, LogNormalFleet
from narrowcast.platform.rounds.ledger import ChunkResult
from narrowcast.platform.rounds.loop import rounds
from narrowcast.platform.rounds.opening import sample_cohort
from narrowcast.platform.rounds.outcome import Outcome
from narrowcast.platform.rounds.plan import Plan
from narrowcast.platform.rounds.state import Run, RunState, start
from narrowcast.platform.seeds import PrivateSeed
from narrowcast.platform.types import Arrays, Chunk, IntArray
from running import begin, local

ALGORITHMS: list[Algorithm] = [FedMF(), CoLR(), SCoLR()]
by_kind = pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda each: each.kind)


def make_task(n_users: int = 12, n_items: int = 130, dimension: int = 8, **training: Any) -> Task:
    random = np.random.default_rng(0)
    orders = [random.permutation(n_items) for _ in range(n_users)]
    counts = random.integers(1, 25, n_users)
    data = Interactions(
        name="tiny",
        source="random",
        n_items=n_items,
        indptr=np.concatenate([[0], np.cumsum(counts)]),
        items=np.concatenate([np.sort(order[:count]) for order, count in zip(orders, counts, strict=True)]),
        validation=np.array([order[-1] for order in orders]),
        test=np.array([order[-2] for order in orders]),
        negatives=np.stack([order[-101:-2] for order in orders]),
    )
    profiles = LogNormalFleet().profiles(data.examples, seed=0)
    settings = FactorisationSGD(**{"batch_size": 16, **training})
    return Task(data, profiles, MatrixFactorisation(embedding_dim=dimension), settings, 0, PrivateSeed.derived(0))


def run(plan: Plan, algorithm: Algorithm, task: Task, state: RunState | None = None) -> list[Outcome]:
    return list(
        rounds(
            Run(plan, algorithm, task),
            local(algorithm, task),
            state or begin(algorithm, task),
        )
    )


@pytest.mark.parametrize(("n_clients", "per_round"), [(10, 3), (10, 10), (7, 4), (943, 60), (5, 1), (5, 100), (1, 1)])
def test_round_robin_sees_every_client_equally_often(n_clients: int, per_round: int) -> None:
    plan = Plan(clients_per_round=per_round)
    size = min(per_round, n_clients)
    cycle = -(-n_clients // size)
    order = plan.sampling.order(plan.seed, n_clients)
    cohorts = [sample_cohort(plan, order, round_index) for round_index in range(1, 3 * cycle + 1)]
    seen = np.zeros(n_clients, dtype=int)
    for played, cohort in enumerate(cohorts, start=1):
        assert len(set(cohort)) == len(cohort) == size
        seen[cohort] += 1
        assert seen.min() == played * size // n_clients
        assert seen.max() == -(-played * size // n_clients)
    for first in range(2 * cycle):
        assert len(set(np.concatenate(cohorts[first : first + cycle]))) == n_clients


def test_round_robin_is_shuffled_by_the_seed() -> None:
    first, again, other = (
        sample_cohort(Plan(seed=seed), Plan(seed=seed).sampling.order(Plan(seed=seed).seed, 943), 1)
        for seed in (0, 0, 1)
    )
    assert np.array_equal(first, again)
    assert set(first) != set(other)
    assert np.ptp(first) > 500


@pytest.mark.parametrize(("n_clients", "per_round"), [(20, 6), (20, 20), (20, 100), (20, 1)])
def test_uniform_sampling_has_no_repeats_and_favours_nobody(n_clients: int, per_round: int) -> None:
    plan = Plan(clients_per_round=per_round, sampling="uniform")
    size = min(per_round, n_clients)
    cohorts = [
        sample_cohort(plan, plan.sampling.order(plan.seed, n_clients), round_index) for round_index in range(1, 1001)
    ]
    assert all(len(set(cohort)) == len(cohort) == size for cohort in cohorts)
    seen = np.bincount(np.concatenate(cohorts), minlength=n_clients)
    share = size / n_clients
    assert np.abs(seen - 1000 * share).max() <= 4.5 * (1000 * share * (1 - share)) ** 0.5
    assert len({tuple(cohort) for cohort in cohorts}) > 1


class Recorder:
    """An algorithm that notes the bytes of what it broadcasts, by packing it."""

    def __init__(self, algorithm: Algorithm) -> None:
        self._algorithm = algorithm
        self.full_bits: list[int] = []
        self.update_bits: list[int | None] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._algorithm, name)

    def broadcast(self, server: Arrays, task: Task, round_index: int) -> Broadcast:
        sent = self._algorithm.broadcast(server, task, round_index)
        self.full_bits.append(8 * len(sent.full.to_bytes()))
        self.update_bits.append(None if sent.update is None else 8 * len(sent.update.to_bytes()))
        return sent


def test_clients_with_more_examples_are_drawn_more_often() -> None:
    plan, examples = Plan(sampling="by_examples", clients_per_round=2), np.array([0, 1, 1, 2, 4])
    cohorts = [sample_cohort(plan, np.arange(5), each, None, examples) for each in range(1, 8001)]
    assert all(len(set(cohort.tolist())) == 2 for cohort in cohorts)
    shares = np.bincount(np.concatenate(cohorts), minlength=5) / 8000
    # Without replacement: first w_u, then w_u / (1 - w_v) after v.
    first = examples / examples.sum()
    then = [sum(first[v] * first[u] / (1 - first[v]) for v in range(5) if v != u) for u in range(5)]
    assert np.abs(shares - first - then).max() < 0.02
    free = np.array([True, True, False, False, True])
    assert {*sample_cohort(plan, np.arange(5), 1, free, examples).tolist()} == {1, 4}
    assert sample_cohort(plan, np.arange(5), 1, np.array([True, *[False] * 4]), examples).tolist() == []


@by_kind
@pytest.mark.parametrize("sampling", ["uniform", "round_robin"])
def test_catch_up_charges_the_missed_rounds_or_the_whole_model(algorithm: Algorithm, sampling: str) -> None:
    recorder = Recorder(algorithm)
    plan = Plan(rounds=12, clients_per_round=4, sampling=sampling, chunk_size=3)
    last_seen: dict[int, int] = {}
    cases = set()
    for outcome in run(plan, recorder, make_task()):
        now, full = outcome.record.round, recorder.full_bits[outcome.record.round - 1]
        for client, got in zip(outcome.ledger.client.tolist(), outcome.ledger.downlink_bits.tolist(), strict=True):
            if client not in last_seen:
                cases.add("newcomer")
                assert got == full
            else:
                updates = [
                    recorder.update_bits[round_index - 1] for round_index in range(last_seen[client] + 1, now + 1)
                ]
                assert got == min(full, sum(updates))
                cases.add("whole model" if sum(updates) > full else "update")
            last_seen[client] = now
    assert {"newcomer"} < cases, cases
    assert recorder.update_bits[0] is None


@by_kind
def test_every_round_charges_one_update_from_the_second_round_on(algorithm: Algorithm) -> None:
    recorder = Recorder(algorithm)
    plan = Plan(rounds=5, clients_per_round=4, downlink="every_round")
    for outcome in run(plan, recorder, make_task()):
        full, update = recorder.full_bits[outcome.record.round - 1], recorder.update_bits[outcome.record.round - 1]
        wanted = full if update is None else min(full, update)
        assert outcome.ledger.downlink_bits.tolist() == [wanted] * 4


def test_catch_up_by_hand() -> None:
    """12 clients in fours: all are newcomers until round 3, and miss two rounds each time from then on."""
    recorder = Recorder(CoLR(rank=1, rows="all"))
    plan = Plan(rounds=6, clients_per_round=4)
    charged = [outcome.ledger.downlink_bits.tolist() for outcome in run(plan, recorder, make_task())]
    full = 8 * (8 + 2 + 8 + 130 * 8 * 4)  # header, number of rows, seed, Q
    update = 8 * (8 + 2 + 8 + 130 * 4)  # header, number of rows, seed, A
    assert charged == [[full] * 4] * 3 + [[3 * update] * 4] * 3
    assert 3 * update < full


@by_kind
def test_clients_that_hold_the_start_are_charged_all_updates_or_the_whole_model(algorithm: Algorithm) -> None:
    recorder = Recorder(algorithm)
    plan = Plan(rounds=12, clients_per_round=4, sampling="uniform", downlink="from_start")
    last_seen: dict[int, int] = {}
    for outcome in run(plan, recorder, make_task()):
        now, full = outcome.record.round, recorder.full_bits[outcome.record.round - 1]
        for client, got in zip(outcome.ledger.client.tolist(), outcome.ledger.downlink_bits.tolist(), strict=True):
            missed = recorder.update_bits[max(last_seen.get(client, 0), 1) : now]
            last_seen[client] = now
            assert got == (0 if now == 1 else full if None in missed else min(full, sum(missed)))
    assert len(last_seen) > 4


@by_kind
def test_totals_add_up(algorithm: Algorithm) -> None:
    plan = Plan(rounds=5, clients_per_round=5, chunk_size=2, checkpoint_every=1, evaluate_every=2)
    totals = np.zeros(3)
    for outcome in run(plan, algorithm, make_task()):
        record, ledger, state = outcome.record, outcome.ledger, outcome.state
        assert state is not None
        totals += ledger.uplink_bits.sum(), ledger.downlink_bits.sum(), record.round_simulated_seconds
        assert (record.uplink_bits, record.downlink_bits) == (ledger.uplink_bits.sum(), ledger.downlink_bits.sum())
        assert np.allclose(
            (record.total_uplink_bits, record.total_downlink_bits, record.simulated_seconds), totals, rtol=1e-12
        )
        assert (state.uplink_bits, state.downlink_bits) == (record.total_uplink_bits, record.total_downlink_bits)
        assert (record.clients, record.delivered) == (5, 5)
        assert (np.diff(ledger.client) > 0).all()
        assert record.loss == pytest.approx(ledger.loss.mean())
        assert record.mean_rank == pytest.approx(ledger.rank.mean())
        assert state.participants[state.last_round == record.round].tolist() == ledger.client.tolist()
        assert (set(outcome.metrics) > {"test.hr@10", "test.ndcg@10"}) == (record.round in (2, 4, 5))


def test_simulated_seconds_by_hand() -> None:
    clock = Clock(seconds_per_example=1e-3, compute_slowdown=5, compute_overhead_seconds=2, server_seconds=0.75)
    task, total = make_task(epochs=3), 0.0
    for outcome in run(Plan(rounds=3, clients_per_round=4, clock=clock), FedMF(), task):
        wanted = []
        ledger = outcome.ledger
        for place, client in enumerate(ledger.client):
            profile = task.profiles[client]
            examples = 3 * 5 * profile.examples  # epochs x (one positive and four negatives)
            assert ledger.examples[place] == examples
            wanted.append(
                ledger.downlink_bits[place] / profile.downlink_bits_per_second
                + 5 * examples * 1e-3 / profile.compute_speed
                + 2
                + ledger.uplink_bits[place] / profile.uplink_bits_per_second
            )
        assert ledger.seconds.tolist() == pytest.approx(wanted)
        assert outcome.record.round_simulated_seconds == pytest.approx(max(wanted) + 0.75)
        total += max(wanted) + 0.75
        assert outcome.record.simulated_seconds == pytest.approx(total)


def with_users(state: RunState, clients: IntArray, users: Any) -> RunState:
    """The state in which these clients took part in round 1 and keep these factors."""
    once = np.ones(len(clients), dtype=np.int64)
    return replace(
        state, participants=clients, last_round=once, clients={USER_FACTORS: np.asarray(users, dtype=np.float32)}
    )


@by_kind
def test_a_client_that_diverged_is_dropped_and_the_run_goes_on(algorithm: Algorithm) -> None:
    task, plan = make_task(), Plan(rounds=6, clients_per_round=4, chunk_size=4, checkpoint_every=1)
    bad = int(sample_cohort(plan, plan.sampling.order(plan.seed, 12), 1)[1])
    state = begin(algorithm, task)
    outcomes = run(plan, algorithm, task, with_users(state, np.array([bad]), np.full((1, 8), np.nan)))
    assert [outcome.record.delivered for outcome in outcomes] == [3, 4, 4, 3, 4, 4]
    for outcome in outcomes:
        assert outcome.ledger.client[~outcome.ledger.delivered].tolist() in ([], [bad])
        assert np.isfinite(outcome.record.loss)
        assert outcome.state is not None
        assert np.isfinite(outcome.state.server[ITEM_FACTORS]).all()
        is_bad = outcome.state.participants == bad
        assert np.isnan(outcome.state.clients[USER_FACTORS][is_bad]).all()
        assert np.isfinite(outcome.state.clients[USER_FACTORS][~is_bad]).all()
        # It did upload, in vain.
        assert (outcome.ledger.uplink_bits > 0).all()


@pytest.mark.parametrize("algorithm", [CoLR(), SCoLR()], ids=lambda each: each.kind)
def test_an_absurd_learning_rate_delivers_nothing_and_keeps_what_was(algorithm: Algorithm) -> None:
    task = make_task(learning_rate=1e30, epochs=3)
    before = begin(algorithm, task)
    (outcome,) = run(Plan(rounds=1, chunk_size=5), algorithm, task, before)
    assert outcome.record.delivered == 0
    assert outcome.state is not None
    assert np.array_equal(outcome.state.server[ITEM_FACTORS], before.server[ITEM_FACTORS])
    assert np.array_equal(outcome.state.clients[USER_FACTORS], algorithm.init_clients(task)[USER_FACTORS])


def test_a_diverged_global_model_fails_the_run_with_advice() -> None:
    # Every client's own change is finite (about 1e38), the sum of twelve of them is not.
    task = make_task(learning_rate=2e38, epochs=1, batch_size=1000, weight_decay=0.0)
    state = start(Run(Plan(), FedMF(), task))
    state = with_users(state, np.arange(12), np.ones((12, 8)))
    with pytest.raises(RunFailed) as caught:
        run(Plan(rounds=2), FedMF(), task, state)
    assert str(caught.value) == (
        "round 1: the global model is no longer finite; lower training.learning_rate (now 2e+38) and run again"
    )


@by_kind
@pytest.mark.parametrize("sampling", ["round_robin", "uniform"])
def test_a_resumed_run_equals_the_straight_one(algorithm: Algorithm, sampling: str) -> None:
    plan = Plan(rounds=7, clients_per_round=5, chunk_size=2, sampling=sampling, checkpoint_every=3, evaluate_every=2)
    task = make_task()
    straight = run(plan, algorithm, task)
    assert [outcome.state is not None for outcome in straight] == [False, False, True, False, False, True, True]
    middle = straight[2].state
    assert middle is not None
    resumed = run(plan, algorithm, task, middle)
    assert [outcome.record for outcome in resumed] == [outcome.record for outcome in straight[3:]]
    assert [outcome.metrics for outcome in resumed] == [outcome.metrics for outcome in straight[3:]]
    assert sha(algorithm, resumed) == sha(algorithm, straight)
    assert sha(algorithm, run(plan.model_copy(update={"rounds": 6}), algorithm, task)) != sha(algorithm, straight)
    assert run(plan, algorithm, task, straight[-1].state) == []


def sha(algorithm: Algorithm, outcomes: list[Outcome]) -> str:
    state = outcomes[-1].state
    assert state is not None
    return model_sha256(algorithm, state)


def test_a_round_changes_neither_the_state_it_starts_from_nor_absent_clients() -> None:
    algorithm, task = FedMF(), make_task()
    before = begin(algorithm, task)
    digest, initial = model_sha256(algorithm, before), algorithm.init_clients(task)
    users = initial[USER_FACTORS].copy()
    (outcome,) = run(Plan(rounds=1, clients_per_round=5), algorithm, task, before)
    assert model_sha256(algorithm, before) == digest
    assert outcome.state is not None
    assert outcome.state.participants.tolist() == outcome.ledger.client.tolist()
    assert (outcome.state.clients[USER_FACTORS] != users[outcome.ledger.client]).any(axis=1).all()
    assert np.array_equal(initial[USER_FACTORS], users)


def test_model_sha256_sees_every_array_and_its_shape() -> None:
    algorithm, task = FedMF(), make_task()
    state = with_users(begin(algorithm, task), np.arange(12), algorithm.init_clients(task)[USER_FACTORS])
    server, clients = dict(state.server), dict(state.clients)
    digests = [
        model_sha256(algorithm, changed)
        for changed in (
            state,
            replace(state, server={**server, ITEM_FACTORS: np.nextafter(server[ITEM_FACTORS], np.float32(9))}),
            replace(state, clients={USER_FACTORS: clients[USER_FACTORS][::-1]}),
            replace(state, clients={USER_FACTORS: clients[USER_FACTORS].reshape(8, 12)}),
            replace(state, clients={USER_FACTORS: clients[USER_FACTORS].astype(np.float64)}),
        )
    ]
    assert len(set(digests)) == 5
    assert model_sha256(algorithm, replace(state, round_index=9)) == digests[0]


class CountThreads(Executor):
    """Notes how many threads torch has while chunks are trained."""

    def __init__(self, algorithm: Algorithm, task: Task) -> None:
        self.inner = local(algorithm, task)
        self.threads: set[int] = set()

    def train(self, broadcast: Arrays, chunks: Sequence[Chunk]) -> list[ChunkResult]:
        self.threads.add(torch.get_num_threads())
        return self.inner.train(broadcast, chunks)


def test_rounds_are_computed_with_one_thread_and_leave_the_setting_as_it_was() -> None:
    algorithm, task = FedMF(), make_task()
    executor, before = CountThreads(algorithm, task), torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        for _ in rounds(Run(Plan(rounds=2), algorithm, task), executor):
            assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert executor.threads == {1}
