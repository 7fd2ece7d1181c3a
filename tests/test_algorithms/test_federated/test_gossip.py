"""Learning without a server: the mean of the models, D-PSGD beside FedAvg, CHOCO's estimates, and who pays for what."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from digits import digits, make_task, relative_error, run
from narrowcast.algorithms.federated.choco_sgd import ESTIMATES, ChocoSGD
from narrowcast.algorithms.federated.d_psgd import DPSGD
from narrowcast.algorithms.federated.fedavg import FedAvg
from narrowcast.algorithms.federated.gossip import MODELS, Gossip
from narrowcast.algorithms.federated.topology import Complete, Ring
from narrowcast.experiment import load_experiment
from narrowcast.platform.contracts import Executor
from narrowcast.platform.errors import UserError
from narrowcast.platform.models.networks import MLP
from narrowcast.platform.rounds.ledger import ChunkResult
from narrowcast.platform.rounds.loop import rounds
from narrowcast.platform.rounds.outcome import Outcome
from narrowcast.platform.rounds.plan import Plan
from narrowcast.platform.rounds.state import Run
from narrowcast.platform.types import Arrays, Chunk, arrays_sha256
from running import local

SIXTEEN = make_task(digits([8] * 16), MLP(hidden=(6,), dtype="float64"))
TASK = make_task(digits([20, 12, 9, 16, 8, 14, 10, 11, 7, 13, 15]), MLP(hidden=(6,), dtype="float64"))
COARSE = ({"kind": "quantise", "levels": 2, "scale": "max"},)
SPARSE = ({"kind": "top_k", "fraction": 0.1},)


def rounded(values: np.ndarray) -> np.ndarray:
    """Return each client's values on a grid of 9 points, from -max to max."""
    step = np.abs(values).max(axis=1, keepdims=True) / 4
    return np.asarray(np.round(values / step) * step)


def mixes(algorithm: Gossip, server: Arrays, n_rounds: int) -> Arrays:
    """Return the state after rounds in which clients mix and do not train, messages rounded if there is a codec."""
    clients = np.arange(16)
    for index in range(1, n_rounds + 1):
        sent = server["models/x"] - server.get("estimates/x", np.zeros(()))
        total = {
            "each/client": clients,
            "each/bits": clients,
            "each/change/x": np.zeros((16, 20)),
            "each/sent/x": rounded(sent) if algorithm.codec else sent,
        }
        server = algorithm.step(server, {}, total, SIXTEEN, index)
    return server


@pytest.mark.parametrize(
    ("algorithm", "n_rounds", "kept"),
    [
        (DPSGD(), 2000, True),
        (ChocoSGD(gamma=0.3, codec=COARSE), 2000, True),  # type: ignore[arg-type]
        (DPSGD(codec=COARSE), 200, False),  # type: ignore[arg-type]
    ],
    ids=["exact", "choco", "naive"],
)
def test_mixing_keeps_the_mean_of_the_models_and_naive_codecs_lose_it(
    algorithm: Gossip, n_rounds: int, kept: bool
) -> None:
    start = np.random.default_rng(0).standard_normal((16, 20))
    server: dict[str, Any] = {"models/x": start, "unheard_bits": np.zeros(16, dtype=np.int64)}
    if isinstance(algorithm, ChocoSGD):
        server["estimates/x"] = np.zeros_like(start)
    after = mixes(algorithm, server, n_rounds)["models/x"]
    moved = np.abs(after.mean(axis=0) - start.mean(axis=0)).max()
    if kept:
        assert moved <= 1e-12
        assert np.abs(after - start.mean(axis=0)).max() < 1e-9
    else:
        assert moved > 0.1 * start.std() / 4


def test_on_a_complete_graph_d_psgd_is_fedavg_with_equal_weights() -> None:
    got, wanted = (
        run(algorithm, TASK, n_rounds=3, clients=11)
        for algorithm in (DPSGD(topology=Complete()), FedAvg(weights="equal"))
    )
    assert relative_error(DPSGD().final(got.server), wanted.server) < 1e-12
    assert all(np.ptp(values, axis=0).max() < 1e-12 for values in MODELS.of(got.server).values())
    assert got.uplink_bits == wanted.uplink_bits


def test_mixing_first_leaves_the_clients_own_steps_apart() -> None:
    first, then = (run(DPSGD(order=order), TASK, clients=11) for order in ("mix_then_step", "step_then_mix"))  # type: ignore[arg-type]
    start, weights = TASK.initial_parameters(), np.eye(11) / 3
    for shift in (-1, 1):
        weights += np.roll(np.eye(11), shift, axis=1) / 3
    for name, models in MODELS.of(first.server).items():
        mixed = np.tensordot(weights, models - start[name], 1)
        assert np.abs(mixed - (MODELS.of(then.server)[name] - start[name])).max() < 1e-12
        assert np.abs(mixed - (models - start[name])).max() > 1e-3


