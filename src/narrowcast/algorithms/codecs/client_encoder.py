"""A codec as one client uses it in one round: with its key, within its budget, from the state that it keeps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from narrowcast.algorithms.codecs.budget import encode_within
from narrowcast.algorithms.codecs.chain import Codec
from narrowcast.platform.types import Arrays


@dataclass(frozen=True)
class ClientEncoder:
    """Encodes one client's update.

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
