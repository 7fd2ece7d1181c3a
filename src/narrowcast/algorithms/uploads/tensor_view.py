"""The tensors that a chunk's clients changed, client by client, and how they are put on the wire."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from narrowcast.algorithms.codecs.client_encoder import ClientEncoder
from narrowcast.algorithms.codecs.coded_tensors import CodedTensors, TensorUpdate, encode_tensors
from narrowcast.algorithms.uploads.client_loop import Coding, Sent
from narrowcast.platform.types import BoolArray, IntArray

Tensors = Mapping[str, NDArray[np.float32]]
TensorCoding = Coding[TensorUpdate, Tensors]


@dataclass(frozen=True)
class Columns:
    """The columns that each client sends of some tensors [long, r]: how many, and for each tensor which.

    Shapes: ranks [C]; own [C, r] of each tensor. Both sides draw `own` from the round's seed.
    """

    ranks: IntArray
    own: Mapping[str, BoolArray]


@dataclass(frozen=True)
class TensorView:
    """Each client's changes [C, ...], in the columns that it sends; `received` has the same shapes.

    Shapes: examples [C], which are sent with the tensors; finite, sends and ranks [C]. The rank is sent too if the
    client's columns depend on it.
    """

    changes: Tensors
    examples: IntArray
    finite: BoolArray
    sends: BoolArray
    columns: Columns | None = None
    ranks: IntArray | None = None
    received: dict[str, NDArray[np.float32]] = field(init=False)

    def __post_init__(self) -> None:
        zeros = {name: np.zeros(values.shape, dtype=np.float32) for name, values in self.changes.items()}
        object.__setattr__(self, "received", zeros)

    def take(self, place: int) -> TensorUpdate:
        """Return one client's tensors in its own columns."""
        tensors = {name: values[place][self._own(name, place)] for name, values in self.changes.items()}
        ranks = () if self.columns is None else (int(self.columns.ranks[place]),)
        return TensorUpdate(tensors, (int(self.examples[place]), *ranks))

    def put(self, place: int, received: Tensors) -> None:
        """Store the tensors that the server decoded of one client."""
        for name, values in received.items():
            self.received[name][place, ...][self._own(name, place)] = values

    def _own(self, name: str, place: int) -> tuple[slice, BoolArray] | tuple[()]:
        return (
            () if self.columns is None or name not in self.columns.own else (slice(None), self.columns.own[name][place])
        )


def send_coded_tensors(update: TensorUpdate, encoder: ClientEncoder) -> Sent[Tensors] | None:
    """Send the tensors through the codec."""
    fitting = encode_tensors(encoder, update.tensors, update.counts)
    if fitting is None:
        return None
    payload, after = fitting
    arrived = CodedTensors.from_bytes(payload.to_bytes(), len(update.counts))
    shapes = {name: values.shape for name, values in update.tensors.items()}
    return Sent(payload.wire_bits(), encoder.codec.decode(arrived.coded, shapes, encoder.key), after)
