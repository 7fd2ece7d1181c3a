"""Quantities of links and devices: within which limits they mean anything, and log-normal ones."""

from __future__ import annotations

from pydantic import Field

from narrowcast.platform.config.files import Section

RATE_LIMITS = (1e-3, 1e18, "bit/s")
"""Beyond these rates no simulated time is meaningful, and sums of it overflow."""


class LogNormal(Section):
    """A log-normal quantity, given by its median and the standard deviation of its logarithm."""

    median: float = Field(gt=0, description="median, in the unit of the quantity")
    sigma: float = Field(ge=0, description="standard deviation of the natural logarithm")
