"""Sensor localisation by two relaxations and by controls, over noise levels, radio ranges and seeds.

The linear program of Biswas and Ye has absolute errors of squared distances, `lifted_stress` their squares. An error is
a diagonal entry, |row|^2 of V, which stays zero once its row is: noise leaves such points.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import product

import numpy as np

from narrowcast.platform.compiled import one_thread
from narrowcast.platform.seeds import generator
from narrowcast.platform.types import Arrays, FloatArray
from narrowcast.solves.burer_monteiro import BurerMonteiro
from narrowcast.solves.localisation import LiftedStress, Localisation, SensorLocalisation
from narrowcast.studies.results import Line, Lines
from narrowcast.studies.tables import Measurements

SENSORS, ANCHORS, SEEDS = 25, 6, 5
NOISES, RANGES = (0.0, 0.05, 0.2), (0.4, 0.55)
STARTS = 5
_ITERATIONS, _PROGRAM_ITERATIONS, _PROGRAM_RESIDUAL = 300, 60, 1e-6
RELAXED, UNREFINED, PROGRAM, PLANE, SCIPY, MDS, TRUTH = (
    "relaxation, refined",
    "relaxation alone",
    "linear program of Biswas and Ye",
    "the same steps in the plane",
    "least_squares, five starts",
    "MDS on shortest paths",
    "the same steps from the true places",
)
METHODS = (RELAXED, UNREFINED, PROGRAM, PLANE, SCIPY, MDS, TRUTH)
"""The last is no method, since it knows the answer: it tells local minima of the stress from its noise."""


def network_of(noise: float, radio_range: float, seed: int) -> Localisation:
    """Return a network; networks of one seed have the same places at every noise and range."""
    return SensorLocalisation(sensors=SENSORS, anchors=ANCHORS, radio_range=radio_range, noise=noise, seed=seed).load()


def solved(problem: Localisation, method: str, seed: int) -> Arrays:
    """Return the answer of a method; controls start from the seed."""
    if method == PROGRAM:
        program = BurerMonteiro(perturbation="noise")
        state = program.init(problem, seed)
        for _ in range(_PROGRAM_ITERATIONS):
            state, report = program.step(problem, state)
            if report.residual <= _PROGRAM_RESIDUAL:
                break
        return program.answer(state)
    if method in (RELAXED, UNREFINED, PLANE, TRUTH):
        solver = LiftedStress(dimensions=2 if method in (PLANE, TRUTH) else None, refine=method != UNREFINED)
        state = solver.init(problem, seed)
        if method == TRUTH:
            assert problem.network.truth is not None
            state = {**state, "lifted": problem.network.truth, "positions": problem.network.truth}
        for _ in range(_ITERATIONS):
            state, report = solver.step(problem, state)
            if report.status != "running":
                break
        return solver.answer(state)
    positions = _least_squares(problem, seed) if method == SCIPY else classical_scaling(problem)
    return {"positions": positions}


def _least_squares(problem: Localisation, seed: int) -> FloatArray:
    """Return the best of some local minima of sum_e (|p_i - p_j| - d_e)^2 from uniform starts."""
    from scipy.optimize import least_squares

    network = problem.network

    def errors(flat: FloatArray) -> FloatArray:
        nodes = np.concatenate([flat.reshape(-1, network.dimension), network.anchors])
        apart = nodes[network.pairs[:, 0]] - nodes[network.pairs[:, 1]]
        return np.asarray(np.linalg.norm(apart, axis=1) - network.distances)

    found = []
    for start in range(STARTS):
        first = generator(seed, "localisation control", start).random(network.sensors * network.dimension)
        found.append(least_squares(errors, first, max_nfev=50))
    best = min(found, key=lambda each: float(each.cost))
    return np.asarray(best.x.reshape(-1, network.dimension))


def classical_scaling(problem: Localisation) -> FloatArray:
    """Return positions by multidimensional scaling of shortest paths, rotated and moved onto the anchors.

    Source: MDS-MAP, Shang, Ruml, Zhang and Fromherz, MobiHoc 2003. Distances between anchors are known.
    """
    from scipy.sparse import csr_array
    from scipy.sparse.csgraph import shortest_path

    network = problem.network
    size, count = network.sensors + len(network.anchors), network.sensors
    first, second = (side + count for side in np.triu_indices(len(network.anchors), 1))
    between = np.linalg.norm(network.anchors[first - count] - network.anchors[second - count], axis=1)
    rows, columns = (np.concatenate(each) for each in ((network.pairs[:, 0], first), (network.pairs[:, 1], second)))
    lengths = np.concatenate([network.distances, between])
    paths = shortest_path(csr_array((lengths, (rows, columns)), shape=(size, size)), directed=False)
    centred = np.eye(size) - 1 / size
    values, vectors = np.linalg.eigh(-centred @ paths**2 @ centred / 2)
    places = vectors[:, ::-1][:, : network.dimension] * np.sqrt(np.maximum(values[::-1][: network.dimension], 0))
    own, known = places[count:], network.anchors
    u, s, vt = np.linalg.svd((own - own.mean(axis=0)).T @ (known - known.mean(axis=0)))
    scale = s.sum() / float(np.sum((own - own.mean(axis=0)) ** 2))
    return np.asarray(scale * (places[:count] - own.mean(axis=0)) @ (u @ vt) + known.mean(axis=0))


def measured(noise: float, radio_range: float, seed: int, method: str) -> Iterator[Line]:
    """Yield the line of a method on a network."""
    problem = network_of(noise, radio_range, seed)
    with one_thread():
        began = time.process_time()
        answer = solved(problem, method, seed)
        spent = time.process_time() - began
    metrics = problem.measure(answer)
    yield {
        "cpu_seconds": spent,
        "position_rmse": metrics["test.position_rmse"],
        "stress": metrics["stress"],
        "gap": metrics["gap"],
    }


def _planned(lines: Lines) -> Iterator[tuple[float, float, int, str]]:
    del lines
    for seed, noise, radio_range, method in product(range(SEEDS), NOISES, RANGES, METHODS):
        yield noise, radio_range, seed, method


MEASUREMENTS = Measurements(
    "sdp-localisation.csv",
    ("noise", "radio_range", "seed", "method"),
    ("cpu_seconds", "position_rmse", "stress", "gap"),
    _planned,
    measured,
)
