"""Aggregators: slow references, wild minorities, and FedAvg with each of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import combinations
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.optimize import minimize
from scipy.stats import kstest, trim_mean

import narrowcast as nc
from narrowcast.algorithms.federated.aggregator import (
    AggregationContext,
    Aggregator,
    Bucketing,
    Bulyan,
    CentredClip,
    CoordinateMedian,
    FLTrust,
    GeometricMedian,
    Krum,
    NearestNeighbourMixing,
    NormClip,
    SignMajority,
    TrimmedMean,
)
from narrowcast.algorithms.federated.apfl import APFL
from narrowcast.algorithms.federated.ditto import Ditto
from narrowcast.algorithms.federated.fedavg import FedAvg
from narrowcast.algorithms.federated.fedpara import FedPara
from narrowcast.algorithms.federated.fedprox import FedProx
from narrowcast.algorithms.federated.partial import Partial
from narrowcast.algorithms.federated.server_optimizer import Momentum
from narrowcast.experiment import load_experiment
from narrowcast.laws import algorithm_cases, algorithm_laws
from narrowcast.laws.algorithm_cases import AlgorithmCase
from narrowcast.platform.errors import UserError
from narrowcast.platform.types import Arrays, Chunk
from small_tasks import network_task, rows_task

AGGREGATORS: dict[str, Aggregator] = {
    "median": CoordinateMedian(),
    "trimmed_mean": TrimmedMean(share=0.3),
    "geometric_median": GeometricMedian(),
    "krum": Krum(byzantine=2, selected=2),
    "bulyan": Bulyan(byzantine=3),
    "norm_clip": NormClip(),
    "centred_clip": CentredClip(),
    "sign_majority": SignMajority(),
    "fltrust": FLTrust(),
    "nnm": NearestNeighbourMixing(byzantine=3, rule=TrimmedMean(share=0.3)),
    "bucketing": Bucketing(rule=CoordinateMedian()),
}
HONEST, WILD, SIZE = 12, 3, 20
CASES = {
    name: case
    for name, case in algorithm_cases.cases(
        {
            **{name: FedAvg(aggregator=each) for name, each in AGGREGATORS.items() if name != "bulyan"},
            "bulyan": FedAvg(aggregator=Bulyan(byzantine=0)),
            "fedprox": FedProx(aggregator=TrimmedMean(), mu=0.1),
            "momentum": FedAvg(aggregator=CoordinateMedian(), server_optimizer=Momentum()),
        }
    ).items()
    if name.startswith("mlp")
}
LAWS: Sequence[Callable[[Any], None]] = (
    algorithm_laws.a_client_that_cannot_send_changes_nothing_and_keeps_its_codec_state,
    algorithm_laws.a_lost_upload_is_counted_and_not_aggregated,
    algorithm_laws.chunk_sizes_change_results_by_rounding_alone,
    algorithm_laws.a_replica_equals_its_single_run,
)


def random_changes(clients: int, seed: int = 0) -> Arrays:
    draw = np.random.default_rng(seed)
    return {"weight": draw.normal(size=(clients, 4, 4)), "bias": draw.normal(size=(clients, 4))}


def rows(changes: Arrays) -> NDArray[Any]:
    """Return each client's change as one vector, [C, SIZE]."""
    return np.concatenate([values.reshape(len(values), -1) for values in changes.values()], axis=1)


def aggregate(
    aggregator: Aggregator, changes: Arrays, weights: Any = None, reference: Arrays | None = None
) -> NDArray[Any]:
    """Return the aggregate as one vector, [SIZE]; the server's own change is the median, or `reference`."""
    weights = np.ones(len(changes["bias"])) if weights is None else weights
    last = {name: np.zeros_like(values[0]) for name, values in changes.items()}
    reference = reference or {name: np.median(values, axis=0) for name, values in changes.items()}
    context = AggregationContext(0, 1, last, reference)
    return rows({name: values[None] for name, values in aggregator.aggregate(changes, weights, context).items()})[0]


def test_a_clip_adds_noise_of_the_round() -> None:
    changes, clip = {"w": np.random.default_rng(0).normal(size=(5, 20_000))}, NormClip(noise=0.3)
    without = NormClip().aggregate(changes, np.ones(5), AggregationContext(0, 1))["w"]
    first, again, second = (
        clip.aggregate(changes, np.ones(5), AggregationContext(0, index))["w"] - without for index in (1, 1, 2)
    )
    assert kstest(first / 0.3, "norm").pvalue > 1e-3
    assert first.tobytes() == again.tobytes()
    assert abs(np.corrcoef(first, second)[0, 1]) < 0.05


