"""A receiver decodes every upload from its bytes and the public seed, whatever the private seed is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from chains import CHAINS
from narrowcast.algorithms.client.uploads import RowView, send_coded_tensors, send_touched_rows, send_whole_matrix
from narrowcast.algorithms.codecs.budget import ClientEncoder
from narrowcast.algorithms.codecs.chain import Codec
from narrowcast.algorithms.codecs.messages import (
    LIKELY,
    CodedTensors,
    TensorUpdate,
    decode_matrix,
    decode_rows,
    encode_matrix,
    encode_rows,
    encode_tensors,
)
from narrowcast.algorithms.codecs.sparsify import memory_of_rows
from narrowcast.algorithms.federated.fedmf import likely_rows
from narrowcast.algorithms.local_training.factorisation import RowCohort
from narrowcast.algorithms.local_training.negatives import SharedNegatives
from narrowcast.platform.config.catalog import CODECS
from narrowcast.platform.contracts import Task
from narrowcast.platform.models.model import USER_FACTORS
from narrowcast.platform.seeds import PrivateSeed, stream_keys
from narrowcast.platform.types import Chunk
from per_client import make_task, synthetic

EXAMPLES, ROUND, COLUMNS = [12, 3, 30], 4, 5
EVERYONE = np.arange(len(EXAMPLES))
FORGETFUL = {name: chain for name, chain in CHAINS.items() if not any(stage.remembers for stage in chain.stages)}
"""Chains that whole matrices of rows may go through."""
every_chain = pytest.mark.parametrize("chain", CHAINS.values(), ids=CHAINS)


def two_tasks(**training: Any) -> tuple[Task, Task]:
    """The clients' task, and a receiver's with another private seed."""
    task = make_task(synthetic(EXAMPLES), **training)
    return task, replace(task, private_seed=PrivateSeed(99))


def keys(task: Task) -> list[int]:
    return [int(key) for key in stream_keys(task.seed, "codec", ROUND, EVERYONE)]


def view_of(task: Task) -> RowView:
    users = task.model.init_clients(task.data, task.private_seed.value)
    chunk = Chunk(ROUND, 0, EVERYONE, {USER_FACTORS: users[USER_FACTORS]})
    cohort = RowCohort.draw(chunk, task)
    changes = np.random.default_rng(0).standard_normal((len(cohort.samples.row_items), COLUMNS)).astype(np.float32)
    everyone = np.ones(len(EXAMPLES), dtype=bool)
    likely = partial(likely_rows, chunk, task) if task.training.shared_negatives else None
    rows = replace(cohort.rows, values=changes)
    return RowView(rows, task.data.examples, everyone, everyone, likely=likely)


def likely_of(task: Task, client: int) -> Any:
    return SharedNegatives.of(task, client, ROUND).likely_rows if task.training.shared_negatives else None


def test_the_chains_have_every_stage() -> None:
    assert {stage.kind for chain in CHAINS.values() for stage in chain.stages} == set(CODECS)


@every_chain
@pytest.mark.parametrize("shared", [False, True])
def test_touched_rows(chain: Codec, shared: bool) -> None:
    task, receiver = two_tasks(shared_negatives=shared)
    state, view = chain.init_state({LIKELY: (task.data.n_items, COLUMNS)}), view_of(task)
    for client, (mine, theirs) in enumerate(zip(keys(task), keys(receiver), strict=True)):
        update = view.take(client)
        encoder = ClientEncoder(chain, mine, state=state)
        sent = send_touched_rows(update, encoder)
        packed = encode_rows(replace(encoder, state=memory_of_rows(state, update.rows)), update)
        assert sent is not None and packed is not None
        rows, values = decode_rows(
            *(chain, packed[0].to_bytes(), receiver.data.n_items, COLUMNS, theirs), likely=likely_of(receiver, client)
        )
        assert np.array_equal(rows, update.rows) and np.array_equal(values, sent.received)
        assert sent.bits == 8 * len(packed[0].to_bytes())


@pytest.mark.parametrize("chain", FORGETFUL.values(), ids=FORGETFUL)
def test_whole_matrices(chain: Codec) -> None:
    task, receiver = two_tasks()
    view = view_of(task)
    for client, (mine, theirs) in enumerate(zip(keys(task), keys(receiver), strict=True)):
        update, encoder = view.take(client), ClientEncoder(chain, mine)
        sent = send_whole_matrix(update, encoder)
        packed = encode_matrix(encoder, update.rows, update.values, update.n_rows)
        assert sent is not None and packed is not None
        rows, values = decode_matrix(chain, packed.to_bytes(), receiver.data.n_items, COLUMNS, theirs)
        assert np.array_equal(rows, update.rows) and np.array_equal(values, sent.received)


@every_chain
def test_tensors(chain: Codec) -> None:
    task, receiver = two_tasks()
    random = np.random.default_rng(0)
    for mine, theirs in zip(keys(task), keys(receiver), strict=True):
        tensors = {name: random.standard_normal(shape).astype(np.float32) for name, shape in SHAPES.items()}
        encoder = ClientEncoder(chain, mine, state=chain.init_state(SHAPES))
        sent = send_coded_tensors(TensorUpdate(tensors, 12), encoder)
        packed = encode_tensors(encoder, TensorUpdate(tensors, 12))
        assert sent is not None and packed is not None
        arrived = CodedTensors.from_bytes(packed[0].to_bytes())
        decoded = chain.decode(arrived.coded, SHAPES, theirs)
        assert all(np.array_equal(decoded[name], sent.received[name]) for name in SHAPES)


SHAPES: Mapping[str, tuple[int, ...]] = {"bias": (7,), "weight": (9, 6)}


def test_only_shared_negatives_can_be_regenerated() -> None:
    """Rows that a receiver expects of shared negatives are touched; of private ones it can expect none."""
    for shared in (True, False):
        task, receiver = two_tasks(shared_negatives=shared)
        own, other = view_of(task), view_of(receiver)
        same = [np.array_equal(own.take(place).rows, other.take(place).rows) for place in EVERYONE]
        assert all(same) if shared else not any(same)
        update = own.take(0)
        assert (update.likely is not None, update.positives) == (shared, EXAMPLES[0])
        regenerated = np.flatnonzero(SharedNegatives.of(receiver, 0, ROUND).likely_rows(EXAMPLES[0]))
        assert set(regenerated) <= set(update.rows) if shared else not set(regenerated) <= set(update.rows)
