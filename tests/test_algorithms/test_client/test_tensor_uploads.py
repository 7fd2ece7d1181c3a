"""Whole tensors through codecs: what is weighed is what arrives, and nothing is lost that a client still owes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import per_client
from digits import digits, make_task, train
from narrowcast.algorithms.client import uploads
from narrowcast.algorithms.client.uploads import (
    Message,
    Uploads,
    finite_clients,
    init_codec_state,
    send_messages,
)
from narrowcast.algorithms.codecs.budget import ClientEncoder
from narrowcast.algorithms.codecs.chain import Codec
from narrowcast.algorithms.codecs.messages import CodedTensors, DensePayload, TensorUpdate, encode_tensors
from narrowcast.algorithms.codecs.quantise import Quantise
from narrowcast.algorithms.codecs.wire import HEADER_BYTES
from narrowcast.algorithms.federated.fedavg import FedAvg
from narrowcast.algorithms.federated.low_rank import CoLR, SCoLR
from narrowcast.algorithms.federated.rank_policy import BandwidthRank
from narrowcast.algorithms.federated.scaffold import Scaffold
from narrowcast.platform.contracts import Algorithm, Task
from narrowcast.platform.errors import UserError
from narrowcast.platform.models.model import USER_FACTORS
from narrowcast.platform.models.networks import CNN
from narrowcast.platform.rounds.ledger import ChunkResult
from narrowcast.platform.rounds.loop import LocalExecutor, rounds
from narrowcast.platform.rounds.plan import Plan
from narrowcast.platform.rounds.state import Run
from narrowcast.platform.types import Arrays, Chunk, LocalUpdates, PayloadError

COUNTS = [21, 8, 40, 3, 17, 8, 0, 30]
CODEC: list[Any] = [{"kind": "quantise", "levels": 3, "scale": "max"}, "entropy"]
FEEDBACK: list[Any] = ["error_feedback", {"kind": "top_k", "fraction": 0.02}]


def with_codec(kind: Any, codec: list[Any], **fields: Any) -> Any:
    return kind.model_validate({"codec": codec, **fields})


def sent(chunk: Chunk, task: Task, changes: Arrays, codec: Codec) -> tuple[Arrays, Uploads]:
    """Send the changes of clients that have learnt nothing for themselves."""
    ones = np.ones(len(chunk.clients), dtype=np.int64)
    finite = finite_clients(LocalUpdates(changes, {}, np.zeros(len(ones)), ones, ones), changes)
    tensors, _, uploads = send_messages(chunk, task, Message(changes), codec.stages, finite)
    return tensors, uploads


@pytest.mark.parametrize("algorithm", [FedAvg, CoLR, SCoLR], ids=lambda each: each.__name__)
def test_the_ledger_has_the_bytes_of_the_payloads(algorithm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[tuple[dict[str, tuple[int, ...]], bytes]] = []

    def recorded(encoder: ClientEncoder, update: TensorUpdate) -> Any:
        fitting = encode_tensors(encoder, update)
        assert fitting is not None
        sent.append(({name: each.shape for name, each in update.tensors.items()}, fitting[0].to_bytes()))
        return fitting

    monkeypatch.setattr(uploads, "encode_tensors", recorded)
    (result,) = train(
        with_codec(algorithm, CODEC), make_task(digits(COUNTS, images=True), CNN(channels=(4, 8), hidden=16))
    )
    order = [place for place, count in enumerate(COUNTS) if count]
    assert result.ledger.uplink_bits[order].tolist() == [8 * len(data) for _, data in sent]
    assert result.ledger.uplink_bits[COUNTS.index(0)] == 0
    for client, (shapes, data) in zip(order, sent, strict=True):
        arrived = CodedTensors.from_bytes(data)
        assert arrived.examples == COUNTS[client]
        if algorithm is not FedAvg:  # the codec sees a client's own columns of A, and the vectors
            rank = arrived.rank
            assert rank == result.ledger.rank[client]
            wanted = {"0.weight": (25, min(rank, 4)), "7.weight": (32, min(rank, 16)), "7.bias": (16,)}
            assert {name: shapes[name] for name in wanted} == wanted


def test_float32_weighs_what_it_packs() -> None:
    task = make_task(digits(COUNTS))
    (result,) = train(FedAvg(), task)
    bits = DensePayload.of(task.model.init_server(task.data, 0)).wire_bits()
    assert result.ledger.uplink_bits.tolist() == [bits if count else 0 for count in COUNTS]


@pytest.mark.parametrize("counts", [(0, 0), (127, 3), (2**32 - 1, 2**16 - 1)])
def test_counts_and_values_come_back_from_the_bytes_alone(counts: tuple[int, int]) -> None:
    tensors = {"b": np.arange(12, dtype=np.float32).reshape(3, 4), "a": np.float32([np.pi])}
    fitting = encode_tensors(ClientEncoder(Codec(), key=1), TensorUpdate(tensors, *counts))
    assert fitting is not None
    data = fitting[0].to_bytes()
    assert fitting[0].wire_bits() == 8 * len(data)
    again = CodedTensors.from_bytes(data)
    assert (again.examples, again.rank) == counts
    decoded = Codec().decode(again.coded, {name: each.shape for name, each in tensors.items()}, 1)
    assert all(np.array_equal(decoded[name], tensors[name]) for name in tensors)
    with pytest.raises(PayloadError):
        CodedTensors.from_bytes(data[: HEADER_BYTES - 1])


def test_a_parameter_may_be_a_single_number() -> None:
    task = make_task(digits([3, 4]))
    changes = {"temperature": np.float32([0.5, -0.25]), "weight": np.ones((2, 3), dtype=np.float32)}
    received, _ = sent(Chunk(1, 0, np.arange(2), {}), task, changes, Codec((Quantise(levels=2**14),)))
    assert np.allclose(received["temperature"], [0.5, -0.25], atol=1e-4)


@pytest.mark.parametrize(("codec", "pays"), [([], True), (CODEC, False), (FEEDBACK, False)], ids=str)
def test_an_update_that_is_not_finite_or_too_large_is_not_delivered(codec: list[Any], pays: bool) -> None:
    task = make_task(digits([3, 4, 5]))
    changes = {"w": np.ones((3, 4), dtype=np.float32)}
    changes["w"][0, 1], changes["w"][1, 2] = np.nan, 2.0**100
    chain = Codec(with_codec(FedAvg, codec).codec)
    state = init_codec_state(chain.stages, 3, {"w": changes["w"][0]})
    _, uploads = sent(Chunk(1, 0, np.arange(3), state), task, changes, chain)
    assert (uploads.bits > 0).tolist() == [pays, pays, True]
    assert uploads.delivered.tolist() == [False, not codec, True]
    for name, values in uploads.state.items():
        assert not values[:2].any(), name


def test_more_bits_bring_the_update_closer() -> None:
    task = make_task(digits([30] * 3))
    changes = {"w": np.random.default_rng(0).normal(size=(3, 400)).astype(np.float32)}
    chunk = Chunk(1, 0, np.arange(3), {}, budget_bits=np.array([1200, 2400, 10**6]))
    chain = with_codec(FedAvg, CODEC).codec
    received, uploads = sent(chunk, task, changes, Codec(chain))
    errors = np.square(received["w"] - changes["w"]).sum(axis=1)
    assert errors[0] > 4 * errors[1] > 16 * errors[2]
    assert (uploads.bits > 0.8 * np.array([1200, 2400, 0])).all()


def test_a_client_without_bits_leaves_those_of_the_others() -> None:
    task = make_task(digits([30] * 3))
    changes = {"w": np.ones((3, 40), dtype=np.float32)}
    chunk = Chunk(1, 0, np.arange(3), {}, budget_bits=np.array([8, 10**6, 10**6]))
    _, uploads = sent(chunk, task, changes, Codec(with_codec(FedAvg, CODEC).codec))
    assert (uploads.bits > 0).tolist() == uploads.delivered.tolist() == [False, True, True]


def test_levels_of_each_client_are_those_that_its_codec_tries_first() -> None:
    """Nothing limits the bits, so that the first are the last: an error is at most a step, of the largest value."""
    task = make_task(digits([30] * 2))
    changes = {"w": np.random.default_rng(0).normal(size=(2, 400)).astype(np.float32)}
    steps = np.array([1, 1000])
    chain = with_codec(FedAvg, [{"kind": "quantise", "levels": 3, "scale": "max"}]).codec
    message = Message(changes, levels=steps)
    received, _, _ = send_messages(Chunk(1, 0, np.arange(2), {}), task, message, chain, np.ones(2, dtype=bool))
    errors = np.abs(received["w"] - changes["w"]).max(axis=1) / np.abs(changes["w"]).max(axis=1)
    assert (errors <= 1.01 / steps).all()
    assert errors[0] > 0.3


def test_what_a_server_decodes_of_a_client_does_not_depend_on_its_chunk() -> None:
    task = make_task(digits([30] * 6))
    changes = {"w": np.random.default_rng(0).normal(size=(2, 40)).astype(np.float32)}
    chain = Codec(with_codec(FedAvg, CODEC).codec)
    together, _ = sent(Chunk(2, 0, np.array([3, 5]), {}), task, changes, chain)
    alone, _ = sent(Chunk(2, 1, np.array([5]), {}), task, {"w": changes["w"][1:]}, chain)
    assert np.array_equal(together["w"][1], alone["w"][0])


def test_a_codec_remembers_an_upload_that_is_lost_as_sent() -> None:
    task = make_task(digits([30] * 2))
    changes = {"w": np.repeat(np.arange(1.0, 51.0, dtype=np.float32)[None], 2, axis=0)}
    chain = Codec(with_codec(FedAvg, FEEDBACK).codec)
    chunk = Chunk(1, 0, np.arange(2), init_codec_state(chain.stages, 2, {"w": changes["w"][0]}))
    _, uploads = sent(replace(chunk, lost=np.array([True, False])), task, changes, chain)
    left = np.where(np.arange(50) == 49, 0, changes["w"][0])  # the largest of 50 was sent
    assert np.allclose(uploads.state["codec/memory/w"], left, atol=0.2)
    assert uploads.delivered.tolist() == [False, True]


def play(algorithm: Algorithm, task: Task, n_rounds: int, lost: bool) -> list[ChunkResult]:
    """Every chunk's result of some rounds in which every third upload is lost."""
    seen: list[ChunkResult] = []

    class Losing(LocalExecutor):
        def train(self, broadcast: Arrays, chunks: Any) -> list[ChunkResult]:
            gone = [(chunk.clients + chunk.round_index) % 3 == 0 for chunk in chunks]
            limited = [replace(each, lost=which if lost else None) for each, which in zip(chunks, gone, strict=True)]
            seen.extend(super().train(broadcast, limited))
            return seen[-len(chunks) :]

    plan = Plan(rounds=n_rounds, clients_per_round=4, chunk_size=2)
    run = Run(plan, algorithm, task)
    server = list(rounds(run, Losing(run)))[-1].state
    assert server is not None
    seen.append(ChunkResult(-1, server.server, server.clients, seen[-1].ledger))
    return seen


