"""Who can be sampled when, and rounds in which few clients or none can be."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from narrowcast.algorithms.federated.aggregator import CoordinateMedian
from narrowcast.algorithms.federated.fedavg import FedAvg
from narrowcast.algorithms.federated.fedmf import FedMF
from narrowcast.experiment import load_experiment
from narrowcast.platform.config.catalog import AVAILABILITIES, SAMPLINGS
from narrowcast.platform.errors import UserError
from narrowcast.platform.rounds.fleet import Clock
from narrowcast.platform.rounds.loop import lockstep
from narrowcast.platform.rounds.opening import sample_cohort
from narrowcast.platform.rounds.plan import Plan
from narrowcast.platform.rounds.sampling import Always, AvailabilityTrace, Bernoulli, Diurnal
from narrowcast.platform.rounds.state import Run
from narrowcast.runs.prepared import prepare
from running import play, sha256
from small_tasks import network_task, rows_task

MEDIAN = FedAvg(aggregator=CoordinateMedian())
PLAN = Plan(rounds=8, clients_per_round=4, chunk_size=3, checkpoint_every=1)
TRACE = "client,time,available\n0,0,1\n1,0,0\n1,30,1\n0,20,0\n2,0,1\n"


def write(folder: Path, text: str = TRACE) -> Path:
    path = folder / "trace.csv"
    path.write_text(text)
    return path


def test_each_kind_is_in_the_catalog_under_its_name() -> None:
    assert all(cls.model_fields["kind"].default == kind for kind, cls in AVAILABILITIES.items())


@pytest.mark.parametrize("kind", [Bernoulli(probability=0.3), Diurnal(time_zones=1.0)], ids=lambda each: each.kind)
def test_who_is_there_is_pure_and_a_clients_own(kind: Bernoulli | Diurnal) -> None:
    many, few = kind.free(500, 3, 7, 1e4), kind.free(50, 3, 7, 1e4)
    assert many is not None
    assert np.array_equal(many[:50], few)
    assert np.array_equal(many, kind.free(500, 3, 7, 1e4))
    assert not np.array_equal(many, kind.free(500, 4, 7, 1e4))
    assert not np.array_equal(many, kind.free(500, 3, 8, 1e4))


def test_the_shares_are_those_stated() -> None:
    share = Bernoulli(probability=0.3).free(100_000, 0, 1, 0.0).mean()
    assert share == pytest.approx(0.3, abs=0.006)
    day = Diurnal(lowest=0.1, highest=0.5, day_seconds=1000)
    for seconds, wanted in ((0, 0.5), (250, 0.3), (500, 0.1), (1000, 0.5)):
        assert day.free(100_000, 0, 1, seconds).mean() == pytest.approx(wanted, abs=0.006)
    spread = day.model_copy(update={"time_zones": 1.0})
    assert [spread.free(100_000, 0, 1, seconds).mean() for seconds in (0, 500)] == pytest.approx([0.3, 0.3], abs=0.006)
    with pytest.raises(UserError, match=r"lowest = 0.5 is above highest = 0.2"):
        Diurnal(lowest=0.5, highest=0.2)


def test_a_trace_is_read_as_it_stands(tmp_path: Path) -> None:
    trace = AvailabilityTrace(path=write(tmp_path))
    wanted = {0: "101", 19.9: "101", 20: "001", 29: "001", 30: "011", 1e9: "011"}
    for seconds, there in wanted.items():
        assert "".join(str(int(each)) for each in trace.free(3, 0, 1, seconds)) == there
    again = trace.model_copy(update={"repeat_seconds": 40.0})
    assert np.array_equal(again.free(3, 0, 1, 85.0), trace.free(3, 0, 1, 5.0))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("client,time\n0,0\n", "has no column available; needed: client, time, available"),
        (TRACE + "2,,1\n", "line 7: could not convert string to float: ''; every column must hold a number"),
        (TRACE + "2,9\n", "line 7: .*; every column must hold a number"),
        (TRACE + "1,25,0\n", "line 7: client 1 has time 25; it must be above 30, the time of the row before"),
        (TRACE.replace("2,0,1", "2,5,1"), "line 6: client 2 has time 5; it must be 0, the start of a trace"),
        (TRACE + "1,nan,0\n", "line 7: client 1 has time nan"),
        (TRACE + "3,0,1\n", "line 7: client 3 is unknown; the data set has clients 0 to 2"),
        (TRACE + "-1,0,1\n", "line 7: client -1 is unknown"),
        (TRACE + "2,5,2\n", "line 7: available = 2; it must be 0 or 1"),
        (TRACE.replace("2,0,1\n", ""), "lacks 1 of 3 clients, first 2; add them"),
    ],
)
def test_a_bad_trace_is_one_clear_line(tmp_path: Path, text: str, said: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(UserError, match=said) as caught:
        AvailabilityTrace(path=path).check(3)
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith(str(path))


def test_a_bad_trace_stops_an_experiment_before_it_begins(tmp_path: Path) -> None:
    experiment = load_experiment("fedavg-digits", [f"availability={{kind: trace, path: {write(tmp_path)}}}"])
    with pytest.raises(UserError, match="lacks 197 of 200 clients, first 3"):
        prepare(experiment, tmp_path / "runs")
    with pytest.raises(UserError, match=r"no file nowhere.csv"):
        load_experiment("fedavg-digits", ["availability={kind: trace, path: nowhere.csv}"])


@pytest.mark.parametrize("sampling", ["round_robin", "uniform"])
def test_only_those_who_are_there_are_sampled(sampling: str) -> None:
    plan = PLAN.model_copy(update={"sampling": SAMPLINGS.resolve(sampling)()})
    order, everyone = plan.sampling.order(plan.seed, 20), np.ones(20, dtype=bool)
    for round_index in range(1, 9):
        everybody = sample_cohort(plan, order, round_index)
        assert np.array_equal(sample_cohort(plan, order, round_index, everyone), everybody)
        free = Bernoulli(probability=0.4).free(20, 0, round_index, 0.0)
        cohort = sample_cohort(plan, order, round_index, free)
        assert free[cohort].all()
        assert len(set(cohort)) == len(cohort) == min(4, free.sum())


@pytest.mark.parametrize(
    ("algorithm", "task"),
    [(FedAvg(), network_task()), (MEDIAN, network_task()), (FedMF(), rows_task())],
)
def test_a_round_without_clients_passes(algorithm: FedAvg, task: object, tmp_path: Path) -> None:
    """Clients are there for the first 15 s of every 100; the server looks again every 10 s."""
    rows = "".join(f"{client},0,1\n{client},15,0\n" for client in range(12))
    trace = AvailabilityTrace(path=write(tmp_path, "client,time,available\n" + rows), repeat_seconds=100)
    clock = Clock(idle_seconds=10.0, server_seconds=0.5)
    plan = PLAN.model_copy(update={"availability": trace, "clock": clock, "rounds": 20})
    Run(plan, algorithm, task).check_plan()
    outcomes, now, changed = play(plan, algorithm, task), 0.0, {0: 0, 4: 0}
    before = algorithm.init(task)
    for outcome in outcomes:
        record, state = outcome.record, outcome.state
        assert state is not None
        assert record.clients == (4 if now % 100 < 15 else 0)
        if not record.clients:
            assert record.round_simulated_seconds == 10.5
            assert (record.uplink_bits, record.downlink_bits, len(outcome.ledger.client)) == (0, 0, 0)
        after = algorithm.final(state.server)
        same = all(np.array_equal(after[name], values) for name, values in algorithm.final(before).items())
        assert same == (record.clients == 0)
        before, now = state.server, record.simulated_seconds
        changed[record.clients] += 1
    assert min(changed.values()) > 1
    resumed = play(plan, algorithm, task, outcomes[6].state)
    assert sha256(algorithm, resumed) == sha256(algorithm, outcomes)
    # A round without clients has no loss, and what is no number equals nothing.
    assert [repr(outcome.record) for outcome in resumed] == [repr(outcome.record) for outcome in outcomes[7:]]
    together = [outcomes[0] for outcomes in lockstep([Run(plan, algorithm, task)] * 2)]
    assert sha256(algorithm, together) == sha256(algorithm, outcomes)  # type: ignore[arg-type]


def test_who_followed_is_charged_one_update_across_idle_rounds() -> None:
    """Nothing is broadcast to nobody: the update after an idle round is the one before it, paid once."""

    class Twice:
        kind = "twice"

        def check(self, n_clients: int) -> None: ...

        def free(self, n_clients: int, seed: int, round_index: int, seconds: float) -> np.ndarray:
            return np.full(n_clients, round_index in (1, 4))

    algorithm, task = FedMF(), rows_task(4)
    straight = play(Plan(rounds=2, clients_per_round=4), algorithm, task)
    idle = play(Plan(rounds=4, clients_per_round=4).model_copy(update={"availability": Twice()}), algorithm, task)
    assert [outcome.record.clients for outcome in idle] == [4, 0, 0, 4]
    assert idle[3].ledger.downlink_bits.tolist() == straight[1].ledger.downlink_bits.tolist()


def test_nobody_ever_there_ends_with_the_model_it_began_with() -> None:
    algorithm, task = FedAvg(), network_task()
    outcomes = play(PLAN.model_copy(update={"availability": Bernoulli(probability=0.0)}), algorithm, task)
    assert [outcome.record.clients for outcome in outcomes] == [0] * 8
    assert outcomes[-1].record.simulated_seconds == 8 * 60
    always = play(PLAN.model_copy(update={"availability": Bernoulli(probability=1.0)}), algorithm, task)
    assert sha256(algorithm, always) == sha256(algorithm, play(PLAN, algorithm, task))
    assert Always().free(5, 0, 1, 0.0) is None
