"""The payload of rows: its weight, its way there and back, hostile bytes, and what a server can do with it."""

import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from narrowcast.algorithms.client.sums import ROWS
from narrowcast.algorithms.codecs.messages import RowsPayload
from narrowcast.algorithms.codecs.wire import HEADER_BYTES, MessageHeader, MessageKind, varint
from narrowcast.algorithms.federated.fedmf import FedMF
from narrowcast.algorithms.federated.low_rank import CoLR, SCoLR, draw_components
from narrowcast.algorithms.federated.rank_policy import BandwidthRank
from narrowcast.algorithms.local_training.factorisation import RowCohort
from narrowcast.algorithms.local_training.factorisation_kernels import FusedResult
from narrowcast.platform.contracts import Algorithm
from narrowcast.platform.models.model import ITEM_FACTORS
from narrowcast.platform.rounds.ledger import ChunkResult
from narrowcast.platform.types import Arrays, Chunk, PayloadError
from per_client import Array, make_task, synthetic

always_the_same = settings(derandomize=True, max_examples=200, deadline=None, database=None)


@st.composite
def payloads(draw: st.DrawFn) -> RowsPayload:
    n_rows, rank = draw(st.integers(0, 40)), draw(st.integers(0, 9))
    touched = np.array(draw(st.lists(st.booleans(), min_size=n_rows, max_size=n_rows)), dtype=bool)
    rows = np.flatnonzero(touched)
    numbers = st.floats(width=32, allow_nan=False)
    values = draw(st.lists(numbers, min_size=len(rows) * rank, max_size=len(rows) * rank))
    return RowsPayload(
        n_rows=n_rows,
        rows=rows,
        values=np.array(values, dtype=np.float32).reshape(len(rows), rank),
        layout=draw(st.sampled_from(["all", "touched"])),
        mask=draw(st.booleans()),
        examples=draw(st.integers(0, 2**32 - 1)),
        seed=draw(st.none() | st.integers(0, 2**64 - 1)),
    )


def dense(payload: RowsPayload) -> Array:
    matrix = np.zeros((payload.n_rows, payload.values.shape[1]), dtype=np.float32)
    matrix[payload.rows] = payload.values
    return matrix


@always_the_same
@given(payloads())
def test_weight_is_that_of_the_bytes(payload: RowsPayload) -> None:
    assert payload.wire_bits() == 8 * len(payload.to_bytes())


@always_the_same
@given(payloads())
def test_there_and_back(payload: RowsPayload) -> None:
    data = payload.to_bytes()
    back = RowsPayload.from_bytes(data)
    assert (back.n_rows, back.layout, back.examples, back.seed) == (
        payload.n_rows,
        payload.layout,
        payload.examples,
        payload.seed,
    )
    assert dense(back).tobytes() == dense(payload).tobytes()
    assert back.values.dtype == np.float32
    if payload.mask or payload.layout == "touched":
        assert back.mask
        assert np.array_equal(back.rows, payload.rows)
        assert back.values.tobytes() == payload.values.tobytes()
    assert back.to_bytes() == data
    assert back.wire_bits() == payload.wire_bits()


@always_the_same
@given(payloads(), st.data())
def test_truncated_or_extended_bytes_are_refused(payload: RowsPayload, data: st.DataObject) -> None:
    packed = payload.to_bytes()
    with pytest.raises(PayloadError):
        RowsPayload.from_bytes(packed[: data.draw(st.integers(0, len(packed) - 1))])
    with pytest.raises(PayloadError):
        RowsPayload.from_bytes(packed + data.draw(st.binary(min_size=1, max_size=50)))


def accept_or_refuse(data: bytes) -> None:
    """Anything but a `PayloadError` comes through; what is accepted can be packed again."""
    try:
        payload = RowsPayload.from_bytes(data)
    except PayloadError as error:
        assert "\n" not in str(error)
    else:
        assert len(payload.to_bytes()) == len(data) == payload.wire_bits() / 8


