from pathlib import Path
from typing import Any

import matplotlib.image
import numpy as np
import pyarrow.parquet as pq
import pytest

from narrowcast.platform.data.interactions import Interactions
from narrowcast.platform.data.samples import Labelled, Samples
from narrowcast.platform.data.scikit_learn import Digits
from narrowcast.platform.tracking.partition import (
    FIGURE,
    TABLE,
    begin_figure,
    partition_table,
    write_partition,
)
from narrowcast.platform.tracking.partition_counts import class_counts, classes_held


def samples(n_clients: int, n_classes: int = 10, n: int = 2000) -> Samples:
    random = np.random.default_rng(3)
    labels = random.integers(0, n_classes, n)
    indptr = np.concatenate([[0], np.sort(random.integers(0, n + 1, n_clients - 1)), [n]]).astype(np.int64)
    nothing = Labelled(np.zeros((0, 1), dtype=np.float32), np.zeros(0, dtype=np.int64))
    train = Labelled(np.zeros((n, 1), dtype=np.float32), labels)
    return Samples("toy", "drawn", n_classes, train, nothing, nothing, random.permutation(n), indptr)


def interactions(n_users: int) -> Interactions:
    sizes = np.random.default_rng(4).integers(1, 300, n_users)
    indptr = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    none = np.zeros(n_users, dtype=np.int64)
    items = np.zeros(indptr[-1], dtype=np.int64)
    return Interactions("toy", "drawn", 500, indptr, items, none, none, np.zeros((n_users, 99), dtype=np.int64))


@pytest.mark.parametrize(
    ("data", "rows"),
    [
        (samples(1), 1),
        (samples(12), 12),
        (samples(12, n_classes=62), 12),
        (samples(1000), 1000),
        (samples(1001), 12),
        (samples(400, n_classes=1000), 1002),
        (samples(200_000), 12),
        (samples(3, n=0), 3),
        (interactions(50), 50),
        (interactions(5000), 1),
    ],
    ids=lambda value: f"{value.n_clients}x{getattr(value, 'n_classes', 0)}" if hasattr(value, "n_clients") else "",
)
def test_reports_are_small_and_drawn(data: Any, rows: int, tmp_path: Path) -> None:
    write_partition(data, tmp_path / "new", begin_figure(data))
    table = pq.read_table(tmp_path / "new" / TABLE)
    assert table.num_rows == rows
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == [TABLE, FIGURE]
    assert all(path.stat().st_size < 200_000 for path in (tmp_path / "new").iterdir())
    image = matplotlib.image.imread(tmp_path / "new" / FIGURE)
    assert image.shape[0] > 500
    assert image[..., :3].std() > 0.02, "a blank image"


def test_the_table_counts_every_sample() -> None:
    data = Digits(partition="shards", clients=30).load()
    table = partition_table(data)
    assert table.column_names == ["client", "examples", *(f"class_{label}" for label in range(10))]
    counts = np.column_stack([table[f"class_{label}"].to_numpy() for label in range(10)])
    assert np.array_equal(counts, class_counts(data))
    assert np.array_equal(counts.sum(axis=0), np.bincount(data.train.labels))
    assert np.array_equal(counts.sum(axis=1), data.examples)
    assert np.array_equal((counts > 0).sum(axis=1), classes_held(data))
    assert table["client"].to_pylist() == list(range(30))


def test_the_summary_says_the_same_as_the_counts() -> None:
    data = samples(3000)
    counts, table = class_counts(data), partition_table(data).to_pylist()
    assert [row["measure"] for row in table] == ["examples", "classes", *(f"class_{label}" for label in range(10))]
    for row, values in zip(table, [data.examples, (counts > 0).sum(axis=1), *counts.T], strict=True):
        assert row["clients_without"] == (values == 0).sum()
        assert row["mean"] == pytest.approx(values.mean())
        found = [row[name] for name in ("min", "p05", "p25", "median", "p75", "p95", "max")]
        assert found == np.quantile(values, [0, 0.05, 0.25, 0.5, 0.75, 0.95, 1]).tolist()
