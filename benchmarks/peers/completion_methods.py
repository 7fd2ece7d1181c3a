"""Methods that complete a matrix, each tuned on the same entries with the same number of trials, then tested.

Runs in the environment of the library that the method comes from, which has to have no other part of this comparison.

    python completion_methods.py METHOD DATA FOLDER     # FOLDER has DATA-SEED.npz, prints a JSON line for each fit
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

TRIALS, TUNING_SEED, TEST_SEEDS = 12, 100, range(5)
_ITERATIONS = 20


@dataclass(frozen=True)
class Entries:
    """Entries of a matrix [p], and the sides of the matrix."""

    row: Any
    column: Any
    value: Any
    shape: tuple[int, int]

    def dense(self) -> Any:
        whole = np.full(self.shape, np.nan)
        whole[self.row, self.column] = self.value
        return whole


Fit = Callable[[Entries, Any, Any, dict[str, Any]], Any]
"""From observed entries, rows and columns to predict, and settings, to predictions."""


def of_narrowcast(solver: Any, decay: float | None, seen: Entries, row: Any, column: Any) -> Any:
    from narrowcast.platform.models.rating_baselines import biases_of
    from narrowcast.solves.completion_problems import Completion
    from narrowcast.solves.observed import observe

    mean, a, b = seen.value.mean(), np.zeros(seen.shape[0]), np.zeros(seen.shape[1])
    if decay is not None:
        a, b = biases_of(seen.row, seen.column, seen.value - mean, seen.shape, decay)
    values = seen.value - mean - a[seen.row] - b[seen.column]
    problem = Completion("peers", "", observe(*seen.shape, seen.row, seen.column, values))
    state = solver.init(problem, 0)
    for _ in range(_ITERATIONS):
        state, _ = solver.step(problem, state)
    answer = solver.answer(state)
    return mean + a[row] + b[column] + np.einsum("ek,ek->e", answer["left"][row], answer["right"][column])


def als(seen: Entries, row: Any, column: Any, settings: dict[str, Any]) -> Any:
    from narrowcast.solves.alternating import ALS

    own = {name: value for name, value in settings.items() if name != "bias_decay"}
    return of_narrowcast(ALS(**own), settings.get("bias_decay"), seen, row, column)


def soft_impute(seen: Entries, row: Any, column: Any, settings: dict[str, Any]) -> Any:
    from narrowcast.solves.thresholding import SoftImpute

    own = {name: value for name, value in settings.items() if name != "bias_decay"}
    return of_narrowcast(SoftImpute(**own), settings.get("bias_decay"), seen, row, column)


def of_surprise(algorithm: Any, seen: Entries, row: Any, column: Any) -> Any:
    import pandas as pd
    from surprise import Dataset, Reader

    table = pd.DataFrame({"user": seen.column, "item": seen.row, "rating": seen.value})
    scale = (seen.value.min(), seen.value.max())
    algorithm.fit(Dataset.load_from_df(table, Reader(rating_scale=scale)).build_full_trainset())
    return np.array([algorithm.predict(u, i).est for i, u in zip(row.tolist(), column.tolist(), strict=True)])


def surprise_svd(seen: Entries, row: Any, column: Any, settings: dict[str, Any]) -> Any:
    from surprise import SVD

    return of_surprise(SVD(random_state=0, **settings), seen, row, column)


def surprise_biases(seen: Entries, row: Any, column: Any, settings: dict[str, Any]) -> Any:
    from surprise import BaselineOnly

    return of_surprise(BaselineOnly({"method": "als", **settings}, verbose=False), seen, row, column)


def knn_imputer(seen: Entries, row: Any, column: Any, settings: dict[str, Any]) -> Any:
    from sklearn.impute import KNNImputer

    return KNNImputer(keep_empty_features=True, **settings).fit_transform(seen.dense())[row, column]


def grid(**values: list[Any]) -> list[dict[str, Any]]:
    return [dict(zip(values, each, strict=True)) for each in product(*values.values())]


Method = tuple[str, Fit, list[dict[str, Any]]]
"""The library of a method, its fit, and its `TRIALS` settings."""


def methods(data: str) -> dict[str, Method]:
    """Return the methods for ratings, or those for a picture."""
    found = of_ratings() if data == "ratings" else of_pictures()
    assert all(len(settings) == TRIALS for _, _, settings in found.values())
    return found


def of_ratings() -> dict[str, Method]:
    ridges = grid(rank=[10, 40], weight_decay=[0.1, 0.14, 0.2], bias_decay=[5.0, 10.0])
    penalties = np.geomspace(0.05, 0.4, TRIALS // 2).round(3).tolist()
    steps = grid(n_factors=[20, 100], reg_all=[0.02, 0.06, 0.1], lr_all=[0.005], n_epochs=[20, 60])
    return {
        "als": ("narrowcast", als, ridges),
        "soft_impute": ("narrowcast", soft_impute, grid(rank=[60], penalty=penalties, bias_decay=[5.0, 10.0])),
        "surprise_svd": ("scikit-surprise", surprise_svd, steps),
        "surprise_biases": ("scikit-surprise", surprise_biases, grid(reg_u=[5, 10, 15, 25], reg_i=[5, 10, 20])),
    }


def of_pictures() -> dict[str, Method]:
    shares = np.geomspace(0.002, 0.4, TRIALS).round(4).tolist()
    neighbours = [1, 2, 3, 5, 8, 12, 20, 30, 50, 80, 120, 200]
    return {
        "als": ("narrowcast", als, grid(rank=[5, 10, 20, 30], weight_decay=[0.003, 0.01, 0.03])),
        "soft_impute": ("narrowcast", soft_impute, grid(rank=[60], penalty=shares)),
        "knn_imputer": ("scikit-learn", knn_imputer, grid(n_neighbors=neighbours)),
    }


def fits(method: str, data: str, folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the error of each trial on a tenth of the observed entries of one seed, then the test errors of others."""
    _, fit, settings = methods(data)[method]

    def error(seen: Entries, held: tuple[Any, Any, Any], its: dict[str, Any]) -> dict[str, Any]:
        began = time.perf_counter()
        found = fit(seen, held[0], held[1], its)
        seconds = time.perf_counter() - began
        rmse = np.sqrt(np.mean((found.clip(seen.value.min(), seen.value.max()) - held[2]) ** 2))
        return {"settings": its, "rmse": float(rmse), "seconds": round(seconds, 2)}

    seen, _ = read(folder / f"{data}-{TUNING_SEED}.npz")
    out = np.random.default_rng(0).permutation(len(seen.value)) < len(seen.value) // 10
    less = Entries(seen.row[~out], seen.column[~out], seen.value[~out], seen.shape)
    tried = []
    for its in settings:
        tried.append(error(less, (seen.row[out], seen.column[out], seen.value[out]), its))
        yield {"split": "validation", "seed": TUNING_SEED, **tried[-1]}
    best = min(tried, key=lambda each: each["rmse"])["settings"]
    for seed in TEST_SEEDS:
        yield {"split": "test", "seed": seed, **error(*read(folder / f"{data}-{seed}.npz"), best)}


def read(path: Path) -> tuple[Entries, tuple[Any, Any, Any]]:
    with np.load(path) as file:
        seen = Entries(file["row"], file["column"], file["value"], tuple(file["shape"].tolist()))
        return seen, (file["test_row"], file["test_column"], file["test_value"])


if __name__ == "__main__":
    for each in fits(sys.argv[1], sys.argv[2], Path(sys.argv[3])):
        print(json.dumps(each), flush=True)
