"""Accounting of the downlink: the bits that the clients of a round download."""

from __future__ import annotations

import numpy as np

from narrowcast.platform.contracts import Broadcast, Recipients, SecureSums
from narrowcast.platform.state import LiveState
from narrowcast.platform.types import IntArray


def download_bits(live: LiveState, broadcast: Broadcast, clients: IntArray) -> IntArray:
    """Return the size of the model that each client is sent, as `Plan.downlink` says, [C]."""
    run, round_index = live.run, live.round_index + 1
    catches_up = run.plan.downlink == "catch_up"
    last_round = live.population.last_round[clients] if catches_up else np.full(len(clients), round_index - 1)
    recipients = Recipients(clients, last_round, round_index)
    own = run.algorithm.download_bits(live.server, broadcast, run.task, recipients)
    if own is not None:
        return own
    full = np.full(len(clients), broadcast.full.wire_bits())
    if broadcast.update is None:
        return full
    sent_before = np.cumsum([0, *live.update_bits, broadcast.update.wire_bits()])
    missed = last_round if catches_up else len(live.update_bits)
    follows = last_round > 0 if catches_up else np.array(True)
    return np.where(follows, np.minimum(sent_before[-1] - sent_before[missed], full), full)


def key_bits(live: LiveState, secure: SecureSums, cohort: IntArray) -> tuple[IntArray, IntArray]:
    """Return the size of the public key for clients that lack it, [C] each: on first participation, after a resume."""
    bits, last_round = secure.public_key_bits(live.run.task), live.population.last_round[cohort]
    since = 0 if secure.keys_last else live.keys_since()
    return bits * (last_round == 0), bits * ((last_round > 0) & (last_round <= since))
