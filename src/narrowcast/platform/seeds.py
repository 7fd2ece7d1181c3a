"""Randomness keyed by (seed, purpose, round, client), so that no result depends on the worker or the time of a draw.

`generator` serves single draws, with numpy's counter-based Philox. `uniform_bits` serves whole cohorts at once: entry
(c, j) is the j-th word of the stream of client c, whatever the other clients.

A run has two seeds. The public stream, of a seed that is a number, holds what every party may regenerate: cohorts,
bases, dithers. The private stream, of a `PrivateSeed`, holds what is a client's own: negatives, batches, its first
factors. Words are cheap, not cryptographic: a word gives the key of its stream.

Code of the package draws from keyed streams alone. Code of others, such as a module with dropout, draws from the global
generators of torch, NumPy and Python, which a whole process shares and whose states depend on all that ran before. Such
code runs inside `isolated`, which seeds them and restores what they were.
"""

from __future__ import annotations

import hashlib
import pickle
import random
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint64]

# The increment and the two multipliers of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014).
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_WORD = 2**64 - 1


def _mix(words: Words) -> Words:
    words = (words ^ (words >> np.uint64(30))) * _MIX_1
    words = (words ^ (words >> np.uint64(27))) * _MIX_2
    return words ^ (words >> np.uint64(31))


def _mix_one(word: int) -> int:
    """Return `_mix` of one word, modulo 2**64."""
    word &= _WORD
    word = ((word ^ (word >> 30)) * int(_MIX_1)) & _WORD
    word = ((word ^ (word >> 27)) * int(_MIX_2)) & _WORD
    return word ^ (word >> 31)


def stream_keys(seed: int, purpose: str, round_index: int, clients: NDArray[np.int64]) -> Words:
    """Return one key per client [C] for the streams of `purpose` in this round."""
    key = int(seed)
    for part in (zlib.crc32(purpose.encode()), round_index):
        key = _mix_one(key + int(_GOLDEN)) ^ _mix_one(int(part) + int(_GOLDEN))
    return _mix(np.uint64(_mix_one(key + int(_GOLDEN))) + _mix(clients.astype(np.uint64) + _GOLDEN))


def uniform_bits(keys: Words, counters: NDArray[np.int64]) -> Words:
    """Return the 64 random bits at position `counters` of the streams of `keys`; the two broadcast together."""
    return _mix(keys + (counters.astype(np.uint64) + np.uint64(1)) * _GOLDEN)


def uniform_unit(keys: Words, counters: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return values uniform over [0, 1), from the bits at position `counters`; the two broadcast together."""
    return (uniform_bits(keys, counters) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def uniform_below(keys: Words, counters: NDArray[np.int64], bounds: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return integers uniform over 0..bound-1; the bias is below bound / 2**53."""
    return (uniform_unit(keys, counters) * bounds).astype(np.int64)


def generator(seed: int, purpose: str, round_index: int = 0, client: int = 0) -> np.random.Generator:
    """Return an independent numpy generator for one draw of this purpose."""
    parts = [seed, zlib.crc32(purpose.encode()), round_index, client]
    # the same words as an array, which numpy takes in half the time; a larger integer is several words
    words = np.array(parts, dtype=np.uint32) if max(parts) < 2**32 else parts
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(words)))


@dataclass(frozen=True)
class PrivateSeed:
    """The seed of the private stream, 0..2**63-1: known to the clients, and neither to the server nor to a decoder.

    Deliberately not an int: functions that take the public seed reject it. A seed that is `own` to the clients is the
    key of a hash (BLAKE2b) that gives each client its key for a purpose and a round: a stream, or a word of it, tells
    neither the seed nor any other stream. Other seeds follow from the public one, as anybody who knows that can
    compute; their streams are made as public ones are.
    """

    value: int = field(repr=False)
    own: bool = False

    @classmethod
    def derived(cls, seed: int) -> Self:
        """Return the private seed that follows one-way from a public seed."""
        return cls(_hashed(seed))

    def successor(self) -> PrivateSeed:
        """Return a private seed that follows one-way from this one, for streams apart from its own."""
        return PrivateSeed(_hashed(self.value), self.own)

    def stream_keys(self, purpose: str, round_index: int, clients: NDArray[np.int64]) -> Words:
        """Return one key per client [C] for the private streams of `purpose` in this round."""
        if not self.own:
            return stream_keys(self.value, purpose, round_index, clients)
        of_round = hashlib.blake2b(key=self.value.to_bytes(8, "little"), digest_size=8, person=b"narrowcast keys")
        of_round.update(f"{purpose}\0{round_index}\0".encode())
        keys = bytearray()
        for client in clients.tolist():
            of_client = of_round.copy()
            of_client.update(client.to_bytes(8, "little"))
            keys += of_client.digest()
        return np.frombuffer(keys, dtype="<u8").astype(np.uint64)


def _hashed(seed: int) -> int:
    digest = hashlib.sha256(b"narrowcast private stream" + seed.to_bytes(8, "little")).digest()
    return int.from_bytes(digest[:8], "little") >> 1


States = Mapping[str, Any]
"""The state of each generator, by its name."""

_LOW_WORD = 2**32 - 1


@dataclass(frozen=True)
class _Generator:
    """A global generator: its state, in a form that can be compared, and how it is set."""

    state: Callable[[], Any]
    restore: Callable[[Any], None]
    seed: Callable[[int], None]


def _torch_state() -> tuple[bytes, ...]:
    import torch

    states = [torch.get_rng_state()]
    if torch.cuda.is_initialized():
        states += torch.cuda.get_rng_state_all()
    return tuple(state.numpy().tobytes() for state in states)


def _restore_torch(states: tuple[bytes, ...]) -> None:
    import torch

    of_cpu, *of_cuda = (torch.frombuffer(bytearray(state), dtype=torch.uint8) for state in states)
    torch.set_rng_state(of_cpu)
    for index, state in enumerate(of_cuda):
        torch.cuda.set_rng_state(state, index)


def _seed_torch(word: int) -> None:
    import torch

    torch.default_generator.manual_seed(word)  # torch.manual_seed asks for every accelerator, which takes 0.1 ms
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(word)


GENERATORS: Mapping[str, _Generator] = {
    "torch": _Generator(_torch_state, _restore_torch, _seed_torch),
    "numpy.random": _Generator(
        lambda: pickle.dumps(np.random.get_state()),
        lambda state: np.random.set_state(pickle.loads(state)),
        lambda word: np.random.seed([word & _LOW_WORD, word >> 32]),
    ),
    "random": _Generator(random.getstate, random.setstate, random.seed),
}
"""The generators by the name of their module."""


def seed_generators(word: int, names: Collection[str] = tuple(GENERATORS)) -> None:
    """Seed the named generators with a word of 64 bits."""
    for name in names:
        GENERATORS[name].seed(word)


def states() -> States:
    """Return the state of every generator."""
    return {name: generator.state() for name, generator in GENERATORS.items()}


def moved_since(before: States) -> tuple[str, ...]:
    """Return the names of the generators that have been drawn from, or seeded, since `before`."""
    return tuple(name for name, state in states().items() if state != before[name])


@contextmanager
def isolated(word: int | None = None) -> Iterator[None]:
    """Restore all generators after a block; they are seeded with a word of 64 bits before it if one is given."""
    before = states()
    if word is not None:
        seed_generators(word)
    try:
        yield
    finally:
        for name, state in before.items():
            if GENERATORS[name].state() != state:
                GENERATORS[name].restore(state)
