"""Changes coded on their way down: clients that follow the messages hold the server's model, bit by bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from pydantic import TypeAdapter

from narrowcast.algorithms.client.sums import TensorSum
from narrowcast.algorithms.codecs.chain import Codec, Stages
from narrowcast.algorithms.codecs.low_rank import draw_basis
from narrowcast.algorithms.codecs.messages import WHOLE, CodedTensors
from narrowcast.algorithms.federated.fedmf import FedMF
from narrowcast.algorithms.federated.low_rank import CoLR, SCoLR
from narrowcast.laws import algorithm_cases, algorithm_laws
from narrowcast.laws.algorithm_cases import AlgorithmCase
from narrowcast.laws.small_tasks import PLAN, run, task_of
from narrowcast.platform.errors import UserError
from narrowcast.platform.models.factorisation import MatrixFactorisation
from narrowcast.platform.models.model import ITEM_FACTORS
from narrowcast.platform.models.networks import MLP
from narrowcast.platform.seeds import stream_keys

MODEL = MatrixFactorisation(embedding_dim=8)
COARSE = TypeAdapter(Stages).validate_python([{"kind": "quantise", "levels": 3}, "entropy"])
FEEDBACK = TypeAdapter(Stages).validate_python(["error_feedback", {"kind": "svd", "rank": 1}])
WARM = TypeAdapter(Stages).validate_python(["error_feedback", {"kind": "power_sgd", "rank": 1}, *COARSE])
CODED = {
    "fedmf": FedMF(downlink_codec=WARM),
    "colr": CoLR(rank=2, downlink_codec=COARSE),
    "scolr": SCoLR(rank=3, downlink_codec=COARSE),
}
CASES = {name: case for name, case in algorithm_cases.cases(CODED).items() if not name.startswith("cnn")}


@pytest.mark.parametrize("law", algorithm_laws.LAWS, ids=lambda law: law.__name__)
@pytest.mark.parametrize("name", CASES)
def test_coded_changes_keep_the_laws_of_algorithms(name: str, law: Callable[[AlgorithmCase], None]) -> None:
    law(CASES[name])


def messages(algorithm: Any, task: Any) -> tuple[list[bytes], list[int], list[np.ndarray], Any]:
    """Return the bytes of each round's change, the keys and seeds it was coded with, Q after it, and the last state."""
    sent, keys, models = [], [], []
    server = algorithm.init(task)
    for outcome in run(PLAN, algorithm, task):
        assert outcome.state is not None
        broadcast = algorithm.broadcast(server, task, outcome.record.round)
        keys.append(int(broadcast.arrays["downlink_key"][0]))
        server = outcome.state.server
        update = algorithm.broadcast(server, task, outcome.record.round + 1).update
        sent.append(update.to_bytes())
        models.append(np.asarray(server[ITEM_FACTORS]))
    return sent, keys, models, server


def test_a_client_follows_the_server_from_bytes_and_the_public_seed() -> None:
    algorithm, task = FedMF(downlink_codec=WARM), task_of(MODEL)
    held = np.asarray(algorithm.init(task)[ITEM_FACTORS])
    sent, keys, models, _ = messages(algorithm, task)
    for place, (data, model) in enumerate(zip(sent, models, strict=True)):
        key = stream_keys(task.seed, "downlink codec", place + 1, np.zeros(1, dtype=np.int64))
        assert int(key[0]) == keys[place]
        held = held + Codec(WARM).decode(CodedTensors.from_bytes(data).coded, {WHOLE: held.shape}, int(key[0]))[WHOLE]
        assert held.tobytes() == model.tobytes()


def test_a_client_of_colr_follows_with_the_basis_of_the_message_before() -> None:
    """The message of a round's A has the seed of the next round's basis, so that no other is sent."""
    algorithm, task = CoLR(rank=2, downlink_codec=COARSE), task_of(MODEL)
    held = np.asarray(algorithm.init(task)[ITEM_FACTORS])
    first = algorithm.broadcast(algorithm.init(task), task, 1)
    seed = getattr(first.full, "seed", None)
    sent, keys, models, _ = messages(algorithm, task)
    for data, key, model in zip(sent, keys, models, strict=True):
        arrived = CodedTensors.from_bytes(data)
        assert seed is not None
        a = Codec(COARSE).decode(arrived.coded, {"update": (len(held), 2)}, key)["update"]
        held = held + a @ draw_basis(algorithm.basis, 2, held.shape[1], seed)
        np.testing.assert_allclose(held, model, atol=1e-6)
        seed, held = arrived.seed, model


def test_with_error_feedback_nothing_is_lost_but_delayed() -> None:
    """Q plus what the server owes is Q of the start plus all means: a reference that codes nothing, round by round."""
    algorithm, task = FedMF(downlink_codec=FEEDBACK), task_of(MODEL)
    server = algorithm.init(task)
    exact = np.asarray(server[ITEM_FACTORS], dtype=np.float64)
    for round_index in range(1, 5):
        broadcast = algorithm.broadcast(server, task, round_index).arrays
        rows = np.random.default_rng(round_index).normal(size=exact.shape).astype(np.float32)
        total = TensorSum({ITEM_FACTORS: rows * 3}, np.full((len(rows), 1), 3.0)).arrays()
        server = algorithm.step(server, broadcast, total, task, 1)
        exact += TensorSum.of(total).mean(ITEM_FACTORS)
        owed = server["downlink/memory/memory/matrix"]
        assert np.abs(owed).max() > 0.1, "rank 1 leaves out most of a random matrix"
        np.testing.assert_allclose(np.asarray(server[ITEM_FACTORS]) + owed, exact, atol=1e-5)


def test_a_network_moves_by_the_decoded_change() -> None:
    algorithm, plain, task = CoLR(rank=2, downlink_codec=COARSE), CoLR(rank=2), task_of(MLP(hidden=(16,)))
    coded, exact = run(PLAN, algorithm, task), run(PLAN, plain, task)
    assert coded[-1].record.downlink_bits < exact[-1].record.downlink_bits
    assert coded[-1].state is not None
    server = coded[-1].state.server
    names = set(algorithm.final(server))
    assert names == set(task.model.init_server(task.data, task.seed))
    update = algorithm.broadcast(server, task, PLAN.rounds + 1).update
    assert update is not None
    key = int(algorithm.broadcast(coded[-2].state.server, task, PLAN.rounds).arrays["downlink_key"][0])  # type: ignore[union-attr]
    shapes = {name: server[f"update/{name}"].shape for name in names}
    decoded = Codec(COARSE).decode(CodedTensors.from_bytes(update.to_bytes()).coded, shapes, key)
    assert all(np.array_equal(decoded[name], server[f"update/{name}"]) for name in names)


@pytest.mark.parametrize("algorithm", [CoLR, SCoLR])
def test_a_memory_does_not_fit_a_basis_that_changes(algorithm: type[CoLR] | type[SCoLR]) -> None:
    with pytest.raises(UserError, match=r"downlink_codec has error_feedback, which keeps state .* with fedmf$"):
        algorithm(downlink_codec=WARM).check(task_of(MODEL))


def test_a_change_that_is_not_finite_keeps_the_memory() -> None:
    algorithm, task = FedMF(downlink_codec=FEEDBACK), task_of(MODEL)
    server = algorithm.init(task)
    total = TensorSum({ITEM_FACTORS: np.full((130, 8), np.nan, np.float32)}, np.ones((130, 1))).arrays()
    after = algorithm.step(server, algorithm.broadcast(server, task, 1).arrays, total, task, 1)
    assert np.isnan(after[ITEM_FACTORS]).all()
    assert set(after) == set(server)
