"""Splits that are given: one file of training rows, one of test items, and possibly one of validation items."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from narrowcast.platform.data.interactions import NO_ITEM, Interactions, row_starts
from narrowcast.platform.data.leave_one_out import Events, Validation, draw_negatives, hold_out, order_by_time
from narrowcast.platform.data.numbered_ids import NumberedIds
from narrowcast.platform.data.rating_table import RatingTable
from narrowcast.platform.errors import UserError
from narrowcast.platform.types import IntArray


def given_split(
    name: str,
    tables: Mapping[str, RatingTable],
    events: Events,
    users: NumberedIds,
    items: NumberedIds,
    *,
    validation: Validation,
    seed: int,
    n_negatives: int,
) -> Interactions:
    """Return the training rows `events` with the held-out items of the tables `test_path` and `validation_path`.

    Without the latter, validation items are taken from the training rows. Items are those of all files. Raise
    `UserError` that names a user who is unknown, has no test item or several, or is trained on an item held out.
    """
    known, train_users = np.unique(events.users, return_inverse=True)
    train = Events(train_users, events.items, events.timestamps)
    held_out = {
        field: _one_per_user(table, users, items, field, known) for field, table in tables.items() if field != "path"
    }
    test = held_out["test_path"]
    if (untested := np.flatnonzero(test == NO_ITEM)).size:
        raise UserError(
            f"{tables['test_path'].path}: has no row of user {users.ids[known[untested[0]]]}, one of {len(untested)} "
            "without a test item; give one row for each user of the training rows"
        )
    for field, held in held_out.items():
        if (leaked := np.flatnonzero(held[train_users] == train.items)).size:
            user, item = users.ids[events.users[leaked[0]]], items.ids[train.items[leaked[0]]]
            raise UserError(
                f"{tables[field].path}: item {item} of user {user} is in the training rows too, as are {len(leaked)} "
                "in all; remove them from the training rows"
            )
    given = held_out.get("validation_path")
    if given is not None and (same := np.flatnonzero(given == test)).size:
        raise UserError(
            f"{tables['validation_path'].path}: the item of user {users.ids[known[same[0]]]} is its test item too; "
            "hold out different items"
        )
    rows = order_by_time(train)
    n_items = len(items.ids)
    indptr, kept, drawn = hold_out(
        row_starts(train_users[rows], len(known)),
        train.items[rows],
        policy=validation if given is None else "none",
        n_items=n_items,
        seed=seed,
    )
    seen = [train_users * n_items + train.items]
    seen += [np.flatnonzero(held != NO_ITEM) * n_items + held[held != NO_ITEM] for held in held_out.values()]
    pairs = np.unique(np.concatenate(seen))
    return Interactions(
        name=name,
        source=str(tables["path"].path),
        n_items=n_items,
        indptr=indptr,
        items=kept,
        validation=drawn if given is None else given,
        test=test,
        negatives=draw_negatives(
            name,
            row_starts(pairs // n_items, len(known)),
            pairs % n_items,
            n_items=n_items,
            seed=seed,
            n_negatives=n_negatives,
        ),
    )


def _one_per_user(table: RatingTable, users: NumberedIds, items: NumberedIds, field: str, known: IntArray) -> IntArray:
    """Return the item of each known user, [U], `NO_ITEM` where the table has no row."""
    who = users.numbers[field]
    if (unknown := np.flatnonzero(~np.isin(who, known))).size:
        raise UserError(
            f"{table.path}: user {users.ids[who[unknown[0]]]} has no training row, nor have the users of "
            f"{len(unknown)} of {len(who)} rows; remove these rows"
        )
    counts = np.bincount(who, minlength=len(users.ids))
    if counts.max(initial=0) > 1:
        user = int(np.argmax(counts))
        raise UserError(f"{table.path}: user {users.ids[user]} has {counts[user]} rows; keep one row for each user")
    held_out = np.full(len(known), NO_ITEM, dtype=np.int64)
    held_out[np.searchsorted(known, who)] = items.numbers[field]
    return held_out
