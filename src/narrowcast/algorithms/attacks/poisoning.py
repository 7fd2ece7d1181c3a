"""Data poisoning: attackers train as all do, on samples of which they have changed the labels or the features."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from narrowcast.platform.data.samples import Labelled, Samples, each_input, joined
from narrowcast.platform.errors import UserError
from narrowcast.platform.rounds.adversary import Attack
from narrowcast.platform.seeds import PrivateSeed
from narrowcast.platform.types import IntArray


def with_own_samples(data: Samples, positions: IntArray, samples: Labelled) -> Samples:
    """Return the data set with these samples [m] at positions [m] of `order`, in place of what was there.

    They are put behind the training samples, since several clients may train on one sample.
    """
    order = data.order.copy()
    order[positions] = len(data.train) + np.arange(len(positions))
    return replace(data, train=_one_after_the_other(data.train, samples), order=order)


def with_more_samples(data: Samples, counts: IntArray, samples: Labelled) -> Samples:
    """Return the data set in which each client has `counts` [U] samples more: these, one client after the other."""
    rows = len(data.train) + np.arange(len(samples))
    return replace(
        data,
        train=_one_after_the_other(data.train, samples),
        order=np.insert(data.order, np.repeat(data.indptr[1:], counts), rows),
        indptr=data.indptr + np.concatenate([[0], np.cumsum(counts)]),
    )


def _one_after_the_other(first: Labelled, second: Labelled) -> Labelled:
    return Labelled(joined([first.features, second.features]), np.concatenate([first.labels, second.labels]))


def of_classes(attack: Attack, data: Any) -> Samples:
    """Return the data set; raise `UserError` if it has no classes."""
    if not isinstance(data, Samples) or data.targets != "classes":
        kind = "samples with classes" if isinstance(data, Samples) else "samples with labels"
        raise UserError(
            f"attack.kind = {attack.kind}: {data.name} does not have {kind}; use an attack on changes, such as "  # type: ignore[attr-defined]
            "sign_flip"
        )
    return data


def poison_draw(seed: PrivateSeed) -> np.random.Generator:
    """Return the generator of poisoned samples, of all attackers together."""
    keys = seed.stream_keys("poisoned samples", 0, np.arange(1))
    return np.random.Generator(np.random.Philox(key=int(keys[0])))


class DataPoisoning(Attack):
    """An attack that is carried out by the samples on which attackers train."""

    def poison(self, data: Any, attackers: IntArray, seed: PrivateSeed) -> Samples:
        """Return the data set with poisoned samples of the attackers; raise `UserError` for data without classes."""
        data = of_classes(self, data)
        owners = data.owners
        positions = np.flatnonzero(np.isin(owners, attackers))
        whose = np.searchsorted(attackers, owners[positions])
        samples = self.poisoned(data, data.train.take(data.order[positions]), whose, poison_draw(seed))
        return with_own_samples(data, positions, samples)

    @abstractmethod
    def poisoned(self, data: Samples, samples: Labelled, owners: IntArray, draw: np.random.Generator) -> Labelled:
        """Return the attackers' samples [n] as they train on them, in the same order; `samples` are a copy.

        owners [n] has the place of each sample's attacker among all attackers.
        """


class LabelFlip(DataPoisoning):
    """Every label y of an attacker is replaced, by C - 1 - y of C classes (`reverse`) or by the next class (`next`).

    Source: `reverse` as in Fang et al., USENIX Security 2020. The corruption of Pillutla et al., IEEE TSP 2022, is a
    permutation of this kind.
    """

    kind: Literal["label_flip"] = "label_flip"
    to: Literal["reverse", "next"] = Field("reverse", description="label C - 1 - y, or y + 1 modulo C")

    def poisoned(self, data: Samples, samples: Labelled, owners: IntArray, draw: np.random.Generator) -> Labelled:
        """Return the samples with other labels."""
        del owners, draw
        classes, labels = data.n_classes, samples.labels
        return replace(samples, labels=classes - 1 - labels if self.to == "reverse" else (labels + 1) % classes)


class RandomLabels(DataPoisoning):
    """Every label of an attacker is drawn anew, uniform over the classes."""

    kind: Literal["random_labels"] = "random_labels"

    def poisoned(self, data: Samples, samples: Labelled, owners: IntArray, draw: np.random.Generator) -> Labelled:
        """Return the samples with labels that are drawn once, before round 1."""
        del owners
        return replace(samples, labels=draw.integers(data.n_classes, size=len(samples)))


class Negative(DataPoisoning):
    """Every image of an attacker is its negative: 255 - x, or 1 - x for images with fractions, with its label.

    Source: Pillutla, Kakade and Harchaoui, Robust Aggregation for Federated Learning, IEEE TSP 2022, section 5.
    """

    kind: Literal["negative"] = "negative"

    def poisoned(self, data: Samples, samples: Labelled, owners: IntArray, draw: np.random.Generator) -> Labelled:
        """Return the negatives of the samples; raise `UserError` for whole numbers that are not images."""
        del owners, draw

        def negative(values: NDArray[Any]) -> NDArray[Any]:
            if values.dtype != np.uint8 and not np.issubdtype(values.dtype, np.floating):
                raise UserError(f"attack.kind = negative: {data.name} has {values.dtype}, not images; use label_flip")
            return np.subtract(255 if values.dtype == np.uint8 else 1, values, dtype=values.dtype)

        return replace(samples, features=each_input(negative, samples.features))
