"""Laws of codec stages, in the shortest chain that a stage can stand in and with a coder after it."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from narrowcast.algorithms.codecs.chain import Codec, Stage, UnsendableUpdateError, check_order
from narrowcast.algorithms.codecs.entropy import Entropy
from narrowcast.algorithms.codecs.quantise import Quantise
from narrowcast.laws.law import LawBrokenError, require
from narrowcast.laws.small_tasks import digest
from narrowcast.platform.types import Arrays, PayloadError

Tensors = Mapping[str, NDArray[Any]]
KEY = 0xFEDC_BA98_7654_3210
_FUZZED = 200


@dataclass(frozen=True)
class CodecCase:
    """A chain with the stage in it, and an update to send."""

    codec: Codec
    update: Tensors

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the update."""
        return {name: values.shape for name, values in self.update.items()}

    @property
    def state(self) -> Arrays:
        """A client's state before its first upload."""
        return self.codec.init_state(self.shapes)


def updates() -> dict[str, Tensors]:
    """Return updates of usual, heavy-tailed, constant, zero and empty tensors."""
    random = np.random.default_rng(0)
    shapes = {"bias": (5,), "kernel": (4, 3, 2, 2), "weight": (20, 8)}

    def filled(draw: Any) -> Tensors:
        return {name: np.asarray(draw(shape), dtype=np.float32) for name, shape in shapes.items()}

    return {
        "normal": filled(random.standard_normal),
        "heavy-tailed": filled(lambda shape: random.standard_cauchy(shape) * 1e6),
        "constant": filled(lambda shape: np.full(shape, -0.25)),
        "zero": filled(np.zeros),
        "empty": {"weight": np.zeros((0, 3), np.float32), "bias": np.zeros((1,), np.float32)},
    }


def chains(stage: Stage) -> list[Codec]:
    """Return the chains of at most three stages that the stage can stand in."""
    codecs = []
    for stages in ((stage,), (stage, Entropy()), (Quantise(), stage)):
        try:
            check_order(stages)
        except ValueError:
            continue
        codecs.append(Codec(stages))
    return codecs


def cases(stage: Stage) -> dict[str, CodecCase]:
    """Return the stage in each chain, with each update."""
    return {
        f"{'+'.join(stage.kind for stage in codec.stages)}, {name} update": CodecCase(codec, update)
        for codec in chains(stage)
        for name, update in updates().items()
    }


def messages_decode_to_finite_tensors_of_the_same_shapes(case: CodecCase) -> None:
    """Encode and decode an update."""
    back = case.codec.decode(case.codec.encode(case.update, KEY, case.state).to_bytes(), case.shapes, KEY)
    shapes = {name: values.shape for name, values in back.items()}
    require(shapes == case.shapes, f"the shapes {case.shapes} come back as {shapes}")
    for name, values in back.items():
        require(values.dtype == np.float32, f"{name} comes back as {values.dtype}")
        require(np.isfinite(values).all(), f"{name} comes back with values that are not finite")


def wire_bits_are_the_length_of_the_bytes_and_at_most_max_bits(case: CodecCase) -> None:
    """Weigh an encoded update."""
    encoded = case.codec.encode(case.update, KEY, case.state)
    bits, most = 8 * len(encoded.to_bytes()), case.codec.max_bits(case.shapes)
    require(encoded.wire_bits() == bits, f"wire_bits is {encoded.wire_bits()}, and {bits} bits are sent")
    require(bits <= most, f"{bits} bits are sent, and max_bits is {most}")


