"""Buffered asynchronous aggregation: FedAvg where all are equal, an event queue by hand, staleness, and resumption."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from narrowcast.algorithms.federated.aggregator import CoordinateMedian
from narrowcast.algorithms.federated.fedavg import FedAvg
from narrowcast.algorithms.federated.fedmf import FedMF
from narrowcast.algorithms.federated.fedprox import FedProx
from narrowcast.experiment import load_experiment
from narrowcast.platform.contracts import Broadcast, Task
from narrowcast.platform.errors import UserError
from narrowcast.platform.rounds.chunks import make_chunks
from narrowcast.platform.rounds.fleet import Clock, Tiers
from narrowcast.platform.rounds.outcome import Outcome
from narrowcast.platform.rounds.plan import Buffered, Plan
from narrowcast.platform.rounds.sampling import Bernoulli, Uniform
from narrowcast.platform.rounds.state import Population, Run, RunState, start
from narrowcast.platform.storage.checkpoint import load_checkpoint, save_checkpoint
from narrowcast.platform.types import Arrays, Chunk, Payload
from narrowcast.runs.prepared import prepare, prepare_lockstep
from running import play, sha256
from small_tasks import Counting, network_task, rows_task

SCHEDULE = Buffered(concurrency=5, buffer_size=3)
PLAN = Plan(rounds=12, chunk_size=2, checkpoint_every=1, schedule=SCHEDULE)


def equal_clients(task: Task) -> Task:
    """Every client with the same link, device and time; what they train on still differs."""
    profiles = Tiers().profiles(task.data.examples, 0)
    return replace(task, profiles=profiles)


def compared(outcomes: list[Outcome]) -> list[object]:
    return [{**vars(outcome.record), "round_simulated_seconds": None} for outcome in outcomes]


@pytest.mark.parametrize("sampling", ["round_robin", "uniform"])
@pytest.mark.parametrize("algorithm", [FedAvg(), FedAvg(weights="equal"), FedProx(mu=0.1)])
def test_with_equal_clients_and_a_buffer_of_all_it_is_fedavg(algorithm: FedAvg, sampling: str) -> None:
    task, clock = equal_clients(network_task()), Clock(seconds_per_example=0.0)
    rounds = Plan(rounds=7, clients_per_round=4, chunk_size=3, checkpoint_every=1, clock=clock, sampling=sampling)
    steps = rounds.model_copy(update={"schedule": Buffered(concurrency=4, buffer_size=4)})
    synchronous, asynchronous = play(rounds, algorithm, task), play(steps, algorithm, task)
    assert sha256(algorithm, asynchronous) == sha256(algorithm, synchronous)
    assert compared(asynchronous) == compared(synchronous)
    for one, other in zip(asynchronous, synchronous, strict=True):
        assert one.record.round_simulated_seconds == pytest.approx(other.record.round_simulated_seconds)
        for name, values in vars(other.ledger).items():
            np.testing.assert_array_equal(getattr(one.ledger, name), values)


def test_arrivals_by_hand() -> None:
    """An event queue of (time, client, version) tells who is in each step, how stale, and when."""
    task, algorithm = network_task(), FedAvg()
    outcomes = play(PLAN, algorithm, task)
    seconds_of = {
        client: seconds
        for outcome in outcomes
        for client, seconds in zip(outcome.ledger.client.tolist(), outcome.ledger.seconds.tolist(), strict=True)
    }
    waiting, place = PLAN.sampling.order(PLAN.seed, 12).tolist(), 0
    queue: list[tuple[float, int, int]] = []
    buffer: list[tuple[float, int, int]] = []
    now = 0.0
    for version, outcome in enumerate(outcomes):
        while len(buffer) < 3:
            out = {client for _, client, _ in (*queue, *buffer)}
            sent = 0
            wanted = 5 - len(queue)
            for step in range(12):
                client = waiting[(place + step) % 12]
                if sent < wanted and client not in out:
                    heapq.heappush(queue, (now + seconds_of.get(client, np.inf), client, version))
                    sent += 1
            place += sent
            now = queue[0][0]
            while queue and queue[0][0] <= now:
                buffer.append(heapq.heappop(queue))
        used, buffer = buffer[:3], buffer[3:]
        assert outcome.ledger.client.tolist() == sorted(client for _, client, _ in used)
        stale = {client: version - taken for _, client, taken in used}
        assert dict(zip(outcome.ledger.client.tolist(), outcome.ledger.staleness.tolist(), strict=True)) == stale
        assert outcome.record.simulated_seconds == now
        assert outcome.record.mean_staleness == pytest.approx(np.mean(list(stale.values())))
    assert max(outcome.record.mean_staleness for outcome in outcomes) > 0.5


def test_stale_updates_count_less_and_their_weights_as_before() -> None:
    """Each step again, from what each client does alone with the model that it took along."""
    task = network_task()
    algorithm = FedAvg(server_learning_rate=0.7)
    outcomes = play(PLAN, algorithm, task)
    models = [algorithm.init(task)] + [outcome.state.server for outcome in outcomes if outcome.state]
    assert len(models) == 13
    for number, outcome in enumerate(outcomes):
        change, weight = dict.fromkeys(models[0], 0.0), 0.0
        for client, staleness in zip(outcome.ledger.client, outcome.ledger.staleness, strict=True):
            version = number - int(staleness)
            chunk = _chunk(task, algorithm, version, int(client))
            partial = algorithm.train(models[version], chunk, task).partial
            weight += float(partial["weight"])
            for name in change:
                change[name] = change[name] + partial["sum/" + name] / np.sqrt(1 + staleness)
        for name, values in models[number].items():
            wanted = values + 0.7 * change[name] / weight
            np.testing.assert_allclose(models[number + 1][name], wanted, rtol=2e-5, atol=1e-6)


def _chunk(task: Task, algorithm: FedAvg, version: int, client: int) -> Chunk:
    population = Population.fresh(algorithm.init_clients(task), task.data.n_clients)
    (chunk,) = make_chunks(np.array([client]), task.data.examples, 1, version + 1, population)
    return chunk


def test_a_broadcast_is_told_the_index_of_the_step_that_it_opens() -> None:
    told: list[int] = []

    class Told(FedAvg):
        def broadcast(self, server: Arrays, task: Task, round_index: int) -> Broadcast:
            told.append(round_index)
            return super().broadcast(server, task, round_index)

    outcomes = play(PLAN, Told(), network_task())
    assert told == [outcome.record.round for outcome in outcomes] == list(range(1, 13))
    told.clear()
    play(PLAN, Told(), network_task(), outcomes[4].state)
    assert told == list(range(6, 13))


def test_without_an_exponent_staleness_does_not_matter() -> None:
    task = network_task()
    equal = PLAN.model_copy(update={"schedule": SCHEDULE.model_copy(update={"staleness_exponent": 0.0})})
    weighted, unweighted = play(PLAN, FedAvg(), task), play(equal, FedAvg(), task)
    assert sha256(FedAvg(), weighted) != sha256(FedAvg(), unweighted)
    assert compared(weighted)[0] == compared(unweighted)[0]


def test_clients_that_took_the_same_version_train_together() -> None:
    task = network_task()
    executor = Counting(FedAvg(), task)
    outcomes = play(PLAN.model_copy(update={"chunk_size": 10}), FedAvg(), task, executor=executor)
    versions = [
        (number, number - int(each))
        for number, outcome in enumerate(outcomes)
        for each in set(outcome.ledger.staleness)
    ]
    assert len(executor.calls) == len(versions)
    assert all(len(call) == 1 for call in executor.calls)
    assert sum(len(call[0].clients) for call in executor.calls) == 36


@pytest.mark.parametrize("algorithm", [FedAvg(), FedProx(mu=0.1)], ids=lambda each: each.kind)
@pytest.mark.parametrize("how", [{}, {"sampling": Uniform()}, {"availability": Bernoulli(probability=0.3)}])
def test_a_resumed_run_is_the_straight_one(algorithm: FedAvg, how: dict[str, object], tmp_path: Path) -> None:
    task, plan = network_task(), PLAN.model_copy(update=how)
    straight = play(plan, algorithm, task)
    assert any(each.state and each.state.schedule and len(each.state.schedule.in_flight) for each in straight)
    for place in (0, 4, 9):
        state = straight[place].state
        assert state is not None
        save_checkpoint(tmp_path, state, "digest")
        loaded, *_ = load_checkpoint(tmp_path, RunState)
        resumed = play(plan, algorithm, task, loaded)
        assert sha256(algorithm, resumed) == sha256(algorithm, straight)
        assert [repr(each.record) for each in resumed] == [repr(each.record) for each in straight[place + 1 :]]


def test_only_models_that_someone_has_are_kept() -> None:
    for outcome in play(PLAN, FedAvg(), network_task()):
        assert outcome.state is not None
        air = outcome.state.schedule
        assert air is not None
        assert set(air.broadcasts) == set(air.in_flight.version.tolist())
        assert len(set(air.in_flight.client.tolist())) == len(air.in_flight)
        assert 5 - 1 <= len(air.in_flight) <= 5 + 2


def test_fewer_clients_than_a_buffer_step_with_those_there_are() -> None:
    outcomes = play(PLAN.model_copy(update={"rounds": 4}), FedAvg(), network_task(2))
    assert [outcome.record.clients for outcome in outcomes] == [2] * 4
    nobody = PLAN.model_copy(update={"availability": Bernoulli(probability=0.0)})
    outcomes = play(nobody, FedAvg(), network_task())
    assert [outcome.record.clients for outcome in outcomes] == [0] * 12
    assert outcomes[-1].record.simulated_seconds == 12 * 60.0


def test_bits_are_paid_by_flight() -> None:
    outcomes = play(PLAN, FedAvg(), network_task())
    full = outcomes[0].ledger.downlink_bits[0]
    for outcome in outcomes:
        assert outcome.ledger.downlink_bits.tolist() == outcome.ledger.uplink_bits.tolist() == [full] * 3
    assert outcomes[-1].record.total_uplink_bits == 36 * full


@pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy:DeprecationWarning")  # MLflow's SQL store
def test_what_cannot_be_buffered_is_refused_in_one_line(tmp_path: Path) -> None:
    Run(PLAN, FedAvg(), network_task()).check_plan()
    with pytest.raises(UserError, match=r"schedule = buffered: fedavg as set here cannot count stale updates less"):
        Run(PLAN, FedAvg(aggregator=CoordinateMedian()), network_task()).check_plan()
    with pytest.raises(UserError, match=r"schedule = buffered: fedmf as set here cannot count stale updates less"):
        Run(PLAN, FedMF(), rows_task()).check_plan()
    coded = FedAvg(codec=({"kind": "quantise"},))  # type: ignore[arg-type]
    for algorithm in (coded, FedProx(partial_share=0.5)):
        with pytest.raises(UserError, match=r"schedule = buffered: how long the clients of fed.* use synchronous"):
            Run(PLAN, algorithm, network_task()).check_plan()
    for late in ({"deadline_seconds": 5.0}, {"over_selection": 1.5}):
        with pytest.raises(UserError, match="has no rounds; leave out radio"):
            Plan(schedule=SCHEDULE, **late)  # type: ignore[arg-type]
    experiment = load_experiment("fedavg-digits", ["schedule=buffered"])
    with pytest.raises(UserError, match="buffered schedule; start each run by itself"):
        prepare_lockstep([prepare(experiment, tmp_path)] * 2)
    assert start(Run(Plan(), FedAvg(), network_task())).schedule is None


@dataclass(frozen=True)
class Sized(Payload):
    """A payload that is nothing but its size."""

    bits: int

    def wire_bits(self) -> int:
        return self.bits

    def to_bytes(self) -> bytes:
        return bytes(self.bits // 8)


class Publishing(FedAvg):
    """FedAvg that publishes an update of 2 to the power of the step's number bits, and the whole model for 2^40."""

    def broadcast(self, server: Arrays, task: Task, round_index: int) -> Broadcast:
        return Broadcast(server, Sized(2**40), Sized(2**round_index))


def test_a_stale_client_is_sent_the_updates_since_the_version_that_it_took() -> None:
    """Sums of powers of 2 tell which updates a client was sent: those after the one that it took before."""
    free = Clock(seconds_per_example=1e-3)
    task = network_task()
    fast = replace(task.profiles, downlink_bits_per_second=np.full(12, 1e15))
    outcomes = play(PLAN.model_copy(update={"rounds": 30, "clock": free}), Publishing(), replace(task, profiles=fast))
    took: dict[int, int] = {}
    stale = 0
    for step, outcome in enumerate(outcomes, start=1):
        ledger = outcome.ledger
        for client, staleness, bits in zip(ledger.client, ledger.staleness, ledger.downlink_bits, strict=True):
            version = step - int(staleness)
            sent = range(took[client] + 1, version + 1) if client in took else None
            assert bits == (2**40 if sent is None else sum(2**number for number in sent)), (step, client)
            stale += sent is not None and staleness > 0
            took[client] = version
    assert stale > 5
