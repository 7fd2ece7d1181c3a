"""DCD-PSGD beside CHOCO-SGD with a bit a value, and push-sum over links of one direction that lose messages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from digits import digits, make_task, relative_error, run
from narrowcast.algorithms.federated.choco_sgd import ChocoSGD
from narrowcast.algorithms.federated.d_psgd import DPSGD
from narrowcast.algorithms.federated.dcd_psgd import DCDPSGD
from narrowcast.algorithms.federated.gossip import MODELS, Gossip
from narrowcast.algorithms.federated.push_sum import PushSum
from narrowcast.algorithms.federated.topology import Exponential, Ring, push_weights
from narrowcast.platform.errors import UserError
from narrowcast.platform.models.networks import MLP
from narrowcast.platform.rounds.loop import rounds
from narrowcast.platform.rounds.plan import Plan
from narrowcast.platform.rounds.state import Run
from narrowcast.platform.types import Arrays, Chunk, LocalUpdates
from running import local

Values = NDArray[np.float64]
SIXTEEN = make_task(digits([8] * 16), MLP(hidden=(6,), dtype="float64"))
TASK = make_task(digits([20, 12, 9, 16, 8, 14, 10, 11, 7, 13, 15]), MLP(hidden=(6,), dtype="float64"))
EVERYONE = np.arange(16)
TARGETS = np.random.default_rng(0).standard_normal((16, 20))
RATE, GAMMA = 0.02, 0.4
FORWARD = Ring(direction="forward")


def sign(values: Values, random: np.random.Generator) -> Values:
    """Return a bit a value: its sign, times the mean magnitude, which takes less away than there is."""
    del random
    return np.asarray(np.sign(values) * np.abs(values).mean(axis=1, keepdims=True))


def dithered_sign(values: Values, random: np.random.Generator) -> Values:
    """Return a bit a value, whose expectation is the value, as DCD's theory asks."""
    most = np.abs(values).max(axis=1, keepdims=True)
    return np.asarray(most * np.where(values >= most * random.uniform(-1, 1, values.shape), 1.0, -1.0))


def exact(values: Values, random: np.random.Generator) -> Values:
    del random
    return values


Quantiser = Callable[[Values, np.random.Generator], Values]


def descents(algorithm: Gossip, quantiser: Quantiser, n_rounds: int) -> Values:
    """Return the models after rounds of ||x - target_i||^2 / 2, messages quantised, by the algorithm's two halves."""
    zeros, random = np.zeros((16, 20)), np.random.default_rng(1)
    server: Arrays = {"models/x": zeros, "unheard_bits": np.zeros(16, dtype=np.int64)}
    if isinstance(algorithm, ChocoSGD):
        server = {**server, "estimates/x": zeros}
    for index in range(1, n_rounds + 1):
        change = -RATE * (server["models/x"] - TARGETS)
        chunk, ones = Chunk(index, 0, EVERYONE, {}), np.ones(16, dtype=np.int64)
        trained = LocalUpdates({"x": change}, {}, np.zeros(16), ones, ones)
        message = algorithm.message(server, chunk, SIXTEEN, trained)
        sent = quantiser(np.asarray(message.tensors["x"]), random)
        total = {"each/client": EVERYONE, "each/bits": ones, "each/change/x": change, "each/sent/x": sent}
        server = algorithm.step(server, {}, total, SIXTEEN, index)
    return np.asarray(server["models/x"])


def in_numpy(kind: str, quantiser: Quantiser, n_rounds: int) -> Values:
    """Return the models by Algorithm 1 of DCD-PSGD, or 2 of CHOCO-SGD, with the ring's weights as a matrix."""
    weights, random = np.eye(16) / 3, np.random.default_rng(1)
    for shift in (-1, 1):
        weights += np.roll(np.eye(16), shift, axis=1) / 3
    models, estimates = np.zeros((16, 20)), np.zeros((16, 20))
    for _ in range(n_rounds):
        gradient = models - TARGETS
        if kind == "dcd_psgd":
            models = models + quantiser(weights @ models - RATE * gradient - models, random)
        else:
            stepped = models - RATE * gradient
            estimates = estimates + quantiser(stepped - estimates, random)
            models = stepped + GAMMA * (weights @ estimates - estimates)
    return models


@pytest.mark.parametrize("quantiser", [exact, sign, dithered_sign])
@pytest.mark.parametrize("algorithm", [DCDPSGD(), ChocoSGD(gamma=GAMMA)], ids=["dcd", "choco"])
def test_steps_are_those_of_the_papers(algorithm: Any, quantiser: Quantiser) -> None:
    got, wanted = descents(algorithm, quantiser, 12), in_numpy(algorithm.kind, quantiser, 12)
    assert np.abs(got - wanted).max() < 1e-12 * np.abs(wanted).max()