@pytest.mark.parametrize("codec", [[], CODEC, FEEDBACK], ids=["float32", "quantised", "feedback"])
def test_scaffolds_control_variate_stays_the_mean_of_the_clients(codec: list[Any]) -> None:
    end = play(with_codec(Scaffold, codec), make_task(digits(COUNTS)), 6, lost=True)[-1]
    moved = 0.0
    for name, values in end.partial.items():
        if name.startswith("control/"):
            assert np.allclose(values, end.state[name].sum(axis=0) / len(COUNTS), atol=2e-6)
            moved = max(moved, float(np.abs(values).max()))
    assert moved > 1e-3


def test_error_feedback_owes_what_has_not_arrived() -> None:
    """Over rounds in which the training does not change, what was received and what is owed add up to all of it."""
    task = make_task(digits([30] * 2))
    changes = {"w": np.random.default_rng(0).normal(size=(2, 50)).astype(np.float32)}
    chain = Codec(with_codec(FedAvg, FEEDBACK).codec)
    state: Arrays = {"codec/memory/w": np.zeros((2, 50), dtype=np.float32)}
    received = np.zeros((2, 50))
    for round_index in range(1, 31):
        chunk = Chunk(round_index, 0, np.arange(2), state)
        arrived, uploads = sent(chunk, task, changes, chain)
        received, state = received + arrived["w"], uploads.state
    assert np.allclose(received + state["codec/memory/w"], 30 * changes["w"], rtol=1e-4, atol=1e-4)
    assert np.count_nonzero(received) > 2 * 15


