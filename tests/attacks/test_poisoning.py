"""The samples on which attackers train, against loops over clients; triggers, pixel by pixel."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from digits import digits
from narrowcast.algorithms.attacks.poisoning import LabelFlip, Negative, RandomLabels
from narrowcast.algorithms.attacks.trigger import Trigger
from narrowcast.platform.data.samples import Labelled, Samples
from narrowcast.platform.errors import UserError
from narrowcast.platform.rounds.adversary import Attack, recruited
from narrowcast.platform.seeds import PrivateSeed

COUNTS = [40, 7, 0, 25, 12]
ATTACKERS = np.array([0, 2, 3])


def own_samples(data: Samples, client: int) -> tuple[Any, Any]:
    samples = data.train.take(data.order[data.indptr[client] : data.indptr[client + 1]])
    return samples.features, samples.labels


def poisoned(attack: Attack, data: Samples) -> Samples:
    after = attack.poison(data, ATTACKERS, PrivateSeed.derived(1))
    assert isinstance(after, Samples)
    return after


@pytest.mark.parametrize(
    ("attack", "flipped"), [(LabelFlip(), lambda y: 9 - y), (LabelFlip(to="next"), lambda y: (y + 1) % 10)]
)
def test_attackers_have_other_labels(attack: Attack, flipped: Any) -> None:
    data = digits(COUNTS)
    after = poisoned(attack, data)
    for client in range(len(COUNTS)):
        (x, y), (new_x, new_y) = own_samples(data, client), own_samples(after, client)
        assert np.array_equal(x, new_x)
        assert new_y.tolist() == ([flipped(label) for label in y] if client in ATTACKERS else y.tolist())


def test_a_sample_of_two_clients_is_poisoned_for_the_attacker_alone() -> None:
    data = digits(COUNTS)
    data.order[data.indptr[1] : data.indptr[1] + 3] = data.order[:3]  # client 1, who is honest, has samples of client 0
    after = poisoned(LabelFlip(), data)
    assert np.array_equal(own_samples(after, 1)[1], own_samples(data, 1)[1])
    assert np.array_equal(own_samples(after, 0)[1][:3], 9 - own_samples(data, 0)[1][:3])


def test_labels_are_drawn_alike_in_every_process_and_differ_by_seed() -> None:
    data = digits([1000, 7, 0, 25, 12])
    first, again = (own_samples(poisoned(RandomLabels(), data), 0)[1] for _ in range(2))
    other = own_samples(RandomLabels().poison(data, ATTACKERS, PrivateSeed.derived(2)), 0)[1]
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)
    shares = np.bincount(first, minlength=10) / 1000
    assert np.abs(shares - 0.1).max() < 5 * np.sqrt(0.09 / 1000)
    assert abs((first == own_samples(data, 0)[1]).mean() - 0.1) < 5 * np.sqrt(0.09 / 1000)


def test_negatives_of_both_kinds_of_images() -> None:
    data = digits(COUNTS)
    before, after = own_samples(data, 3), own_samples(poisoned(Negative(), data), 3)
    np.testing.assert_array_equal(after[0], np.float32(1) - before[0])
    assert np.array_equal(after[1], before[1])
    whole = (255 * np.asarray(data.train.features)).astype(np.uint8)
    as_bytes = replace(data, train=Labelled(whole, data.train.labels))
    got = own_samples(poisoned(Negative(), as_bytes), 3)[0]
    assert got.dtype == np.uint8
    assert np.array_equal(got, 255 - own_samples(as_bytes, 3)[0])


def picture(attack: Trigger, side: int, *, part: int | None = None) -> list[str]:
    """The pixels of the trigger, or of one part, as rows of # and dots."""
    parts = attack.parts(np.zeros((1, 1, side, side), dtype=np.uint8), "pictures")
    pixels = np.any(parts if part is None else parts[part : part + 1], axis=0)
    return ["".join("#" if bright else "." for bright in row) for row in pixels]


def test_the_trigger_is_that_of_the_paper() -> None:
    # Rows 0 and 3, columns 0 to 3 and 6 to 9, as in the code of DBA for MNIST.
    dots = "." * 12
    bars = ["####..####.." if row in (0, 3) else dots for row in range(12)]
    assert picture(Trigger(), 12) == bars
    assert picture(Trigger(), 12, part=1) == ["......####..", *[dots] * 11]
    assert picture(Trigger(shape="square", size=3), 5) == ["###..", "###..", "###..", ".....", "....."]
    assert sum(row.count("#") for row in bars) == sum(row.count("#") for row in picture(Trigger(shape="square"), 12))


@pytest.mark.parametrize("images", [True, False], ids=["images", "flat"])
@pytest.mark.parametrize("distributed", [False, True])
def test_a_share_of_each_attackers_images_has_the_trigger(images: bool, distributed: bool) -> None:
    data = digits(COUNTS, images=images)
    attack = Trigger(target=3, size=2, share=0.3, distributed=distributed)
    after = poisoned(attack, data)
    for client in range(len(COUNTS)):
        (x, y), (new_x, new_y) = own_samples(data, client), own_samples(after, client)
        changed = (x != new_x).reshape(len(x), 64).any(axis=1) | (y != new_y)
        if client not in ATTACKERS:
            assert not changed.any()
            continue
        stamped = int(np.ceil(0.3 * COUNTS[client]))
        # an image of the target whose pixels are bright already does not change
        assert stamped - 1 <= changed.sum() <= stamped
        assert (new_y[changed] == 3).all()
        pixels = picture(attack, 8, part=int(np.searchsorted(ATTACKERS, client)) if distributed else None)
        bright = np.array([[mark == "#" for mark in row] for row in pixels])
        assert (new_x[changed].reshape(-1, 8, 8)[:, bright] == 1).all()
        assert np.array_equal(new_x.reshape(-1, 8, 8)[:, ~bright], x.reshape(-1, 8, 8)[:, ~bright])


def test_success_is_measured_on_other_classes_with_the_whole_trigger() -> None:
    data = digits(COUNTS)
    attack = Trigger(target=3, size=2, distributed=True)
    measured = attack.measured(data)
    others = data.test.labels != 3
    assert len(measured) == others.sum()
    assert (measured.labels == 3).all()
    bright = np.array([[mark == "#" for mark in row] for row in picture(attack, 8)])
    pictures = np.asarray(measured.features).reshape(-1, 8, 8)
    assert (pictures[:, bright] == 1).all()
    assert np.array_equal(pictures[:, ~bright], np.asarray(data.test.features)[others].reshape(-1, 8, 8)[:, ~bright])


@pytest.mark.parametrize(
    ("attack", "says"),
    [
        (
            Trigger(),
            "attack.size = 4: the trigger takes 4 x 10 pixels, and images of digits have 8 x 8; give a smaller",
        ),
        (Trigger(size=9, shape="square"), "attack.size = 9: the trigger takes 9 x 9 pixels"),
        (Trigger(size=2, target=10), "attack.target = 10: digits has the classes 0 to 9"),
    ],
)
def test_a_trigger_that_does_not_fit_is_one_line(attack: Attack, says: str) -> None:
    with pytest.raises(UserError, match=says):
        recruited(attack, digits(COUNTS), None, 0, PrivateSeed.derived(0))


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"shape": "square", "distributed": True}, "a square is one part"),
    ],
)
def test_fields_that_contradict_each_other_are_one_line(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says):
        Trigger(**fields)