@pytest.mark.parametrize("clients", [1, 2, 7, 10])
@pytest.mark.parametrize("share", [0.0, 0.1, 0.3, 0.49])
def test_the_trimmed_mean_is_scipys(clients: int, share: float) -> None:
    changes = random_changes(clients)
    wanted = trim_mean(rows(changes), share, axis=0)
    assert aggregate(TrimmedMean(share=share), changes) == pytest.approx(wanted, abs=1e-14)


@pytest.mark.parametrize(("share", "clients"), [("0.29", 100), ("0.29", 200), ("0.35", 180), ("0.1", 10), ("0.3", 11)])
def test_the_share_left_out_is_that_of_exact_fractions(share: str, clients: int) -> None:
    out = int(Fraction(share) * clients)
    values = np.random.default_rng(0).normal(size=(clients, 5))
    wanted = np.sort(values, axis=0)[out : clients - out].mean(axis=0)
    got = TrimmedMean(share=float(share)).aggregate({"w": values}, np.ones(clients), AggregationContext(0, 1))["w"]
    assert got == pytest.approx(wanted, abs=1e-14)


@pytest.mark.parametrize("clients", [3, 7, 9, 11])
def test_the_share_that_a_refusal_names_is_enough(clients: int) -> None:
    with pytest.raises(UserError, match="raise it to at least") as refused:
        TrimmedMean(share=0.01).check(clients)
    TrimmedMean(share=float(str(refused.value).split("at least ")[1].split(",")[0])).check(clients)


def test_the_geometric_median_has_the_least_sum_of_weighted_distances() -> None:
    changes, weights = random_changes(7), np.arange(1.0, 8)
    vectors = rows(changes)

    def distance(point: NDArray[Any]) -> Any:
        return weights @ np.linalg.norm(vectors - point, axis=1)

    least = minimize(distance, vectors.mean(axis=0), tol=1e-12)
    got = aggregate(GeometricMedian(iterations=200), changes, weights)
    assert got == pytest.approx(least.x, abs=1e-5)
    ended = GeometricMedian(iterations=10_000, tolerance=1e-12)
    assert aggregate(ended, changes, weights) == pytest.approx(least.x, abs=1e-6)
    few = [distance(aggregate(GeometricMedian(iterations=count), changes, weights)) for count in (1, 4, 16)]
    assert few[0] > few[1] > few[2] >= least.fun - 1e-9


@pytest.mark.parametrize("byzantine", [0, 1, 3])
@pytest.mark.parametrize("selected", [1, 3])
def test_krum_is_its_definition(byzantine: int, selected: int) -> None:
    changes = random_changes(9, seed=byzantine)
    vectors = rows(changes)
    scores = []
    for own, vector in enumerate(vectors):
        others = np.delete(vectors, own, axis=0)
        least = min(
            sum(float(((vector - other) ** 2).sum()) for other in chosen)
            for chosen in combinations(others, len(vectors) - byzantine - 2)
        )
        scores.append(least)
    wanted = vectors[np.argsort(scores)[:selected]].mean(axis=0)
    assert aggregate(Krum(byzantine=byzantine, selected=selected), changes) == pytest.approx(wanted, abs=1e-12)


def score(own: int, vectors: NDArray[Any], neighbours: int, power: int = 2) -> float:
    """The least sum of distances to so many others, over all choices of them."""
    others = [float(np.linalg.norm(vectors[own] - other) ** power) for other in np.delete(vectors, own, axis=0)]
    return min(map(sum, combinations(others, neighbours)))


@pytest.mark.parametrize(
    ("settings", "neighbours", "power"), [((2, True), 6, 2), ((1, True), 7, 2), ((3, True), 5, 2), ((0, False), 8, 1)]
)
def test_krums_of_released_codes_count_other_neighbours(
    settings: tuple[int, bool], neighbours: int, power: int
) -> None:
    chosen = set()
    for seed in range(20):
        changes = random_changes(10, seed)
        vectors = rows(changes)
        wanted = np.argmin([score(own, vectors, neighbours, power) for own in range(10)])
        got = aggregate(Krum(byzantine=2, left_out=settings[0], squared=settings[1]), changes)
        assert got == pytest.approx(vectors[wanted], abs=1e-12)
        chosen.add(int(wanted))
    assert len(chosen) > 1


