"""The clients of an asynchronous run that are in flight, with the versions of the model that they were sent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Self

import numpy as np

from narrowcast.platform.types import Arrays, BoolArray, FloatArray, IntArray


@dataclass(frozen=True)
class InFlight:
    """Clients that were sent a model and whose update has not been used, in order of arrival and client; all [F].

    `version` counts the server's steps up to the model that a client was sent. Units: `arrives_at` in simulated
    seconds since the start of the run, `seconds` since the client was sent its model.
    """

    client: IntArray
    version: IntArray
    arrives_at: FloatArray
    seconds: FloatArray
    downlink_bits: IntArray

    @classmethod
    def none(cls) -> Self:
        """Return the record of no client."""
        nobody = np.empty(0, dtype=np.int64)
        return cls(nobody, nobody, np.empty(0), np.empty(0), nobody)

    def __len__(self) -> int:
        return len(self.client)

    def take(self, rows: IntArray | BoolArray | slice) -> Self:
        """Return some of the clients."""
        return type(self)(**{each.name: getattr(self, each.name)[rows] for each in fields(self)})

    def merged(self, others: Self) -> Self:
        """Return these clients and others in order."""
        both = type(self)(
            **{
                each.name: np.concatenate([getattr(self, each.name), getattr(others, each.name)])
                for each in fields(self)
            }
        )
        return both.take(np.lexsort((both.client, both.arrives_at)))


_CLIENTS, _VERSION, _DISPATCHED = "flight/", "version/", "sent_out"  # names in checkpoints, which stay as they are


@dataclass(frozen=True)
class AsyncState:
    """The state of an asynchronous run between two steps of the server.

    `broadcasts` holds, by version, each model that a client in flight was sent. `dispatched` counts the models sent
    since the start of the run.
    """

    in_flight: InFlight = field(default_factory=InFlight.none)
    broadcasts: Mapping[int, Arrays] = field(default_factory=dict)
    dispatched: int = 0

    @classmethod
    def from_arrays(cls, arrays: Arrays) -> Self | None:
        """Read the state from the arrays of a checkpoint; return None if that of a synchronous run is given."""
        if _DISPATCHED not in arrays:
            return None
        broadcasts: dict[int, dict[str, np.ndarray]] = {}
        for name in arrays:
            if name.startswith(_VERSION):
                version, _, tensor = name.removeprefix(_VERSION).partition("/")
                broadcasts.setdefault(int(version), {})[tensor] = arrays[name]
        in_flight = InFlight(**{each.name: arrays[_CLIENTS + each.name] for each in fields(InFlight)})
        return cls(in_flight, broadcasts, int(arrays[_DISPATCHED][0]))

    def to_arrays(self) -> Arrays:
        """Return the state as the arrays of a checkpoint."""
        return {
            _DISPATCHED: np.array([self.dispatched]),
            **{_CLIENTS + each.name: getattr(self.in_flight, each.name) for each in fields(InFlight)},
            **{
                f"{_VERSION}{version}/{name}": values
                for version, tensors in self.broadcasts.items()
                for name, values in tensors.items()
            },
        }

    def dispatch(self, clients: InFlight, version: int, broadcast: Arrays) -> Self:
        """Return the state after more clients were sent this version."""
        if not len(clients):
            return self
        return replace(
            self,
            in_flight=self.in_flight.merged(clients),
            broadcasts={**self.broadcasts, version: broadcast},
            dispatched=self.dispatched + len(clients),
        )

    def without_first(self, count: int) -> Self:
        """Return the state without the first clients to arrive, and without broadcasts that no client has any more."""
        left = self.in_flight.take(slice(count, None))
        broadcasts = {each: self.broadcasts[each] for each in np.unique(left.version).tolist()}
        return replace(self, in_flight=left, broadcasts=broadcasts)
