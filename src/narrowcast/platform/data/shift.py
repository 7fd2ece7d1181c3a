"""Clients whose data differ in kind, not in amount: groups of them see turned images, or name the classes differently.

Each client belongs to a group, u modulo `groups`, and its samples of all splits are changed alike, so that one global
model cannot fit all groups, and a model of a group's own can.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field

from narrowcast.platform.config.files import Section
from narrowcast.platform.data.samples import Labelled, Samples
from narrowcast.platform.errors import UserError
from narrowcast.platform.rounds.client_contracts import ClientSplit
from narrowcast.platform.seeds import generator
from narrowcast.platform.types import IntArray

_QUARTERS = 4
_SIDES = (-2, -1)
_SPLITS: tuple[ClientSplit, ...] = ("train", "validation", "test")


class ClientShift(Section, ABC):
    """Base of the shifts: a subclass changes the samples of a group."""

    groups: int

    @abstractmethod
    def check(self, data: Samples) -> None:
        """Raise `UserError` if the samples cannot be changed so."""

    @abstractmethod
    def changed(self, samples: Labelled, groups: IntArray, data: Samples) -> Labelled:
        """Return samples as their groups, [n], see them."""

    def of(self, data: Samples) -> Samples:
        """Return the data set with the samples of each client changed as its group's.

        Held-out samples belong to the clients that `Samples.of_clients` says, and to group 0 if they belong to none.
        """
        self.check(data)
        owners = {split: data.client_of_each(split) for split in _SPLITS}
        changed: dict[str, Any] = {
            split: self.changed(getattr(data, split), np.where(of_split < 0, 0, of_split % self.groups), data)
            for split, of_split in owners.items()
        }
        held_out: dict[str, IntArray] = {
            split: of_split for split, of_split in owners.items() if split != "train" and len(of_split)
        }
        return replace(data, **changed, held_out_users=held_out)


class Rotated(ClientShift):
    """Images of group g are turned by g quarters, counter-clockwise.

    Reference: the rotated MNIST of Ghosh et al., An Efficient Framework for Clustered Federated Learning, NeurIPS 2020
    (arXiv:2006.04088).
    """

    kind: Literal["rotated"] = "rotated"
    groups: int = Field(
        4, ge=2, le=_QUARTERS, description="groups of clients; group g sees images turned by g quarters"
    )

    def check(self, data: Samples) -> None:
        """Raise `UserError` for samples other than square images."""
        features = data.train.features
        if not isinstance(features, np.ndarray) or features.ndim != 4 or features.shape[2] != features.shape[3]:
            shapes = {name: values.shape[1:] for name, values in data.inputs.items()}
            got = ", ".join(f"{name} {list(shape)}" for name, shape in shapes.items())
            raise UserError(
                f"data.shift = rotated turns square images [channels, n, n]; {data.name} has {got}; use permuted_labels"
            )

    def changed(self, samples: Labelled, groups: IntArray, data: Samples) -> Labelled:
        """Return the turned images."""
        del data
        features: Any = np.array(samples.features)
        for group in range(1, self.groups):
            rows = groups == group
            features[rows] = np.rot90(features[rows], group, axes=_SIDES)
        return replace(samples, features=features)


class PermutedLabels(ClientShift):
    """Clients of a group call the classes by names of their own: a permutation, drawn by the seed of the data set.

    Group 0 keeps the names.

    Reference: the permuted labels of Sattler, Müller and Samek, Clustered Federated Learning, IEEE Transactions on
    Neural Networks and Learning Systems 2021 (arXiv:1910.01991).
    """

    kind: Literal["permuted_labels"] = "permuted_labels"
    groups: int = Field(4, ge=2, description="groups of clients; each but the first permutes the classes")

    def check(self, data: Samples) -> None:
        """Raise `UserError` for samples without classes."""
        if data.targets != "classes":
            raise UserError(
                f"data.shift = permuted_labels permutes classes; {data.name} has {data.targets}; use rotated"
            )

    def changed(self, samples: Labelled, groups: IntArray, data: Samples) -> Labelled:
        """Return the samples with their classes' new names."""
        own = [
            generator(data.seed, f"classes of group {group}").permutation(data.n_classes)
            for group in range(1, self.groups)
        ]
        names = np.array([np.arange(data.n_classes), *own])
        return replace(samples, labels=names[groups, samples.labels])


Shift = Annotated[Rotated | PermutedLabels, Field(discriminator="kind")]