@pytest.mark.parametrize(("clients", "byzantine"), [(3, 0), (7, 0), (7, 1), (11, 2)])
def test_bulyan_is_its_definition(clients: int, byzantine: int) -> None:
    changes = random_changes(clients, seed=clients)
    everyone, left, selected = rows(changes), list(rows(changes)), []
    while len(selected) < clients - 2 * byzantine:
        neighbours = min(max(len(left) - byzantine - 2, 1), len(left) - 1)
        scores = [
            (round(score(own, np.array(left), neighbours), 9), float(((everyone - left[own]) ** 2).sum()))
            for own in range(len(left))
        ]
        best = scores.index(min(scores))
        selected.append(left.pop(best))
    wanted = []
    for values in np.array(selected).T:
        middle = np.median(values)
        wanted.append(np.mean(sorted(values, key=lambda value: abs(value - middle))[: clients - 4 * byzantine]))
    assert aggregate(Bulyan(byzantine=byzantine), changes) == pytest.approx(np.array(wanted), abs=1e-12)


@pytest.mark.parametrize("radius", [3.0, "median"])
def test_clipped_changes_keep_their_direction_and_lose_their_length(radius: Any) -> None:
    changes, weights = random_changes(6), np.arange(1.0, 7)
    vectors = rows(changes)
    most = radius if radius != "median" else sorted(map(np.linalg.norm, vectors))[2:4]
    most = np.mean(most)
    clipped = [
        vector if np.linalg.norm(vector) <= most else vector * most / np.linalg.norm(vector) for vector in vectors
    ]
    wanted = np.average(clipped, axis=0, weights=weights)
    assert aggregate(NormClip(radius=radius), changes, weights) == pytest.approx(wanted, abs=1e-14)


def test_the_centred_clip_goes_on_from_the_last_round() -> None:
    algorithm, task = FedAvg(aggregator=CentredClip(radius=2.0, iterations=2)), network_task()
    state, v = {"x": np.zeros(20)}, np.zeros(20)
    state |= {"optimizer/aggregate/x": np.zeros(20)}
    for round_index in (1, 2):
        vectors = rows(random_changes(7, round_index))
        for _ in range(2):
            steps = [vector - v for vector in vectors]
            v = v + np.mean([step * min(1.0, 2.0 / np.linalg.norm(step)) for step in steps], axis=0)
        total = algorithm.fold([{"each/sum/x": vectors, "each/weight": np.ones(7)}])
        before, state = state["x"], dict(algorithm.step(state, {}, total, task, round_index))
        assert state["x"] - before == pytest.approx(v, abs=1e-13)
    nobody = algorithm.fold([{"each/sum/x": np.empty((0, 20)), "each/weight": np.empty(0)}])
    assert algorithm.step(state, {}, nobody, task, 3)["optimizer/aggregate/x"] == pytest.approx(v, abs=1e-13)


def test_signs_are_counted() -> None:
    changes = {"w": np.array([[1.0, -2.0, 0.0], [5.0, 3.0, 0.0], [-0.1, -9.0, 4.0], [2.0, 1.0, -1.0]])}
    got = SignMajority(size=0.5).aggregate(changes, np.arange(1.0, 5), AggregationContext(0, 1))["w"]
    assert got.tolist() == [0.5, 0.0, 0.0]


def test_fltrust_is_its_definition_and_a_change_counts_by_its_direction_alone() -> None:
    changes, own = random_changes(9), random_changes(1, seed=1)
    vectors, (g,), reference = rows(changes), rows(own), {name: values[0] for name, values in own.items()}
    trust = [max(0.0, float(v @ g) / (np.sqrt(v @ v) * np.sqrt(g @ g))) for v in vectors]
    assert 2 <= np.count_nonzero(trust) < 9
    total = np.zeros(SIZE)
    for vector, each in zip(vectors, trust, strict=True):
        total += each * np.sqrt(g @ g) / np.sqrt(vector @ vector) * vector
    weights = np.arange(1.0, 10)  # which do not count
    got = aggregate(FLTrust(), changes, weights, reference)
    assert got == pytest.approx(total / sum(trust), abs=1e-14)
    factors = np.geomspace(1e-6, 1e6, 9)
    longer = {name: (values.T * factors).T for name, values in changes.items()}
    assert aggregate(FLTrust(), longer, None, reference) == pytest.approx(got, abs=1e-14)
    against = {name: np.stack([-values, 0 * values]) for name, values in reference.items()}
    assert not aggregate(FLTrust(), against, None, reference).any()
    joined = {name: np.concatenate([changes[name], against[name]]) for name in changes}
    assert aggregate(FLTrust(), joined, None, reference) == pytest.approx(got, abs=1e-14)


