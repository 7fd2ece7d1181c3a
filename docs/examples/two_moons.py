"""A data set: points of two interleaved half circles, which every client sees turned by an angle of its own."""

from typing import Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from narrowcast.extend import DataSource, Labelled, Samples, generator


class TwoMoons(DataSource, BaseModel):
    """Two classes of points in the plane, with `noise` around them; `shift` is the largest angle, in radians."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["two_moons"] = "two_moons"
    clients: int = Field(20, ge=1)
    examples: int = Field(30, ge=2, description="of each client, half of each class")
    noise: float = Field(0.1, ge=0)
    shift: float = Field(0.3, ge=0)
    seed: int | None = Field(None, ge=0, description="none: that of the run")

    def load(self) -> Samples:
        """Draw the points of all clients, and some for validation and test from new clients."""
        parts = [self._points(client) for client in range(self.clients + 10)]
        train, held_out = parts[: self.clients], parts[self.clients :]
        total = self.clients * self.examples
        return Samples(
            name=self.kind,
            source="drawn from its seed",
            n_classes=2,
            train=_together(train),
            validation=_together(held_out[:5]),
            test=_together(held_out[5:]),
            order=np.arange(total),
            indptr=np.arange(0, total + 1, self.examples),
        )

    def _points(self, client: int) -> Labelled:
        random = generator(self.seed or 0, "two moons", client)
        labels = np.arange(self.examples) % 2
        angle = np.pi * random.random(self.examples) + np.pi * labels
        points = np.stack([np.cos(angle) + labels, np.sin(angle) + labels / 2], axis=1)
        points += self.noise * random.standard_normal(points.shape)
        turn = random.uniform(-self.shift, self.shift)
        rotation = np.array([[np.cos(turn), -np.sin(turn)], [np.sin(turn), np.cos(turn)]])
        return Labelled((points @ rotation).astype(np.float32), labels)


def _together(parts: list[Labelled]) -> Labelled:
    features, labels = zip(*((each.features, each.labels) for each in parts), strict=True)
    return Labelled(np.concatenate(features), np.concatenate(labels))
