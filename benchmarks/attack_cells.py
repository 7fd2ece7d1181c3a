"""The cells of the table of attacks: a mode, a cohort and a number of rounds, on some users of MovieLens-100K."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import numpy as np

from narrowcast.experiment import Experiment, load_experiment
from narrowcast.platform.data.interactions import Interactions
from narrowcast.platform.types import FloatArray
from narrowcast.runs.attack_trial import AttackResult, attack_run

_FEDMF = "algorithm={kind: fedmf}"
MODES: dict[str, tuple[str, ...]] = {
    "none": (_FEDMF,),
    "none, rows: all": ("algorithm={kind: fedmf, rows: all, aggregation: weighted}",),
    "none, coded": ("algorithm={kind: fedmf, codec: [{kind: quantise, levels: 7}, entropy]}",),
    "none, shared negatives": (
        "algorithm={kind: fedmf, codec: [{kind: quantise, levels: 7}, entropy]}",
        "training.shared_negatives=true",
    ),
    "plain": (_FEDMF, "secure={kind: plain}"),
    "masked": (_FEDMF, "secure={kind: masked}"),
    "masked, unequal ranks": (
        "algorithm={kind: scolr, rank: 8, rank_policy: uniform}",
        "secure={kind: masked}",
    ),
    "ckks, smallest_count": (_FEDMF, "secure={kind: ckks, bits: 16, smallest_count: 3}"),
}
"""The settings of each mode. `ckks` alone opens the same sums as `masked`, to the bit."""
READABLE = frozenset(mode for mode in MODES if mode.startswith(("none", "plain")))
"""The modes in which the server reads each client's rows and values."""


def cell_experiment(mode: str, cohort: int, rounds: int, *settings: str) -> Experiment:
    """Return the experiment of a cell."""
    small = ["model.embedding_dim=16", f"rounds={rounds}", f"clients_per_round={cohort}", f"evaluate_every={rounds}"]
    return load_experiment("scolr-ml100k", [*MODES[mode], *small, "backend=local", *settings])


def measure_cell(mode: str, cohort: int, rounds: Sequence[int], *settings: str) -> list[AttackResult]:
    """Return the results of all attacks after each number of rounds.

    Readable uploads are attacked where every client takes part in every round; sums where a round draws half of them.
    """
    experiment = cell_experiment(mode, cohort, max(rounds), *settings)
    data, popularity = some_users(cohort if mode in READABLE else 2 * cohort)
    return attack_run(experiment, data, rounds, popularity)


def some_users(count: int) -> tuple[Interactions, FloatArray]:
    """Return the data of users drawn at random, and the popularity of the items among all others, [N]."""
    data = _movielens()
    users = np.sort(np.random.default_rng(0).choice(data.n_users, count, replace=False))
    items = [data.items[data.indptr[user] : data.indptr[user + 1]] for user in users]
    few = replace(
        data,
        indptr=np.concatenate([[0], np.cumsum([len(each) for each in items])]),
        items=np.concatenate(items),
        validation=data.validation[users],
        test=data.test[users],
        negatives=data.negatives[users],
    )
    everyone = np.bincount(data.items, minlength=data.n_items)
    return few, (everyone - np.bincount(few.items, minlength=data.n_items)).astype(np.float64)


@cache
def _movielens() -> Interactions:
    data = load_experiment("scolr-ml100k").data_source.load()
    assert isinstance(data, Interactions)
    return data
