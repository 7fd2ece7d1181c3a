"""A payload carries all it needs: what one process sends, another decodes that has the public seed and no other.

Every algorithm trains and sends, and its own decoding is compared with that of the second process, bit for bit.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import receiver
from chains import CHAINS, matrix
from narrowcast.algorithms.client import uploads
from narrowcast.algorithms.codecs import messages as coded_rows
from narrowcast.algorithms.codecs import messages as coded_tensors
from narrowcast.algorithms.codecs import messages as whole_matrix
from narrowcast.algorithms.codecs.atomo import Atomo
from narrowcast.algorithms.codecs.budget import ClientEncoder
from narrowcast.algorithms.codecs.chain import Codec
from narrowcast.algorithms.codecs.messages import DensePayload, RowsPayload, TensorUpdate, encode_tensors
from narrowcast.algorithms.federated import adaptive_atomo, adaptive_svd
from narrowcast.algorithms.federated.adaptive_atomo import AdaptiveAtomo
from narrowcast.algorithms.federated.adaptive_svd import AdaptiveSVD
from narrowcast.algorithms.federated.fedavg import FedAvg
from narrowcast.algorithms.federated.fedmf import FedMF
from narrowcast.algorithms.federated.fedpara import FedPara
from narrowcast.algorithms.federated.fedprox import FedProx
from narrowcast.algorithms.federated.low_rank import CoLR, SCoLR
from narrowcast.algorithms.federated.rank_policy import UniformRank
from narrowcast.algorithms.federated.scaffold import Scaffold
from narrowcast.platform.contracts import Task
from narrowcast.platform.rounds.state import Population
from narrowcast.platform.seeds import PrivateSeed, stream_keys
from narrowcast.platform.types import Chunk
from sampling import sampled
from small_tasks import network_task, rows_task

ROUND, SEED = 3, 7
CODED: Any = [{"kind": "quantise", "levels": 9, "norms": "column", "rounding": "dithered"}, "entropy"]
ROTATED: Any = ["rotate", {"kind": "quantise", "levels": 9}]
SPARSE: Any = ["error_feedback", {"kind": "top_k", "fraction": 0.3}]
ROWS: dict[str, tuple[type, dict[str, Any]]] = {
    "fedmf": (FedMF, {"codec": CODED}),
    "fedmf, rotated": (FedMF, {"codec": ROTATED}),
    "fedmf, remembered": (FedMF, {"codec": SPARSE}),
    "fedmf, whole matrix": (FedMF, {"codec": CODED, "rows": "all"}),
    "colr": (CoLR, {"codec": CODED, "rank": 4}),
    "scolr": (SCoLR, {"codec": CODED, "rank": 4, "rank_policy": UniformRank()}),
    "adaptive_svd": (AdaptiveSVD, {"codec": CODED, "rank": 3}),
}
TENSORS: dict[str, tuple[type, dict[str, Any]]] = {
    "fedavg": (FedAvg, {"codec": CODED}),
    "fedavg, remembered": (FedAvg, {"codec": SPARSE}),
    "fedprox": (FedProx, {"codec": ROTATED}),
    "fedpara": (FedPara, {"codec": CODED}),
    "scaffold": (Scaffold, {"codec": CODED, "control_upload": "sent"}),
    "colr": (CoLR, {"codec": CODED, "rank": 2}),
    "scolr": (SCoLR, {"codec": CODED, "rank": 3, "rank_policy": UniformRank()}),
    "adaptive_atomo": (AdaptiveAtomo, {"codec": CODED, "rank": 4}),
}


@dataclass
class Message:
    """What a client sent and what the sender's own process made of it; `key` tells the client."""

    kind: str
    data: bytes
    key: int
    received: receiver.Arrays
    public: dict[str, Any] = field(default_factory=dict)


