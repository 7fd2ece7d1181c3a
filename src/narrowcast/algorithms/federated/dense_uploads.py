"""What clients send of the whole tensors they trained, in float32 or through a codec, within their budgets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from narrowcast.algorithms.codecs.atomo import Atomo
from narrowcast.algorithms.codecs.chain import Codec
from narrowcast.algorithms.codecs.coded_tensors import CodedTensors, encode_tensors
from narrowcast.algorithms.codecs.dense import dense_wire_bits
from narrowcast.algorithms.codecs.stage import UnsendableUpdateError
from narrowcast.algorithms.federated.codec_state import as_client_state, codec_state
from narrowcast.algorithms.federated.own_basis_network import encode_in_own_bases
from narrowcast.platform.contracts import Task
from narrowcast.platform.seeds import stream_keys
from narrowcast.platform.types import Arrays, BoolArray, Chunk, IntArray, LocalUpdates

Changes = Mapping[str, NDArray[np.float32]]


@dataclass(frozen=True)
class Columns:
    """The columns that each client sends of some tensors: `ranks` [C] says how many, `own` [C, r] for each which.

    Both sides draw `own` from the round's seed; a client of rank 0 sends nothing.
    """

    ranks: IntArray
    own: Mapping[str, BoolArray]


@dataclass(frozen=True)
class Uploads:
    """What the clients of a chunk send.

    Shapes: changes [C, ...] as the server decodes them; trained [C], whose training stayed finite; delivered [C], whose
    update counts; bits [C], none where nothing is sent; state, what a codec keeps on each client [C, ...]; ranks [C],
    where clients chose them after their training.
    """

    changes: Changes
    trained: BoolArray
    delivered: BoolArray
    bits: IntArray
    state: Arrays
    ranks: IntArray | None = None


def send_tensors(
    task: Task,
    chunk: Chunk,
    updates: LocalUpdates,
    changes: Changes,
    codec: Codec,
    columns: Columns | None = None,
    *,
    own_rank: int | None = None,
) -> Uploads:
    """Send each client's changes [C, ...]: whoever has data, and where there are columns a rank.

    With an `own_rank` each client sends its change in bases of its own, at that rank or less.
    A client whose budget does not allow its upload sends nothing and pays nothing; one whose upload is lost has paid.
    """
    trained = finite_clients(updates)
    sends = task.data.examples[chunk.clients] > 0
    if columns is not None:
        sends = sends & (columns.ranks > 0)
    if not codec.stages:
        return _plain(chunk, changes, trained, sends, columns)
    return _coded(task, chunk, changes, trained, sends, codec, columns, own_rank)


def finite_clients(updates: LocalUpdates) -> BoolArray:
    """The clients whose training stayed finite, [C]."""
    finite = np.isfinite(updates.loss)
    for values in (*updates.changes.values(), *updates.state.values()):
        finite &= np.isfinite(values).reshape(len(values), -1).all(axis=1)
    return finite


def _plain(chunk: Chunk, changes: Changes, trained: BoolArray, sends: BoolArray, columns: Columns | None) -> Uploads:
    """All values in float32; an update that is not finite is sent and paid for, and does not count."""
    n_values = np.zeros(len(sends), dtype=np.int64)
    for name, values in changes.items():
        if columns is not None and name in columns.own:
            n_values += values.shape[1] * columns.own[name].sum(axis=1)
        else:
            n_values += values[0].size
    bits = dense_wire_bits(0) + 32 * n_values
    sends = sends & chunk.affords(bits)
    return Uploads(changes, trained, sends & trained & chunk.arrives(), np.where(sends, bits, 0), {})


def _coded(
    task: Task,
    chunk: Chunk,
    changes: Changes,
    trained: BoolArray,
    sends: BoolArray,
    codec: Codec,
    columns: Columns | None,
    own_rank: int | None,
) -> Uploads:
    """Through a codec, at the finest levels that a client's budget allows; what is not finite is not sent."""
    n_clients = len(chunk.clients)
    received = {name: np.zeros(values.shape, dtype=np.float32) for name, values in changes.items()}
    bits, sent, ranks = np.zeros(n_clients, np.int64), np.zeros(n_clients, bool), np.zeros(n_clients, np.int64)
    keys = stream_keys(task.seed, "codec", chunk.round_index, chunk.clients)
    budgets = np.full(n_clients, np.inf) if chunk.budget_bits is None else chunk.budget_bits.astype(np.float64)
    state = {name: np.array(values) for name, values in codec_state(chunk.state).items()}
    for client in np.flatnonzero(sends & trained):
        parts = {name: _part(name, int(client), columns) for name in changes}
        tensors = {name: values[client][parts[name]] for name, values in changes.items()}
        counts = [int(task.data.examples[chunk.clients[client]])]
        if columns is not None:
            counts.append(int(columns.ranks[client]))
        before = {name: values[client] for name, values in state.items()}
        try:
            sending = _send(codec, tensors, counts, int(keys[client]), before, float(budgets[client]), own_rank)
        except UnsendableUpdateError:
            continue
        if sending is None:
            continue
        bits[client], sent[client], ranks[client] = sending.bits, True, sending.rank
        for name, values in sending.state.items():
            state[name][client] = values
        for name, values in sending.received.items():
            received[name][client, ...][parts[name]] = values
    chosen = None if own_rank is None else ranks
    return Uploads(received, trained, sent & chunk.arrives(), bits, as_client_state(state), chosen)


@dataclass(frozen=True)
class _Sending:
    """What one client sends: its weight, what the server decodes, the client's state after it, the rank it chose."""

    bits: int
    received: Changes
    state: Arrays
    rank: int


def _send(
    codec: Codec,
    tensors: Changes,
    counts: Sequence[int],
    key: int,
    state: Arrays,
    budget_bits: float,
    own_rank: int | None,
) -> _Sending | None:
    """None where nothing fits."""
    receiver, rank, after = codec, 0, state
    if own_rank is None:
        fitting = encode_tensors(codec, tensors, counts, key, state=state, budget_bits=budget_bits)
        if fitting is None:
            return None
        payload, after = fitting
    else:
        own = encode_in_own_bases(codec, dict(tensors), counts, key, most=own_rank, budget_bits=budget_bits)
        if own is None:
            return None
        payload, rank = own
        receiver = Codec((Atomo(rank=own_rank), *codec.stages))
    arrived = CodedTensors.from_bytes(payload.to_bytes(), len(counts))
    received = receiver.decode(arrived.coded, {name: values.shape for name, values in tensors.items()}, key)
    return _Sending(payload.wire_bits(), received, after, rank)


def _part(name: str, client: int, columns: Columns | None) -> tuple[slice] | tuple[slice, BoolArray] | tuple[()]:
    """Where the values that a client sends of a tensor stand in it."""
    return () if columns is None or name not in columns.own else (slice(None), columns.own[name][client])
