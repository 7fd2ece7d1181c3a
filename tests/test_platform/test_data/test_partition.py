from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from pydantic import BaseModel, TypeAdapter, ValidationError

from narrowcast.platform.data.partition import IID, Dirichlet, Natural, Partition, Quantity, Shards, Similarity
from narrowcast.platform.errors import UserError

N_CLASSES = 10
LABELS = np.random.default_rng(5).permutation(np.repeat(np.arange(N_CLASSES), np.arange(100, 700, 60)))
KINDS = [
    IID(),
    Quantity(),
    Quantity(sizes="power_law", skew=2, min_examples=3),
    Dirichlet(),
    Dirichlet(alpha=0.05, capped=False),
    Dirichlet(alpha=1e-3),
    Dirichlet(alpha=1e6),
    Dirichlet(min_examples=10),
    Shards(),
    Shards(classes_per_client=1),
    Shards(classes_per_client=10),
    Similarity(),
    Similarity(share=0),
]


def counts(partition: Any, n_clients: int, seed: int = 0, labels: Any = LABELS) -> Any:
    """How many samples of each class each client has, [U, classes]."""
    order, indptr = partition.deal(labels, n_clients, seed)
    owners = np.repeat(np.arange(n_clients), np.diff(indptr))
    table = np.zeros((n_clients, labels.max() + 1), dtype=np.int64)
    np.add.at(table, (owners, labels[order]), 1)
    return table


@pytest.mark.parametrize("partition", KINDS, ids=str)
@pytest.mark.parametrize("n_clients", [1, 17, 100])
def test_every_sample_is_dealt_once(partition: Any, n_clients: int) -> None:
    if isinstance(partition, Shards):
        n_clients = max(n_clients, N_CLASSES)
    order, indptr = partition.deal(LABELS, n_clients, 3)
    assert (order.dtype, indptr.dtype) == (np.int64, np.int64)
    assert np.array_equal(np.sort(order), np.arange(len(LABELS)))
    assert (indptr[0], indptr[-1], len(indptr)) == (0, len(LABELS), n_clients + 1)
    assert all((np.diff(order[begin:end]) > 0).all() for begin, end in pairwise(indptr.tolist()))
    assert np.diff(indptr).min() >= getattr(partition, "min_examples", 0)


@pytest.mark.parametrize("partition", KINDS, ids=str)
def test_the_seed_alone_decides(partition: Any) -> None:
    first, again, other = (partition.deal(LABELS, 20, seed) for seed in (7, 7, 8))
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    assert not np.array_equal(first[0], other[0])


@pytest.mark.parametrize(
    "partition", [IID(), Quantity(), Dirichlet(), Dirichlet(capped=False, alpha=0.05), Shards()], ids=str
)
def test_a_million_clients_of_whom_most_are_empty(partition: Any) -> None:
    order, indptr = partition.deal(LABELS, 1_000_000, 0)
    sizes = np.diff(indptr)
    assert np.array_equal(np.sort(order), np.arange(len(LABELS)))
    assert (sizes == 0).sum() >= 1_000_000 - len(LABELS)
    # The clients with data are not the first ones.
    assert np.flatnonzero(sizes).max() > 900_000


def test_iid_sizes_differ_by_at_most_one_and_labels_as_chance_has_it() -> None:
    table = counts(IID(), 48)
    assert np.ptp(table.sum(axis=1)) == 1
    expected = np.bincount(LABELS) / 48
    chi_square = ((table - expected) ** 2 / expected).sum()
    # 47 * 9 = 423 degrees of freedom: mean 423, standard deviation 29; a fixed seed, so this cannot flicker.
    assert 310 < chi_square < 540


@pytest.mark.parametrize("sizes", ["lognormal", "power_law"])
def test_quantity_skew_is_in_the_sizes_and_not_in_the_labels(sizes: Any) -> None:
    even = np.diff(Quantity(sizes=sizes, skew=0).deal(LABELS, 40, 0)[1])
    assert np.ptp(even) <= 1
    spread = [np.diff(Quantity(sizes=sizes, skew=skew).deal(LABELS, 40, 0)[1]).std() for skew in (0.2, 0.5, 1, 2)]
    assert spread == sorted(spread)
    largest = counts(Quantity(sizes=sizes, skew=2), 40)
    largest = largest[largest.sum(axis=1).argmax()]
    assert np.allclose(largest / largest.sum(), np.bincount(LABELS) / len(LABELS), atol=0.03)


def test_power_law_sizes_are_powers_of_the_rank() -> None:
    labels = np.zeros(1_000_000, dtype=np.int64)
    sizes = np.sort(np.diff(Quantity(sizes="power_law", skew=1).deal(labels, 100, 0)[1]))[::-1]
    harmonic = (1 / np.arange(1, 101)).sum()
    assert np.abs(sizes - 1e6 / harmonic / np.arange(1, 101)).max() <= 1


def test_lognormal_sizes_have_the_spread_asked_for() -> None:
    labels = np.zeros(1_000_000, dtype=np.int64)
    sizes = np.diff(Quantity(skew=0.5).deal(labels, 1000, 0)[1])
    assert np.log(sizes).std() == pytest.approx(0.5, rel=0.1)


