"""FedCS: the paper's greedy choice, its bound, equal fleets, uploads that take turns, and where it is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from digits import digits, make_task
from narrowcast.algorithms.federated.fedavg import FedAvg
from narrowcast.experiment import load_experiment
from narrowcast.platform.contracts import Task
from narrowcast.platform.errors import UserError
from narrowcast.platform.rounds.fleet import Clock
from narrowcast.platform.rounds.loop import rounds
from narrowcast.platform.rounds.outcome import Outcome
from narrowcast.platform.rounds.plan import Plan
from narrowcast.platform.rounds.sampling import Draw, FedCS, PredictedSeconds, Uniform
from narrowcast.platform.rounds.state import Run
from running import local

RANDOM = np.random.default_rng(5)
SECONDS = PredictedSeconds(RANDOM.uniform(0, 4, 20), RANDOM.uniform(0, 60, 20), RANDOM.uniform(1, 9, 20), 2.0)


def algorithm_3(seconds: PredictedSeconds, limit: float) -> list[int]:
    """Return the choice of the paper's Algorithm 3, line by line; empty if no client fits."""
    download, compute, upload = seconds.download.tolist(), seconds.compute.tolist(), seconds.upload.tolist()
    left, chosen, elapsed = list(range(len(upload))), list[int](), 0.0

    def distribution(clients: list[int]) -> float:
        return max((download[client] for client in clients), default=0.0)

    def added(client: int) -> float:
        return upload[client] + max(0.0, compute[client] - elapsed)

    def cost(client: int) -> float:
        return distribution([*chosen, client]) - distribution(chosen) + added(client)

    while left:
        best = max(left, key=lambda client: 1 / cost(client))
        left.remove(best)
        if distribution([*chosen, best]) + elapsed + added(best) + seconds.server < limit:
            elapsed += added(best)
            chosen.append(best)
    return chosen


@pytest.mark.parametrize("limit", [5.0, 12.0, 40.0, 70.0, 1000.0])
def test_the_choice_is_that_of_the_papers_algorithm(limit: float) -> None:
    choice, known = FedCS(round_seconds=limit).choice(SECONDS).tolist(), algorithm_3(SECONDS, limit)
    alone = int((SECONDS.download + SECONDS.compute + SECONDS.upload).argmin())
    assert choice == (known or [alone])
    assert bool(known) == (limit > 5)


def test_of_equal_clients_the_choice_is_random() -> None:
    def equal(clients: np.ndarray) -> PredictedSeconds:
        return PredictedSeconds(*np.ones((2, len(clients))), np.full(len(clients), 2.0))

    for number in range(1, 20):
        draw = Draw(8, 0, number, np.arange(30), predicted=equal)
        asked = Uniform().draw(draw)
        assert FedCS(round_seconds=1000).draw(draw).tolist() == asked.tolist()
        assert FedCS(round_seconds=9).draw(draw).tolist() == asked[:3].tolist()  # 1 + 1 + 2 n < 9


def play(task: Task, plan: Plan) -> list[Outcome]:
    run = Run(plan, FedAvg(), task)
    run.check()
    return list(rounds(run, local(FedAvg(), task)))


def test_rounds_end_as_planned_or_sooner_and_uploads_take_turns() -> None:
    task, clock = make_task(digits([12, 30, 9, 20] * 4)), Clock(uploads="sequential", seconds_per_example=1e-3)
    free = Plan(rounds=4, sampling=Uniform(), clients_per_round=10, clock=clock, downlink="every_round")
    limit = float(np.median([outcome.record.round_simulated_seconds for outcome in play(task, free)])) / 2
    numbers = set()
    for outcome in play(task, free.model_copy(update={"sampling": FedCS(round_seconds=limit)})):
        ledger, profiles = outcome.ledger, task.profiles.take(outcome.ledger.client)
        ready = (
            ledger.downlink_bits / profiles.downlink_bits_per_second + 7e-3 * ledger.examples / profiles.compute_speed
        )
        now, done = 0.0, {}
        for place in sorted(range(len(ready)), key=lambda place: ready[place]):
            now = max(now, ready[place]) + ledger.uplink_bits[place] / profiles.uplink_bits_per_second[place]
            done[place] = now
        assert ledger.seconds == pytest.approx([done[place] for place in range(len(ready))])
        assert outcome.record.round_simulated_seconds == pytest.approx(now)
        assert now < limit
        numbers.add(len(ready))
    assert 1 < min(numbers) <= max(numbers) < 10
    nobody = play(task, free.model_copy(update={"sampling": FedCS(round_seconds=1e-6), "rounds": 1}))
    assert nobody[0].record.clients == 1


def test_who_uploads_nothing_waits_for_nobody() -> None:
    clock, ready, upload = Clock(uploads="sequential"), np.array([3.0, 1.0, 2.0]), np.array([1.0, 0.0, 4.0])
    assert clock.seconds_with_uploads(ready, upload).tolist() == [7.0, 1.0, 6.0]
    assert clock.model_copy(update={"uploads": "parallel"}).seconds_with_uploads(ready, upload).tolist() == [4, 1, 6]


SEQUENTIAL = {"clock.uploads": "sequential"}


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"sampling": "fedcs"}, "set clock.uploads = sequential too"),
        ({"sampling": "fedcs", **SEQUENTIAL, "secure": "masked"}, "keys of secure sums depend on who is chosen"),
        ({"sampling": "fedcs", **SEQUENTIAL, "algorithm.codec": ["svd"]}, "known only after their training"),
        ({**SEQUENTIAL, "schedule": "buffered"}, "with schedule = buffered uploads have times of their own"),
        ({**SEQUENTIAL, "radio": {"channel": "fixed"}}, "with radio uploads have times of their own"),
        ({**SEQUENTIAL, "deadline_seconds": 9, "stragglers": "partial"}, "with stragglers = partial uploads"),
        ({"sampling": "fedcs", **SEQUENTIAL, "replacement": True}, "repeats no client"),
    ],
)
def test_what_does_not_fit_is_refused(settings: dict[str, Any], said: str) -> None:
    base = {"data": {"kind": "digits", "clients": 16}, "algorithm": {"kind": "fedavg"}, "backend": "local"}
    overrides = [f"{name}={value}" for name, value in settings.items() if "." in name]
    with pytest.raises(UserError, match=said):
        experiment = load_experiment({**base, **{k: v for k, v in settings.items() if "." not in k}}, overrides)
        task = experiment.task(experiment.data_source.load())
        Run(experiment, experiment.secured_algorithm, task).check()


def test_uploads_at_the_same_time_leave_an_experiment_what_it_was() -> None:
    former, turns = load_experiment("fedavg-digits"), load_experiment("fedavg-digits", ["clock.uploads=sequential"])
    assert "clock.uploads" not in former.identity()
    assert former.digest() == load_experiment("fedavg-digits", ["clock.uploads=parallel"]).digest() != turns.digest()