@pytest.mark.parametrize(
    "algorithm",
    [FedAvg(), FedProx(mu=0.5, partial_share=1.0), FedPara(gamma=0.5), Ditto(), Partial(kept="head"), APFL()],
    ids=lambda algorithm: algorithm.kind,
)
def test_the_server_learns_what_a_client_with_its_samples_would(algorithm: Any) -> None:
    task = network_task(batch_size="all", epochs=3)
    client = int(np.argmax(task.data.examples))
    own, _ = task.data.of_clients("train").rows(np.array([client]))
    task = replace(task, data=replace(task.data, server=task.data.train.take(own)))
    trusting = algorithm.model_copy(update={"aggregator": FLTrust()})
    server, chunk = trusting.init(task), Chunk(1, 0, np.array([client]), {})
    broadcast = trusting.broadcast(server, task, 1).arrays
    chunk = replace(chunk, state={name: values[[client]] for name, values in trusting.init_clients(task).items()})
    moved = trusting.step(server, broadcast, trusting.fold([trusting.train(broadcast, chunk, task).partial]), task, 1)
    # The server does all epochs, though the client of fedprox does part of them: its change has the server's length.
    partial = algorithm.kind == "fedprox"
    whole = algorithm.model_copy(update={"partial_share": 0.0}) if partial else algorithm
    alone = whole.step(server, broadcast, whole.fold([whole.train(broadcast, chunk, task).partial]), task, 1)
    got, wanted = (rows({name: (after[name] - server[name])[None] for name in server})[0] for after in (moved, alone))
    assert np.linalg.norm(got) == pytest.approx(np.linalg.norm(wanted), rel=1e-5)
    assert (got == pytest.approx(wanted, abs=1e-5 * float(np.abs(wanted).max()))) != partial


def test_fltrust_needs_samples_of_the_servers_own() -> None:
    needs = r"algorithm\.aggregator = fltrust compares .* data\.server\.samples=100, or use another aggregator$"
    for task in (network_task(), rows_task()):
        with pytest.raises(UserError, match=needs):
            FedAvg(aggregator=FLTrust()).check(task)


def test_each_change_is_mixed_with_its_nearest_ones() -> None:
    changes = random_changes(8)
    vectors = rows(changes)
    mixed = []
    for vector in vectors:
        near = sorted(vectors, key=lambda other: float(np.linalg.norm(other - vector)))[:6]
        mixed.append(np.mean(near, axis=0))
    rule = NearestNeighbourMixing(byzantine=2, rule=CoordinateMedian())
    assert aggregate(rule, changes) == pytest.approx(np.median(mixed, axis=0), abs=1e-12)
    all_of_them = NearestNeighbourMixing(byzantine=0, rule=Krum(byzantine=0))
    assert aggregate(all_of_them, changes) == pytest.approx(vectors.mean(axis=0), abs=1e-12)


def test_buckets_hold_every_change_once_and_are_drawn_anew_in_each_round() -> None:
    vectors = np.eye(7)
    drawn = [Bucketing(size=2).averaging(vectors, AggregationContext(3, round_index)) for round_index in (1, 2)]
    for buckets in drawn:
        assert (buckets.sum(axis=0) == 1).all()
        assert sorted(buckets.sum(axis=1)) == [1, 2, 2, 2]
    assert not np.array_equal(*drawn)
    changes = random_changes(8)
    mean = Bucketing(size=4, rule=TrimmedMean(share=0))
    assert aggregate(mean, changes) == pytest.approx(rows(changes).mean(axis=0), abs=1e-14)
    assert aggregate(Bucketing(size=1), changes) == pytest.approx(np.median(rows(changes), axis=0), abs=1e-14)


def test_multi_krum_of_all_clients_and_an_untrimmed_mean_are_the_mean() -> None:
    changes = random_changes(8)
    mean = rows(changes).mean(axis=0)
    for aggregator in (Krum(selected=8), TrimmedMean(share=0), NormClip(radius=1e9), Bulyan(byzantine=0)):
        assert aggregate(aggregator, changes) == pytest.approx(mean, abs=1e-14)


