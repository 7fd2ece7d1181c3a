"""The laws that every codec keeps: weight, way there and back, state, hostile bytes, updates that cannot be sent."""

from __future__ import annotations

import pickle
import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from chains import CHAINS, EXACT, Array, codec, round_trip, shapes_of
from narrowcast.algorithms.codecs.chain import LARGEST_VALUE, Codec, EncodedUpdate, Stages, UnsendableUpdateError
from narrowcast.platform.config.catalog import CODECS
from narrowcast.platform.config.files import validate
from narrowcast.platform.errors import UserError
from narrowcast.platform.types import PayloadError

KEY = 0xFEDC_BA98_7654_3210
UPDATE = {
    "bias": np.random.default_rng(1).standard_normal(5).astype(np.float32),
    "kernel": np.random.default_rng(2).standard_normal((4, 3, 2, 2)).astype(np.float32),
    "weight": np.random.default_rng(3).standard_t(2, (20, 8)).astype(np.float32),
}
SHAPES = shapes_of(UPDATE)


def always_the_same(examples: int) -> settings:
    return settings(derandomize=True, max_examples=examples, deadline=None, database=None)


@st.composite
def updates(draw: st.DrawFn) -> dict[str, Array]:
    """One to three tensors of up to four dimensions, of normal, heavy-tailed, sparse, constant or zero values."""
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    tensors = {}
    for name in draw(st.lists(st.sampled_from(["a", "b/c", "Q"]), min_size=1, max_size=3, unique=True)):
        shape = tuple(draw(st.lists(st.integers(0, 7), max_size=4)))
        values = {
            "normal": random.standard_normal(shape),
            "heavy": random.standard_cauchy(shape),
            "sparse": random.standard_normal(shape) * (random.random(shape) < 0.1),
            "constant": np.full(shape, random.standard_normal()),
            "zero": np.zeros(shape),
        }[draw(st.sampled_from(["normal", "heavy", "sparse", "constant", "zero"]))]
        tensors[name] = np.asarray(values * 10.0 ** draw(st.integers(-46, 20)), dtype=np.float32)
    return tensors


def test_every_kind_of_the_catalog_is_in_a_chain() -> None:
    assert {stage.kind for chain in CHAINS.values() for stage in chain.stages} == set(CODECS)
    assert all(kind == model.model_fields["kind"].default for kind, model in CODECS.items())


@pytest.mark.slow
@always_the_same(400)
@given(updates(), st.integers(0, 2**64 - 1))
@example({"Q": np.zeros((3, 2), np.float32)}, 0)
@example({"Q": np.full((3, 2), 1e-45, np.float32)}, 1)
def test_the_weight_is_that_of_the_bytes_and_they_decode_to_the_same_shapes(
    tensors: dict[str, Array], key: int
) -> None:
    shapes = shapes_of(tensors)
    for name, chain in CHAINS.items():
        state = chain.init_state(shapes)
        encoded, after = chain.encode_with_state(tensors, key, state)
        data = encoded.to_bytes()
        assert encoded.wire_bits() == 8 * len(data), name
        assert encoded.wire_bits() <= chain.max_bits(shapes), name
        assert name not in EXACT or encoded.wire_bits() == chain.max_bits(shapes), name
        back = chain.decode(data, shapes, key)
        assert shapes_of(back) == shapes, name
        assert all(values.dtype == np.float32 and np.isfinite(values).all() for values in back.values()), name
        assert {each: values.shape for each, values in after.items()} == {
            each: np.shape(values) for each, values in state.items()
        }, name


@pytest.mark.parametrize("name", CHAINS)
def test_one_key_gives_one_message(name: str) -> None:
    chain = CHAINS[name]
    first, after = chain.encode_with_state(UPDATE, KEY, chain.init_state(SHAPES))
    shuffled = {each: np.asfortranarray(UPDATE[each]) for each in reversed(UPDATE)}
    again, after_again = pickle.loads(pickle.dumps(chain)).encode_with_state(shuffled, KEY, chain.init_state(SHAPES))
    assert again.to_bytes() == first.to_bytes() == EncodedUpdate.from_bytes(first.to_bytes()).to_bytes()
    assert {each: values.tobytes() for each, values in after.items()} == {
        each: values.tobytes() for each, values in after_again.items()
    }
    decoded = [chain.decode(first.to_bytes(), SHAPES, KEY) for _ in range(2)]
    assert all(decoded[0][each].tobytes() == decoded[1][each].tobytes() for each in UPDATE)


@pytest.mark.parametrize("name", CHAINS)
def test_zeros_stay_zeros(name: str) -> None:
    zeros = {each: np.zeros_like(values) for each, values in UPDATE.items()}
    back = round_trip(CHAINS[name], zeros, KEY)
    assert all(not values.any() for values in back.values())