def encoding_is_deterministic_in_its_key(case: CodecCase) -> None:
    """Encode an update twice, the second time with a pickled codec and the tensors in another order."""
    again = {name: np.asfortranarray(case.update[name]) for name in reversed(list(case.update))}
    first, after = case.codec.encode_with_state(case.update, KEY, case.state)
    second, after_again = pickle.loads(pickle.dumps(case.codec)).encode_with_state(again, KEY, case.state)
    require(first.to_bytes() == second.to_bytes(), "the bytes differ")
    require(digest(after) == digest(after_again), "the states differ")
    decoded = [case.codec.decode(first.to_bytes(), case.shapes, KEY) for _ in range(2)]
    require(digest(decoded[0]) == digest(decoded[1]), "the same bytes decode to different tensors")


def the_state_keeps_its_names_and_shapes(case: CodecCase) -> None:
    """Encode five updates one after the other."""
    state = case.state
    for name, values in state.items():
        require(not np.any(values), f"{name} is not zero before the first upload")
    shapes = {name: np.shape(values) for name, values in state.items()}
    for step in range(5):
        state = case.codec.encode_with_state(case.update, KEY + step, state)[1]
        now = {name: np.shape(values) for name, values in state.items()}
        require(now == shapes, f"the state had the shapes {shapes} and has {now}")


def zeros_stay_zeros(case: CodecCase) -> None:
    """Send an update of zeros."""
    zeros = {name: np.zeros_like(values) for name, values in case.update.items()}
    back = case.codec.decode(case.codec.encode(zeros, KEY, case.state).to_bytes(), case.shapes, KEY)
    require(all(not values.any() for values in back.values()), "an update of zeros comes back with other values")


def hostile_bytes_raise_payload_error(case: CodecCase) -> None:
    """Decode bytes that were cut, lengthened, changed and made up."""
    data = case.codec.encode(case.update, KEY, case.state).to_bytes()
    random = np.random.default_rng(0)
    for changed in (data[:-1], data + b"\0", *(_corrupted(data, random) for _ in range(_FUZZED))):
        try:
            back = case.codec.decode(changed, case.shapes, KEY)
        except PayloadError:
            continue
        except Exception as error:
            raise LawBrokenError(f"{len(changed)} bytes raise {type(error).__name__}: {error}") from error
        require(
            len(changed) == len(data) or changed not in (data[:-1], data + b"\0"), "cut or padded bytes are decoded"
        )
        finite = all(np.isfinite(values).all() for values in back.values())
        require(finite, "changed bytes decode to values that are not finite")


def _corrupted(data: bytes, random: np.random.Generator) -> bytes:
    if random.random() < 0.3:
        return random.bytes(int(random.integers(0, len(data) + 4)))
    values = bytearray(data)
    for index in random.integers(0, max(len(values), 1), size=int(random.integers(1, 4))):
        if values:
            values[index] = int(random.integers(256))
    return bytes(values[: random.integers(0, len(values) + 1)] if random.random() < 0.5 else values)


def an_update_that_is_not_finite_is_refused(case: CodecCase) -> None:
    """Send an update with a value that is not a number."""
    bad = {name: values.copy() for name, values in case.update.items()}
    next(values for values in bad.values() if values.size).flat[0] = np.nan
    try:
        case.codec.encode(bad, KEY, case.state)
    except UnsendableUpdateError:
        return
    require(condition=False, reason="it was encoded")


def digest_of(case: CodecCase) -> str:
    """Return the sha256 of the update's bytes, of the state after them, and of the tensors that they decode to."""
    encoded, after = case.codec.encode_with_state(case.update, KEY, case.state)
    sent = encoded.to_bytes()
    decoded = case.codec.decode(sent, case.shapes, KEY)
    return digest({**after, "bytes": np.frombuffer(sent, np.uint8), **{f"decoded {k}": v for k, v in decoded.items()}})


LAWS = (
    messages_decode_to_finite_tensors_of_the_same_shapes,
    wire_bits_are_the_length_of_the_bytes_and_at_most_max_bits,
    encoding_is_deterministic_in_its_key,
    the_state_keeps_its_names_and_shapes,
    zeros_stay_zeros,
    hostile_bytes_raise_payload_error,
    an_update_that_is_not_finite_is_refused,
)