@always_the_same
@given(payloads(), st.lists(st.integers(0, 8 * HEADER_BYTES - 1), min_size=1, max_size=3, unique=True))
def test_flipped_bits_in_the_header(payload: RowsPayload, places: list[int]) -> None:
    packed = bytearray(payload.to_bytes())
    for place in places:
        packed[place // 8] ^= 1 << place % 8
    accept_or_refuse(bytes(packed))


@always_the_same
@given(st.binary(max_size=60) | st.binary(max_size=60).map(lambda tail: bytes([MessageKind.ROWS]) + tail))
def test_arbitrary_bytes(data: bytes) -> None:
    accept_or_refuse(data)


@pytest.mark.parametrize("layout", ["all", "touched"])
def test_a_mask_with_rows_beyond_the_last_is_refused(layout: str) -> None:
    packed = bytearray(RowsPayload(3, np.array([1]), np.ones((1, 2), np.float32), layout, mask=True).to_bytes())
    place = HEADER_BYTES + 1  # after the number of rows
    assert packed[place] == 0b010
    packed[place] = 0b1000 if layout == "touched" else 0b1010  # as many values as before
    with pytest.raises(PayloadError, match="beyond the last row"):
        RowsPayload.from_bytes(bytes(packed))


@pytest.mark.parametrize("flags", [*range(4), *range(128, 132)])
@pytest.mark.parametrize("rank", [0, 1, 2**16 - 1])
@pytest.mark.parametrize("n_rows", [2**22, 2**32 - 1])
def test_a_header_that_claims_much_makes_nothing_big(n_rows: int, rank: int, flags: int) -> None:
    tracemalloc.start()
    try:
        accept_or_refuse(MessageHeader(MessageKind.ROWS, flags, rank, 1).to_bytes() + varint(n_rows) + bytes(20))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2**20


ALGORITHMS: dict[str, Algorithm] = {
    f"{algorithm.kind}-{algorithm.aggregation}-{algorithm.rows}": algorithm
    for aggregation in ("per_item_mean", "weighted")
    for rows in ("touched", "all")
    for algorithm in (
        FedMF(aggregation=aggregation, rows=rows),
        CoLR(rank=3, aggregation=aggregation, rows=rows),
        SCoLR(rank=5, aggregation=aggregation, rows=rows, rank_policy=BandwidthRank()),
    )
}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_server_gets_the_partial_sum_from_the_bytes_that_the_ledger_counts(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    result, packed = train_and_pack(ALGORITHMS[name], monkeypatch)
    ledger, n_items = result.ledger, 150
    assert sum(data is None for data in packed) == (2 if name.startswith("scolr") else 0)
    total, weight = np.zeros_like(result.partial[ROWS]), np.zeros((n_items, 1))
    for place, data in enumerate(packed):
        assert ledger.uplink_bits[place] == (0 if data is None else 8 * len(data))
        assert ledger.delivered[place] == (data is not None)
        if data is None:
            continue
        payload = RowsPayload.from_bytes(data)
        rank = payload.values.shape[1]
        assert rank == ledger.rank[place]
        # The server knows the rank from the payload and draws the same components again.
        columns = draw_components(np.array([rank]), total.shape[1], ledger.client[place : place + 1], 0, 4)[0]
        if "weighted" in name:
            total[np.ix_(payload.rows, columns)] += payload.values * np.float32(payload.examples)
            weight += payload.examples
        else:
            total[np.ix_(payload.rows, columns)] += payload.values
            weight[payload.rows] += 1
    assert np.allclose(total, result.partial[ROWS], rtol=1e-5, atol=1e-6)
    assert total.any()
    assert np.array_equal(weight, np.broadcast_to(result.partial["weight"], weight.shape))


def train_and_pack(
    algorithm: FedMF | CoLR | SCoLR, monkeypatch: pytest.MonkeyPatch
) -> tuple[ChunkResult, list[bytes | None]]:
    """Train a chunk; the bytes of each client that sends any, in the order of the chunk."""
    payloads: list[RowsPayload] = []
    train = type(algorithm).trained

    def recorded(
        self: FedMF | CoLR | SCoLR, broadcast: Arrays, cohort: RowCohort, columns: Array, weights: Array, *, keep: bool
    ) -> FusedResult:
        kept = train(self, broadcast, cohort, columns, weights, keep=True)
        assert kept.row_changes is not None
        for place, client in enumerate(cohort.chunk.clients):
            own = cohort.rows.span(place)
            values, rows = kept.row_changes[own][:, columns[place]], cohort.samples.row_items[own]
            examples, mask = int(cohort.task.data.examples[client]), self.aggregation == "per_item_mean"
            payloads.append(RowsPayload(cohort.task.data.n_items, rows, values, self.row_layout, mask, examples))
        return train(self, broadcast, cohort, columns, weights, keep=keep)

    monkeypatch.setattr(type(algorithm), "trained", recorded)
    data = synthetic([3, 20, 1, 11, 8, 30])
    # from "not even rank 1" to "all five": a component weighs 32 bits for each row that is sent
    task = make_task(data, uplink=np.array([0.0, 10.0, 5200.0, 5500.0, 1e9, 7000.0]))
    broadcast = algorithm.broadcast(algorithm.init(task), task, 4).arrays
    users = task.model.init_clients(data, 0)
    result = algorithm.train(broadcast, Chunk(4, 0, np.arange(6), users), task)
    packed = [payload.to_bytes() if rank else None for payload, rank in zip(payloads, result.ledger.rank, strict=True)]
    return result, packed


@pytest.mark.parametrize("algorithm", [FedMF(), CoLR(), SCoLR()], ids=lambda each: each.kind)
def test_the_server_sends_what_a_client_needs_to_follow(algorithm: FedMF | CoLR | SCoLR) -> None:
    """Applying the update broadcast to the previous round's model gives this round's model."""
    task = make_task(synthetic([3, 20, 1, 11]))
    server = algorithm.init(task)
    first = algorithm.broadcast(server, task, 1)
    assert first.update is None
    users = task.model.init_clients(task.data, 0)
    trained = algorithm.train(first.arrays, Chunk(1, 0, np.arange(4), users), task)
    second = algorithm.broadcast(algorithm.step(server, first.arrays, trained.partial, task, 1), task, 2)
    assert second.update is not None
    for payload in (first.full, second.full, second.update):
        assert payload.wire_bits() == 8 * len(payload.to_bytes())
    update, full = (RowsPayload.from_bytes(each.to_bytes()) for each in (second.update, second.full))
    held = np.array(server[ITEM_FACTORS])
    if algorithm.kind == "fedmf":
        held[update.rows] = update.values
    else:
        held[update.rows] += update.values @ np.asarray(first.arrays["basis"])
    assert np.allclose(held, full.values, rtol=0, atol=1e-6)
    assert np.array_equal(full.values, second.arrays[ITEM_FACTORS])
