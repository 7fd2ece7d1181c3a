"""SFMF on the excerpt of its released code: the central program, and the federated one in the clear and encrypted.

Reference: Chai et al., Secure Federated Matrix Factorization, IEEE Intelligent Systems 2020 (arXiv:1906.05108); the
released code and its logs (Di-Chai/FedMF): the 40 items of MovieLens latest-small with the most ratings, the seven of
the first ten users with five of them or more, the last three of each user for testing. Both factors begin at 0.01, so
that all 100 columns stay equal: it is a model of rank 1.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from narrowcast.platform.data.explicit_ratings import ExplicitRatings
from narrowcast.platform.types import FloatArray
from narrowcast.reproduce.run_spec import RunSpec

STUDY = "sfmf"
ROUNDS, RANK, START, RATE, DECAY = 175, 100, 0.01, 1e-3, 1e-4
EXCERPT = "set: ml-latest-small, first_users: 10, top_items: 40, min_ratings: 5, split: last, test_last: 3"
_INTEGERS = "bits: 20, clip: 0.0625, rounding: nearest"


@dataclass(frozen=True)
class SFMFSetting:
    """One way to send the gradients; `published`: the error in the log of the released code, if it has one."""

    name: str
    rows: str = "all"
    dtype: str = "float64"
    secure: str = "none"
    published: float | None = None

    @property
    def run(self) -> RunSpec:
        """The run of this setting."""
        return RunSpec(
            f"{STUDY}-{self.name.replace(' ', '-').replace(',', '')}",
            "fedavg-digits",
            (
                f"data={{kind: explicit_ratings, {EXCERPT}}}",
                f"model={{kind: masked_factorisation, rank: {RANK}, centred: false, initial: constant, "
                f"initial_scale: {START}, dtype: {self.dtype}}}",
                f"algorithm={{kind: sfmf, rows: {self.rows}}}",
                f"training={{kind: rating_sgd, learning_rate: {RATE}, weight_decay: {DECAY}}}",
                f"secure={self.secure}",
                "clients_per_round=7",
                "sampling=uniform",
                f"rounds={ROUNDS}",
                f"evaluate_every={ROUNDS}",
                "checkpoint_seconds=100000",
            ),
            most_seeds=1,
        )


SETTINGS = (
    SFMFSetting("full, float64", published=1.3965372),
    SFMFSetting("part, float32", "touched", "float32", published=1.3965372),
    *(
        SFMFSetting(f"full, {scheme}", secure=f"{{kind: {scheme}, {_INTEGERS}}}", published=published)
        for scheme, published in (("plain", None), ("masked", None), ("ckks", None), ("paillier", 1.3965372))
    ),
)
"""Nothing is drawn at random but masks, keys and noise, which leave the model as it is: one seed."""


@dataclass(frozen=True)
class Central:
    """The central program after its last iteration: mean squared training error, and root of the test one."""

    loss: float
    rmse: float


def run_central() -> Central:
    """Take the steps of all users on one pair of factors, rating by rating, in the order of users and times."""
    fields = {"first_users": 10, "top_items": 40, "min_ratings": 5, "split": "last", "test_last": 3}
    data = ExplicitRatings.model_validate({"set": "ml-latest-small", **fields}).load()
    h, w = np.full((data.n_users, RANK), START), np.full((data.n_items, RANK), START)
    train, test = data.part("train"), data.part("test")
    for _ in range(ROUNDS):
        for user, item, value in zip(*(column.tolist() for column in train), strict=True):
            error = value - h[user] @ w[item]
            h[user] = h[user] - RATE * (-2 * error * w[item] + 2 * DECAY * h[user])
            w[item] = w[item] - RATE * (-2 * error * h[user] + 2 * DECAY * w[item])

    def squares(users: object, items: object, values: FloatArray) -> FloatArray:
        return np.square([value - h[u] @ w[i] for u, i, value in zip(users, items, values, strict=True)])  # type: ignore[call-overload]

    return Central(float(np.mean(squares(*train))), float(np.sqrt(np.mean(squares(*test)))))
