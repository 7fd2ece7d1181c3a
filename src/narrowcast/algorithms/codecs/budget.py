"""Encoding within a budget of bits: by the upper bound of an update's size, or by its size once encoded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import log2, sqrt
from typing import Any

import numpy as np
from numpy.typing import NDArray

from narrowcast.algorithms.codecs.chain import NO_STATE, Codec, EncodedUpdate
from narrowcast.platform.types import Arrays

_INTERPOLATIONS = 6  # further tries bisect the remaining range of levels
_CLOSE = 32  # levels that are 1/32 finer would lower the error by 6 %, and take another encoding or two to find


def encode_within(
    codec: Codec,
    tensors: Mapping[str, NDArray[Any]],
    key: int,
    budget_bits: float,
    state: Arrays = NO_STATE,
    finest: int | None = None,
) -> tuple[EncodedUpdate, Arrays] | None:
    """Encode with the most levels, up to `finest`, whose packed update is within the budget; None if no levels are.

    Also return the client's state after sending. The search starts at the codec's own levels and ends with levels k
    that fit while others, at most 1 + k / 32 above, do not: the size of entropy-coded updates is nearly, but not
    exactly, monotone in the levels. A codec without levels fits or does not.
    """
    if codec.levels is None:
        encoded, after = codec.encode_with_state(tensors, key, state)
        return (encoded, after) if encoded.wire_bits() <= budget_bits else None
    # An estimate of the bits that twice the levels add, until two sizes are known.
    bits_per_doubling = sum(np.size(values) for values in tensors.values()) / 2 + 1
    fits, beyond = _levels_below(codec), _levels_above(codec, finest)
    best, spare, excess, guess, tries = None, None, None, codec.levels, 0
    while beyond - fits > 1 + fits // _CLOSE:
        guess = min(max(guess, fits + 1), beyond - 1)
        encoded, after = codec.with_levels(guess).encode_with_state(tensors, key, state)
        left = budget_bits - encoded.wire_bits()
        if left >= 0:
            best, fits, spare = (encoded, after), guess, left
        else:
            beyond, excess = guess, -left
        tries += 1
        if tries > _INTERPOLATIONS:
            guess = int(sqrt(max(fits, 1) * beyond))
            continue
        if spare is not None and excess is not None:
            bits_per_doubling = max(1.0, (spare + excess) / log2(beyond / fits))
        guess = int(guess * 2 ** min(max(left / bits_per_doubling, -4.0), 4.0))
    return best


def _levels_below(codec: Codec) -> int:
    return _allowed(codec).start - 1


def _levels_above(codec: Codec, finest: int | None) -> int:
    allowed = _allowed(codec)
    return allowed.stop if finest is None else min(finest + 1, allowed.stop)


def _allowed(codec: Codec) -> range:
    allowed = codec.levels_allowed
    if allowed is None:
        raise ValueError("this codec has no levels to choose; give it a quantiser")
    return allowed


@dataclass(frozen=True)
class ClientEncoder:
    """The encoder of one client's update.

    `key` is the 64-bit word of the client's public stream, which the server knows too. `budget_bits` bounds the whole
    upload; infinite: the codec's own levels are used. `state` is what the codec kept on the client, as `init_state`
    or the client's last encoding returned it.
    """

    codec: Codec
    key: int
    budget_bits: float = np.inf
    state: Arrays = field(default_factory=dict)

    def encode(
        self, tensors: Mapping[str, NDArray[Any]], head: bytes = b"", finest: int | None = None
    ) -> tuple[bytes, Arrays] | None:
        """Return `head` followed by the coded tensors, and the client's state once they are sent.

        The levels are the most, up to `finest`, that fit the budget; None if no levels fit. Raise
        `UnsendableUpdateError` for values that are not finite.
        """
        left = self.budget_bits - 8 * len(head)
        if np.isinf(left):
            encoded, after = self.codec.encode_with_state(tensors, self.key, self.state)
        elif within := encode_within(self.codec, tensors, self.key, left, self.state, finest):
            encoded, after = within
        else:
            return None
        return head + encoded.to_bytes(), after
