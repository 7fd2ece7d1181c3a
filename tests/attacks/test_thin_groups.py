"""Components that one or two clients sent under masks, with lost uploads: unread unless the bound opens them."""

from __future__ import annotations

import numpy as np
import pytest

from attack_cells import cell_experiment, some_users
from lossy_links import LOSING
from narrowcast.algorithms.attacks.inference import ThinGroup, read_thin_groups
from narrowcast.algorithms.attacks.transcript import Transcript
from narrowcast.runs.attack_trial import record_transcript


def attacked(smallest_group: int, adversary: str) -> tuple[Transcript, list[ThinGroup]]:
    secure = f"secure={{kind: masked, smallest_group: {smallest_group}, adversary: {adversary}, threshold: 0.7}}"
    chosen = cell_experiment("masked, unequal ranks", 6, 15, LOSING, secure, "algorithm.rank=16")
    transcript, _ = record_transcript(chosen, *some_users(12))
    return transcript, read_thin_groups(transcript, 3)


@pytest.mark.parametrize("adversary", ["honest_but_curious", "active"])
def test_thin_groups_stay_hidden(adversary: str) -> None:
    transcript, thin = attacked(3, adversary)
    assert sum(each.opened is not None for each in transcript.rounds) > 5
    assert len(thin) > 3
    assert all(group.integers is None for group in thin)


def test_thin_groups_are_read_where_the_bound_is_one() -> None:
    """The control: the same attack on clients that let sums of one client be opened."""
    transcript, thin = attacked(1, "honest_but_curious")
    assert len(thin) > 3
    rounds = {each.round_index: each for each in transcript.rounds}
    for group in thin:
        opened, messages = rounds[group.round_index].opened, transcript.messages
        assert group.integers is not None
        assert opened is not None
        assert messages is not None
        part = messages.layout.groups[group.group].values
        if part:
            values = group.integers[: part[0].size] * messages.fixed_point.step
            np.testing.assert_allclose(values, opened.values[:, part[0].column], atol=1e-6)
