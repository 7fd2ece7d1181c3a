"""Components that one client sent under masks, unmasked by the server with what the survivors reveal.

A pair masks the components that both of its clients send. A component of one sender therefore carries the mask of its
own alone, and an own-mask seed that survivors reveal for another component must not cover it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from narrowcast.algorithms.attacks.transcript import RoundTranscript, Transcript
from narrowcast.algorithms.secure.mask_recovery import MaskRecovery
from narrowcast.algorithms.secure.messages import Messages
from narrowcast.algorithms.secure.round_keys import RoundKeys
from narrowcast.algorithms.secure.shamir import SHARE_BYTES
from narrowcast.platform.types import IntArray


@dataclass(frozen=True)
class ThinGroup:
    """A group of entries that one client sent, and its integers if the server could read them."""

    round_index: int
    place: int
    client: int
    integers: IntArray | None


def read_thin_groups(transcript: Transcript) -> list[ThinGroup]:
    """Return the groups that one arrived client sent, with its integers where unmasking gives plausible ones.

    Integers are plausible if all values are within the clip, as hardly any are under a mask of a wider ring.
    """
    found: list[ThinGroup] = []
    for each in transcript.rounds:
        senders: dict[int, list[int]] = {}
        for upload in each.protected:
            for place in upload.groups:
                senders.setdefault(place, []).append(upload.client)
        thin = {place: clients[0] for place, clients in sorted(senders.items()) if len(clients) == 1}
        if thin and transcript.messages is not None and each.keys is not None:
            messages = each.keys.messages(transcript.messages)
            seeds = _own_mask_seeds(each, messages, each.keys)
            found += [
                ThinGroup(each.round_index, place, client, _read(each, place, client, messages, seeds))
                for place, client in thin.items()
            ]
    return found


def _own_mask_seeds(each: RoundTranscript, messages: Messages, keys: RoundKeys) -> Mapping[int, bytes]:
    """Return the own-mask seeds that the survivors' shares give, by client; empty if the round was refused."""
    shares: dict[int, list[bytes]] = {}
    for data in each.told.get("reveal", {}).get("revealed", ()):
        survivor, (body,) = messages.unmasking_shares(each.round_index).open(data.tobytes(), keys.verify)
        assert body is not None
        shares[survivor] = [bytes(body[at : at + SHARE_BYTES]) for at in range(0, len(body), SHARE_BYTES)]
    threshold = messages.scheme.survivor_threshold(messages.cohort)
    if len(shares) < threshold:
        return {}
    return MaskRecovery.of(each.round_index, keys.advertised, shares, threshold).survivor_seeds


def _read(
    each: RoundTranscript, place: int, client: int, messages: Messages, seeds: Mapping[int, bytes]
) -> IntArray | None:
    """Return the integers of a group without its sender's own mask, or None if they are not plausible."""
    scheme, numbers, group = messages.scheme, messages.fixed_point, messages.layout.groups[place]
    sent = next(upload.groups for upload in each.protected if upload.client == client)
    masks, elements = messages.mask_layout().zeros(), sent[place]
    if client in seeds:
        groups = np.isin(np.arange(len(messages.layout.groups)), list(sent))
        messages.mask_layout().add(masks, seeds[client], groups)
        elements = elements - masks[place].astype(np.uint64)
    integers = scheme.open_sum(group, elements, numbers)
    most = 2 ** (scheme.bits - 1)
    return integers if (np.abs(integers[: group.n_values]) <= most).all() else None
