"""Dynamic averaging beside the paper's protocol in NumPy, FedAvg and training alone; and who pays for which model."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from digits import digits, make_task, relative_error, run
from narrowcast.algorithms.federated.dynamic_averaging import DynamicAveraging
from narrowcast.algorithms.federated.fedavg import FedAvg
from narrowcast.algorithms.federated.gossip import MODELS
from narrowcast.algorithms.federated.local import Local
from narrowcast.experiment import load_experiment
from narrowcast.platform.errors import UserError
from narrowcast.platform.models.networks import MLP
from narrowcast.platform.rounds.loop import rounds
from narrowcast.platform.rounds.plan import Plan
from narrowcast.platform.rounds.state import Run
from narrowcast.platform.seeds import generator
from narrowcast.platform.types import Arrays, Chunk, LocalTerms
from running import local

EXAMPLES = [20, 12, 9, 16, 8, 14, 10, 11]
TASK = make_task(digits(EXAMPLES), MLP(hidden=(6,), dtype="float64"))
SINGLE = make_task(digits(EXAMPLES), MLP(hidden=(6,)))


def flat(model: Arrays) -> np.ndarray:
    """Return the values of a model as one vector."""
    return np.concatenate([np.ravel(model[name]) for name in sorted(model)])


def trained(model: Arrays, client: int, round_index: int) -> Arrays:
    """Return a client's model after its local steps of a round."""
    chunk = Chunk(round_index, 0, np.array([client]), {})
    terms = LocalTerms(start={name: values[np.newaxis] for name, values in model.items()})
    changes = TASK.training.train(TASK.initial_parameters(), chunk, TASK, terms).changes
    return {name: values + changes[name][0] for name, values in model.items()}


@dataclass
class Protocol:
    """Algorithm 1 of the paper, with weights; every client takes part in every round."""

    threshold: float
    weights: list[float]
    models: list[Arrays] = field(default_factory=lambda: [TASK.initial_parameters() for _ in EXAMPLES])
    reference: Arrays = field(default_factory=TASK.initial_parameters)
    violations: int = 0

    def far(self, model: Arrays) -> bool:
        return float(np.sum((flat(model) - flat(self.reference)) ** 2)) > self.threshold

    def mean(self, clients: list[int]) -> Arrays:
        whole = sum(self.weights[i] for i in clients)
        return {name: sum(self.weights[i] / whole * self.models[i][name] for i in clients) for name in self.reference}

    def round(self, number: int) -> tuple[list[int], list[int]]:
        """Return the clients that violate, and those that are averaged."""
        self.models = [trained(model, client, number) for client, model in enumerate(self.models)]
        violating = [i for i, model in enumerate(self.models) if self.far(model)]
        together, others = list(violating), []
        self.violations += len(violating)
        if violating:
            others = [int(i) for i in generator(0, "augmentation", number).permutation(8) if i not in violating]
        if violating and self.violations >= 8:
            together, others, self.violations = together + others, [], 0
        while others and self.far(self.mean(together)):
            together.append(others.pop(0))
        if together:
            mean = self.mean(together)
            for i in together:
                self.models[i] = mean
            if len(together) == 8:
                self.reference = mean
        return violating, together


@pytest.mark.parametrize("weights", ["examples", "equal"])
def test_rounds_are_those_of_the_papers_protocol(weights: Any) -> None:
    algorithm = DynamicAveraging(threshold=0.2, weights=weights)
    known = Protocol(0.2, [float(n) if weights == "examples" else 1.0 for n in EXAMPLES])
    whole = FedAvg().broadcast(FedAvg().init(TASK), TASK, 1).full.wire_bits()
    waiting, kinds = np.ones(8, dtype=int), set()
    plan = Plan(rounds=12, clients_per_round=8, chunk_size=3, checkpoint_every=1)
    for number, outcome in enumerate(rounds(Run(plan, algorithm, TASK), local(algorithm, TASK)), 1):
        violating, together = known.round(number)
        assert outcome.state is not None
        models = MODELS.of(outcome.state.server)
        for i, model in enumerate(known.models):
            assert relative_error({name: values[i] for name, values in models.items()}, model) < 1e-12
        mean = known.mean(list(range(8)))
        assert relative_error(algorithm.final(outcome.state.server), mean) < 1e-12
        asked = [i for i in together if i not in violating]
        bits = [whole if i in violating else 1 + whole * (i in asked) for i in range(8)]
        assert outcome.ledger.uplink_bits.tolist() == bits
        assert outcome.ledger.downlink_bits.tolist() == (waiting * whole).tolist()
        assert outcome.record.metrics["averaged_clients"] == len(together)
        # Who is asked sends after all others.
        rates = TASK.profiles.uplink_bits_per_second
        quiet = max(s for i, s in enumerate(outcome.ledger.seconds) if i not in asked)
        assert outcome.ledger.seconds[asked] == pytest.approx(quiet + whole / rates[asked])
        waiting = np.array([int(i in together) for i in range(8)])
        kinds.add((bool(asked), len(together) in (0, 8), bool(violating)))
    assert {(False, True, False), (True, False, True), (True, True, True), (False, False, True)} <= kinds