@pytest.mark.parametrize("name", CHAINS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_updates_that_are_not_finite_are_refused_in_one_line(name: str, bad: float) -> None:
    weight = UPDATE["weight"].copy()
    weight[3, 3] = bad
    with pytest.raises(
        UnsendableUpdateError, match=r"^the update of weight has values that are not finite, or beyond 2\^96$"
    ):
        CHAINS[name].encode({**UPDATE, "weight": weight}, KEY)


@pytest.mark.parametrize("name", CHAINS)
def test_the_largest_numbers_are_sent_and_larger_ones_refused(name: str) -> None:
    signs = np.where(np.arange(24).reshape(6, 4) % 5 > 2, -1, 1)
    back = round_trip(CHAINS[name], {"Q": signs * LARGEST_VALUE}, KEY)
    assert np.isfinite(back["Q"]).all()
    with pytest.raises(UnsendableUpdateError):
        CHAINS[name].encode({"Q": signs * LARGEST_VALUE * 1.01}, KEY)


@pytest.mark.parametrize("name", CHAINS)
def test_truncated_or_extended_bytes_are_refused(name: str) -> None:
    data = CHAINS[name].encode(UPDATE, KEY).to_bytes()
    for length in range(len(data)):
        with pytest.raises(PayloadError):
            CHAINS[name].decode(data[:length], SHAPES, KEY)
    for tail in (b"\0", b"\1", bytes(9)):
        with pytest.raises(PayloadError):
            CHAINS[name].decode(data + tail, SHAPES, KEY)


def accept_or_refuse(chain: Codec, data: bytes) -> None:
    """Anything but a `PayloadError` comes through; what is accepted has the shapes asked for and is finite."""
    try:
        back = chain.decode(data, SHAPES, KEY)
    except PayloadError as refusal:
        assert "\n" not in str(refusal)
    else:
        assert shapes_of(back) == SHAPES
        assert all(np.isfinite(values).all() for values in back.values())


@pytest.mark.parametrize("name", CHAINS)
def test_flipped_bits_and_other_bytes_do_no_harm(name: str) -> None:
    data = CHAINS[name].encode(UPDATE, KEY).to_bytes()
    random = np.random.default_rng(0)
    for _ in range(100):
        flipped = np.frombuffer(data, dtype=np.uint8).copy()
        places = random.integers(0, min(len(data), random.choice([12, 80, len(data)])), 3)
        flipped[places] ^= random.integers(1, 256, 3).astype(np.uint8)
        accept_or_refuse(CHAINS[name], flipped.tobytes())
        accept_or_refuse(CHAINS[name], data[:4] + random.bytes(random.integers(0, len(data) + 9)))
        accept_or_refuse(CHAINS[name], random.bytes(random.integers(0, 60)))


@pytest.mark.parametrize("name", CHAINS)
def test_short_bytes_make_nothing_big(name: str) -> None:
    """The receiver makes what the shapes say, a few times over, and not what the bytes claim."""
    CHAINS[name].decode(CHAINS[name].encode(UPDATE, KEY).to_bytes(), SHAPES, KEY)  # compiles
    random = np.random.default_rng(0)
    tracemalloc.start()
    try:
        for start in (b"", b"\xff\xff\xff\xff\x0f", b"\x07" + b"\1\0\xff\xff\xff\x0f", b"\2", b"\xff\x01"):
            accept_or_refuse(CHAINS[name], start + random.bytes(300))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2**22


@pytest.mark.parametrize("name", [name for name, chain in CHAINS.items() if chain.levels is not None])
def test_a_client_may_choose_its_levels_and_the_receiver_learns_them(name: str) -> None:
    chain, other = CHAINS[name], CHAINS[name].with_levels(5)
    assert other.levels == 5
    assert other is chain.with_levels(5)
    data = other.encode(UPDATE, KEY).to_bytes()
    by_other, by_chain = other.decode(data, SHAPES, KEY), chain.decode(data, SHAPES, KEY)
    assert all(np.array_equal(by_other[each], by_chain[each]) for each in UPDATE)
    for wrong in (0, 2**15 + 1):
        with pytest.raises(ValueError, match="levels"):
            chain.with_levels(wrong)


def test_a_codec_without_levels_takes_none() -> None:
    with pytest.raises(ValueError, match="no stage of this codec has levels: svd"):
        CHAINS["SVD"].with_levels(3)


class _Algorithm(BaseModel):
    codec: Stages = ()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (["entropy"], 'codec = ["entropy"]: "entropy" takes symbols; put a quantiser before it'),
        (["quantise", "cast"], '"quantise" gives symbols, but "cast" after it takes values'),
        (["cast", "entropy"], '"cast" gives bytes, but "entropy" after it takes symbols'),
        (["rotate", "error_feedback"], '"error_feedback" must come first'),
        (["rotate", "rotate"], "a codec may have each kind once"),
        ([{"kind": "quantise", "level": 3}], "codec.0.level is unknown; known here: kind, levels, norm_type, norms"),
        ([{"kind": "quantise", "levels": 0}], "codec.0.levels = 0: should be greater than or equal to 1"),
        (["eden", "entrop"], 'Did you mean "entropy"?'),
        ([{"kind": "rotate", "block": 100}], "codec.0.block = 100: should be a power of two, such as 128"),
    ],
)
def test_what_is_wrong_in_a_file_is_said_with_its_path(values: Any, message: str) -> None:
    with pytest.raises(UserError) as refusal:
        validate(_Algorithm, {"codec": values}, "test.yaml")
    said = str(refusal.value).replace("'", '"')
    assert message.replace("'", '"') in said


def test_one_stage_stands_for_a_chain_and_a_name_for_its_defaults() -> None:
    assert _Algorithm.model_validate({"codec": "eden"}).codec == codec({"kind": "eden"}).stages
    assert _Algorithm.model_validate({"codec": {"kind": "quantise", "levels": 3}}).codec[0].levels == 3
    chain = _Algorithm.model_validate({"codec": ["quantise", "entropy"]})
    assert _Algorithm.model_validate(chain.model_dump()) == chain
    with pytest.raises(ValidationError):
        _Algorithm.model_validate({"codec": 3})
