"""A loss that counts well-classified samples less, and a metric of how good the predicted probabilities are."""

from typing import ClassVar, Literal

from pydantic import Field
from torch import Tensor, nn

from narrowcast.extend import Loss, Metric


class FocalLoss(Loss):
    """(1 - p)^gamma times the cross-entropy, p being the probability of the right class; gamma 0 is cross-entropy.

    Reference: Lin et al., Focal Loss for Dense Object Detection, ICCV 2017.
    """

    takes: ClassVar = ("classes",)
    kind: Literal["focal"] = "focal"
    gamma: float = Field(2.0, ge=0, description="exponent of 1 - p; 0: cross-entropy")

    def per_sample(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of each sample, [n], for scores [n, classes] and classes [n]."""
        entropy = nn.functional.cross_entropy(outputs, targets, reduction="none")
        return (1 - (-entropy).exp()) ** self.gamma * entropy


class Brier(Metric):
    """Mean squared difference between the predicted probabilities and the right class, summed over classes."""

    takes: ClassVar = ("classes",)
    kind: Literal["brier"] = "brier"
    lower_is_better: ClassVar[bool] = True

    def per_sample(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the squared difference of each sample, [n]."""
        right = nn.functional.one_hot(targets, outputs.shape[1])
        return (outputs.softmax(1) - right).square().sum(1)