def test_with_a_bit_a_value_dcd_diverges_where_choco_converges() -> None:
    errors = {
        (kind, quantiser): np.abs(in_numpy(kind, quantiser, 600) - in_numpy(kind, exact, 600)).max()
        for kind in ("dcd_psgd", "choco_sgd")
        for quantiser in (sign, dithered_sign)
        if (kind, quantiser) != ("choco_sgd", dithered_sign)
    }
    assert errors["dcd_psgd", dithered_sign] > 1e6
    assert errors["choco_sgd", sign] < 0.01
    assert 0.1 < errors["dcd_psgd", sign] < 1  # what the codec leaves out is in no later message


def test_dcd_without_a_codec_is_d_psgd_that_mixes_first() -> None:
    got, wanted = (
        run(algorithm, TASK, n_rounds=4, clients=11) for algorithm in (DCDPSGD(), DPSGD(order="mix_then_step"))
    )
    assert relative_error(MODELS.of(got.server), MODELS.of(wanted.server)) < 1e-12
    assert (got.uplink_bits, got.downlink_bits) == (wanted.uplink_bits, wanted.downlink_bits)


def test_push_sum_on_symmetric_weights_is_d_psgd() -> None:
    got, wanted = (run(algorithm, TASK, n_rounds=4, clients=11) for algorithm in (PushSum(), DPSGD()))
    assert relative_error(MODELS.of(got.server), MODELS.of(wanted.server)) < 1e-12
    assert np.abs(got.server["push weights"] - 1).max() < 1e-12
    assert got.uplink_bits == wanted.uplink_bits + 4 * 11 * 64  # a weight beside each model


@pytest.mark.parametrize(
    "topology",
    [FORWARD, Exponential(direction="forward"), {"kind": "star"}, {"kind": "erdos_renyi", "probability": 0.3}],
)
def test_push_sum_keeps_the_mean_over_links_that_lose_messages(topology: Any) -> None:
    algorithm = PushSum.model_validate({"topology": topology, "message_loss": 0.3})
    start = np.random.default_rng(0).standard_normal((16, 3))
    arcs = len(algorithm.topology.arcs(16, 1, 0))
    server: Arrays = {
        **{"models/x": start, "masses/x": start, "in flight/x": np.zeros((arcs, 3)), "push weights": np.ones(16)},
        **{"in flight/push weights": np.zeros(arcs), "unheard_bits": np.zeros(16, dtype=np.int64)},
    }
    n_rounds = 2000 if algorithm.topology == FORWARD else 400
    random, flying, zeros = np.random.default_rng(1), 0.0, np.zeros((16, 3))
    for index in range(1, n_rounds + 1):
        clients = np.flatnonzero(random.random(16) < 0.9)
        receivers = np.bincount(algorithm.topology.arcs(16, 1, 0)[:, 0], minlength=16)[:, np.newaxis]
        total = {"each/client": clients, "each/bits": clients, "each/change/x": zeros[clients]}
        total["each/sent/x"] = (server["masses/x"] / (1 + receivers))[clients]
        server = algorithm.step(server, {}, total, SIXTEEN, index)
        flying = max(flying, float(np.abs(server["in flight/x"]).max()))
    assert np.abs(algorithm.final(server)["x"] - start.mean(axis=0)).max() < 1e-12
    assert server["push weights"].sum() + server["in flight/push weights"].sum() == pytest.approx(16, abs=1e-12)
    assert np.abs(server["models/x"] - start.mean(axis=0)).max() < 1e-6
    assert flying > 0.01


def test_weights_of_a_sender_sum_to_1() -> None:
    weights = push_weights(np.array([[0, 1], [0, 2], [1, 2], [2, 0]]), 3).toarray()
    assert np.array_equal(weights, [[1 / 3, 0, 1 / 2], [1 / 3, 1 / 2, 0], [1 / 3, 1 / 2, 1 / 2]])


def test_a_client_hears_and_pays_for_what_arrives() -> None:
    plan = Plan(rounds=3, clients_per_round=11, chunk_size=4, checkpoint_every=1)
    algorithm, model = PushSum(topology=FORWARD, message_loss=0.4), 8 * (8 + 2 + 8 * 460)
    heard = np.zeros(11, dtype=bool)
    for index, outcome in enumerate(rounds(Run(plan, algorithm, TASK), local(algorithm, TASK))):
        assert outcome.ledger.uplink_bits.tolist() == [model + 64] * 11
        assert outcome.ledger.downlink_bits.tolist() == ((model + 64) * heard + (0 if index else model)).tolist()
        assert outcome.state is not None
        flight = outcome.state.server["in flight/push weights"]
        senders = algorithm.topology.arcs(11, 1, 0)[:, 0]
        heard = np.isin(np.arange(11), (senders[flight == 0] + 1) % 11)
    assert 0 < heard.sum() < 11


@pytest.mark.parametrize("algorithm", [DPSGD(topology=FORWARD), ChocoSGD(topology=Exponential(direction="forward"))])
def test_symmetric_weights_need_links_in_both_directions(algorithm: Gossip) -> None:
    with pytest.raises(UserError, match="use direction = both, or push_sum"):
        algorithm.check(TASK)
