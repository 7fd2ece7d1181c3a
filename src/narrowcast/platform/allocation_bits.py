"""Bits that an allocation of the uplink costs besides the updates: channel states and data sizes up, grants down.

They go over control channels beside the data, so that they take no simulated time and no part of a client's budget.
"""

from __future__ import annotations

from narrowcast.platform.open_round import OpenRound
from narrowcast.platform.state import LiveState

CHANNEL_STATE_BITS = 16
"""A client's report of its channel: a signal-to-noise ratio of 256 dB in steps of 2^-8 dB, 0.1 % of a rate."""
EXAMPLES_BITS = 32
"""A client's number of examples, from which the server expects its errors; sent once, and as long as in a header."""
GRANT_BITS = 32
"""The bits that a client may send in the round, up to 2^32 - 1, 0 included."""


def allocation_bits(live: LiveState, opened: OpenRound) -> tuple[int, int]:
    """Return the uplink and downlink bits of a round's allocation; none if uploads have no budgets."""
    if opened.link_allocation.budget_bits is None:
        return 0, 0
    clients = len(opened.cohort)
    newcomers = int((live.population.last_round[opened.cohort] == 0).sum())
    return CHANNEL_STATE_BITS * clients + EXAMPLES_BITS * newcomers, GRANT_BITS * clients
