"""The contract that losses and metrics of neural networks share: values of samples, from outputs and targets."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from narrowcast.platform.data.samples import Samples, Targets
from narrowcast.platform.errors import UserError
from narrowcast.platform.kinds import kind_of
from narrowcast.platform.section import Section


class SampleMeasure(Section):
    """Base of losses and metrics: a subclass maps outputs and targets of n samples to values, in `per_sample`.

    Outputs are those of the module, [n, ...]; targets are those of the data set: classes [n] int64, tokens [n, length]
    int64, numbers [n, k] in the type of the outputs. `takes` names the targets that the subclass is defined for.
    """

    takes: ClassVar[tuple[Targets, ...]] = ("classes", "tokens", "numbers")

    def __hash__(self) -> int:
        return hash(type(self))  # once or more in a round; equality tells the measures of a class apart

    def check(self, data: Samples) -> None:
        """Raise `UserError` if the measure is not defined for the targets of this data set."""
        if data.targets not in self.takes:
            raise UserError(
                f"{kind_of(self)} takes {' or '.join(self.takes)}, but the targets of "
                f"{data.name} are {data.targets}; use another, or leave it out"
            )

    def per_sample(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the value of each sample, [n], which must not depend on the other samples."""
        raise NotImplementedError


def over_positions(outputs: Tensor) -> Tensor:
    """Return scores [n, classes] or [n, length, classes] as one row for each prediction."""
    return outputs.flatten(0, -2)


def per_position_mean(values: Tensor, targets: Tensor) -> Tensor:
    """Return one value per prediction as the mean over the positions of each sample, [n]."""
    return values if targets.ndim == 1 else values.view(targets.shape).mean(1)


def differences(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return outputs less targets, [n, k]; raise `ValueError` if the shapes differ, which would be broadcast."""
    if outputs.shape != targets.shape:
        raise ValueError(f"outputs {list(outputs.shape)} are no predictions of targets {list(targets.shape)}")
    return outputs - targets
