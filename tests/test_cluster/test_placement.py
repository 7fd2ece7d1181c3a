"""Placement of hosts on nodes, without a cluster."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from narrowcast.cluster.decisions import Node, Policy, place


@pytest.mark.parametrize(
    ("offers", "need", "room"),
    [
        ({"CPU": 4.0}, {"CPU": 1}, 4),
        ({"CPU": 4.0}, {"CPU": 1.5}, 2),
        ({"CPU": 4.0, "GPU": 1.0}, {"CPU": 0, "GPU": 0.5}, 2),
        ({"CPU": 4.0, "GPU": 1.0}, {"CPU": 0, "GPU": 1 / 3}, 3),
        ({"CPU": 0.3}, {"CPU": 0.1}, 3),
        ({"CPU": 4.0}, {"CPU": 1, "edge": 1}, 0),
        ({"CPU": 4.0, "edge": 2.0}, {"CPU": 1, "edge": 1}, 2),
        ({"CPU": 4.0}, {"CPU": 0}, 9),
    ],
)
def test_a_node_has_room_for_what_its_scarcest_resource_holds(
    offers: Mapping[str, float], need: Mapping[str, float], room: int
) -> None:
    assert Node("node", offers).room_for(need, most=9) == room


@pytest.mark.parametrize(
    ("policy", "wanted", "present", "placed"),
    [
        ("spread", 4, {}, {"a": 2, "b": 1, "c": 1}),
        ("spread", 3, {}, {"a": 1, "b": 1, "c": 1}),
        ("spread", 2, {"b": 1, "c": 1}, {"a": 0, "b": 1, "c": 1}),  # no host moves without a gain
        ("spread", 2, {"c": 2}, {"a": 1, "b": 0, "c": 1}),  # and one does where it spreads them
        ("spread", 9, {}, {"a": 4, "b": 2, "c": 1}),
        ("pack", 4, {}, {"a": 4, "b": 0, "c": 0}),
        ("pack", 2, {"b": 2}, {"a": 2, "b": 0, "c": 0}),
        ("pack", 5, {}, {"a": 4, "b": 1, "c": 0}),
    ],
)
def test_hosts_are_spread_or_packed(
    policy: Policy, wanted: int, present: Mapping[str, int], placed: Mapping[str, int]
) -> None:
    assert place({"a": 4, "b": 2, "c": 1}, wanted, policy, present) == placed


rooms = st.dictionaries(st.sampled_from("abcdef"), st.integers(0, 5))


@given(rooms, st.integers(0, 20), st.sampled_from(["spread", "pack"]), rooms)
def test_every_host_that_fits_is_placed_and_the_placement_stays(
    room: dict[str, int], wanted: int, policy: Policy, present: dict[str, int]
) -> None:
    placed = place(room, wanted, policy, present)
    assert placed.keys() == room.keys()
    assert all(0 <= placed[name] <= room[name] for name in room)
    assert sum(placed.values()) == min(wanted, sum(room.values()))
    assert place(room, wanted, policy, placed) == placed
    if policy == "spread":
        most = max(placed.values(), default=0)
        assert all(placed[name] >= most - 1 or placed[name] == room[name] for name in room)
