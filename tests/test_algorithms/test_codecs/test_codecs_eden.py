"""The rotation against a dense matrix, and DRIVE and EDEN against what their papers prove."""

from __future__ import annotations

from math import sqrt

import numpy as np
import pytest

from chains import Array, codec, error, round_trip
from narrowcast.algorithms.codecs.chain import stream
from narrowcast.algorithms.codecs.eden import centroids, distortion, rotate, rotate_back, rotated_shapes
from narrowcast.platform.seeds import uniform_bits

# Max, IRE Transactions on Information Theory 1960, table I: mean squared errors of 2, 3, 4, 8 and 16 output levels.
MAX_1960 = {2: 0.3634, 3: 0.1902, 4: 0.1175, 8: 0.03454, 16: 0.009497}
# Vargaftik et al.: pi / 2 - 1 for DRIVE; for EDEN 1 / (1 - D) - 1 with these distortions D.
UNBIASED = {2: 0.5708, 4: 0.1331, 8: 0.0358, 16: 0.0096}


def hadamard(size: int) -> Array:
    matrix = np.ones((1, 1))
    while len(matrix) < size:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return matrix / sqrt(size)


def normal(count: int, seed: int = 0) -> dict[str, Array]:
    return {"x": np.random.default_rng(seed).standard_normal(count).astype(np.float32)}