def test_a_client_whose_upload_is_lost_keeps_what_it_learnt_for_itself() -> None:
    task = per_client.make_task(per_client.synthetic([3, 20, 1, 11, 8, 30]))
    algorithm = with_codec(FedAvg, CODEC)
    start_of_clients, who = algorithm.init_clients(task), np.arange(6)
    chunk = Chunk(1, 0, who, start_of_clients)
    broadcast = algorithm.broadcast(algorithm.init(task), task, 1).arrays
    free = algorithm.train(broadcast, chunk, task)
    gone = algorithm.train(broadcast, replace(chunk, lost=np.ones(6, dtype=bool)), task)
    broke = algorithm.train(broadcast, replace(chunk, budget_bits=np.zeros(6, dtype=np.int64)), task)
    for result in (gone, broke):
        assert not result.ledger.delivered.any()
        assert np.array_equal(result.state[USER_FACTORS], free.state[USER_FACTORS])
    assert (free.state[USER_FACTORS] != start_of_clients[USER_FACTORS]).any()


def test_a_low_rank_client_that_has_no_rank_sends_nothing() -> None:
    task = make_task(digits(COUNTS))
    (result,) = train(with_codec(SCoLR, CODEC, rank_policy=BandwidthRank(upload_seconds=1e-9)), task)
    assert not result.ledger.uplink_bits.any()
    assert not result.ledger.delivered.any()
    assert not result.ledger.rank.any()


@pytest.mark.parametrize("algorithm", [CoLR, SCoLR])
@pytest.mark.parametrize("codec", [FEEDBACK, ["power_sgd"]], ids=["error_feedback", "power_sgd"])
def test_low_rank_networks_refuse_codecs_that_remember(algorithm: Any, codec: list[Any]) -> None:
    with pytest.raises(UserError, match="changes in every round"):
        with_codec(algorithm, codec).check(make_task(digits(COUNTS)))
