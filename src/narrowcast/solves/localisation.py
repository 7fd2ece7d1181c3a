"""Sensor localisation: networks that are drawn or read from a file, two semidefinite relaxations, and a solver.

Squared distances are linear in the Gram matrix of the positions. One relaxation is the linear semidefinite program of
absolute errors. The other has their squares, and the solver minimises it by damped Newton steps on positions in more
dimensions than the space has.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
from pydantic import Field

from narrowcast.platform.config.files import Section
from narrowcast.platform.data.download import located
from narrowcast.platform.errors import UserError
from narrowcast.platform.seeds import generator
from narrowcast.platform.solving import ProblemSource, Solver, StepResult, name_of
from narrowcast.platform.storage.disk import readable
from narrowcast.platform.types import Arrays, FloatArray, IntArray
from narrowcast.solves.certificate import Proof, sparse_eigenvalue_bound
from narrowcast.solves.semidefinite import (
    NEGLIGIBLE,
    SemidefiniteProblem,
    SemidefiniteProgram,
    SymmetricConstraints,
    constraints_of,
    numerical_rank,
)

if TYPE_CHECKING:
    from scipy.sparse import csr_array


@dataclass(frozen=True, eq=False)
class SensorNetwork:
    """Anchors at known positions, sensors at unknown ones, and distances between some pairs.

    Shapes: anchors [a, d]; pairs [m, 2], numbers of nodes, sensors first, at least one of a pair a sensor; distances
    [m]; truth, the positions of the sensors [n, d], None if they are not known.
    """

    sensors: int
    anchors: FloatArray
    pairs: IntArray
    distances: FloatArray
    truth: FloatArray | None = None

    @property
    def dimension(self) -> int:
        """The dimension d of the space."""
        return int(self.anchors.shape[1])

    @cached_property
    def digest(self) -> str:
        """The sha256 of what a solver sees."""
        digest = hashlib.sha256(str(self.sensors).encode())
        for array in (self.anchors, self.pairs, self.distances):
            digest.update(np.ascontiguousarray(array).data)
        return digest.hexdigest()

    def farthest(self, lengths: FloatArray) -> FloatArray:
        """Return a bound on the distance of each sensor from the origin [n], if pairs are at most `lengths` [m] apart.

        It is the shortest path to an anchor plus that anchor's distance; infinite without a path.
        """
        from scipy.sparse import csr_array
        from scipy.sparse.csgraph import dijkstra

        size, anchors = self.sensors + len(self.anchors), np.arange(len(self.anchors)) + self.sensors
        graph = csr_array((np.maximum(lengths, np.finfo(float).tiny), self.pairs.T), shape=(size, size))
        paths = dijkstra(graph, directed=False, indices=anchors)[:, : self.sensors]
        return np.asarray((paths + np.linalg.norm(self.anchors, axis=1)[:, None]).min(axis=0))

    def check(self) -> None:
        """Raise `UserError` for a sensor that no path of measured distances joins with an anchor."""
        lost = np.flatnonzero(~np.isfinite(self.farthest(self.distances)))
        if len(lost):
            raise UserError(
                f"sensor {lost[0] + 1} and {len(lost) - 1} others have no path of measured distances to an anchor; "
                "give a larger radio range, more anchors, or leave them out"
            )


def draw_network(
    sensors: int, anchors: int, dimension: int, radio_range: float, noise: float, seed: int
) -> SensorNetwork:
    """Return sensors and anchors uniform in the unit cube, with the distances of all pairs within the radio range.

    A measured distance is the true one times 1 + noise Z, Z standard normal, and at least a hundredth of it.
    """
    positions = generator(seed, "sensor places").random((sensors + anchors, dimension))
    first, second = np.triu_indices(sensors + anchors, 1)
    true = np.linalg.norm(positions[first] - positions[second], axis=1)
    seen = (true <= radio_range) & (first < sensors) & (true > 0)
    pairs, true = np.stack([first[seen], second[seen]], axis=1), true[seen]
    factor = 1 + noise * generator(seed, "sensor noise").standard_normal(len(true))
    return SensorNetwork(sensors, positions[sensors:], pairs, true * np.maximum(factor, 0.01), positions[:sensors])


def read_network(path: Path) -> SensorNetwork:
    """Return the network of a text file of lines `anchor NAME x y` and `distance NAME NAME length`.

    All other names are sensors; `sensor NAME x y` gives the true position of one, to measure errors with.
    """
    advice = 'give lines "anchor NAME x y", "distance NAME NAME length", and "sensor NAME x y" where it is known'
    with readable(path, (OSError, UnicodeDecodeError), advice):
        lines = [line.split() for line in path.read_text(encoding="utf-8").splitlines()]
    anchors: dict[str, list[float]] = {}
    known: dict[str, list[float]] = {}
    measured: dict[frozenset[str], float] = {}
    for number, words in enumerate(lines, start=1):
        if not words or words[0].startswith("#"):
            continue
        where = f"{path}: line {number}"
        if words[0] == "distance" and len(words) == 4:
            pair, (length,) = frozenset(words[1:3]), _numbers(words[3:], where)
            if len(pair) < 2 or pair in measured or length <= 0:
                got = " ".join(words)[:60]
                raise UserError(f"{where} is {got!r}; give each pair of two nodes once, and lengths > 0")
            measured[pair] = length
        elif words[0] in ("anchor", "sensor") and len(words) in (4, 5):
            table = anchors if words[0] == "anchor" else known
            if words[1] in anchors or words[1] in known:
                raise UserError(f"{where}: {words[1]} is given twice; keep one")
            table[words[1]] = _numbers(words[2:], where)
        else:
            raise UserError(f"{where} is {' '.join(words)[:60]!r}; {advice}")
    return _network(path, anchors, known, measured)


def _network(
    path: Path, anchors: dict[str, list[float]], known: dict[str, list[float]], measured: dict[frozenset[str], float]
) -> SensorNetwork:
    names = sorted({name for pair in measured for name in pair} - anchors.keys())
    if not anchors or not names:
        raise UserError(f"{path}: has {len(anchors)} anchors and {len(names)} sensors with distances; give both")
    sizes = {len(coordinates) for coordinates in (*anchors.values(), *known.values())}
    if len(sizes) > 1:
        raise UserError(f"{path}: has positions of two and of three coordinates; give all the same")
    number_of = {name: number for number, name in enumerate([*names, *anchors])}
    edges = sorted(
        (min(number_of[a], number_of[b]), max(number_of[a], number_of[b]), length)
        for (a, b), length in ((tuple(pair), length) for pair, length in measured.items())
        if not (a in anchors and b in anchors)
    )
    pairs = np.array([edge[:2] for edge in edges], dtype=np.int64).reshape(-1, 2)
    truth = np.array([known[name] for name in names]) if known.keys() >= set(names) else None
    distances = np.array([edge[2] for edge in edges])
    network = SensorNetwork(len(names), np.array(list(anchors.values())), pairs, distances, truth)
    try:
        network.check()
    except UserError as error:
        raise UserError(f"{path}: {error}; sensors are numbered by their sorted names") from error
    return network


def _numbers(words: Sequence[str], where: str) -> list[float]:
    try:
        numbers = [float(word) for word in words]
    except ValueError:
        numbers = [math.nan]
    if not all(map(math.isfinite, numbers)):
        raise UserError(f"{where}: {' '.join(words)[:60]!r} is not a list of finite numbers")
    return numbers


LOWER_IS_BETTER = ("objective", "bound", "gap", "rank", "position_rmse", "stress", "infeasibility")
"""Metrics of `Localisation` of which the lower value is better."""


@dataclass(frozen=True, eq=False)
class Localisation(SemidefiniteProblem):
    """Find Z = [[I, X'], [X, Y]] >= 0 of side d + n whose squared distances are near the measured ones.

    An answer is `positions` X [n, d]; `lifted` P [n, k], k >= d, stands for Z with X = P[:, :d] and Y = P P'. With
    Y = X X', of rank d, positions have exactly these distances; Z >= 0 relaxes it. The objective is
    f(Z) = sum_e (q_e(Z) - d_e^2)^2, where q_e is linear in Z.

    `program` is the linear program of Biswas and Ye, sum_e |q_e(Z) - d_e^2|, for solvers of those; their answer is
    `vectors` V [d + n + 2 m, k], a row for each dimension, sensor and side of an error.

    Source: Biswas and Ye, IPSN 2004; So and Ye, Mathematical Programming 109, 2007.
    """

    name: str
    source: str
    network: SensorNetwork
    proof: Proof = "lanczos"

    @property
    def digest(self) -> str:
        """The sha256 of the network."""
        return self.network.digest

    @property
    def sizes(self) -> Mapping[str, int]:
        """Sensors, anchors and measured distances."""
        network = self.network
        return {"sensors": network.sensors, "anchors": len(network.anchors), "distances": len(network.distances)}

    @cached_property
    def squared(self) -> SymmetricConstraints:
        """The matrices A_e of the squared distances q_e(Z) = <A_e, Z>."""
        network, count = self.network, len(self.network.distances)
        dimension, every = network.dimension, np.arange(count)
        first, second = network.pairs.T
        between = second < network.sensors
        entries = [(every, dimension + first, dimension + first, np.ones(count))]
        e, i, j = every[between], dimension + first[between], dimension + second[between]
        entries += [(e, j, j, np.ones(len(e))), (e, np.minimum(i, j), np.maximum(i, j), -np.ones(len(e)))]
        e, i = every[~between], dimension + first[~between]
        anchor = network.anchors[second[~between] - network.sensors]
        for c in range(dimension):
            entries.append((e, np.full(len(e), c), i, -anchor[:, c]))
            entries += [(e, np.full(len(e), b), np.full(len(e), c), anchor[:, b] * anchor[:, c]) for b in range(c + 1)]
        parts = [np.concatenate(part) for part in zip(*entries, strict=True)]
        return constraints_of(dimension + network.sensors, count, *parts)

    @cached_property
    def program(self) -> SemidefiniteProgram:
        """The linear program, with two diagonal entries for the positive and negative part of each error.

        Its bound on the trace holds for optimal matrices alone: their objective is at most that of X = 0, Y = 0.
        """
        from scipy.sparse import csr_array

        network, squared = self.network, self.squared
        count, core = len(network.distances), squared.size
        size, targets = core + 2 * count, network.distances**2
        values = squared.values.tocoo()
        every = np.arange(count)
        entries = [(values.row, squared.rows[values.col], squared.columns[values.col], values.data)]
        entries += [(every, core + every, core + every, -np.ones(count))]
        entries += [(every, core + count + every, core + count + every, np.ones(count))]
        unit = [(b, c) for c in range(network.dimension) for b in range(c + 1)]
        entries += [(np.array([count + n]), np.array([b]), np.array([c]), np.ones(1)) for n, (b, c) in enumerate(unit)]
        constraints = constraints_of(
            size, count + len(unit), *(np.concatenate(part) for part in zip(*entries, strict=True))
        )
        costs = np.concatenate([np.zeros(core), np.ones(2 * count)])
        cost = csr_array((costs, (np.arange(size), np.arange(size))), shape=(size, size))
        wanted = np.concatenate([targets, [1.0 if b == c else 0.0 for b, c in unit]])
        worst = float(np.abs(self._distances(np.zeros((network.sensors, network.dimension))) - targets).sum())
        trace = self._trace_bound(worst) + worst
        return SemidefiniteProgram(self.name, self.source, cost, constraints, wanted, trace, self.proof)

    def errors(self, lifted: FloatArray) -> FloatArray:
        """Return q_e - d_e^2 [m] of positions in d or more dimensions [n, k]."""
        return self._distances(lifted) - self.network.distances**2

    def measure(self, answer: Arrays) -> Mapping[str, float]:
        """Return the metrics of an answer.

        `objective`: f of the lifted positions, or of the positions if there are no others; `bound`: a lower bound on f
        over all Z, `gap`: their difference over sum_e d_e^4; `rank`: d, and the eigenvalues of Y - X X' that count.
        `stress`: f of the positions themselves. `test.position_rmse` where the true positions are known. Of `vectors`
        the metrics of `program`.
        """
        dimension = self.network.dimension
        measures: dict[str, float] = {}
        if "vectors" in answer:
            vectors = answer["vectors"]
            axes, sensors = vectors[:dimension], vectors[dimension : dimension + self.network.sensors]
            positions = sensors @ axes.T
            measures |= self.program.measure(answer)
            measures["rank"] = numerical_rank(vectors[: dimension + self.network.sensors])
        else:
            positions, lifted = answer["positions"], answer.get("lifted", answer["positions"])
            objective, bound = float(np.sum(self.errors(lifted) ** 2)), self.bound(lifted)
            measures |= {"objective": objective, "bound": bound}
            measures["gap"] = (objective - bound) / float(np.sum(self.network.distances**4))
            beyond = np.linalg.svd(lifted[:, dimension:], compute_uv=False)
            measures["rank"] = float(
                dimension + np.count_nonzero(beyond**2 > NEGLIGIBLE * np.linalg.norm(lifted, 2) ** 2)
            )
        measures["stress"] = float(np.sum(self.errors(positions) ** 2))
        if self.network.truth is not None:
            error = np.sum((positions - self.network.truth) ** 2, axis=1)
            measures["test.position_rmse"] = float(np.sqrt(error.mean()))
        return measures

    def bound(self, lifted: FloatArray) -> float:
        """Return a lower bound on f over all Z >= 0, from the gradient at the Z of lifted positions [n, k].

        f is convex in Z. With G = sum_e 2 (q_e - d_e^2) A_e and any L [d, d], an optimal Z* has
        <G, Z*> >= tr L + R min(0, l), where l is the least eigenvalue of G - [[L, 0], [0, 0]] from below, and R bounds
        the trace of Z*: its objective is at most f, so that each distance, and each path to an anchor, is bounded.
        """
        from scipy.sparse import coo_array, csr_array

        dimension, errors = self.network.dimension, self.errors(lifted)
        gradient = self.squared.adjoint(2 * errors)
        upper = gradient[:dimension].toarray()
        multiplier = upper[:, :dimension] + upper[:, dimension:] @ lifted[:, :dimension]
        multiplier = (multiplier + multiplier.T) / 2
        entry = np.indices((dimension, dimension)).reshape(2, -1)
        block = coo_array((multiplier.ravel(), tuple(entry)), shape=gradient.shape)
        least = min(0.0, sparse_eigenvalue_bound(csr_array(gradient - block), self.proof))
        objective = float(errors @ errors)
        along = 2 * float(errors @ self._distances(lifted))
        trace = self._trace_bound(float(np.sqrt(objective)))
        return max(0.0, objective - along + float(np.trace(multiplier)) + trace * least)

    def _distances(self, lifted: FloatArray) -> FloatArray:
        """Return the squared distances q_e [m]."""
        network = self.network
        anchors = np.zeros((len(network.anchors), lifted.shape[1]))
        anchors[:, : network.dimension] = network.anchors
        nodes = np.concatenate([lifted, anchors])
        return np.asarray(((nodes[network.pairs[:, 0]] - nodes[network.pairs[:, 1]]) ** 2).sum(axis=1))

    def _trace_bound(self, error: float) -> float:
        """Return a bound on tr Z if no squared distance is above the measured one by more than `error`."""
        network = self.network
        return network.dimension + float(np.sum(network.farthest(np.sqrt(network.distances**2 + error)) ** 2))


_LIFTED = 12
"""Dimensions beyond the space: with six, a drawn network of 50 sensors had a gap of 1e-2, with twelve of 1e-12."""
_EASED, _MOST_DAMPING = 1 / 3, 1e12
_LEAST_DROP, _EXACT = 1e-11, 1e-22
"""Of the objective, of a step that ends a stage; of sum_e d_e^4, the objective at which it ends too."""


class LiftedStress(Solver, Section):
    """Minimises sum_e (|p_i - p_j|^2 - d_e^2)^2 over positions in k >= d dimensions, then in d.

    Positions P in k dimensions are the semidefinite relaxation's Z = [[I, X'], [X, P P']] of rank at most k (Burer and
    Monteiro): where the bound of the problem meets the objective, no other Z is better. The coordinates beyond d are
    then left out, and with `refine` a second stage minimises the same stress in d dimensions from there.

    An iteration is a Newton step, damped as that of Levenberg and Marquardt while it would raise the objective. The
    residual is the norm of the gradient over (sum_e d_e^4)^(3/4).

    Source: Biswas and Ye, IPSN 2004, and the refinement of Biswas, Liang, Toh, Wang and Ye, IEEE T. Autom. Sci. Eng.
    3(4), 2006. Differs from the papers: 1. least squares of squared distances, not absolute errors; 2. factors in place
    of an interior-point method.
    """

    kind: Literal["lifted_stress"] = "lifted_stress"
    dimensions: int | None = Field(
        None, ge=2, le=1000, description="dimensions k of the relaxation; null: twelve more than the space"
    )
    refine: bool = Field(True, description="minimise in the dimensions of the space after the relaxation")

    def check(self, problem: Any) -> None:
        """Raise `UserError` for another problem than localisation, or dimensions below those of the space."""
        if not isinstance(problem, Localisation):
            raise UserError(f"lifted_stress solves sensor localisation, not {name_of(problem)}; choose another solver")
        if self.dimensions is not None and self.dimensions < problem.network.dimension:
            raise UserError(
                f"solver.dimensions is {self.dimensions}, but the sensors are in {problem.network.dimension}; raise it"
            )

    def init(self, problem: Localisation, seed: int) -> Arrays:
        """Return positions that are Gaussian around the mean of the anchors, as wide as the longest distance."""
        self.check(problem)
        network = problem.network
        size = self.dimensions or network.dimension + _LIFTED
        drawn = generator(seed, "localisation start").standard_normal((network.sensors, size))
        lifted = drawn * float(network.distances.max())
        lifted[:, : network.dimension] += network.anchors.mean(axis=0)
        return {
            "lifted": lifted,
            "positions": np.ascontiguousarray(lifted[:, : network.dimension]),
            "damping": np.array(1e-3),
            "stage": np.array(0),
        }

    def step(self, problem: Localisation, state: Arrays) -> tuple[Arrays, StepResult]:
        """Return the state after a step of its stage: 0 in k dimensions, 1 in those of the space."""
        dimension, refining = problem.network.dimension, int(state["stage"]) == 1
        at = state["positions" if refining else "lifted"]
        errors = problem.errors(at)
        jacobian = _jacobian(problem, at)
        gradient = jacobian.T @ errors
        moved, damping = _damped_step(problem, at, errors, jacobian, gradient, float(state["damping"]))
        before, after = float(errors @ errors), float(np.sum(problem.errors(moved) ** 2))
        scale = float(np.sum(problem.network.distances**4))
        over = before - after <= _LEAST_DROP * before or after <= _EXACT * scale
        new = {**state, "damping": np.array(damping)}
        if refining:
            new["positions"] = moved
        else:
            new |= {"lifted": moved, "positions": np.ascontiguousarray(moved[:, :dimension])}
            if over and self.refine:
                new |= {"stage": np.array(1), "damping": np.array(1e-3)}
        residual = float(np.linalg.norm(gradient)) / scale**0.75
        ended = over and (refining or not self.refine)
        return new, StepResult(residual, "converged" if ended else "running")

    def answer(self, state: Arrays) -> Arrays:
        """Return `positions` [n, d], and `lifted` [n, k], which the bound is computed from."""
        return {"positions": state["positions"], "lifted": state["lifted"]}


def _damped_step(
    problem: Localisation,
    at: FloatArray,
    errors: FloatArray,
    jacobian: csr_array,
    gradient: FloatArray,
    damping: float,
) -> tuple[FloatArray, float]:
    """Return the positions after the first step that lowers the objective, and the next damping; unchanged if none."""
    from scipy.sparse import csc_array, eye_array, kron
    from scipy.sparse.linalg import splu

    squares = jacobian.T @ jacobian
    scale = float(squares.diagonal().max()) or 1.0
    sensors = problem.squared.adjoint(errors)[problem.network.dimension :, problem.network.dimension :]
    hessian = csc_array(squares + 2 * kron(sensors, eye_array(at.shape[1])))
    while damping <= _MOST_DAMPING:
        damped = csc_array(hessian + damping * scale * eye_array(hessian.shape[0]))
        step = splu(damped, permc_spec="MMD_AT_PLUS_A", options={"SymmetricMode": True}).solve(gradient)
        moved = at - step.reshape(at.shape)
        if float(np.sum(problem.errors(moved) ** 2)) < float(errors @ errors):
            return moved, max(damping * _EASED, 1e-15)
        damping *= 4
    return at, damping


def _jacobian(problem: Localisation, at: FloatArray) -> csr_array:
    """Return the derivatives of the squared distances by the coordinates, [m, n k]."""
    from scipy.sparse import csr_array

    network, (sensors, size) = problem.network, at.shape
    anchors = np.zeros((len(network.anchors), size))
    anchors[:, : network.dimension] = network.anchors
    first, second = network.pairs.T
    change = 2 * (at[first] - np.concatenate([at, anchors])[second])
    every, between = np.arange(len(first)), second < sensors
    rows = np.concatenate([np.repeat(every, size), np.repeat(every[between], size)])
    columns = [(node[:, None] * size + np.arange(size)).ravel() for node in (first, second[between])]
    data = np.concatenate([change.ravel(), -change[between].ravel()])
    return csr_array((data, (rows, np.concatenate(columns))), shape=(len(first), sensors * size))


class SensorLocalisation(ProblemSource, Section):
    """Sensors and anchors uniform in the unit square or cube; pairs within the radio range measure their distance.

    A measured distance has a relative error of standard deviation `noise`. Lengths are in sides of the square. Raises
    `UserError` if a sensor has no path of measured distances to an anchor.
    """

    lower_is_better: ClassVar[tuple[str, ...]] = LOWER_IS_BETTER
    drawn: ClassVar[bool] = True

    kind: Literal["sensor_localisation"] = "sensor_localisation"
    sensors: int = Field(50, ge=1, le=10**4, description="number of sensors")
    anchors: int = Field(8, ge=1, le=10**4, description="number of anchors, whose positions are known")
    dimension: Literal[2, 3] = Field(2, description="2: a square, 3: a cube")
    radio_range: float = Field(0.35, gt=0, le=2, description="largest distance that is measured")
    noise: float = Field(0.05, ge=0, le=1, description="standard deviation of a distance's relative error")
    proof: Proof = Field("lanczos", description="proof of the bound, as of max_cut")
    seed: int | None = Field(None, ge=0, description="seed of positions and noise; null: that of the run")

    def load(self) -> Localisation:
        """Draw the network."""
        network = draw_network(self.sensors, self.anchors, self.dimension, self.radio_range, self.noise, self.seed or 0)
        network.check()
        return Localisation(self.kind, "drawn", network, self.proof)


class SensorDistances(ProblemSource, Section):
    """Sensors whose measured distances are in a text file: lines `anchor NAME x y` and `distance NAME NAME length`.

    Lines `sensor NAME x y` give true positions, which errors are measured with; positions may have a third coordinate.
    Sensors are numbered by their sorted names.
    """

    lower_is_better: ClassVar[tuple[str, ...]] = LOWER_IS_BETTER

    kind: Literal["sensor_distances"] = "sensor_distances"
    path: Path = Field(description="file of anchors and measured distances")
    proof: Proof = Field("lanczos", description="proof of the bound, as of max_cut")

    def load(self) -> Localisation:
        """Return the problem; raise `UserError` if the file is not a sensor network."""
        path = located(self.path, "path", "problem")
        return Localisation(path.name, str(path), read_network(path), self.proof)