@pytest.mark.parametrize("alpha", [0.1, 1.0, 10.0])
def test_uncapped_shares_of_a_class_have_the_moments_of_the_dirichlet(alpha: float) -> None:
    n_clients, n = 20, 100_000
    labels = np.repeat(np.arange(200), n // 200)
    shares = counts(Dirichlet(alpha=alpha, capped=False), n_clients, labels=labels) / (n // 200)
    assert shares.mean() == pytest.approx(1 / n_clients)
    variance = (1 / n_clients) * (1 - 1 / n_clients) / (n_clients * alpha + 1)
    assert shares.var() == pytest.approx(variance, rel=0.15)


@pytest.mark.parametrize("capped", [True, False])
def test_dirichlet_approaches_iid_as_alpha_grows(capped: bool) -> None:
    expected = np.bincount(LABELS) / len(LABELS)
    distances = []
    for alpha in (0.01, 0.1, 1, 10, 1e6):
        table = counts(Dirichlet(alpha=alpha, capped=capped), 10)
        shares = table / np.maximum(table.sum(axis=1, keepdims=True), 1)
        distances.append(np.abs(shares - expected).sum(axis=1).mean())
    assert distances == sorted(distances, reverse=True)
    assert distances[0] > 1
    assert distances[-1] < 0.02


def test_classes_smaller_than_the_clients_do_not_go_to_the_same_few() -> None:
    labels = np.repeat(np.arange(10), 100)
    sizes = np.diff(Dirichlet(alpha=1e6, capped=False).deal(labels, 1000, 0)[1])
    # Chance leaves a client empty with 0.9 ** 10, which is 35 %.
    assert 600 < (sizes > 0).sum() < 700


def test_a_client_with_its_share_gets_nothing_of_later_classes() -> None:
    table = counts(Dirichlet(alpha=0.05), 10)
    held = np.cumsum(table, axis=1)[:, :-1]
    assert (table[:, 1:][held * 10 >= len(LABELS)] == 0).all()
    free = counts(Dirichlet(alpha=0.05, capped=False), 10)
    assert table.sum(axis=1).max() < free.sum(axis=1).max()


@pytest.mark.parametrize("per_client", [1, 2, 5])
@pytest.mark.parametrize("n_clients", [10, 33, 1000])
def test_shards_give_at_most_so_many_classes(per_client: int, n_clients: int) -> None:
    table = counts(Shards(classes_per_client=per_client), n_clients)
    assert (table > 0).sum(axis=1).max() == per_client
    if n_clients == 33:
        assert np.ptp(table.sum(axis=1)) < 0.5 * table.sum(axis=1).mean()


def test_shards_of_equal_classes_are_of_equal_size() -> None:
    labels = np.repeat(np.arange(10), 600)
    table = counts(Shards(), 100, labels=labels)
    assert (table.sum(axis=1) == 60).all()
    assert set(np.unique(table)) == {0, 30, 60}


def test_similarity_sorts_the_classes_of_what_it_does_not_mix() -> None:
    labels = np.repeat(np.arange(10), 600)
    held = (counts(Similarity(share=0), 20, labels=labels) > 0).sum(axis=1)
    assert (held == 1).all(), "20 contiguous parts of 300 samples"
    mixed = counts(Similarity(share=0.5), 20, labels=labels)
    assert mixed.sum(axis=1).tolist() == [300] * 20
    main = mixed.max(axis=1)
    assert (main > 75).all()
    assert (main < 200).all(), "at most 150 of the sorted half, and about 15 of the mixed one"
    assert np.abs(counts(Similarity(share=1), 20, labels=labels) - 30).max() < 25


def test_natural_users_keep_their_samples() -> None:
    users = np.array([2, 0, 2, 2, 0])
    order, indptr = Natural().deal(np.zeros(5, dtype=np.int64), 4, 0, users)
    assert [part.tolist() for part in np.split(order, indptr[1:-1])] == [[1, 4], [], [0, 2, 3], []]


@pytest.mark.parametrize("partition", [IID(), Quantity(), Dirichlet()], ids=str)
def test_no_samples_are_dealt_to_nobody(partition: Any) -> None:
    order, indptr = partition.deal(np.zeros(0, dtype=np.int64), 3, 0)
    assert order.tolist() == []
    assert indptr.tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize(
    ("partition", "n_clients", "message"),
    [
        (Natural(), 10, "the data set has no users; use iid, dirichlet, shards or quantity"),
        (
            Dirichlet(min_examples=10),
            1000,
            "1000 clients with min_examples 10 need 10000 samples, but there are 3700; lower",
        ),
        (Quantity(min_examples=10), 1000, "need 10000 samples, but there are 3700; lower min_examples or clients"),
        (
            Dirichlet(alpha=0.01, min_examples=30, capped=False),
            100,
            "none of 1000 draws with alpha 0.01 .* raise alpha",
        ),
        (Shards(classes_per_client=2), 4, "4 clients with 2 classes each cannot hold all 10 classes; raise"),
        (Shards(classes_per_client=11), 4, "classes_per_client is 11, but the samples have 10 classes; use 1 to 10"),
    ],
    ids=str,
)
def test_what_cannot_be_dealt_is_one_clear_line(partition: Any, n_clients: int, message: str) -> None:
    with pytest.raises(UserError, match=f"^partition {partition.kind}: .*{message}|this data set {message}") as caught:
        partition.deal(LABELS, n_clients, 0)
    assert "\n" not in str(caught.value)


def test_a_kind_alone_stands_for_its_defaults() -> None:
    adapter: TypeAdapter[BaseModel] = TypeAdapter(Partition)
    assert adapter.validate_python("shards") == Shards()
    assert adapter.validate_python({"kind": "dirichlet", "alpha": 1}) == Dirichlet(alpha=1)
    for wrong in (
        "shard",
        {"kind": "dirichlet", "alpha": 0},
        {"kind": "iid", "alpha": 1},
        {"kind": "quantity", "skew": -1},
    ):
        with pytest.raises(ValidationError):
            adapter.validate_python(wrong)
