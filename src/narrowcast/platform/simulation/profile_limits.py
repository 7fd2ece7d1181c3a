"""Limits of the rates and speeds that a fleet gives its clients."""

from __future__ import annotations

from dataclasses import fields

import numpy as np

from narrowcast.platform.errors import UserError
from narrowcast.platform.types import Profiles

_LIMITS = {
    "uplink_bits_per_second": (1e-3, 1e18, "bit/s"),
    "downlink_bits_per_second": (1e-3, 1e18, "bit/s"),
    "compute_speed": (1e-9, 1e9, "times the reference device"),
}
"""Beyond these no simulated time is meaningful, and sums of it overflow."""


def check_profiles(profiles: Profiles, fleet: str, n_clients: int) -> Profiles:
    """Return the profiles; raise `UserError` unless each client has one, with rates and a speed within the limits."""
    if not isinstance(profiles, Profiles):
        raise UserError(f"fleet.kind = {fleet}: profiles returned {type(profiles).__name__}, not Profiles")
    for column in fields(Profiles):
        if (shape := np.shape(getattr(profiles, column.name))) != (n_clients,):
            raise UserError(
                f"fleet.kind = {fleet}: profiles returned {column.name} of the shape {list(shape)}, and there are "
                f"{n_clients} clients; return one profile for each"
            )
    for name, (least, most, unit) in _LIMITS.items():
        values = getattr(profiles, name)
        if (beyond := np.flatnonzero(~((values >= least) & (values <= most)))).size:
            raise UserError(
                f"fleet.kind = {fleet}: {name.partition('_bits')[0]} of {beyond.size} of {values.size} clients is not "
                f"between {least:g} and {most:g} {unit}, such as {values[beyond[0]]:g} of client {beyond[0]}; "
                "change the fleet"
            )
    return profiles
