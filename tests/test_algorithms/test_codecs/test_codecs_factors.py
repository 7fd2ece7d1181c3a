"""SVD, PowerSGD, the random basis, and the memory of what they lose."""

from __future__ import annotations

from math import sqrt

import numpy as np
import pytest

from chains import CHAINS, Array, codec, error, matrix, quantise, round_trip, shapes_of
from narrowcast.algorithms.codecs.low_rank import WARM, iterated_svd, truncated_svd
from narrowcast.algorithms.codecs.sparsify import MEMORY, memory_of_rows, with_memory_of_rows
from narrowcast.platform.seeds import generator


def best(values: Array, rank: int) -> Array:
    """The slow reference: numpy's decomposition, cut."""
    left, singular, right = np.linalg.svd(values.astype(np.float64), full_matrices=False)
    return np.asarray((left[:, :rank] * singular[:rank]) @ right[:rank])


@pytest.mark.parametrize("parts", ["uv", "usv"])
@pytest.mark.parametrize("shape", [(80, 8), (8, 80), (30, 30)])
@pytest.mark.parametrize("rank", [1, 2])
def test_svd_is_the_best_approximation_of_its_rank(shape: tuple[int, int], rank: int, parts: str) -> None:
    values = matrix(*shape)
    got = round_trip(codec({"kind": "svd", "rank": rank, "parts": parts}), {"Q": values}, 0)["Q"]
    assert np.allclose(got, best(values, rank), atol=1e-6)


@pytest.mark.parametrize("shape", [(40, 6), (6, 40)])
def test_the_gram_matrix_gives_the_decomposition(shape: tuple[int, int]) -> None:
    values = matrix(*shape)
    left, singular, right = truncated_svd(values, 4)
    assert np.allclose(left.T @ left, np.eye(4), atol=1e-7)
    assert np.allclose(right @ right.T, np.eye(4), atol=1e-7)
    assert np.allclose(singular, np.linalg.svd(values.astype(np.float64), compute_uv=False)[:4], rtol=1e-6)
    tiny = truncated_svd(values * np.float32(1e-38), 2)
    assert np.allclose((tiny[0] * tiny[1]) @ tiny[2], best(values, 2) * 1e-38, rtol=0.02, atol=1e-40)


def test_svd_of_a_matrix_of_lower_rank_than_asked_for() -> None:
    values = np.outer(np.arange(1, 21), [1.0, 0, 2, 0, 0, 0, 0, 3]).astype(np.float32)
    assert np.allclose(round_trip(codec({"kind": "svd", "rank": 3}), {"Q": values}, 0)["Q"], values, rtol=1e-5)


@pytest.mark.parametrize(("parts", "values"), [("uv", 4 * (3706 + 64)), ("usv", 4 * (3706 + 64 + 1))])
def test_svd_pays_for_all_factors(parts: str, values: int) -> None:
    """CoLR's tables count 3706 values a rank, those of U; 64 of V and 1 of S are sent as well."""
    assert codec({"kind": "svd", "rank": 4, "parts": parts}).max_bits({"Q": (3706, 64)}) == 32 * values


def test_vectors_and_small_matrices_go_whole_and_kernels_as_matrices() -> None:
    random = np.random.default_rng(0)
    tensors = {
        "bias": random.standard_normal(40).astype(np.float32),
        "small": random.standard_normal((3, 3)).astype(np.float32),
        "kernel": matrix(20, 18).reshape(20, 2, 3, 3),
    }
    for kind in ("svd", "power_sgd"):
        chain = codec({"kind": kind, "rank": 2})
        assert chain.max_bits(shapes_of(tensors)) == 32 * (40 + 9 + 2 * (20 + 18))
        back = round_trip(chain, tensors, 0)
        assert np.array_equal(back["bias"], tensors["bias"])
        assert np.array_equal(back["small"], tensors["small"])
        assert 0.0 < np.abs(back["kernel"] - tensors["kernel"]).max() < 0.4