@pytest.fixture
def messages(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Message]]:
    """All messages that this process decodes while it trains."""
    found: list[Message] = []
    last: list[bytes] = []
    decode, split = Codec.decode, coded_tensors.CodedTensors.from_bytes.__func__  # type: ignore[attr-defined]

    def of_rows(codec: Codec, data: bytes, n_rows: int, columns: int, key: int, **known: Any) -> Any:
        monkeypatch.setattr(Codec, "decode", decode)
        rows, values = coded_rows.decode_rows(codec, data, n_rows, columns, key, **known)
        monkeypatch.setattr(Codec, "decode", of_tensors)
        found.append(Message("rows", data, key, {"rows": rows, "values": values}))
        return rows, values

    def of_matrix(codec: Codec, data: bytes, n_rows: int, columns: int, key: int) -> Any:
        monkeypatch.setattr(Codec, "decode", decode)
        rows, values = whole_matrix.decode_matrix(codec, data, n_rows, columns, key)
        monkeypatch.setattr(Codec, "decode", of_tensors)
        found.append(Message("matrix", data, key, {"rows": rows, "values": values}))
        return rows, values

    def of_bytes(cls: type, data: bytes) -> Any:
        last[:] = [data]
        return split(cls, data)

    def of_tensors(codec: Codec, data: bytes, shapes: Any, key: int) -> Any:
        tensors = decode(codec, data, shapes, key)
        rank = split(coded_tensors.CodedTensors, last[0]).rank
        found.append(Message("tensors", last[0], key, dict(tensors), {"shapes": {str(rank): shapes}}))
        return tensors

    for module in (uploads, adaptive_svd):
        monkeypatch.setattr(module, "decode_rows", of_rows)
    monkeypatch.setattr(uploads, "decode_matrix", of_matrix)
    monkeypatch.setattr(coded_tensors.CodedTensors, "from_bytes", classmethod(of_bytes))
    monkeypatch.setattr(Codec, "decode", of_tensors)
    assert uploads.CodedTensors is adaptive_atomo.CodedTensors is coded_tensors.CodedTensors
    yield found


def send(algorithm: Any, task: Task, budget: int | None = None) -> Any:
    """Train all clients of a task and send what they learn; the ledger of it."""
    everyone = np.arange(task.data.n_clients)
    state = Population.fresh(algorithm.init_clients(task), len(everyone)).take(everyone)
    broadcast = algorithm.broadcast(algorithm.init(task), task, ROUND).arrays
    budgets = None if budget is None else np.full(len(everyone), budget)
    return algorithm.train(broadcast, Chunk(ROUND, 0, everyone, state, budgets), task).ledger


def decoded_elsewhere(folder: Path, cases: list[dict[str, Any]], data: list[bytes]) -> list[receiver.Arrays]:
    """What a second process makes of the messages."""
    for number, each in enumerate(data):
        (folder / f"{number}.bin").write_bytes(each)
    (folder / "cases.json").write_text(json.dumps(cases))
    subprocess.run([sys.executable, receiver.__file__, folder], check=True, timeout=120)
    return [dict(np.load(folder / f"{number}.npz")) for number in range(len(data))]


def stages_of(stages: Any) -> list[dict[str, Any]]:
    return [stage.model_dump(mode="json") for stage in stages]


