"""Components of few senders under masks, unmasked by the server with all that the survivors reveal.

A pair masks the components that both of its clients send. A component of one sender therefore carries the own mask of
this client alone, and what survivors reveal of its mask of other components must not open it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from narrowcast.algorithms.attacks.transcript import RoundTranscript, Transcript
from narrowcast.algorithms.secure.bit_packing import RingElements
from narrowcast.algorithms.secure.mask_recovery import recovered
from narrowcast.algorithms.secure.messages import Messages
from narrowcast.algorithms.secure.round_keys import RoundKeys
from narrowcast.platform.types import IntArray


@dataclass(frozen=True)
class ThinGroup:
    """A group of entries that few of the arrived clients sent, and their sum's integers if the server could read it."""

    round_index: int
    place: int
    clients: tuple[int, ...]
    integers: IntArray | None


def read_thin_groups(transcript: Transcript, least_senders: int) -> list[ThinGroup]:
    """Return the groups that fewer arrived clients sent, with their integers where an attempt to unmask them succeeds.

    An attempt succeeds if all values are within what that many clients can send, as hardly any are under a mask.
    """
    found: list[ThinGroup] = []
    for each in transcript.rounds:
        if each.keys is None or transcript.messages is None or "reveal" not in each.told:
            continue
        messages = each.keys.messages(transcript.messages)
        senders: dict[int, list[int]] = {}
        for upload in each.protected:
            for place in upload.groups:
                senders.setdefault(place, []).append(upload.client)
        thin = {place: who for place, who in senders.items() if len(who) < least_senders}
        masks = _known_masks(each, messages, each.keys) if thin else []
        found += [
            ThinGroup(each.round_index, place, tuple(who), _read(each, place, who, messages, masks))
            for place, who in sorted(thin.items())
        ]
    return found


def _known_masks(each: RoundTranscript, messages: Messages, keys: RoundKeys) -> list[list[RingElements]]:
    """Return the masks of all groups that the revealed secrets give, in each way in which they might be made.

    They are those of the protocol, and those of a client that would draw its own mask of all groups from one seed.
    """
    survivors = frozenset(upload.client for upload in each.protected)
    recovery = recovered(messages, each.round_index, keys, survivors, each.told["reveal"])
    layout, at_once = messages.mask_layout(), messages.mask_layout().zeros()
    for client, own in recovery.own_seeds.items():
        layout.add(at_once, own.shared, recovery.rule.sent[client])
    return [recovery.masks(layout, keys.advertised), [elements.astype(np.uint64) for elements in at_once]]


def _read(
    each: RoundTranscript, place: int, clients: list[int], messages: Messages, masks: list[list[RingElements]]
) -> IntArray | None:
    group, most = messages.layout.groups[place], len(clients) * 2 ** (messages.scheme.bits - 1)
    sent = [upload.groups[place] for upload in each.protected if upload.client in clients]
    total = np.add.reduce(sent)
    for known in masks:
        integers = messages.scheme.open_sum(group, total - known[place], messages.fixed_point)
        if (np.abs(integers[: group.n_values]) <= most).all() and integers[: group.n_values].any():
            return integers
    return None