@pytest.mark.parametrize("name", AGGREGATORS)
def test_a_wild_minority_moves_no_aggregate_far(name: str) -> None:
    honest, wild = random_changes(HONEST), random_changes(WILD, seed=1)
    changes = {each: np.concatenate([honest[each], 1e6 + wild[each]]) for each in honest}
    mean = rows(honest).mean(axis=0)
    aggregator = AGGREGATORS[name]
    if isinstance(aggregator, GeometricMedian):
        aggregator = GeometricMedian(iterations=100)
    assert np.linalg.norm(aggregate(aggregator, changes) - mean) < np.linalg.norm(rows(honest) - mean, axis=1).max()
    assert np.linalg.norm(rows(changes).mean(axis=0) - mean) > 1e5


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
@pytest.mark.parametrize("name", CASES)
def test_fedavg_with_an_aggregator_keeps_the_laws(name: str, law: Callable[[AlgorithmCase], None]) -> None:
    law(CASES[name])


@pytest.mark.parametrize(
    ("aggregator", "clients", "phrases"),
    [
        ("{kind: krum, byzantine: 100}", 20, ("byzantine = 100 needs at least 203 clients", "are 20;", "at most 8")),
        ("{kind: krum, byzantine: 9}", 20, ("byzantine = 9 needs at least 21 clients", "are 20;", "at most 8")),
        ("{kind: krum, byzantine: 8, selected: 13}", 20, ("selected = 13", "at most 12")),
        ("{kind: bulyan, byzantine: 5}", 20, ("byzantine = 5 needs at least 23 clients", "are 20;", "at most 4")),
        ("{kind: nnm, byzantine: 10}", 20, ("byzantine = 10 needs at least 21 clients", "are 20;", "at most 9")),
        ("{kind: bucketing, rule: {kind: krum, byzantine: 4}}", 20, ("byzantine = 4 needs at least 11", "are 10;")),
        ("trimmed_mean", 9, ("share = 0.1 leaves out none of 9 clients", "at least 0.111", "at least 10")),
    ],
)
def test_bounds_that_a_cohort_does_not_keep_are_refused(aggregator: str, clients: int, phrases: list[str]) -> None:
    settings = [f"clients_per_round={clients}", f"algorithm={{kind: fedavg, aggregator: {aggregator}}}"]
    with pytest.raises(UserError) as refused:
        next(iter(nc.rounds(load_experiment("fedavg-digits", settings))))
    assert all(phrase in str(refused.value) for phrase in phrases)


@pytest.mark.parametrize("settings", ["{kind: krum, byzantine: 8, selected: 12}", "{kind: trimmed_mean, share: 0.05}"])
def test_bounds_that_a_cohort_just_keeps_are_accepted(settings: str) -> None:
    experiment = load_experiment("fedavg-digits", [f"algorithm={{kind: fedavg, aggregator: {settings}}}", "rounds=1"])
    assert next(iter(nc.rounds(experiment))).record.delivered == 20


def test_a_round_that_drop_outs_leave_too_small_moves_nothing(caplog: pytest.LogCaptureFixture) -> None:
    algorithm, model = FedAvg(aggregator=Krum(byzantine=2)), {"x": np.zeros(5)}
    for clients, moves in ((6, False), (7, True)):
        changes = {"each/sum/x": np.random.default_rng(0).normal(size=(clients, 5)), "each/weight": np.ones(clients)}
        moved = algorithm.step(model, {}, algorithm.fold([changes]), network_task(), 4)["x"]
        assert moved.any() == moves
    (warning,) = (each.getMessage() for each in caplog.records)
    assert warning.startswith(
        "round 4: the changes of 6 clients are not used: algorithm.aggregator.byzantine = 2 needs"
    )


def test_the_server_holds_every_change_and_nobody_moves_nothing() -> None:
    algorithm, task = FedAvg(aggregator=CoordinateMedian()), network_task()
    draw = np.random.default_rng(0)
    chunks = [{"each/sum/x": draw.normal(size=(clients, 50)), "each/weight": np.ones(clients)} for clients in (2, 7, 4)]
    model = {"x": np.zeros(50)}
    moved = algorithm.step(model, {}, algorithm.fold(chunks), task, 1)["x"]
    assert np.array_equal(moved, np.median(np.concatenate([chunk["each/sum/x"] for chunk in chunks]), axis=0))
    nobody = algorithm.fold([{"each/sum/x": np.empty((0, 50)), "each/weight": np.empty(0)}])
    assert not algorithm.step(model, {}, nobody, task, 1)["x"].any()
