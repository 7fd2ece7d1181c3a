"""Ratings as labelled samples: items, classes, users, held-out ratings, the model of them, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from digits import make_task
from narrowcast.platform.data.partition import IID
from narrowcast.platform.data.rated_items import RatedItems
from narrowcast.platform.errors import UserError
from narrowcast.platform.models.networks import ItemEmbedding
from narrowcast.platform.types import Chunk, LocalTerms

ROWS = "user,item,rating,timestamp\nb,7,3.5,30\na,7,1,20\na,9,2,10\nb,9,4,40\na,3,5,30\nb,3,2.5,40\n"
LAST = {"split": "last", "test_last": 1}


def rated(folder: Path, ratings: dict[str, Any] = LAST, **fields: Any) -> RatedItems:
    path = folder / "own.csv"
    path.write_text(ROWS)
    return RatedItems.model_validate({"ratings": {"path": path, **ratings}, "validation_share": 0.0, **fields})


def test_a_user_is_a_client_whose_last_ratings_are_held_out(tmp_path: Path) -> None:
    data = rated(tmp_path).load()
    # items 3, 7, 9 are 0 to 2; the stars 1, 2, 2.5, 3.5, 4, 5 are classes 0 to 5
    assert (data.n_items, data.n_classes, data.n_clients, data.targets) == (3, 6, 2, "classes")
    assert data.train.features.tolist() == [[2], [1], [1], [2]]
    assert data.train.labels.tolist() == [1, 0, 3, 4]
    assert [data.order[a:b].tolist() for a, b in zip(data.indptr, data.indptr[1:], strict=False)] == [[0, 1], [2, 3]]
    assert (data.test.features.tolist(), data.test.labels.tolist()) == ([[0], [0]], [5, 2])
    assert data.held_out_users["test"].tolist() == [0, 1]
    liked = rated(tmp_path, liked_from=3.5).load()
    assert (liked.n_classes, liked.train.labels.tolist(), liked.test.labels.tolist()) == (2, [0, 0, 1, 1], [1, 0])


def test_the_seed_chooses_users_or_deals_their_ratings(tmp_path: Path) -> None:
    assert {tuple(rated(tmp_path, clients=1, seed=seed).load().test.labels) for seed in range(8)} == {(5,), (2,)}
    dealt = rated(tmp_path, clients=4, partition=IID()).load()
    assert dealt.examples.tolist() == [1, 1, 1, 1]


@pytest.mark.parametrize(
    ("ratings", "fields", "message"),
    [
        ({**LAST, "validation_last": 1}, {}, "ratings.validation_last is not for rated_items; give data.validation_sh"),
        ({**LAST, "clients": 1}, {}, "ratings.clients is not for rated_items; give data.clients instead"),
        (LAST, {"clients": 3}, "own.csv has 2 users, but 3 clients are requested; lower clients"),
        (LAST, {"liked_from": 9}, "own.csv: all ratings are of one class; change data.liked_from"),
    ],
)
def test_what_is_refused(tmp_path: Path, ratings: dict[str, Any], fields: dict[str, Any], message: str) -> None:
    with pytest.raises((UserError, ValueError), match=message):
        rated(tmp_path, ratings, **fields).load()


def test_the_model_is_a_row_of_each_item_and_a_linear_layer(tmp_path: Path) -> None:
    data, model = rated(tmp_path).load(), ItemEmbedding(embedding_dim=2, hidden=(4,))
    module = model.module(data)
    rows, first, last = (layer.weight for layer in module if hasattr(layer, "weight"))
    hidden = torch.relu(rows[1] @ first.T + module[2].bias)
    torch.testing.assert_close(module(torch.tensor([[1]])), (hidden @ last.T + module[4].bias)[None])
    with pytest.raises(UserError, match=r"item_embedding takes items, and samples of .* are none; use mlp"):
        model.module(replace(data, n_items=0))


def test_clients_train_at_once_as_one_after_another(tmp_path: Path) -> None:
    data, model = rated(tmp_path).load(), ItemEmbedding(embedding_dim=2)
    server, chunk = model.init_server(data, 0), Chunk(1, 0, np.arange(2), {})
    results, modes = {}, {}
    for execution in ("auto", "per_client"):
        task = make_task(data, model, learning_rate=0.5, epochs=3, batch_size=1, execution=execution)
        results[execution] = task.training.train(server, chunk, task, LocalTerms()).changes
        modes[execution] = task.training.mode(task)
    assert modes == {"auto": "batched", "per_client": "per_client"}
    for name, changes in results["auto"].items():
        np.testing.assert_allclose(changes, results["per_client"][name], atol=1e-6)
    unrated = results["auto"]["0.weight"][:, 0]
    assert not unrated.any()  # an item that a client has not rated does not move


@pytest.mark.data("ml-100k")
def test_movielens_by_user() -> None:
    data = RatedItems(liked_from=4, seed=0, validation_share=0.2).load()
    assert (data.n_clients, data.n_items, data.n_classes) == (943, 1682, 2)
    assert [len(part) for part in (data.train, data.validation, data.test)] == [64_000, 16_000, 20_000]
    labels = np.concatenate([part.labels for part in (data.train, data.validation, data.test)])
    assert labels.sum() == 55_375  # of 100,000 ratings 34,174 have four stars and 21,201 five
