"""Sensors with measured distances to one another and to anchors, drawn here or read from a file."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from narrowcast.platform.data.own_files import readable
from narrowcast.platform.errors import UserError
from narrowcast.platform.seeds import generator
from narrowcast.platform.types import FloatArray, IntArray


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
        found = hashlib.sha256(str(self.sensors).encode())
        for array in (self.anchors, self.pairs, self.distances):
            found.update(np.ascontiguousarray(array).data)
        return found.hexdigest()

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
    places = generator(seed, "sensor places").random((sensors + anchors, dimension))
    first, second = np.triu_indices(sensors + anchors, 1)
    true = np.linalg.norm(places[first] - places[second], axis=1)
    seen = (true <= radio_range) & (first < sensors) & (true > 0)
    pairs, true = np.stack([first[seen], second[seen]], axis=1), true[seen]
    factor = 1 + noise * generator(seed, "sensor noise").standard_normal(len(true))
    return SensorNetwork(sensors, places[sensors:], pairs, true * np.maximum(factor, 0.01), places[:sensors])


def read_network(path: Path) -> SensorNetwork:
    """Return the network of a text file of lines `anchor NAME x y` and `distance NAME NAME length`.

    Names that are no anchors' are sensors; `sensor NAME x y` gives the true position of one, to measure errors with.
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
    sizes = {len(place) for place in (*anchors.values(), *known.values())}
    if len(sizes) > 1:
        raise UserError(f"{path}: has positions of two and of three coordinates; give all the same")
    place = {name: number for number, name in enumerate([*names, *anchors])}
    kept = sorted(
        (min(place[a], place[b]), max(place[a], place[b]), length)
        for (a, b), length in ((tuple(pair), length) for pair, length in measured.items())
        if not (a in anchors and b in anchors)
    )
    pairs = np.array([each[:2] for each in kept], dtype=np.int64).reshape(-1, 2)
    truth = np.array([known[name] for name in names]) if known.keys() >= set(names) else None
    distances = np.array([each[2] for each in kept])
    network = SensorNetwork(len(names), np.array(list(anchors.values())), pairs, distances, truth)
    try:
        network.check()
    except UserError as error:
        raise UserError(f"{path}: {error}; sensors are numbered by their sorted names") from error
    return network


def _numbers(words: Sequence[str], where: str) -> list[float]:
    try:
        found = [float(word) for word in words]
    except ValueError:
        found = [math.nan]
    if not all(map(math.isfinite, found)):
        raise UserError(f"{where}: {' '.join(words)[:60]!r} is no list of finite numbers")
    return found
