"""A cell whose clients stand at given positions, such as those of a sensor localisation."""

from __future__ import annotations

import csv
from functools import lru_cache
from pathlib import Path
from typing import Literal, Self

import numpy as np
from pydantic import Field, model_validator

from narrowcast.algorithms.channel.channel_random import FOR_THE_WHOLE_RUN, normals
from narrowcast.algorithms.channel.rayleigh import Rayleigh
from narrowcast.platform.errors import UserError
from narrowcast.platform.types import FloatArray, Profiles
from narrowcast.platform.units import METRES

_ANSWER = ".safetensors"
_ADVICE = "give the answer.safetensors of a localisation, or a CSV file with the columns x and y"


class LocatedRayleigh(Rayleigh):
    """`rayleigh` with the distances of given positions to a base station, in the place of drawn ones.

    The file is the `answer.safetensors` of a localisation, whose `positions` [n, d] are used, or a CSV file with the
    columns x and y, and z if there is one. Row c is the place of client c; more rows than clients are allowed. No
    client is nearer to the base station than `nearest`, and `farthest` has no effect. Raises `UserError` for a file
    that is none, or that has fewer rows than the number of a client.
    """

    kind: Literal["located_rayleigh"] = "located_rayleigh"  # type: ignore[assignment]
    path: Path = Field(description="answer.safetensors of a localisation, or a CSV file with the columns x and y")
    unit: float = Field(
        100.0, gt=0, allow_inf_nan=False, description="length of the positions' unit", json_schema_extra=METRES
    )
    base: tuple[float, float] | tuple[float, float, float] = Field(
        (0.5, 0.5), description="position of the base station, in the positions' unit"
    )

    @model_validator(mode="after")
    def _file_is_there(self) -> Self:
        if not self.path.is_file():
            raise ValueError(f"no file {self.path}; give the answer.safetensors of a localisation, or a CSV file")
        return self

    def mean_snr(self, profiles: Profiles, seed: int) -> FloatArray:
        """Return the mean linear SNR of the uplink over fades, [C]."""
        stamp = self.path.stat()
        places = _positions(self.path, stamp.st_mtime_ns, stamp.st_size)
        if places.shape[1] != len(self.base):
            raise UserError(
                f"{self.path} has positions of {places.shape[1]} coordinates, but radio.channel.base has "
                f"{len(self.base)}; give as many"
            )
        if len(profiles) and (last := int(profiles.client.max())) >= len(places):
            raise UserError(f"{self.path} has {len(places)} positions and none of client {last}; add it")
        metres = self.unit * np.linalg.norm(places[profiles.client] - np.array(self.base), axis=1)
        shadow = self.shadowing_decibel * normals(seed, "shadowing", FOR_THE_WHOLE_RUN, profiles.client)
        loss = 10 * self.exponent * np.log10(np.maximum(metres, self.nearest) / self.reference_distance)
        return np.asarray(10 ** ((self.reference_snr_decibel - loss + shadow) / 10))


@lru_cache(maxsize=4)
def _positions(path: Path, modified: int, size: int) -> FloatArray:
    """Return the positions of a file [n, d]; `modified` and `size` are the cache key of its content."""
    del modified, size
    try:
        found = _answered(path) if path.name.endswith(_ANSWER) else _table(path)
    except Exception as error:  # a file of any content; safetensors has an exception class of its own
        raise UserError(f"{path}: cannot be read ({error}); {_ADVICE}") from error
    if found is None:
        raise UserError(f"{path}: has no positions; {_ADVICE}")
    if found.ndim != 2 or found.shape[1] not in (2, 3) or not np.isfinite(found).all():
        raise UserError(f"{path}: has positions of the shape {found.shape}, or some that are no numbers; {_ADVICE}")
    return np.asarray(found, dtype=np.float64)


def _answered(path: Path) -> FloatArray | None:
    from safetensors.numpy import load_file

    return load_file(path).get("positions")


def _table(path: Path) -> FloatArray:
    with path.open(newline="", encoding="utf-8") as lines:
        rows = list(csv.DictReader(lines))
    names = [name for name in ("x", "y", "z") if rows and name in rows[0]]
    return np.array([[float(row[name]) for name in names] for row in rows], dtype=np.float64)