@pytest.mark.parametrize("passes", [1, 2, 3])
def test_the_rotation_is_signs_and_a_dense_hadamard_matrix(passes: int) -> None:
    x, key = normal(80), 5
    expected = x["x"].reshape(5, 16).astype(np.float64)
    for index in range(passes):
        words = uniform_bits(stream(key, f"signs {index}"), np.arange(2))
        signs = [1 - 2 * (int(words[place // 64]) >> place % 64 & 1) for place in range(80)]
        expected = (expected * np.reshape(signs, (5, 16))) @ hadamard(16)
    assert np.allclose(rotate(x, 16, passes, key)["blocks"], expected, atol=1e-5)
    assert 25 < signs.count(-1) < 55


@pytest.mark.parametrize(("count", "shapes"), [
    (0, {}), (1, {"tail": (1, 1)}), (5, {"tail": (1, 8)}), (16, {"blocks": (1, 16)}),
    (37, {"blocks": (2, 16), "tail": (1, 8)}), (48, {"blocks": (3, 16)}), (63, {"blocks": (3, 16), "tail": (1, 16)}),
])  # fmt: skip
def test_blocks_and_padded_tail(count: int, shapes: dict[str, tuple[int, int]]) -> None:
    assert rotated_shapes(count, 16) == shapes
    tensors = normal(count)
    rotated = rotate(tensors, 16, 2, 1)
    assert {name: rows.shape for name, rows in rotated.items()} == shapes
    energy = sum(float((rows.astype(np.float64) ** 2).sum()) for rows in rotated.values())
    assert energy == pytest.approx(float((tensors["x"].astype(np.float64) ** 2).sum()), rel=1e-5)
    assert np.allclose(rotate_back(rotated, {"x": (count,)}, 2, 1)["x"], tensors["x"], atol=1e-5)


def test_padding_is_paid_for() -> None:
    assert codec("rotate").encode(normal(1025), 0).wire_bits() == 32 * 1025
    assert codec("rotate").encode(normal(1027), 0).wire_bits() == 32 * (1024 + 4)
    # 1 byte of levels, a float32 for each of two blocks, 1024 + 512 bits
    assert codec("eden").encode(normal(1024 + 300), 0).wire_bits() == 8 + 2 * 32 + 1024 + 512


@pytest.mark.parametrize("levels", MAX_1960)
def test_centroids_are_those_of_max(levels: int) -> None:
    assert distortion(levels) == pytest.approx(MAX_1960[levels], abs=6e-5 if levels > 2 else 3e-5)


@pytest.mark.parametrize("levels", [2, 3, 5, 16, 100, 256])
def test_centroids_are_the_means_of_their_cells(levels: int) -> None:
    """The slow reference: a fine grid of the normal density."""
    grid = np.linspace(-9, 9, 400_001)
    density = np.exp(-grid * grid / 2)
    points = centroids(levels)
    assert np.all(np.diff(points) > 0)
    cell = np.searchsorted((points[1:] + points[:-1]) / 2, grid)
    means = np.bincount(cell, density * grid) / np.bincount(cell, density)
    assert np.allclose(points, means, atol=1e-4)
    grid_error = (density * (grid - points[cell]) ** 2).sum() / density.sum()
    assert distortion(levels) == pytest.approx(grid_error, rel=1e-3)


@pytest.mark.parametrize("levels", UNBIASED)
def test_error_of_drive_and_eden_is_the_published_one(levels: int) -> None:
    """Relative squared errors in high dimension, unbiased: 0.571, 0.133, 0.0358, 0.0096 for 1, 2, 3 and 4 bits."""
    assert 1 / (1 - distortion(levels)) - 1 == pytest.approx(UNBIASED[levels], abs=6e-5)
    for seed, tensors in enumerate([normal(2**15), {"x": np.random.default_rng(1).standard_t(2, 2**15)}]):
        got = error(codec({"kind": "eden", "levels": levels, "block": 2**15}), tensors, seed)
        assert got == pytest.approx(UNBIASED[levels], rel=0.04)
        least = error(codec({"kind": "eden", "levels": levels, "block": 2**15, "scale": "min_mse"}), tensors, seed)
        assert least == pytest.approx(distortion(levels), rel=0.04)
        assert least < got


def test_drive_is_signs_and_the_papers_scale() -> None:
    """DRIVE's own formula, with the rotation as a matrix: S = ||x||^2 / ||R x||_1 and x = S R^-1 sign(R x)."""
    tensors, key = normal(64), 3
    rotated = rotate(tensors, 64, 2, key)["blocks"]
    scale = (rotated**2).sum() / np.abs(rotated).sum()
    expected = rotate_back({"blocks": scale * np.sign(rotated)}, {"x": (64,)}, 2, key)["x"]
    got = round_trip(codec({"kind": "eden", "levels": 2, "block": 64}), tensors, key)["x"]
    assert np.allclose(got, expected, atol=1e-5)


def sparse() -> dict[str, Array]:
    random = np.random.default_rng(0)
    vectors = {
        "normal": random.standard_normal(64),
        "heavy": random.standard_t(1.5, 64),
        "even": np.ones(64),
        "two": np.eye(64)[3] + np.eye(64)[9] / 2,
        "three": np.eye(64)[3] + np.eye(64)[9] / 2 + np.eye(64)[20] / 4,
    }
    return {name: values.astype(np.float32) for name, values in vectors.items()}


def bias(x: Array, levels: int, passes: int, keys: int = 800) -> tuple[float, float]:
    """||mean - x||^2 / ||x||^2 over keys, and what it would be of noise alone."""
    chain = codec({"kind": "eden", "levels": levels, "block": 64, "passes": passes})
    samples = np.array([round_trip(chain, {"x": x}, key)["x"] for key in range(keys)], dtype=np.float64)
    energy = float((x.astype(np.float64) ** 2).sum())
    return float(((samples.mean(axis=0) - x) ** 2).sum()) / energy, float(samples.var(axis=0).sum()) / keys / energy


@pytest.mark.parametrize("levels", [2, 4])
@pytest.mark.parametrize("name", sparse())
def test_no_bias_after_two_passes(name: str, levels: int) -> None:
    got, noise = bias(sparse()[name], levels, passes=2)
    assert got < 1.8 * noise  # a mean of 64 squares around 1, with deviation 0.18


def test_one_pass_is_biased_where_few_values_are_large() -> None:
    """(1, 1/2, 0, ...): signs alone decide, so that every key gives 3/4 of the energy to the first value's place."""
    got, _ = bias(sparse()["two"], 2, passes=1, keys=200)
    assert got == pytest.approx(0.25, abs=0.01)
    got, _ = bias(sparse()["three"], 2, passes=1, keys=200)
    assert got == pytest.approx(0.3125, abs=0.01)