def test_without_a_threshold_it_is_fedavg_and_with_a_huge_one_training_alone() -> None:
    fedavg = run(FedAvg(), SINGLE, n_rounds=4, clients=8)
    always = run(algorithm := DynamicAveraging(threshold=0), SINGLE, n_rounds=4, clients=8)
    final = algorithm.final(always.server)
    assert all(np.array_equal(final[name], values) for name, values in fedavg.server.items())
    costs = ("uplink_bits", "downlink_bits", "simulated_seconds")
    assert [getattr(always, cost) for cost in costs] == [getattr(fedavg, cost) for cost in costs]
    never, alone = (run(which, TASK, n_rounds=4, clients=8) for which in (DynamicAveraging(threshold=1e300), Local()))
    own = {
        name: TASK.initial_parameters()[name] + alone.clients[f"personal/{name}"] for name in MODELS.of(never.server)
    }
    assert relative_error(MODELS.of(never.server), own) < 1e-12
    assert never.uplink_bits == 4 * 8


def test_a_partial_average_leaves_the_mean_of_the_models_as_it_is() -> None:
    start, rng = TASK.initial_parameters(), np.random.default_rng(0)
    moves = {name: rng.standard_normal((8, *values.shape)) for name, values in start.items()}
    distance = sum(float(np.square(values[:2].mean(axis=0)).sum()) for values in moves.values())
    algorithm = DynamicAveraging(threshold=0.7 * distance, weights="equal")
    server, diverged = algorithm.init(TASK), np.arange(8) < 2
    total = {
        **{f"sum/{name}": values[:2].sum(axis=0) for name, values in moves.items()},
        "weight": np.array(2.0),
        **{"each/client": np.arange(8), "each/diverged": diverged, "each/weight": np.ones(8), "each/bits": np.ones(8)},
        **{f"each/divergence/{name}": values for name, values in moves.items()},
    }
    after = algorithm.step(server, {}, total, TASK, 1)
    assert 2 < algorithm.step_metrics(server, after, total, TASK)["averaged_clients"] < 8
    for name, values in MODELS.of(after).items():
        wanted = start[name] + moves[name].mean(axis=0)
        assert np.abs(values.mean(axis=0) - wanted).max() < 1e-14
        assert np.abs(algorithm.final(after)[name] - wanted).max() < 1e-14


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"algorithm.codec": ["svd"]}, "averages models as they are"),
        ({"secure": "masked"}, "dynamic_averaging"),
        ({"schedule": "buffered"}, "cannot count stale updates less"),
        ({"new_clients": 3, "evaluate_clients": "test"}, "new_clients = 3: with algorithm.kind = dynamic_averaging"),
        ({"model": "softmax", "algorithm.threshold": -1}, "greater than or equal to 0"),
    ],
)
def test_what_does_not_fit_is_refused(settings: dict[str, Any], said: str) -> None:
    base = {"data": {"kind": "digits", "clients": 16}, "algorithm": {"kind": "dynamic_averaging"}, "backend": "local"}
    overrides = [f"{name}={value}" for name, value in settings.items() if "." in name]
    with pytest.raises(UserError, match=said):
        experiment = load_experiment({**base, **{k: v for k, v in settings.items() if "." not in k}}, overrides)
        experiment.task(experiment.data_source.load())
