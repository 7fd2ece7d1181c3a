"""Values that are not finite; changes of some rows, of clients in any order and of clients without rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from narrowcast.algorithms.client.sums import sum_of_rows
from narrowcast.platform.types import RowChanges, all_finite


@pytest.mark.parametrize(
    ("values", "finite"),
    [
        ([[1.0, -2.0], [0.0, 3.0]], True),
        ([1e38, -3e38], True),  # the sum of their squares is not
        ([1.0, np.nan], False),
        ([np.inf, -np.inf], False),
        ([], True),
    ],
)
def test_values_are_finite_if_each_is(values: Any, finite: bool) -> None:
    assert all_finite(np.array(values, dtype=np.float32)) is finite


DENSE = np.zeros((4, 5, 2), dtype=np.float32)
"""Changes of 5 rows by four clients: the first changes two, the second none, the third all, the last one."""
DENSE[0, [1, 4]], DENSE[2], DENSE[3, 0] = [[1, 2], [3, 4]], np.arange(1, 11).reshape(5, 2), [-5, 6]


def changes_in(order: list[int] | None) -> RowChanges:
    """Return the changes with the clients' rows in this order, None for that of the chunk."""
    rows = [np.flatnonzero(DENSE[client].any(axis=1)) for client in order or range(4)]
    values = [DENSE[client][own] for client, own in zip(order or range(4), rows, strict=True)]
    starts = np.cumsum([0, *map(len, rows)])
    return RowChanges(
        np.concatenate(rows), starts, np.concatenate(values), 5, None if order is None else np.array(order)
    )


@pytest.mark.parametrize("order", [None, [2, 0, 3, 1], [1, 3, 2, 0], [3, 2, 1, 0]])
def test_rows_are_those_of_their_clients_in_any_order(order: list[int] | None) -> None:
    changes = changes_in(order)
    assert np.array_equal(changes.dense(), DENSE)
    assert changes.counts.tolist() == [2, 0, 5, 1]
    assert [changes.of_client(client)[0].tolist() for client in range(4)] == [[1, 4], [], [0, 1, 2, 3, 4], [0]]
    assert np.bincount(changes.owners, minlength=4).tolist() == [2, 0, 5, 1]
    factors = np.array([2.0, 3.0, -1.0, 0.5])
    assert np.array_equal(changes.scaled(factors).dense(), factors[:, None, None] * DENSE)
    weight, delivered = np.array([1.0, 7.0, 2.0, 3.0], dtype=np.float32), np.array([True, True, False, True])
    assert np.array_equal(sum_of_rows(changes, weight, delivered), DENSE[0] + 3 * DENSE[3])


@pytest.mark.parametrize("order", [None, [2, 0, 3, 1]])
def test_whole_tensors_are_changes_of_all_rows_in_the_order_of_the_chunk(order: list[int] | None) -> None:
    whole = RowChanges.whole(changes_in(order).dense())
    assert whole.counts.tolist() == [5] * 4
    for client in range(4):
        rows, values = whole.of_client(client)
        assert rows.tolist() == [0, 1, 2, 3, 4]
        assert np.array_equal(values, DENSE[client])
