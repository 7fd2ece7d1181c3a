"""Whole matrices through a codec, both ways, against the same in plain numpy: the baselines of CoLR's Fig. 4."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from pydantic import TypeAdapter

from narrowcast.algorithms.client.sums import ROWS
from narrowcast.algorithms.codecs.budget import ClientEncoder
from narrowcast.algorithms.codecs.chain import Codec, Stages
from narrowcast.algorithms.codecs.messages import decode_matrix, encode_matrix
from narrowcast.algorithms.codecs.wire import HEADER_BITS
from narrowcast.algorithms.federated.fedmf import FedMF
from narrowcast.algorithms.local_training.factorisation import RowCohort
from narrowcast.platform.errors import UserError
from narrowcast.platform.models.model import ITEM_FACTORS
from narrowcast.platform.types import Chunk, PayloadError
from per_client import make_task, synthetic

Matrix = NDArray[np.float32]
CODECS: dict[str, dict[str, Any]] = {
    "svd": {"kind": "svd", "rank": 2, "parts": "usv"},
    "top_k": {"kind": "top_k", "fraction": 0.125, "indices": "int32"},
}


def codec_of(kind: str) -> Codec:
    return Codec(TypeAdapter(Stages).validate_python(CODECS[kind]))


def compressed(kind: str, matrix: Matrix) -> Matrix:
    """What the released code keeps of a whole matrix."""
    if kind == "svd":
        left, values, right = np.linalg.svd(matrix.astype(np.float64), full_matrices=False)
        return ((left[:, :2] * values[:2]) @ right[:2]).astype(np.float32)
    kept = np.argsort(-abs(matrix).ravel(), kind="stable")[: int(np.ceil(0.125 * matrix.size))]
    flat = np.zeros(matrix.size, dtype=np.float32)
    flat[kept] = matrix.ravel()[kept]
    return flat.reshape(matrix.shape)


@pytest.mark.parametrize("kind", CODECS)
def test_a_round_is_that_of_the_released_code(kind: str) -> None:
    """Each client's whole change is compressed, rows are divided by who touched them, and the mean once more."""
    task = make_task(synthetic([3, 20, 1, 11]))
    algorithm = FedMF(rows="all", codec=codec_of(kind).stages, downlink_codec=codec_of(kind).stages)
    algorithm.check(task)
    server, users = algorithm.init(task), algorithm.init_clients(task)
    broadcast = algorithm.broadcast(server, task, 1)
    chunk = Chunk(1, 0, np.arange(4), users)
    result = algorithm.train(broadcast.arrays, chunk, task)
    after = algorithm.step(server, broadcast.arrays, result.partial, task, 1)

    before = np.asarray(server[ITEM_FACTORS])
    cohort = RowCohort.draw(chunk, task)
    samples, trained = cohort.samples, cohort.train_rows(before, np.ones(4, dtype=np.float32), keep_changes=True)
    assert trained.row_changes is not None
    total, touched = np.zeros_like(before), np.zeros(len(before))
    for first, last in zip(samples.row_starts, samples.row_starts[1:], strict=False):
        change, rows = np.zeros_like(before), samples.row_items[first:last]
        change[rows] = trained.row_changes[first:last]
        total += compressed(kind, change)
        touched[rows] += 1
    mean = (total / np.maximum(touched, 1)[:, None]).astype(np.float32)
    assert after[ITEM_FACTORS] - before == pytest.approx(compressed(kind, mean), abs=2e-6)

    second = algorithm.broadcast(after, task, 2)
    assert second.update is not None
    values = before.size
    bits = {"svd": 32 * 2 * (len(before) + before.shape[1] + 1), "top_k": 64 * int(np.ceil(0.125 * values))}[kind]
    assert second.update.wire_bits() == HEADER_BITS + bits
    assert result.ledger.uplink_bits.tolist() == [HEADER_BITS + bits + 8 * -(-len(before) // 8)] * 4


@pytest.mark.parametrize("kind", CODECS)
def test_there_and_back(kind: str) -> None:
    random, codec = np.random.default_rng(0), codec_of(kind)
    rows = np.sort(random.permutation(37)[:12])
    values = random.standard_normal((12, 6)).astype(np.float32)
    payload = encode_matrix(ClientEncoder(codec, key=5), rows, values, 37)
    assert payload is not None
    back, received = decode_matrix(codec, payload.to_bytes(), 37, 6, 5)
    whole = np.zeros((37, 6), dtype=np.float32)
    whole[rows] = values
    assert np.array_equal(back, rows)
    assert received == pytest.approx(compressed(kind, whole)[rows], abs=1e-5)
    for bad in (payload.to_bytes()[:-1], payload.to_bytes() + b"\0", b"", b"\xff" * len(payload.to_bytes())):
        with pytest.raises(PayloadError):
            decode_matrix(codec, bad, 37, 6, 5)


def test_a_budget_is_kept() -> None:
    codec = codec_of("svd")
    rows, values = np.arange(3), np.ones((3, 6), np.float32)
    assert encode_matrix(ClientEncoder(codec, 0, budget_bits=100), rows, values, 37) is None
    quantised = Codec(TypeAdapter(Stages).validate_python([{"kind": "quantise", "levels": 7}]))
    payload = encode_matrix(ClientEncoder(quantised, 0, budget_bits=800), rows, values, 37)
    assert payload is not None
    assert payload.wire_bits() <= 800


def test_whole_matrices_have_no_memory() -> None:
    with pytest.raises(UserError, match="codec has error_feedback"):
        FedMF.model_validate({"rows": "all", "codec": ["error_feedback"]}).check(make_task(synthetic([3, 20])))


def test_a_diverged_mean_is_left_for_the_round_to_refuse() -> None:
    task = make_task(synthetic([3, 20]))
    algorithm = FedMF(downlink_codec=codec_of("svd").stages)
    server = algorithm.init(task)
    broadcast = algorithm.broadcast(server, task, 1).arrays
    shape = np.asarray(server[ITEM_FACTORS]).shape
    total = {ROWS: np.full(shape, np.nan, dtype=np.float32), "weight": np.ones((shape[0], 1))}
    assert np.isnan(algorithm.step(server, broadcast, total, task, 1)[ITEM_FACTORS]).all()
