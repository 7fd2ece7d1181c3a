"""A model: a multilayer perceptron with residual connections and layer norm."""

from math import prod
from typing import Literal

from pydantic import Field
from torch import Tensor, nn

from narrowcast.extend import NeuralNetwork, Samples


class Block(nn.Module):
    """x + W relu(norm(x))."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return x and its change."""
        return x + self.linear(self.norm(x).relu())


class ResidualMLP(NeuralNetwork):
    """A linear layer, `depth` residual blocks of `width` units, and a linear layer to the outputs."""

    kind: Literal["residual_mlp"] = "residual_mlp"
    width: int = Field(32, ge=1)
    depth: int = Field(2, ge=1)

    def module(self, data: Samples) -> nn.Module:
        """Build the module for the features and targets of this data set."""
        features = prod(data.train.features.shape[1:])
        blocks = (Block(self.width) for _ in range(self.depth))
        return nn.Sequential(
            nn.Flatten(), nn.Linear(features, self.width), *blocks, nn.Linear(self.width, self.n_outputs(data))
        )
