"""The clients that are out with a model: when they come back, and which version of the model they took along."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Self

import numpy as np

from narrowcast.platform.types import Arrays, BoolArray, FloatArray, IntArray


@dataclass(frozen=True)
class Flights:
    """Clients in the order of their arrival, of those in one instant the lowest first; all [F].

    `version` counts the server's steps up to the model that a client took along. Units: `arrives_at` in simulated
    seconds since the run began, `seconds` since the client was sent out.
    """

    client: IntArray
    version: IntArray
    arrives_at: FloatArray
    seconds: FloatArray
    downlink_bits: IntArray

    @classmethod
    def none(cls) -> Self:
        """Nobody is out."""
        nobody = np.empty(0, dtype=np.int64)
        return cls(nobody, nobody, np.empty(0), np.empty(0), nobody)

    def __len__(self) -> int:
        return len(self.client)

    def take(self, rows: IntArray | BoolArray | slice) -> Self:
        """Some of them."""
        return type(self)(**{each.name: getattr(self, each.name)[rows] for each in fields(self)})

    def joined_by(self, others: Self) -> Self:
        """These and others, in order."""
        both = type(self)(
            **{
                each.name: np.concatenate([getattr(self, each.name), getattr(others, each.name)])
                for each in fields(self)
            }
        )
        return both.take(np.lexsort((both.client, both.arrives_at)))


_FLIGHT, _VERSION, _SENT_OUT = "flight/", "version/", "sent_out"


@dataclass(frozen=True)
class Airspace:
    """What an asynchronous run keeps between steps: who is out, and each model that someone out took along.

    `sent_out` counts all flights since the run began.
    """

    flights: Flights = field(default_factory=Flights.none)
    versions: Mapping[int, Arrays] = field(default_factory=dict)
    sent_out: int = 0

    @classmethod
    def of(cls, kept: Arrays) -> Self:
        """From the arrays of a checkpoint; an empty one where there are none."""
        if _SENT_OUT not in kept:
            return cls()
        versions: dict[int, dict[str, np.ndarray]] = {}
        for name in kept:
            if name.startswith(_VERSION):
                version, _, tensor = name.removeprefix(_VERSION).partition("/")
                versions.setdefault(int(version), {})[tensor] = kept[name]
        flights = Flights(**{each.name: kept[_FLIGHT + each.name] for each in fields(Flights)})
        return cls(flights, versions, int(kept[_SENT_OUT][0]))

    def kept(self) -> Arrays:
        """As arrays, to be checkpointed."""
        return {
            _SENT_OUT: np.array([self.sent_out]),
            **{_FLIGHT + each.name: getattr(self.flights, each.name) for each in fields(Flights)},
            **{
                f"{_VERSION}{version}/{name}": values
                for version, tensors in self.versions.items()
                for name, values in tensors.items()
            },
        }

    def send(self, flights: Flights, version: int, broadcast: Arrays) -> Self:
        """With more clients out, who took this version along."""
        if not len(flights):
            return self
        return replace(
            self,
            flights=self.flights.joined_by(flights),
            versions={**self.versions, version: broadcast},
            sent_out=self.sent_out + len(flights),
        )

    def without_first(self, count: int) -> Self:
        """Without the first to arrive, and without the models that nobody has any longer."""
        left = self.flights.take(slice(count, None))
        return replace(
            self, flights=left, versions={each: self.versions[each] for each in np.unique(left.version).tolist()}
        )