@pytest.mark.slow
def test_every_algorithm(messages: list[Message], tmp_path: Path) -> None:
    cases: list[dict[str, Any]] = []
    sent: list[Message] = []

    def collect(algorithm: Any, task: Task, public: dict[str, Any], budget: int | None = None) -> None:
        messages.clear()
        ledger = send(algorithm, replace(task, private_seed=PrivateSeed(99)), budget)
        bits = {int(client): int(bits) for client, bits in zip(ledger.client, ledger.uplink_bits, strict=True) if bits}
        clients = {int(key): place for place, key in enumerate(stream_keys(SEED, "codec", ROUND, ledger.client))}
        assert {clients[each.key]: 8 * len(each.data) for each in messages} == bits and len(bits) > 5
        shapes = {rank: its for each in messages for rank, its in each.public.get("shapes", {}).items()}
        sent.extend(messages)
        who = [{"kind": each.kind, "client": clients[each.key], "shapes": shapes} for each in messages]
        cases.extend({**each, **public, "seed": SEED, "round": ROUND} for each in who)

    for shared in (False, True):
        task = rows_task(seed=SEED)
        task = replace(task, training=task.training.model_copy(update={"shared_negatives": shared}))
        for name, (kind, fields) in ROWS.items():
            algorithm = kind.model_validate(fields)
            negatives = task.training.negatives if shared else 0
            dimension = 8 if name == "adaptive_svd" else None
            sizes = {"n_rows": task.data.n_items, "columns": 8, "negatives": negatives, "dimension": dimension}
            for budget in (None, 2500) if name != "fedmf, remembered" else (None,):
                collect(algorithm, task, {**sizes, "codec": stages_of(algorithm.codec)}, budget)
    for kind, fields in TENSORS.values():
        algorithm = kind.model_validate(fields)
        drawn = (Atomo(rank=4),) if kind is AdaptiveAtomo else ()
        collect(algorithm, network_task(seed=SEED), {"codec": stages_of((*drawn, *algorithm.codec))})
    exact = network_task(seed=SEED)
    exact = replace(exact, model=exact.model.model_copy(update={"dtype": "float64"}))
    for codec in (SPARSE, ROTATED):
        collect(double := FedAvg(codec=codec), exact, {"codec": stages_of(double.codec)})
    assert sent[-1].received["1.weight"].dtype == np.float64

    elsewhere = decoded_elsewhere(tmp_path, cases, [each.data for each in sent])
    assert {each.kind for each in sent} == {"rows", "matrix", "tensors"}
    for mine, theirs in zip(sent, elsewhere, strict=True):
        assert mine.received.keys() == theirs.keys()
        assert all(np.array_equal(mine.received[name], theirs[name]) for name in theirs)
    case, message = next(each for each in zip(cases, sent, strict=True) if each[1].kind == "tensors")
    with_another_seed = receiver.received({**case, "seed": SEED + 1}, message.data)
    assert not np.array_equal(with_another_seed["1.weight"], message.received["1.weight"]), "the dither is of the seed"


@pytest.mark.slow
@pytest.mark.parametrize("dtype", sampled([np.float32, np.float64], [np.float32]))
def test_every_codec_and_none(tmp_path: Path, dtype: type[np.floating[Any]]) -> None:
    tensors: dict[str, Any] = {"bias": np.linspace(-1, 1, 5, dtype=dtype), "weight": matrix(12, 6).astype(dtype) / 3}
    shapes = {"0": {name: values.shape for name, values in tensors.items()}}
    public = {"seed": SEED, "round": ROUND, "client": 4, "shapes": shapes, "codec": []}
    key = int(stream_keys(SEED, "codec", ROUND, np.array([4]))[0])
    cases, data, wanted = [], [], []
    for chain in (each.of(np.dtype(dtype)) for each in CHAINS.values()):
        fitting = encode_tensors(
            ClientEncoder(chain, key, state=chain.init_state(shapes["0"])), TensorUpdate(tensors, 9)
        )
        assert fitting is not None
        cases.append({**public, "kind": "tensors", "codec": stages_of(chain.stages)})
        data.append(fitting[0].to_bytes())
        wanted.append(dict(chain.decode(fitting[0].coded, shapes["0"], key)))
    cases += [{**public, "kind": "whole tensors"}]
    data += [DensePayload.of(tensors, 9).to_bytes()]
    wanted += [tensors]
    if dtype is np.float32:
        rows = np.array([1, 4, 9])
        cases += [{**public, "kind": "whole rows"}]
        data += [RowsPayload(12, rows, tensors["weight"][rows], "touched", mask=True, examples=9).to_bytes()]
        wanted += [{"rows": rows, "values": tensors["weight"][rows]}]
    for mine, theirs in zip(wanted, decoded_elsewhere(tmp_path, cases, data), strict=True):
        assert mine.keys() == theirs.keys() and all(np.array_equal(mine[name], theirs[name]) for name in mine)
        assert all(theirs[name].dtype == mine[name].dtype for name in mine)