def power_by_hand(values: Array, start: Array) -> tuple[Array, Array]:
    """The slow reference: Vogels et al., Algorithm 1, with Gram-Schmidt; the product and the next Q."""
    left = values @ start
    for column in range(left.shape[1]):
        for other in range(column):
            left[:, column] -= (left[:, other] @ left[:, column]) * left[:, other]
        left[:, column] /= np.linalg.norm(left[:, column])
    right = values.T @ left
    return left @ right.T, right


def test_power_sgd_is_the_papers_iteration() -> None:
    chain, first, second = codec({"kind": "power_sgd", "rank": 2}), matrix(40, 8, 1), matrix(40, 8, 2)
    state = chain.init_state({"Q": (40, 8)})
    assert {name: values.shape for name, values in state.items()} == {WARM + "Q": (8, 2)}
    encoded, state = chain.encode_with_state({"Q": first}, 1, state)
    start = np.asarray(state[WARM + "Q"], dtype=np.float64)
    # the warm Q spans what one iteration from the drawn one gives; the paper's columns may have other signs
    encoded, after = chain.encode_with_state({"Q": second}, 2, state)
    product, right = power_by_hand(second.astype(np.float64), start.copy())
    assert np.allclose(chain.decode(encoded.to_bytes(), {"Q": (40, 8)}, 2)["Q"], product, atol=1e-5)
    assert np.allclose(np.abs(after[WARM + "Q"]), np.abs(right), atol=1e-5)


def test_a_warm_start_comes_to_the_best_approximation() -> None:
    values, chain = matrix(60, 10, decay=0.6), codec({"kind": "power_sgd", "rank": 2})
    state, least = chain.init_state({"Q": (60, 10)}), float(((best(values, 2) - values) ** 2).sum())
    errors = []
    for key in range(12):
        encoded, state = chain.encode_with_state({"Q": values}, key, state)
        errors.append(float(((chain.decode(encoded.to_bytes(), {"Q": (60, 10)}, key)["Q"] - values) ** 2).sum()))
    assert errors[0] > 1.05 * least
    assert errors[-1] == pytest.approx(least, rel=1e-3)


def test_a_cold_start_draws_its_factors_and_keeps_none() -> None:
    values, shapes = {"Q": matrix(60, 10, decay=0.9)}, {"Q": (60, 10)}
    chain = codec({"kind": "power_sgd", "rank": 2, "warm_start": False})
    assert not chain.init_state(shapes)
    assert not any(stage.remembers for stage in chain.stages)
    assert any(stage.remembers for stage in codec("power_sgd").stages)
    encoded, after = chain.encode_with_state(values, 7, {})
    assert not after
    start = generator(7, WARM + "Q").standard_normal((10, 2))
    product, _ = power_by_hand(values["Q"].astype(np.float64), start)
    assert np.allclose(chain.decode(encoded.to_bytes(), shapes, 7)["Q"], product, atol=1e-5)
    feedback = codec("error_feedback", {"kind": "power_sgd", "rank": 2, "warm_start": False})
    assert set(feedback.init_state(shapes)) == {MEMORY + "Q"}


def test_one_iteration_of_a_warm_svd_is_power_sgds_product() -> None:
    shapes = {"Q": (40, 8)}
    warm = codec({"kind": "svd", "rank": 2, "warm_start": True})
    power, states = codec({"kind": "power_sgd", "rank": 2}), {}
    for name, chain, prefix in (("svd", warm, "svd/"), ("power", power, WARM)):
        state = chain.init_state(shapes)
        states[name] = {prefix + "Q": np.random.default_rng(3).standard_normal((8, 2)).astype(np.float32)}
        assert {each: values.shape for each, values in state.items()} == {prefix + "Q": (8, 2)}
    update = {"Q": matrix(40, 8, 2)}
    by_svd, by_power = (
        chain.decode(chain.encode(update, 1, states[name]).to_bytes(), shapes, 1)["Q"]
        for name, chain in (("svd", warm), ("power", power))
    )
    assert np.allclose(by_svd, by_power, atol=1e-6)


