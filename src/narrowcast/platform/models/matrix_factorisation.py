"""Matrix factorisation for implicit feedback; user factors never leave their client."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from narrowcast.platform.client_contracts import ClientSplit
from narrowcast.platform.contracts import Dataset, Split
from narrowcast.platform.data.interactions import NO_ITEM, Interactions
from narrowcast.platform.errors import UserError
from narrowcast.platform.section import Section
from narrowcast.platform.seeds import generator
from narrowcast.platform.types import Arrays, FloatArray, IntArray

ITEM_FACTORS, USER_FACTORS = "item_factors", "user_factors"
_USERS_AT_ONCE = 100  # their scores, or the rows gathered for them, fit in the processor's cache
_ITEMS_PER_CANDIDATE = 50  # up to here, scoring all items is faster than gathering the ranked ones


class MatrixFactorisation(Section):
    """The score of user u for item i is p_u . q_i; both factors start as N(0, 1/d), and there is no bias.

    Shapes: Q item_factors [N, d] is global; P user_factors [U, d] is private.
    """

    shares: ClassVar[frozenset[str]] = frozenset(("hr@10", "ndcg@10"))

    kind: Literal["matrix_factorisation"] = "matrix_factorisation"
    embedding_dim: int = Field(64, ge=1, le=1024, description="d, the length of user and item vectors")

    def check(self, data: Dataset) -> None:
        """Raise `UserError` unless the data are interactions."""
        if not isinstance(data, Interactions):
            raise UserError(
                f"model.kind = {self.kind} needs user-item interactions, but {data.name} has labelled samples; "
                "use another model or data set"
            )

    def init_server(self, data: Interactions, seed: int) -> Arrays:
        """Draw the item factors Q."""
        return {ITEM_FACTORS: self._draw(data.n_items, seed, ITEM_FACTORS)}

    def init_clients(self, data: Interactions, seed: int) -> Arrays:
        """Draw the user factors P."""
        return {USER_FACTORS: self._draw(data.n_users, seed, USER_FACTORS)}

    def _draw(self, rows: int, seed: int, purpose: str) -> np.ndarray[tuple[int, int], np.dtype[np.float32]]:
        draw = generator(seed, purpose).standard_normal((rows, self.embedding_dim), dtype=np.float32)
        return draw * np.float32(self.embedding_dim**-0.5)

    def evaluate(
        self, server: Arrays, clients: Arrays, data: Interactions, split: Literal["validation", "test"]
    ) -> Mapping[str, float]:
        """Return HR@10 and NDCG@10 of each user's held-out item among its 99 fixed negatives."""
        values = _gains(self.ranks(server, clients, data, split))
        return {name: float(each.mean()) for name, each in values.items() if len(each)}

    def baselines(self, data: Interactions) -> Mapping[str, Mapping[str, float]]:
        """Return the metrics of ranking items by their numbers of training interactions, the same for all users."""
        counts = np.bincount(data.items, minlength=data.n_items).astype(np.float32)
        factors = {ITEM_FACTORS: counts[:, None]}, {USER_FACTORS: np.ones((data.n_users, 1), dtype=np.float32)}
        splits: tuple[Split, Split] = ("test", "validation")
        found = {
            f"{split}.{name}": value for split in splits for name, value in self.evaluate(*factors, data, split).items()
        }
        return {"popularity": found}

    @property
    def client_parameters(self) -> frozenset[str]:
        """The arrays of the clients' state that `measure_clients` takes."""
        return frozenset((USER_FACTORS,))

    def measure_clients(
        self, parameters: Arrays, state: Arrays, data: Interactions, split: ClientSplit, clients: IntArray
    ) -> Mapping[str, FloatArray]:
        """Return HR@10, which is 0 or 1, and NDCG@10 of each user's held-out item, [C]; NaN without one."""
        targets = data.test if split == "test" else data.validation
        some = np.flatnonzero(targets[clients] != NO_ITEM)
        item_factors = torch.from_numpy(np.array(parameters[ITEM_FACTORS]))
        own = torch.from_numpy(np.array(state[USER_FACTORS]))
        ranks = np.empty(0, dtype=np.int64)
        if len(item_factors) == 1:
            ranks = _ranks(item_factors[0], own[some], _candidates(data, targets, clients[some]))
        elif len(some):
            parts = [slice(place, place + 1) for place in some.tolist()]
            each = [_ranks(item_factors[at][0], own[at], _candidates(data, targets, clients[at])) for at in parts]
            ranks = np.concatenate(each)
        measured = {name: np.full(len(clients), np.nan) for name in sorted(self.shares)}
        for name, values in _gains(ranks).items():
            measured[name][some] = values
        return measured

    def ranks(
        self, server: Arrays, clients: Arrays, data: Interactions, split: Literal["validation", "test"]
    ) -> IntArray:
        """Return the rank of each user's held-out item, 0 to 99, among its 99 fixed negatives; a tie ranks it last.

        The published ML-1M lists hold the test item itself among the negatives of 156 users; it then ties with itself
        and loses a place, here as in the code released with CoLR. Users without such an item are left out.

        Reference: He et al., Neural Collaborative Filtering, WWW 2017, section 4.1.
        """
        targets = data.test if split == "test" else data.validation
        users = np.flatnonzero(targets != NO_ITEM)
        item_factors = torch.from_numpy(np.array(server[ITEM_FACTORS]))
        user_factors = torch.from_numpy(np.array(clients[USER_FACTORS]))
        return _ranks(item_factors, user_factors[torch.from_numpy(users)], _candidates(data, targets, users))


def _candidates(data: Interactions, targets: IntArray, users: IntArray) -> IntArray:
    """Return the held-out item of each user and its negatives, [n, 100]."""
    return np.concatenate([targets[users, None], data.negatives[users]], axis=1)


def _ranks(item_factors: Tensor, user_factors: Tensor, candidates: IntArray) -> IntArray:
    """Return the rank of the first of each user's candidates [n, k] among them; user_factors [n, d]."""
    ranks = [torch.empty(0, dtype=torch.int64)]
    for start in range(0, len(candidates), _USERS_AT_ONCE):
        part = slice(start, start + _USERS_AT_ONCE)
        own, places = user_factors[part], torch.from_numpy(candidates[part])
        if len(item_factors) <= _ITEMS_PER_CANDIDATE * places.shape[1]:
            scores = (own @ item_factors.T).gather(1, places)
        else:
            scores = torch.bmm(item_factors[places], own.unsqueeze(2)).squeeze(2)
        ranks.append((scores[:, 1:] >= scores[:, :1]).sum(dim=1))
    return torch.cat(ranks).numpy()


def _gains(ranks: IntArray) -> dict[str, FloatArray]:
    """Return HR@10 and NDCG@10 of each rank."""
    hit = ranks < 10
    return {"hr@10": hit.astype(np.float64), "ndcg@10": np.where(hit, 1 / np.log2(ranks + 2.0), 0.0)}
