"""Data poisoning: attackers train as all do, on samples of which they have changed the labels or the features."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from narrowcast.platform.data.samples import Labelled, Samples, each_input
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
    old, new = data.train.features, samples.features
    if isinstance(old, dict):
        assert isinstance(new, dict)
        features: Any = {name: np.concatenate([old[name], new[name]]) for name in old}
    else:
        features = np.concatenate([np.asarray(old), np.asarray(new)])
    return replace(data, train=Labelled(features, np.concatenate([data.train.labels, samples.labels])), order=order)


class DataPoisoning(Attack):
    """An attack that is carried out by the samples on which attackers train."""

    def poison(self, data: Any, attackers: IntArray, seed: PrivateSeed) -> Samples:
        """Return the data set with poisoned samples of the attackers; raise `UserError` for data without classes."""
        if not isinstance(data, Samples) or data.targets != "classes":
            kind = "samples with classes" if isinstance(data, Samples) else "samples with labels"
            raise UserError(
                f"attack.kind = {self.kind}: {data.name} does not have {kind}; use an attack on changes, such as "  # type: ignore[attr-defined]
                "sign_flip"
            )
        owners = data.owners
        positions = np.flatnonzero(np.isin(owners, attackers))
        whose = np.searchsorted(attackers, owners[positions])
        keys = seed.stream_keys("poisoned samples", 0, np.arange(1))
        draw = np.random.Generator(np.random.Philox(key=int(keys[0])))
        samples = self.poisoned(data, data.train.take(data.order[positions]), whose, draw)
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