@pytest.mark.parametrize("parts", ["uv", "usv"])
@pytest.mark.parametrize("shape", [(80, 8), (8, 80), (30, 30)])
def test_a_warm_svd_comes_to_the_exact_one(shape: tuple[int, int], parts: str) -> None:
    """With many iterations at once, and with one for each update: also if the matrix turns a little each time."""
    values, fields = matrix(*shape, decay=0.6), {"kind": "svd", "rank": 2, "parts": parts, "warm_start": True}
    at_once = round_trip(codec({**fields, "iterations": 60}), {"Q": values}, 3)["Q"]
    assert np.allclose(at_once, best(values, 2), atol=1e-5)
    chain, turn = codec(fields), np.linalg.qr(np.eye(shape[1]) + 0.002 * matrix(shape[1], shape[1], 5))[0]
    turn *= np.sign(np.diag(turn))
    state, lost = chain.init_state({"Q": shape}), []
    for key in range(15):
        values = (values @ turn).astype(np.float32)
        encoded, state = chain.encode_with_state({"Q": values}, key, state)
        back = chain.decode(encoded.to_bytes(), {"Q": shape}, key)["Q"]
        lost.append(float(((back - values) ** 2).sum() / ((best(values, 2) - values) ** 2).sum()))
    assert lost[0] > 1.02
    assert 1 - 1e-4 < lost[-1] < 1.002


def test_the_directions_of_a_warm_svd_are_orthogonal_and_the_strongest_comes_first() -> None:
    update, rank = matrix(50, 9, decay=0.8), 3
    left, singular, right = iterated_svd(update, np.random.default_rng(0).standard_normal((9, rank)), 2)
    assert np.allclose(left.T @ left, np.eye(rank), atol=1e-9)
    assert np.allclose(right @ right.T, np.eye(rank), atol=1e-9)
    assert np.all(np.diff(singular) <= 0)


def test_a_client_with_fewer_rows_or_a_higher_rank_than_its_state_is_served() -> None:
    chain = codec({"kind": "power_sgd", "rank": 3})
    state = chain.init_state({"Q": (50, 8)})
    for rows in (40, 2, 1, 0, 40):
        encoded, state = chain.encode_with_state({"Q": matrix(rows, 8) if rows else np.empty((0, 8))}, rows, state)
        assert chain.decode(encoded.to_bytes(), {"Q": (rows, 8)}, rows)["Q"].shape == (rows, 8)
        assert np.shape(state[WARM + "Q"]) == (8, 3)
    wider = codec({"kind": "power_sgd", "rank": 5})
    encoded, after = wider.encode_with_state({"Q": matrix(40, 8)}, 1, state)
    assert np.shape(after[WARM + "Q"]) == (8, 3)
    assert wider.decode(encoded.to_bytes(), {"Q": (40, 8)}, 1)["Q"].shape == (40, 8)


@pytest.mark.parametrize("basis", ["orthonormal", "gaussian"])
def test_the_unbiased_basis_has_no_bias(basis: str) -> None:
    values, keys = matrix(6, 8), 1500
    chain = codec({"kind": "basis", "rank": 2, "basis": basis})
    samples = np.array([round_trip(chain, {"Q": values}, key)["Q"] for key in range(keys)])
    assert np.all(np.abs(samples.mean(axis=0) - values) < 5 * samples.std(axis=0) / sqrt(keys))


def test_the_projection_has_the_error_of_one() -> None:
    values = np.random.default_rng(0).standard_normal((50, 8)).astype(np.float32)
    chain = codec({"kind": "basis", "rank": 2, "scale": "projection"})
    errors = [error(chain, {"Q": values}, key) for key in range(300)]
    assert np.mean(errors) == pytest.approx(1 - 2 / 8, abs=0.01)
    once = round_trip(chain, {"Q": values}, 3)
    assert np.allclose(round_trip(chain, once, 3)["Q"], once["Q"], atol=1e-5)


REMEMBERED = [name for name, chain in CHAINS.items() if chain.stages and chain.stages[0].kind == "error_feedback"]


