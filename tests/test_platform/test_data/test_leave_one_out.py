from collections import defaultdict

import numpy as np
import pytest

from narrowcast.platform.data.interactions import NO_ITEM, Events, IntArray, Interactions, Validation, leave_one_out
from narrowcast.platform.errors import UserError

Rows = tuple[IntArray, IntArray, IntArray]


def random_rows(seed: int = 1) -> Rows:
    """40 users with odd ids and 1-60 rows each out of 200 items, with repeats and many equal times."""
    random = np.random.default_rng(seed)
    users = np.repeat(7 + 3 * np.arange(40), random.integers(1, 61, 40))
    random.shuffle(users)
    return users, 5 * random.integers(0, 200, len(users)), random.integers(0, 50, len(users))


def split(rows: Rows, validation: Validation = "second_last", seed: int = 0, least: int = 20) -> Interactions:
    return leave_one_out("set", "test", Events(*rows), validation=validation, min_interactions=least, seed=seed)


def plain_split(rows: Rows, validation: Validation, least: int) -> list[tuple[list[int], int, int]]:
    """The same split, slowly: (training items, validation item, test item) of every user."""
    latest: dict[tuple[int, int], tuple[int, int]] = {}
    for row, (user, item, time) in enumerate(zip(*(column.tolist() for column in rows), strict=True)):
        latest[user, item] = max(latest.get((user, item), (time, row)), (time, row))
    history: dict[int, list[int]] = defaultdict(list)
    for (user, item), _ in sorted(latest.items(), key=lambda entry: entry[1]):
        history[user].append(item)
    kept = {user: items for user, items in sorted(history.items()) if len(items) >= least}
    number = {item: index for index, item in enumerate(sorted({i for items in kept.values() for i in items}))}
    result = []
    for items in kept.values():
        *train, test = (number[item] for item in items)
        held_out = train.pop() if validation == "second_last" else NO_ITEM
        result.append((sorted(train), held_out, test))
    return result


def as_lists(data: Interactions) -> list[tuple[list[int], int, int]]:
    return [
        (data.items[start:end].tolist(), int(held_out), int(test))
        for start, end, held_out, test in zip(
            data.indptr[:-1], data.indptr[1:], data.validation, data.test, strict=True
        )
    ]


@pytest.mark.parametrize("validation", ["second_last", "none"])
@pytest.mark.parametrize("least", [3, 20])
@pytest.mark.parametrize("seed", range(5))
def test_split_equals_a_plain_reference(validation: Validation, least: int, seed: int) -> None:
    rows = random_rows(seed)
    data = split(rows, validation, least=least)
    assert as_lists(data) == plain_split(rows, validation, least)
    assert data.n_items == 1 + max(max(*train, held, test) for train, held, test in as_lists(data))


def test_a_random_validation_item_leaves_training_and_the_rest_is_as_without() -> None:
    without, drawn = split(random_rows(), "none"), split(random_rows(), "random")
    for (before, _, test), (after, held_out, same_test) in zip(as_lists(without), as_lists(drawn), strict=True):
        assert sorted([*after, held_out]) == before
        assert test == same_test
    assert np.array_equal(without.negatives, drawn.negatives)
    last = split(random_rows(), "second_last")
    assert not np.array_equal(last.validation, drawn.validation)


@pytest.mark.parametrize("validation", ["second_last", "random", "none"])
def test_negatives_are_distinct_and_were_never_interacted_with(validation: Validation) -> None:
    data = split(random_rows(), validation)
    assert data.negatives.shape == (data.n_users, 99)
    for (train, held_out, test), row in zip(as_lists(data), data.negatives.tolist(), strict=True):
        assert len(set(row)) == 99
        assert not set(row) & {*train, held_out, test}
        assert 0 <= min(row) <= max(row) < data.n_items


def test_negatives_are_uniform_over_the_untouched_items() -> None:
    # 400 users have the same 20 items; four more bring the other 200 in.
    users = np.append(np.repeat(np.arange(400), 20), np.repeat(np.arange(400, 404), 50))
    items = np.append(np.tile(np.arange(20), 400), np.arange(20, 220))
    rows = users, items, np.zeros(8200, dtype=np.int64)
    drawn = np.bincount(split(rows).negatives[:400].ravel(), minlength=220)
    assert not drawn[:20].any()
    # Each of 200 items is drawn by a user with chance 99/200: mean 198, deviation 10.
    assert 150 < drawn[20:].min() < drawn[20:].max() < 246


def test_the_seed_decides_everything_that_is_drawn() -> None:
    first, again, other = (split(random_rows(), "random", seed) for seed in (0, 0, 1))
    assert first.digest == again.digest
    assert first.digest != other.digest
    assert np.array_equal(first.negatives, again.negatives)
    assert not np.array_equal(first.negatives, other.negatives)
    assert not np.array_equal(first.validation, other.validation)
    assert np.array_equal(first.test, other.test)


def test_equal_times_are_ordered_by_row_and_a_repeat_counts_at_its_last_time() -> None:
    items = np.array([4, 3, 2, 1, 0, *range(5, 205)])
    users = np.append(np.zeros(5, dtype=np.int64), np.repeat(np.arange(1, 6), 40))
    times = np.zeros(205, dtype=np.int64)
    data = split((users, items, times), least=3)
    assert (data.test[0], data.validation[0]) == (0, 1)
    repeated = np.append(users, 0), np.append(items, 4), np.append(times, 9)
    data = split(repeated, least=3)
    assert (data.test[0], data.validation[0]) == (4, 0)
    assert data.items[: data.indptr[1]].tolist() == [1, 2, 3]


def test_too_few_interactions_is_a_user_error() -> None:
    with pytest.raises(UserError, match=r"no user has 100 interactions \(the most is \d+\); lower min"):
        split(random_rows(), least=100)


def test_too_few_items_to_rank_against_is_a_user_error() -> None:
    rows = np.zeros(30, dtype=np.int64), np.arange(30), np.arange(30)
    with pytest.raises(UserError, match=r"user 0 .* leaves 0 of 30 items .* 99 are needed; use a data set with more"):
        split(rows)