def test_choco_without_a_codec_is_d_psgd_if_gamma_is_1() -> None:
    got, wanted, slower = (
        run(algorithm, TASK, n_rounds=4, clients=11) for algorithm in (ChocoSGD(), DPSGD(), ChocoSGD(gamma=0.5))
    )
    assert relative_error(MODELS.of(got.server), MODELS.of(wanted.server)) < 1e-12
    assert relative_error(MODELS.of(slower.server), MODELS.of(wanted.server)) > 1e-4
    assert got.uplink_bits == wanted.uplink_bits
    assert got.downlink_bits == wanted.downlink_bits


class Overheard(Executor):
    """Keeps the results of all chunks, as somebody who hears every message."""

    def __init__(self, executor: Executor) -> None:
        self.executor, self.results = executor, list[list[ChunkResult]]()

    def train(self, broadcast: Arrays, chunks: Sequence[Chunk]) -> list[ChunkResult]:
        self.results.append(self.executor.train(broadcast, chunks))
        return self.results[-1]


def overheard(algorithm: Gossip) -> Iterator[tuple[Outcome, dict[int, ChunkResult]]]:
    """Yield five rounds of 6 of the 11 clients: the outcome, and by client the result of its chunk of one."""
    plan = Plan(rounds=5, clients_per_round=6, chunk_size=1, checkpoint_every=1)
    executor = Overheard(local(algorithm, TASK))
    outcomes = rounds(Run(plan, algorithm, TASK), executor)
    for outcome in outcomes:
        yield outcome, {int(result.ledger.client[0]): result for result in executor.results[-1]}


def test_neighbours_that_add_up_what_they_decode_hold_the_estimates_of_the_sender() -> None:
    algorithm = ChocoSGD(gamma=0.3, codec=SPARSE)  # type: ignore[arg-type]
    start = TASK.initial_parameters()
    copies = {(holder, of): dict(start) for of in range(11) for holder in (of, (of + 1) % 11, (of - 1) % 11)}
    for outcome, heard in overheard(algorithm):
        for (_, of), copy in copies.items():
            if of in heard:
                for name in start:
                    copy[name] = copy[name] + heard[of].partial[f"each/sent/{name}"][0]
        assert outcome.state is not None
        models, estimates = MODELS.of(outcome.state.server), ESTIMATES.of(outcome.state.server)
        for (_, of), copy in copies.items():
            assert arrays_sha256(copy) == arrays_sha256({name: values[of] for name, values in estimates.items()})
        means = {name: values.mean(axis=0) for name, values in models.items()}
        error = sum(float(((values - means[name]) ** 2).sum()) for name, values in models.items()) / 11
        assert outcome.record.metrics["consensus_error"] == pytest.approx(error)
    assert error > 0


@pytest.mark.parametrize(
    "algorithm",
    [
        DPSGD(transmission="unicast"),
        DPSGD(topology=Ring(), codec=COARSE),  # type: ignore[arg-type]
        ChocoSGD(codec=SPARSE, gamma=0.3),  # type: ignore[arg-type]
        ChocoSGD(codec=COARSE, transmission="unicast"),  # type: ignore[arg-type]
    ],
    ids=["d_psgd-unicast", "d_psgd-coded", "choco", "choco-unicast"],
)
def test_clients_pay_for_what_they_send_and_for_what_their_neighbours_sent(algorithm: Any) -> None:
    whole = FedAvg().broadcast(FedAvg().init(TASK), TASK, 1).full.wire_bits()
    times, waiting, newcomers = 1, dict.fromkeys(range(11), 0), set(range(11))
    if algorithm.transmission == "unicast":
        times = 2
    for outcome, heard in overheard(algorithm):
        ledger = outcome.ledger
        for client, downlink in zip(ledger.client.tolist(), ledger.downlink_bits.tolist(), strict=True):
            assert downlink == min(waiting[client], 2 * whole) + (whole if client in newcomers else 0)
            newcomers.discard(client)
            waiting[client] = 0
        for client, result in heard.items():
            bits = int(result.partial["each/bits"][0])
            assert int(result.ledger.uplink_bits[0]) == bits * times
            for neighbour in ((client + 1) % 11, (client - 1) % 11):
                if neighbour in heard or algorithm.kind == "choco_sgd":
                    waiting[neighbour] += bits
    assert not newcomers


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"algorithm.topology": {"kind": "erdos_renyi", "probability": 0.01}}, "parts without a link"),
        ({"algorithm": {"kind": "choco_sgd", "topology": "random_matching"}}, "has other links in each round"),
        ({"new_clients": 3, "evaluate_clients": "test"}, "new_clients = 3: with algorithm.kind = d_psgd"),
        ({"radio": {"channel": "fixed", "downlink": "broadcast"}}, "sends each its own message; use radio.downlink"),
        ({"schedule": "buffered"}, "cannot count stale updates less"),
        ({"secure": "masked"}, "d_psgd"),
    ],
)
def test_what_has_no_meaning_without_a_server_is_refused(settings: dict[str, Any], said: str) -> None:
    base = {"data": {"kind": "digits", "clients": 16}, "algorithm": {"kind": "d_psgd"}, "backend": "local"}
    overrides = [f"{name}={value}" for name, value in settings.items() if "." in name]
    with pytest.raises(UserError, match=said):
        experiment = load_experiment({**base, **{k: v for k, v in settings.items() if "." not in k}}, overrides)
        experiment.task(experiment.data_source.load())