@pytest.mark.parametrize("name", REMEMBERED)
def test_what_was_sent_and_what_is_owed_add_up(name: str) -> None:
    chain, shapes = CHAINS[name], {"Q": (20, 6), "b": (6,)}
    random = np.random.default_rng(0)
    state, given, got = chain.init_state(shapes), np.zeros((20, 6)), np.zeros((20, 6))
    assert all(not np.any(values) for values in state.values())
    for key in range(30):
        tensors = {each: random.standard_normal(shape).astype(np.float32) for each, shape in shapes.items()}
        encoded, state = chain.encode_with_state(tensors, key, state)
        given += tensors["Q"]
        got += chain.decode(encoded.to_bytes(), shapes, key)["Q"]
        scale = 1 + np.abs(np.asarray(state[MEMORY + "Q"])).max()
        assert np.allclose(got + state[MEMORY + "Q"], given, atol=1e-3 * scale)


def test_memory_makes_top_k_send_everything_in_the_end() -> None:
    """The same update again and again: without a memory most of it is never sent; with one the mean comes near."""
    x = {"Q": np.random.default_rng(0).standard_normal((30, 4)).astype(np.float32)}
    for stages, least, most in ((["top_k"], 0.5, 1.0), (["error_feedback", "top_k"], 0.0, 0.05)):
        chain = codec(*[{"kind": "top_k", "fraction": 0.1} if stage == "top_k" else stage for stage in stages])
        state, total = chain.init_state(shapes_of(x)), np.zeros((30, 4))
        for key in range(200):
            encoded, state = chain.encode_with_state(x, key, state)
            total += chain.decode(encoded.to_bytes(), shapes_of(x), key)["Q"]
        lost = float(((total / 200 - x["Q"]) ** 2).sum() / (x["Q"] ** 2).sum())
        assert least <= lost <= most


def test_the_memory_of_rows_waits_until_they_are_touched() -> None:
    chain = codec("error_feedback", quantise(levels=1, scale="max", rounding="nearest"))
    whole = chain.init_state({"Q": (6, 2)})
    rows, update = np.array([1, 4]), np.array([[1.0, 0.4], [0.2, 0.4]], dtype=np.float32)
    _, part = chain.encode_with_state({"Q": update}, 0, memory_of_rows(whole, rows))
    after = with_memory_of_rows(whole, rows, part)
    assert not np.any(whole[MEMORY + "Q"])
    expected = np.zeros((6, 2))
    expected[rows] = [[0, 0.4], [0.2, 0.4]]
    assert np.allclose(after[MEMORY + "Q"], expected)
    # the next round touches rows 4 and 5: what row 4 owes is added there, row 1 keeps what it owes
    encoded, part = chain.encode_with_state({"Q": update * 0 + 0.6}, 1, memory_of_rows(after, np.array([4, 5])))
    assert np.allclose(chain.decode(encoded.to_bytes(), {"Q": (2, 2)}, 1)["Q"], [[1.0, 1.0], [1.0, 1.0]])
    last = with_memory_of_rows(after, np.array([4, 5]), part)
    assert np.allclose(np.asarray(last[MEMORY + "Q"])[[1, 4, 5]], [[0, 0.4], [-0.2, 0.0], [-0.4, -0.4]], atol=1e-6)


def test_the_warm_factors_are_no_rows() -> None:
    chain = codec("error_feedback", {"kind": "power_sgd", "rank": 2})
    whole = chain.init_state({"Q": (30, 8)})
    rows = np.arange(0, 30, 2)
    _, part = chain.encode_with_state({"Q": matrix(15, 8)}, 0, memory_of_rows(whole, rows))
    after = with_memory_of_rows(whole, rows, part)
    assert {name: np.shape(values) for name, values in after.items()} == {MEMORY + "Q": (30, 8), WARM + "Q": (8, 2)}
    assert np.any(after[WARM + "Q"])
    assert not np.any(np.asarray(after[MEMORY + "Q"])[1::2])


@pytest.mark.parametrize("kind", ["svd", "power_sgd"])
def test_a_direction_has_one_norm_on_either_side(kind: str) -> None:
    """Four norms, where one for each whole factor makes two."""
    chain = codec({"kind": kind, "rank": 2}, quantise(levels=1, norms="column", norm_type="bfloat16"))
    symbols = codec({"kind": kind, "rank": 2}, quantise(levels=1, norm_type="bfloat16"))
    shape = {"Q": (40, 90)}
    assert chain.max_bits(shape) == symbols.max_bits(shape) + 8 * 2 * 2
