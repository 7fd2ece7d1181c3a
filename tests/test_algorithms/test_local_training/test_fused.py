"""The fused kernel against the batched program and the slow reference, and what it must not depend on."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import narrowcast
from cohorts import Cohort, random_cohort
from narrowcast.algorithms.codecs.low_rank import draw_basis
from narrowcast.algorithms.local_training import factorisation_kernels
from narrowcast.algorithms.local_training.factorisation import LocalResult, train_low_rank, train_rows
from narrowcast.algorithms.local_training.factorisation_kernels import (
    Factors,
    FusedResult,
    Subspace,
    sum_rows,
    train_low_rank_fused,
    train_rows_fused,
)
from narrowcast.algorithms.local_training.negatives import ChunkSamples, draw_batches, draw_samples, shuffle
from narrowcast.platform.data.interactions import Interactions
from narrowcast.platform.models.model import ITEM_FACTORS, USER_FACTORS
from narrowcast.platform.types import Chunk
from per_client import Array, LowRankPart, client_batches, make_task, relative_error, synthetic, train_cohort

BOUND = 2e-6  # of rounding to float32, in some hundred steps
KINDS = {"fedmf": None, "colr-1": 1, "colr-4": 4, "colr-d": 64, "colr-gaussian": 6, "scolr": 8}


def low_rank_part(kind: str, n_clients: int, dimension: int, seed: int = 0) -> LowRankPart | None:
    """B, and all components; for SCoLR random ones, sometimes none."""
    rank = KINDS[kind]
    if rank is None:
        return None
    basis = draw_basis("gaussian" if "gaussian" in kind else "orthonormal", min(rank, dimension), dimension, seed)
    random = np.random.default_rng(seed)
    share = random.random((n_clients, 1)) if kind == "scolr" else 1.0
    return LowRankPart(basis, random.random((n_clients, len(basis))) < share)


def train_fused(
    cohort: Cohort, samples: ChunkSamples, part: LowRankPart | None, threads: int = 1, keep_changes: bool = True
) -> FusedResult:
    """`part` is in the order of the chunk; a client without components is not summed."""
    users = np.asarray(cohort.chunk.state[USER_FACTORS])[samples.order]
    training = cohort.task.training
    factors = np.ones(len(users), dtype=np.float32)
    start = Factors(cohort.item_factors, users)
    if part is None:
        return train_rows_fused(start, samples, training, factors, threads, keep_changes)
    components = part.components[samples.order]
    factors *= components.any(axis=1)
    subspace = Subspace(part.basis, components)
    return train_low_rank_fused(start, subspace, samples, training, factors, threads, keep_changes)


def draw(cohort: Cohort, threads: int = 1) -> ChunkSamples:
    task, chunk = cohort.task, cohort.chunk
    return draw_samples(task, chunk.clients, chunk.round_index, threads)


def train_float64(cohort: Cohort, part: LowRankPart | None) -> LocalResult:
    """The batched program, which is tested against the slow reference, in float64."""
    task, chunk = cohort.task, cohort.chunk
    batches = draw_batches(task, chunk.clients, chunk.round_index)
    item_factors = torch.from_numpy(cohort.item_factors).double()
    users = torch.from_numpy(np.asarray(chunk.state[USER_FACTORS])[batches.order]).double()
    if part is None:
        return train_rows(item_factors, users, batches, task.training)
    subspace = Subspace(part.basis, part.components[batches.order])
    return train_low_rank(item_factors, users, subspace, batches, task.training)


def small_cohort(data: Interactions, *, dimension: int = 8, **training: object) -> Cohort:
    task = make_task(data, dimension=dimension, **training)
    users = task.model.init_clients(data, 0)
    item_factors = np.asarray(task.model.init_server(data, 0)[ITEM_FACTORS])
    return Cohort(task, Chunk(1, 0, np.arange(data.n_users), users), item_factors)


def assert_close(result: FusedResult, wanted: LocalResult) -> None:
    assert result.row_changes is not None
    assert relative_error(result.row_changes, wanted.row_changes.numpy()) <= BOUND
    assert relative_error(result.user_factors, wanted.user_factors.numpy()) <= BOUND
    assert relative_error(result.loss, wanted.loss.numpy()) <= BOUND
    assert result.finite.all()


def bits(*arrays: Array) -> list[bytes]:
    return [np.ascontiguousarray(array).tobytes() for array in arrays]


@pytest.mark.parametrize("case", range(20))
def test_samples_and_shuffles_are_those_of_the_batches(case: int) -> None:
    cohort = random_cohort(case)
    task, chunk = cohort.task, cohort.chunk
    batches = draw_batches(task, chunk.clients, chunk.round_index)
    samples = draw(cohort)
    for name in ("order", "row_items", "row_starts", "samples"):
        assert np.array_equal(getattr(samples, name), getattr(batches, name))
    steps = client_batches(batches)
    for client, place in enumerate(samples.order):
        n_samples, start = int(samples.samples[client]), samples.sample_starts[client]
        words, shuffled = np.empty((2, n_samples), dtype=np.uint64)
        heads = np.empty(2 * n_samples + 2, dtype=np.uint32)
        rows = samples.sample_rows[start : start + n_samples].astype(np.int64) + samples.row_starts[client]
        items, labels = [], []
        for epoch in range(task.training.epochs):
            mask = shuffle(samples.shuffle_keys[client], epoch, n_samples, words, shuffled, heads)
            order = (shuffled & np.uint64(mask)).astype(np.int64)
            items.append(samples.row_items[rows[order]])
            labels.append(order < samples.positives[client])
        assert np.array_equal(np.concatenate(items), np.concatenate([items for items, _ in steps[place]]))
        assert np.array_equal(np.concatenate(labels), np.concatenate([labels for _, labels in steps[place]]))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", range(20))
def test_fused_equals_the_batched_program(case: int, kind: str) -> None:
    cohort = random_cohort(case)
    part = low_rank_part(kind, len(cohort.chunk.clients), 64, case)
    samples = draw(cohort)
    result, wanted = train_fused(cohort, samples, part), train_float64(cohort, part)
    assert_close(result, wanted)
    total = np.zeros(result.total.shape)
    summed = np.ones(len(samples.order), dtype=bool) if part is None else part.components[samples.order].any(axis=1)
    of_summed = summed[np.repeat(np.arange(len(summed)), np.diff(samples.row_starts))]
    np.add.at(total, samples.row_items[of_summed], wanted.row_changes.numpy()[of_summed])
    assert relative_error(result.total, total) <= BOUND
    assert np.array_equal(result.touched, np.bincount(samples.row_items[of_summed], minlength=len(total)))


@pytest.mark.parametrize("kind", ["fedmf", "colr-4", "scolr"])
def test_fused_equals_the_slow_reference(kind: str) -> None:
    cohort = random_cohort(1)
    task, chunk = cohort.task, cohort.chunk
    part = low_rank_part(kind, len(chunk.clients), 64)
    batches = draw_batches(task, chunk.clients, chunk.round_index)
    users = np.asarray(chunk.state[USER_FACTORS])
    wanted = train_cohort(cohort.item_factors, users, batches, task.training, part)
    samples = draw(cohort)
    result = train_fused(cohort, samples, part)
    summed = np.ones(len(users), dtype=bool) if part is None else part.components.any(axis=1)
    mean = result.total / np.maximum(result.touched, 1)[:, None]
    assert relative_error(mean, wanted.per_item_mean(summed)) <= BOUND
    assert relative_error(result.user_factors, wanted.user_factors[samples.order]) <= BOUND
    assert relative_error(result.loss, wanted.loss[samples.order]) <= BOUND


@pytest.mark.parametrize("kind", ["fedmf", "colr-4"])
def test_full_batches_are_one_step_per_epoch_in_both_programs(kind: str) -> None:
    cohort = small_cohort(synthetic([20, 3, 11]), batch_size="all", epochs=2)
    part, samples = low_rank_part(kind, 3, 8), draw(cohort)
    batches = draw_batches(cohort.task, cohort.chunk.clients, cohort.chunk.round_index)
    assert batches.steps.tolist() == [2, 2, 2]
    assert batches.sizes.tolist() == [*samples.samples, *samples.samples]
    assert_close(train_fused(cohort, samples, part), train_float64(cohort, part))


@pytest.mark.parametrize("kind", ["fedmf", "colr-4", "colr-gaussian"])
@pytest.mark.parametrize("item_weight_decay", [0.0, 0.05, None])
def test_item_weight_decay_moves_q_alone_and_zero_leaves_it(item_weight_decay: float | None, kind: str) -> None:
    """With p = 0 the loss has no gradient in q, so that a single step moves q by its decay only."""
    cohort = small_cohort(
        synthetic([20, 3]), batch_size=4096, epochs=1, weight_decay=0.01, item_weight_decay=item_weight_decay
    )
    cohort.chunk.state[USER_FACTORS][:] = 0
    part = low_rank_part(kind, 2, 8)
    samples = draw(cohort)
    result, tensors = train_fused(cohort, samples, part), train_float64(cohort, part)
    decay = 0.01 if item_weight_decay is None else item_weight_decay
    wanted = -cohort.task.training.learning_rate * 2 * decay * cohort.item_factors[samples.row_items].astype(np.float64)
    if part is not None:
        wanted = wanted @ part.basis.T * Subspace(part.basis, part.components).gradient_scale
    assert result.row_changes is not None
    for changes in (result.row_changes, tensors.row_changes.numpy()):
        assert changes.any() == (decay > 0)
        assert np.allclose(changes, wanted, rtol=1e-4, atol=1e-8)
    assert result.user_factors.any(axis=1).all()


@pytest.mark.parametrize("kind", ["fedmf", "scolr"])
def test_an_item_weight_decay_equal_to_weight_decay_changes_no_bit(kind: str) -> None:
    results = []
    for item_weight_decay in (None, 5e-4, 0.0):
        cohort = small_cohort(synthetic([20, 3, 11]), item_weight_decay=item_weight_decay)
        result = train_fused(cohort, draw(cohort), low_rank_part(kind, 3, 8))
        results.append(bits(result.total, result.user_factors, result.loss))
    assert results[0] == results[1] != results[2]


@pytest.mark.parametrize("kind", KINDS)
def test_results_do_not_depend_on_threads(kind: str) -> None:
    cohort = random_cohort(5)
    part = low_rank_part(kind, len(cohort.chunk.clients), 64)
    results = []
    for threads in (1, 2, 4, 100):
        samples = draw(cohort, threads)
        kept = train_fused(cohort, samples, part, threads)
        summed = train_fused(cohort, samples, part, threads, keep_changes=False)
        assert summed.row_changes is None
        assert kept.row_changes is not None
        for result in (kept, summed):
            arrays = (result.total, result.touched, result.user_factors, result.loss, result.finite, kept.row_changes)
            results.append(bits(*arrays, samples.row_items))
    assert all(other == results[0] for other in results[1:])


@pytest.mark.parametrize("train_negatives", ["clean", "leaky"])
def test_samples_do_not_depend_on_company(train_negatives: str) -> None:
    data = synthetic([5, 30, 12, 140, 1], n_items=150)
    task = make_task(data, seed=3, train_negatives=train_negatives)
    together = draw_samples(task, np.arange(5), 7)
    for client, place in enumerate(together.order):
        alone = draw_samples(task, np.array([place]), 7)
        start, count = together.sample_starts[client], together.samples[client]
        mine = slice(together.row_starts[client], together.row_starts[client + 1])
        assert np.array_equal(alone.row_items, together.row_items[mine])
        assert np.array_equal(alone.sample_rows[:count], together.sample_rows[start : start + count])
        assert alone.shuffle_keys[0] == together.shuffle_keys[client]


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("share", [1.0, 0.6, 0.0])
def test_sum_is_that_of_numpy_bit_by_bit(share: float, weighted: bool) -> None:
    cohort = random_cohort(4)
    samples = draw(cohort)
    changes = train_fused(cohort, samples, None).row_changes
    assert changes is not None
    n_items, delivered = cohort.task.data.n_items, np.random.default_rng(0).random(len(samples.order)) < share
    factors = samples.positives.astype(np.float32) if weighted else np.ones(len(delivered), dtype=np.float32)
    wanted, touched = np.zeros((n_items, 64), dtype=np.float32), np.zeros(n_items)
    for client in np.flatnonzero(delivered):
        part = slice(samples.row_starts[client], samples.row_starts[client + 1])
        wanted[samples.row_items[part]] += changes[part] * factors[client]
        touched[samples.row_items[part]] += 1
    total = sum_rows(n_items, samples.row_items, samples.row_starts, changes, factors, delivered)
    assert bits(*total) == bits(wanted, touched)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_diverged_client_leaves_the_others_alone(value: float, kind: str) -> None:
    healthy = small_cohort(synthetic([20, 3, 11, 20, 7]), learning_rate=2.0)
    part = low_rank_part(kind.replace("scolr", "colr-4"), 5, 8)
    samples = draw(healthy)
    wanted = train_fused(healthy, samples, part)
    rows = np.repeat(samples.order, np.diff(samples.row_starts))
    assert wanted.row_changes is not None
    for bad in range(5):
        users = np.array(healthy.chunk.state[USER_FACTORS])
        users[bad] = value
        sick = Cohort(healthy.task, Chunk(1, 0, healthy.chunk.clients, {USER_FACTORS: users}), healthy.item_factors)
        for threads in (1, 2):
            result = train_fused(sick, samples, part, threads)
            others = samples.order != bad
            assert result.row_changes is not None
            assert np.array_equal(result.finite, others)
            assert bits(result.user_factors[others]) == bits(wanted.user_factors[others])
            assert bits(result.loss[others]) == bits(wanted.loss[others])
            assert bits(result.row_changes[rows != bad]) == bits(wanted.row_changes[rows != bad])
            assert np.isfinite(result.total).all()
            assert np.array_equal(result.touched, np.bincount(samples.row_items[rows != bad], minlength=150))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("training", [{"batch_size": 1}, {"batch_size": 4096}, {"negatives": 0}, {"negatives": 40}])
@pytest.mark.parametrize("dimension", [1, 5, 17])
def test_corners(dimension: int, training: dict[str, int], kind: str) -> None:
    cohort = small_cohort(synthetic([150, 1, 40]), dimension=dimension, **training)  # the first knows every item
    part = low_rank_part(kind, 3, dimension)
    samples = draw(cohort)
    negatives = training.get("negatives", 4)
    assert dict(zip(samples.order, samples.samples, strict=True)) == {0: 150, 1: 1 + negatives, 2: 40 + 40 * negatives}
    assert_close(train_fused(cohort, samples, part), train_float64(cohort, part))


def test_read_only_arrays_are_not_compiled_for_again() -> None:
    cohort = random_cohort(2)
    result = train_fused(cohort, draw(cohort), None)
    item_factors, users = cohort.item_factors.copy(), np.array(cohort.chunk.state[USER_FACTORS])
    for array in (item_factors, users):
        array.flags.writeable = False
    again = train_fused(
        Cohort(
            cohort.task, Chunk(cohort.chunk.round_index, 0, cohort.chunk.clients, {USER_FACTORS: users}), item_factors
        ),
        draw(cohort),
        low_rank_part("fedmf", len(users), 64),
    )
    assert bits(again.total) == bits(result.total)
    assert len(factorisation_kernels._train_clients.signatures) == 1


SCRIPT = """
import numpy as np
from per_client import synthetic
import hashlib, test_fused as t
cohort = t.small_cohort(synthetic([20, 3, 11, 140, 7]), dimension=64)
print(t.fingerprint(cohort))
"""


def fingerprint(cohort: Cohort) -> str:
    hasher = hashlib.sha256()
    for kind in KINDS:
        result = train_fused(cohort, draw(cohort), low_rank_part(kind, len(cohort.chunk.clients), 64))
        for part in bits(result.total, result.user_factors, result.loss):
            hasher.update(part)
    return hasher.hexdigest()


def test_the_cache_of_a_kernel_is_another_once_a_function_of_another_module_that_it_calls_has_changed(
    tmp_path: Path,
) -> None:
    copy = tmp_path / "narrowcast"
    shutil.copytree(Path(narrowcast.__file__).parent, copy, ignore=shutil.ignore_patterns("__pycache__"))
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"}
    script = "from narrowcast.platform import compiled; print(compiled.__file__, compiled._cache_folder(''))"

    def run() -> str:
        return subprocess.run(
            [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True
        ).stdout

    def change(module: str, before: str, after: str) -> None:
        text = (copy / module).read_text()
        assert text.count(before) == 1
        (copy / module).write_text(text.replace(before, after))

    folders = [run()]
    assert folders[0].startswith(str(copy))
    change("algorithms/local_training/negatives.py", "def shuffle(", "def shuffle(  ")  # which `_train_clients` calls
    folders.append(run())
    change("algorithms/federated/fedavg.py", "class FedAvg(", "class FedAvg(  ")  # nothing in it is compiled
    folders.append(run())
    assert folders[0] != folders[1] == folders[2]


@pytest.mark.slow
def test_a_process_that_compiles_and_one_that_reads_the_cache_agree(tmp_path: Path) -> None:
    copy = tmp_path / "narrowcast"
    shutil.copytree(Path(narrowcast.__file__).parent, copy, ignore=shutil.ignore_patterns("__pycache__"))
    environment = {
        **os.environ,
        "PYTHONPATH": f"{tmp_path}:{Path(__file__).parent}:{Path(__file__).parents[2] / 'fixtures'}",
        "PYTHONDONTWRITEBYTECODE": "1",
        "HOME": "/dev/null",
        "XDG_CACHE_HOME": "",
        "NUMBA_CACHE_DIR": "",
    }

    def run() -> str:
        command = [sys.executable, "-c", SCRIPT]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    caches = copy / "platform" / "__pycache__"
    compiles = run()
    assert list(caches.glob("narrowcast-*/*/*.nbc"))
    reads = run()
    shutil.rmtree(caches)
    caches.write_text("not a folder")  # so nothing can be kept, as in a package that is read-only
    keeps_nothing = run()
    assert compiles == reads == keeps_nothing
