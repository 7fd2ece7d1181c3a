"""FedMAvg against a slow loop over Algorithm 1, its senders, its sets, its codecs; SFMF against the released code."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from narrowcast.algorithms.federated.fedmavg import FedMAvg
from narrowcast.algorithms.local_training.ratings import AlternatingGradient
from narrowcast.experiment import build_experiment
from narrowcast.laws.small_tasks import rating_matrix
from narrowcast.platform.contracts import Task
from narrowcast.platform.data.rating_matrix import RatingMatrix
from narrowcast.platform.errors import UserError
from narrowcast.platform.models.factorisation import COLUMN_FACTORS, ROW_FACTORS, ConstraintSet, MaskedFactorisation
from narrowcast.platform.rounds.fleet import Tiers
from narrowcast.platform.rounds.outcome import Outcome
from narrowcast.platform.rounds.plan import Plan
from narrowcast.platform.rounds.state import Run, start
from narrowcast.platform.seeds import PrivateSeed, generator

DATA = rating_matrix(np.arange(3, 14))
PLAN = Plan(rounds=4, clients_per_round=99, chunk_size=4, checkpoint_every=1, evaluate_every=4)
SEVERAL = AlternatingGradient(h_steps=3, w_steps=5, gamma1=1.5, gamma2=1.2, weight_decay=0.3)
ONE = AlternatingGradient(h_steps=1, w_steps=0, gamma1=2, gamma2=1)


def outcomes(algorithm: Any, model: Any, training: Any, data: RatingMatrix = DATA, plan: Plan = PLAN) -> list[Outcome]:
    fleet = Tiers().profiles(data.examples, plan.seed)
    task = Task(data, fleet, model, training, plan.seed, PrivateSeed.derived(plan.seed))
    run = Run(plan, algorithm, task)
    run.check()
    backend = build_experiment({"name": "x", "data": "digits", "algorithm": "fedavg"}, "x").backend
    return list(backend.run(run, start(run)))


def plain_fedmavg(
    algorithm: FedMAvg, model: MaskedFactorisation, training: AlternatingGradient, data: RatingMatrix, plan: Plan
) -> tuple[Any, Any]:
    """Algorithm 1 with dense masks, client by client and column by column."""
    x, mask = np.zeros((data.n_items, data.n_users)), np.zeros((data.n_items, data.n_users))
    users, items, values = data.part("train")
    x[items, users], mask[items, users] = values - model.offset(data), 1
    w = model.init_server(data, plan.seed)[ROW_FACTORS]
    h = model.init_clients(data, PrivateSeed.derived(plan.seed).value)[COLUMN_FACTORS][data.owners, data.places].T
    omega = np.bincount(data.owners).astype(float)
    decay = training.weight_decay
    for s in range(1, plan.rounds + 1):
        ws = []
        for p in range(data.n_clients):
            own = np.flatnonzero(data.owners == p)
            xp, mp, hp, wp = x[:, own], mask[:, own], h[:, own], w.copy()
            grams = [(w * mp[:, [j]]).T @ (w * mp[:, [j]]) for j in range(len(own))]
            c = training.gamma1 / 2 * 2 * (max(np.linalg.eigvalsh(gram)[-1] for gram in grams) + decay)
            for _ in range(training.h_steps):
                hp = model.h_set.project((hp - (2 * w.T @ (mp * (w @ hp - xp)) + 2 * decay * hp) / c).T).T
            rows = mp.any(axis=1)
            l_w = min(np.linalg.eigvalsh(hp @ hp.T)[-1], (mp * (hp**2).sum(axis=0)).sum(axis=1).max())
            d = training.gamma2 * 2 * (l_w + decay)
            for _ in range(training.w_steps // s + 1):
                gradient = 2 * (mp * (wp @ hp - xp)) @ hp.T + 2 * decay * wp * rows[:, None]
                wp = wp - gradient / d
            h[:, own] = hp
            ws.append(wp)
        if algorithm.senders is None:
            mean = np.einsum("p,pnk->nk", omega / omega.sum(), np.array(ws))
        else:
            random = generator(plan.seed, "senders", s)
            drawn = random.choice(data.n_clients, algorithm.senders, p=omega / omega.sum())
            mean = np.mean([ws[p] for p in drawn], axis=0)
        w = model.w_set.project_w(mean)
    return w, h


@pytest.mark.parametrize("training", [SEVERAL, ONE], ids=["several steps", "one step"])
@pytest.mark.parametrize("senders", [None, 5, 40])
@pytest.mark.parametrize("sets", [("none", "none"), ("nonnegative", "simplex")])
def test_equals_algorithm_1(training: AlternatingGradient, senders: int | None, sets: tuple[str, str]) -> None:
    w_set, h_set = (ConstraintSet.model_validate(each) for each in sets)
    model = MaskedFactorisation(rank=3, dtype="float64", w_set=w_set, h_set=h_set)
    algorithm = FedMAvg(senders=senders)
    last = outcomes(algorithm, model, training)[-1]
    assert last.state is not None
    w, h = plain_fedmavg(algorithm, model, training, DATA, PLAN)
    assert np.abs(last.state.server[ROW_FACTORS] - w).max() < 1e-12
    columns = last.state.clients[COLUMN_FACTORS][DATA.owners, DATA.places]
    assert np.abs(columns - h.T).max() < 1e-12


def test_all_columns_observed_take_one_constant() -> None:
    users, items = (each.ravel() for each in np.meshgrid(np.arange(6), np.arange(5), indexing="ij"))
    values = np.random.default_rng(0).random(30)
    split, owners = np.zeros(30, dtype=np.int8), np.array([0, 0, 1, 1, 2, 0])
    data = RatingMatrix("full", "random", 6, 5, users, items, values, split, owners)
    model = MaskedFactorisation(rank=2, dtype="float64")
    last = outcomes(FedMAvg(), model, SEVERAL, data)[-1]
    assert last.state is not None
    w, _ = plain_fedmavg(FedMAvg(), model, SEVERAL, data, PLAN)
    assert data.is_complete
    assert np.abs(last.state.server[ROW_FACTORS] - w).max() < 1e-12


def test_clients_that_are_not_drawn_send_nothing_and_learn_their_columns() -> None:
    one, first = outcomes(FedMAvg(senders=1), MaskedFactorisation(rank=3), SEVERAL)[0], None
    assert int((one.ledger.uplink_bits > 0).sum()) == int(one.ledger.delivered.sum()) == 1
    assert one.state is not None
    first = MaskedFactorisation(rank=3).init_clients(DATA, PrivateSeed.derived(0).value)[COLUMN_FACTORS]
    moved = (one.state.clients[COLUMN_FACTORS] != first).any(axis=(1, 2))
    assert moved.all()


@pytest.mark.parametrize("rows", ["all", "touched"])
def test_rows_alone_give_the_same_model_in_fewer_bits(rows: Any) -> None:
    model = MaskedFactorisation(rank=3)
    whole, some = (outcomes(FedMAvg(rows=each), model, SEVERAL)[-1] for each in ("all", rows))
    assert whole.state is not None
    assert some.state is not None
    assert np.array_equal(whole.state.server[ROW_FACTORS], some.state.server[ROW_FACTORS])
    assert (some.record.uplink_bits < whole.record.uplink_bits) == (rows == "touched")


def test_through_codecs_and_grids() -> None:
    model = MaskedFactorisation(rank=3)
    exact = outcomes(FedMAvg(), model, SEVERAL)[-1]
    for fields in (
        {"codec": [{"kind": "quantise", "levels": 2**14, "scale": "max"}]},
        {"codec": [{"kind": "quantise", "levels": 2**14, "scale": "max"}], "rows": "touched"},
        {"codec": ["error_feedback", {"kind": "top_k", "fraction": 0.3}]},
        {"download": {"step": 1e-3}},
    ):
        coded = outcomes(FedMAvg.model_validate(fields), model, SEVERAL)[-1]
        assert coded.state is not None
        assert exact.state is not None
        gap = np.abs(coded.state.server[ROW_FACTORS] - exact.state.server[ROW_FACTORS]).max()
        assert 0 < gap < 0.3, fields


@pytest.mark.parametrize("kind", ["nonnegative", "box", "ball", "simplex", "orthogonal_nonnegative"])
def test_a_projection_is_the_nearest_point_of_its_set(kind: Any) -> None:
    random = np.random.default_rng(0)
    chosen = ConstraintSet(kind=kind, low=-0.2, high=0.4, radius=1.3)
    vectors = random.standard_normal((50, 4))
    nearest = chosen.project(vectors)
    assert np.allclose(chosen.project(nearest), nearest, atol=1e-12)
    for _ in range(200):
        other = chosen.project(random.standard_normal((50, 4)) * random.choice([0.3, 1, 3]))
        distances = (np.linalg.norm(each - vectors, axis=1) for each in (nearest, other))
        closest, far = distances
        assert (closest <= far + 1e-9).all()
    if kind == "simplex":
        assert np.allclose(nearest.sum(axis=1), 1.3)
    if kind == "orthogonal_nonnegative":
        assert ((nearest > 0).sum(axis=1) <= 1).all()


def test_wrong_settings_are_one_line() -> None:
    small, float64 = MaskedFactorisation(rank=3), MaskedFactorisation(rank=3, dtype="float64")
    for algorithm, model, said in (
        (FedMAvg(), MaskedFactorisation(rank=30), "model.rank = 30: tiny has 40 rows and 15 columns; use at most 15"),
        (FedMAvg(rows="touched"), float64, "algorithm.rows = touched sends float32"),
    ):
        with pytest.raises(UserError, match=said):
            outcomes(algorithm, model, SEVERAL)
    experiment = {"name": "x", "data": {"kind": "explicit_ratings", "set": "ml-100k"}}
    for algorithm, said in (
        ("fedavg", "fedavg does not train masked_factorisation by alternating_gradient; use fedmavg or sfmf"),
        ("fedmf", "fedmf"),
        ("sfmf", "use training.kind = rating_sgd"),
    ):
        built = build_experiment({**experiment, "algorithm": algorithm}, "x")
        with pytest.raises(UserError, match=said):
            built.task(built.data_source.load())
    assert replace(DATA, name="x").n_clients == small.init_clients(DATA, 0)[COLUMN_FACTORS].shape[0]


EXCERPT = {
    "data": {
        "kind": "explicit_ratings",
        "set": "ml-latest-small",
        **{"first_users": 10, "top_items": 40, "min_ratings": 5, "split": "last", "test_last": 3},
    },
    "model": {"rank": 100, "initial": "constant", "initial_scale": 0.01, "centred": False, "dtype": "float64"},
    "training": {"kind": "rating_sgd"},
    **{"clients_per_round": 10, "rounds": 175, "evaluate_every": 175, "backend": {"kind": "local"}},
}


@pytest.mark.data("ml-latest-small")
@pytest.mark.parametrize("rows", ["all", "touched"])
def test_sfmf_gives_the_numbers_of_the_released_code(rows: str) -> None:
    model = {**EXCERPT["model"], "dtype": "float32" if rows == "touched" else "float64"}  # type: ignore[dict-item]
    built = build_experiment({"name": "x", **EXCERPT, "model": model, "algorithm": {"kind": "sfmf", "rows": rows}}, "x")
    run = Run(built, built.algorithm, built.task(built.data_source.load()))
    last = list(built.backend.run(run, start(run)))[-1]
    # An encrypted run of theirs has 1.3965372 with values rounded to 1e-5.
    assert last.metrics["test.rmse"] == pytest.approx(1.3965415543969, abs=1e-12 if rows == "all" else 2e-6)
