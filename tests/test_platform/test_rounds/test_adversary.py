"""Attackers in a run: who they are, what they change, what they know, and that nothing else is affected by them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import narrowcast as nc
import short_runs
from narrowcast.experiment import Experiment, load_experiment
from narrowcast.platform.data.samples import Samples
from narrowcast.platform.errors import UserError
from narrowcast.platform.rounds.evaluation import measure_clients, model_sha256
from narrowcast.platform.rounds.loop import LocalExecutor, lockstep, rounds
from narrowcast.platform.rounds.outcome import Outcome
from narrowcast.platform.rounds.state import LiveState, Run
from narrowcast.platform.types import Chunk

CLIENTS = 10
SETTINGS: dict[str, Any] = {
    **{"data": {"kind": "digits", "clients": CLIENTS, "partition": {"kind": "dirichlet", "alpha": 1.0}}},
    **{"model": {"kind": "mlp", "hidden": [8]}, "rounds": 3, "clients_per_round": 8, "chunk_size": 3, "seed": 4},
    **{"training": {"epochs": 2, "learning_rate": 0.2}, "checkpoint_every": 1, "evaluate_every": 3},
}
ATTACKERS = (1, 4, 6, 9)


def experiment(attack: Any = None, **more: Any) -> Experiment:
    attack = attack if attack is None or "attackers" in attack else {**attack, "attackers": ATTACKERS}
    return load_experiment({"name": "attacked", "algorithm": "fedavg", **SETTINGS, "attack": attack, **more})


@cache
def digits() -> Samples:
    data: Samples = experiment().data_source.load()
    return data


def run_of(of: Experiment) -> Run:
    return Run(of, of.secured_algorithm, of.task(digits()))


def finished(of: Experiment) -> list[Outcome]:
    run = run_of(of)
    run.check()
    return list(rounds(run, LocalExecutor(run)))


def sha(of: Experiment, outcomes: Sequence[Outcome]) -> str:
    state = outcomes[-1].state
    assert state is not None
    return model_sha256(of.secured_algorithm, state)


def vectors(of: Experiment, clients: Any) -> Any:
    """The true changes of clients in round 1, each trained by itself as an honest client."""
    run = run_of(experiment(**{"algorithm": of.algorithm.model_dump()}))
    algorithm: Any = run.algorithm
    broadcast = algorithm.broadcast(algorithm.init(run.task), run.task, 1).arrays
    rows = []
    for client in clients:
        updates = algorithm.each_update(broadcast, Chunk(1, 0, np.array([client]), {}), run.task)
        rows.append(np.concatenate([updates.changes[name].ravel() for name in sorted(updates.changes)]))
    return np.stack(rows).astype(np.float64)


def moved(of: Experiment, outcome: Outcome) -> Any:
    """How far the model moved in round 1, as a vector."""
    run, state = run_of(of), outcome.state
    assert state is not None
    before, after = run.algorithm.init(run.task), state.server
    return np.concatenate([(after[name] - before[name]).ravel() for name in sorted(before)]).astype(np.float64)


def claims_of(name: str, own: Any, others: Any, w: Any, v: Any) -> tuple[Any, Any]:
    """An attack, and what attackers with changes `own` and weights w claim among others with weights v."""
    match name:
        case "own":
            return {"kind": "sign_flip", "scale": 2}, -2 * own
        case "all":
            return {"kind": "inner_product", "scale": 0.5}, 0 * own - 0.5 * others.mean(0)
        case "group":
            return {"kind": "alie", "view": "group", "z": 1.5}, 0 * own + own.mean(0) - 1.5 * own.std(0)
        case "omniscient":
            return {"kind": "omniscient"}, own - 2 * (w @ own + v @ others) / w.sum()
        case _:
            return {"kind": "replacement"}, own * (w.sum() + v.sum()) / w.sum()


@pytest.mark.parametrize("weights", ["examples", "equal"])
@pytest.mark.parametrize("name", ["own", "all", "group", "omniscient", "replacement"])
@pytest.mark.parametrize("chunk_size", [2, 30])
def test_the_mean_has_the_claims_of_attackers_in_place_of_what_they_learnt(
    name: str, weights: Any, chunk_size: int
) -> None:
    attack, _ = claims_of(name, np.ones((1, 1)), np.ones((1, 1)), np.ones(1), np.ones(1))
    of = experiment(attack, algorithm={"kind": "fedavg", "weights": weights}, rounds=1, chunk_size=chunk_size)
    (outcome,) = finished(of)
    cohort = outcome.ledger.client
    attacks = np.isin(cohort, ATTACKERS)
    assert 2 <= attacks.sum() < len(cohort) - 2
    true = vectors(of, cohort)
    weight = digits().examples[cohort].astype(float) if weights == "examples" else np.ones(len(cohort))
    changes = true.copy()
    changes[attacks] = claims_of(name, true[attacks], true[~attacks], weight[attacks], weight[~attacks])[1]
    np.testing.assert_allclose(moved(of, outcome), np.average(changes, axis=0, weights=weight), atol=2e-6)
    assert outcome.record.metrics == {"attackers": attacks.sum()}


def test_noise_is_the_attackers_own_and_another_in_each_round() -> None:
    attack = {"kind": "gaussian", "standard_deviation": 3.0}
    of = experiment(attack, algorithm={"kind": "fedavg", "weights": "equal"}, rounds=2)
    first, second = finished(of)
    moves = []
    for outcome, before in ((first, None), (second, first)):
        cohort = outcome.ledger.client
        noise = np.isin(cohort, ATTACKERS).sum() ** 0.5 * 3 / len(cohort)
        state, start = outcome.state, None if before is None else before.state
        assert state is not None
        began = run_of(of).algorithm.init(run_of(of).task) if start is None else start.server
        move = np.concatenate([(state.server[name] - began[name]).ravel() for name in sorted(began)])
        assert move.std() == pytest.approx(noise, rel=0.15)
        moves.append(move)
    assert abs(np.corrcoef(moves)[0, 1]) < 0.2


def test_attackers_that_wait_leave_no_trace() -> None:
    honest, waiting = experiment(), experiment({"kind": "trigger", "size": 2, "first_round": 4})
    before, after = finished(honest), finished(waiting)
    assert sha(honest, before) == sha(waiting, after)
    for honest_round, waiting_round in zip(before, after, strict=True):
        for name in ("uplink_bits", "downlink_bits", "examples", "seconds", "loss"):
            assert np.array_equal(getattr(honest_round.ledger, name), getattr(waiting_round.ledger, name))
        assert (honest_round.record.metrics, waiting_round.record.metrics) == ({}, {"attackers": 0.0})


@pytest.mark.parametrize("kind", ["label_flip", "sign_flip"])
def test_attackers_are_honest_until_their_first_round_and_in_between(kind: str) -> None:
    settings = {"rounds": 6, "clients_per_round": CLIENTS}
    honest = finished(experiment(**settings))
    attacked = finished(experiment({"kind": kind, "first_round": 3, "every": 2}, **settings))
    counts = [outcome.record.metrics["attackers"] for outcome in attacked]
    assert counts == [0, 0, 4, 0, 4, 0]
    same = [sha(experiment(), honest[: index + 1]) == sha(experiment(), attacked[: index + 1]) for index in range(6)]
    assert same == [True, True, False, False, False, False]


@pytest.mark.parametrize("attack", [{"kind": "label_flip"}, {"kind": "sign_flip"}, {"kind": "alie", "z": 1.0}])
@pytest.mark.parametrize(
    "more",
    [
        {},
        {"algorithm": {"kind": "fedavg", "codec": [{"kind": "quantise", "levels": 7}]}},
        {"algorithm": {"kind": "fedavg", "codec": ["error_feedback", {"kind": "top_k", "fraction": 0.05}]}},
        {"algorithm": "scaffold"},
        {"algorithm": "ditto"},
        {"algorithm": {"kind": "fedavg", "aggregator": "median"}},
        {"over_selection": 1.25, "clients_per_round": 6},
    ],
    ids=["plain", "quantised", "top-k", "scaffold", "ditto", "median", "late"],
)
def test_a_run_goes_on_from_any_round_to_the_same_end(attack: Any, more: Any) -> None:
    of = experiment(attack, **more)
    run = run_of(of)
    run.check()
    whole = list(rounds(run, LocalExecutor(run)))
    rest = list(rounds(run, LocalExecutor(run), whole[0].state))
    assert sha(of, rest) == sha(of, whole)
    assert sha(of, whole) != sha(of, whole[:1])
    assert rest[-1].record.uplink_bits == whole[-1].record.uplink_bits


@pytest.mark.parametrize("aggregator", [None, {"kind": "geometric_median", "iterations": 3, "nu": 0.05}])
def test_secure_sums_have_the_claims_of_attackers(aggregator: Any) -> None:
    algorithm = {"kind": "fedavg", "aggregator": aggregator}
    plain, masked = (
        experiment({"kind": "alie", "z": 1.5}, rounds=1, algorithm=algorithm, secure=secure)
        for secure in ("none", {"kind": "masked", "bits": 32})
    )
    run = run_of(masked)
    secure = run.algorithm.secure_sums
    assert secure is not None
    store = secure.key_store()
    (outcome,) = rounds(run, LocalExecutor(run, store), None, secure.rounds(store, run.task))
    (wanted,) = finished(plain)
    difference = moved(masked, outcome) - moved(plain, wanted)
    assert np.abs(difference).max() < 1e-4 < np.abs(moved(plain, wanted)).max()
    assert outcome.record.metrics == wanted.record.metrics


def test_replicas_in_lockstep_have_the_attackers_that_they_have_alone() -> None:
    pair = [experiment({"kind": "label_flip"}), experiment({"kind": "alie", "z": 1.0})]
    *_, last = lockstep([run_of(of) for of in pair])
    for index, of in enumerate(pair):
        outcome = last[index]
        assert isinstance(outcome, Outcome)
        assert sha(of, [outcome]) == sha(of, finished(of))


def test_clients_are_judged_without_the_attackers() -> None:
    of = experiment({"kind": "sign_flip"}, evaluate_clients=["test"], algorithm="ditto")
    run = run_of(of)
    *_, last = finished(of)
    assert last.state is not None
    measures = measure_clients(LiveState.of(run, last.state))
    for values in measures.values():
        assert np.isnan(values[list(ATTACKERS)]).all()
        assert np.isfinite(np.delete(values, ATTACKERS)).any()
    honest = np.delete(measures["test.accuracy"], ATTACKERS)
    assert last.metrics["test.accuracy.mean"] == pytest.approx(np.nanmean(honest))


@pytest.mark.parametrize("kind", ["random_labels", "sign_flip"])
def test_no_attacker_reaches_clients_that_train_alone(kind: str) -> None:
    settings: dict[str, Any] = {"algorithm": "local", "evaluate_clients": ["test"]}
    measures = []
    for of in (experiment(**settings), experiment({"kind": kind}, **settings)):
        *_, last = finished(of)
        measures.append(last.client_metrics["test.accuracy"])
    honest = np.delete(np.arange(CLIENTS), ATTACKERS)
    assert np.array_equal(measures[0][honest], measures[1][honest], equal_nan=True)
    assert np.isnan(measures[1][list(ATTACKERS)]).all()


@pytest.mark.slow
def test_success_is_recorded_beside_the_accuracy_of_clean_images(tmp_path: Path) -> None:
    trigger = {"kind": "trigger", "size": 1, "attackers": 0.4}
    *_, last = finished(experiment(trigger, rounds=60, evaluate_every=60, clients_per_round=CLIENTS))
    assert last.metrics["attack.success"] > 0.8
    assert last.metrics["test.accuracy"] > 0.8
    of_run = nc.run(experiment(trigger, rounds=1), output=tmp_path)
    (axes,) = nc.compare([of_run]).figure(["round"], "attack.success").axes
    assert axes.get_ylabel() == "attack success (%)"
    assert ("attack success", f"{100 * of_run.final['attack.success']:.2f} %") in of_run.summary()
    *_, without = finished(experiment({**trigger, "first_round": 100}, rounds=60, evaluate_every=60))
    assert without.metrics["attack.success"] < 0.3


def test_attackers_within_a_radius_end_on_a_ball_around_the_model_and_scale_what_they_have_learnt() -> None:
    of = experiment({"kind": "trigger", "size": 1, "radius": 0.02, "pull": 0.5, "factor": 7.0})
    run = run_of(of)
    algorithm: Any = run.algorithm
    broadcast = algorithm.broadcast(algorithm.init(run.task), run.task, 1).arrays
    chunk = Chunk(1, 0, np.arange(CLIENTS), {})
    learnt = algorithm.each_update(broadcast, chunk, run.task)
    claimed = algorithm.tamper(broadcast, chunk, run.task, learnt)
    honest = np.setdiff1d(np.arange(CLIENTS), ATTACKERS)
    rows = [
        np.hstack([updates.changes[name].reshape(CLIENTS, -1) for name in sorted(updates.changes)])
        for updates in (learnt, claimed)
    ]
    for values, length in zip(rows, (0.02, 0.14), strict=True):
        assert np.linalg.norm(values[list(ATTACKERS)], axis=1) == pytest.approx(np.full(4, length), rel=1e-5)
        assert np.array_equal(values[honest], vectors(of, honest))
    phases = {"kind": "partial", "phases": [{"trained": "head"}]}
    with pytest.raises(UserError, match=r"attack\.radius hold attackers .* train in phases"):
        finished(experiment({"kind": "trigger", "size": 1, "radius": 1.0}, algorithm=phases, rounds=1))


@pytest.mark.parametrize(("asked", "number"), [(3, 3), (0.2, 2), (0.25, 2), ((0, 7), 2)])
def test_attackers_are_drawn_by_the_seed(asked: Any, number: int) -> None:
    attack = {"kind": "sign_flip", "attackers": asked}
    drawn = [run_of(experiment(attack, seed=seed)).task.adversary for seed in (4, 4, 5, 6, 7)]
    counts = [0 if one is None else int(one.clients.sum()) for one in drawn]
    assert counts == [number] * 5
    clients = [one.clients.tolist() for one in drawn if one is not None]
    assert clients[0] == clients[1]
    assert (len(set(map(str, clients))) > 1) == (not isinstance(asked, tuple))


def test_new_clients_never_attack() -> None:
    more = {"new_clients": 4, "evaluate_clients": ["test"]}
    run = run_of(experiment({"kind": "sign_flip", "attackers": 6}, **more))
    assert run.task.adversary is not None
    assert run.new_clients is not None
    assert np.array_equal(run.task.adversary.clients, ~run.new_clients)


def test_runs_without_an_attack_are_those_of_versions_without_any() -> None:
    assert not [name for name in experiment().identity() if "attack" in name]
    assert experiment({"kind": "sign_flip"}).identity()["attack.kind"] == "sign_flip"


def test_the_data_set_of_the_run_is_the_true_one() -> None:
    run = run_of(experiment({"kind": "label_flip"}))
    assert run.task.data.digest == digits().digest
    assert run.task.adversary is not None
    assert run.task.adversary.data.digest != digits().digest


@pytest.mark.parametrize(
    ("attack", "more", "says"),
    [
        ({"kind": "sign_flip", "attackers": 11}, {}, "attack.attackers = 11 of the 10 clients that take part are 11"),
        (
            {"kind": "sign_flip", "attackers": 0.01},
            {},
            "attack.attackers = 0.01 of the 10 clients that take part are 0",
        ),
        ({"kind": "sign_flip", "attackers": (3, 12)}, {}, r"attack.attackers = \(3, 12\): give different clients of"),
        ({"kind": "sign_flip", "attackers": (3, 3)}, {}, r"attack.attackers = \(3, 3\): give different clients of"),
        ({"kind": "sign_flip", "attackers": 0}, {}, "attack.sign_flip.attackers|attack.attackers"),
        ({"kind": "sign_flip", "view": "all"}, {}, "view"),
        (
            {"kind": "alie"},
            {"schedule": {"kind": "buffered"}},
            "attack.kind = alie: attackers follow the changes of others, and on a buffered",
        ),
        ({"kind": "mimic"}, {"algorithm": {"kind": "submodel", "widths": [0.5]}}, "train slices of their own"),
        ({"kind": "trigger"}, {}, "attack.size = 4: the trigger takes 4 x 10 pixels"),
    ],
)
def test_an_attack_that_cannot_be_is_one_line(attack: Any, more: Any, says: str) -> None:
    with pytest.raises(UserError, match=says) as error:
        run_of(experiment(attack, **more))
    assert len(str(error.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("attack", "says"),
    [
        ("label_flip", "does not have samples with labels; use an attack on changes, such as sign_flip"),
        ("alie", "attack.kind = alie: attackers follow the changes of others, and here each client trains item rows"),
    ],
)
def test_factorisation_refuses_what_it_has_no_place_for(attack: str, says: str) -> None:
    with pytest.raises(UserError, match=says):
        short_runs.run_of(short_runs.loaded("fedmf", attack=attack))


@pytest.mark.parametrize("name", ["fedmf", "scolr", "colr", "fedavg", "fedmavg"])
def test_a_cohort_of_attackers_moves_the_model_the_other_way(name: str) -> None:
    moves = []
    clients = short_runs.run_of(short_runs.loaded(name)).task.data.n_clients
    for attack in (None, {"kind": "sign_flip", "attackers": clients}):
        run = short_runs.run_of(short_runs.loaded(name, attack=attack, rounds=1))
        (outcome,) = rounds(run, LocalExecutor(run))
        assert outcome.state is not None
        before = run.algorithm.final(run.algorithm.init(run.task))
        after = run.algorithm.final(outcome.state.server)
        moves.append({key: after[key].astype(np.float64) - before[key] for key in before})
    for key, move in moves[0].items():
        assert np.abs(move).max() > 1e-4
        np.testing.assert_allclose(moves[1][key], -move, atol=2e-6 * max(1, np.abs(move).max()))


def test_buffered_attackers_train_on_poisoned_data() -> None:
    schedule = {"schedule": {"kind": "buffered", "concurrency": 5, "buffer_size": 3}}
    honest, attacked = experiment(**schedule), experiment({"kind": "label_flip"}, **schedule)
    assert sha(honest, finished(honest)) != sha(attacked, finished(attacked))
