"""HR@10 and NDCG@10 against a loop over users, by products with all items and by gathered rows."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from narrowcast.platform.models.factorisation import MatrixFactorisation
from narrowcast.platform.models.model import ITEM_FACTORS, USER_FACTORS
from per_client import synthetic


@pytest.mark.parametrize("n_items", [150, 1500], ids=["product", "gathered"])
def test_users_rank_their_held_out_item_among_its_negatives(n_items: int) -> None:
    data = synthetic([4] * 230, n_items=n_items)
    data.negatives[7, 3] = data.test[7]  # ties with itself, and loses
    model = MatrixFactorisation(embedding_dim=8)
    server, clients = model.init_server(data, 1), model.init_clients(data, 1)
    hits, gains = [], []
    for user, target in enumerate(data.test):
        scores = server[ITEM_FACTORS].astype(np.float64) @ clients[USER_FACTORS][user]
        rank = sum(scores[other] >= scores[target] for other in data.negatives[user])
        hits.append(rank < 10)
        gains.append(1 / np.log2(rank + 2) if rank < 10 else 0.0)
    assert model.evaluate(server, clients, data, "test") == pytest.approx(
        {"hr@10": np.mean(hits), "ndcg@10": np.mean(gains)}
    )
    assert 0.3 < np.mean(hits) < 0.7
    assert model.evaluate(server, clients, replace(data, validation=np.full(230, -1)), "validation") == {}
