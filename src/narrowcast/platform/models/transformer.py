"""A causal transformer: each position of a window is seen by itself and by those after it.

Reference: Vaswani et al., Attention Is All You Need, NeurIPS 2017, section 3.2; Radford et al., Language Models are
Unsupervised Multitask Learners, 2019 (GPT-2), section 2.3: norms before each part, and one after the last block.
Letters: n windows of l tokens, w the width, h the heads.
"""

from __future__ import annotations

from math import sqrt
from typing import ClassVar, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from narrowcast.platform.data.samples import Samples, one_array
from narrowcast.platform.errors import UserError
from narrowcast.platform.models.networks import Width, shape_of_sample
from narrowcast.platform.models.neural_network import NeuralNetwork

FIRST_DEVIATION = 0.02
"""Standard deviation of the first weights of GPT-2."""


class _Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.output = (nn.Linear(width, width) for _ in range(4))

    def forward(self, inputs: Tensor) -> Tensor:
        """Return [n, l, w]: for each position the values of those before and at it, by softmax(Q K' / sqrt(w / h))."""
        n, length, width = inputs.shape
        query, key, value = (
            part(inputs).view(n, length, self.heads, width // self.heads).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        )
        scores = query @ key.transpose(2, 3) / sqrt(width // self.heads)
        later = torch.ones(length, length, dtype=torch.bool, device=inputs.device).triu(1)
        weights = scores.masked_fill(later, -torch.inf).softmax(3)
        return self.output((weights @ value).transpose(1, 2).reshape(n, length, width))


class _Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(width), _Attention(width, heads)
        self.norm2, self.linear1, self.linear2 = (
            nn.LayerNorm(width),
            nn.Linear(width, 4 * width),
            nn.Linear(4 * width, width),
        )

    def forward(self, inputs: Tensor) -> Tensor:
        """Return [n, l, w]."""
        attended = inputs + self.attention(self.norm1(inputs))
        return attended + self.linear2(nn.functional.gelu(self.linear1(self.norm2(attended))))


class _Scores(nn.Module):
    def __init__(self, n_tokens: int, length: int, n_outputs: int, size: Transformer, *, every_position: bool) -> None:
        super().__init__()
        self.every_position = every_position
        self.embedding, self.position = nn.Embedding(n_tokens, size.width), nn.Embedding(length, size.width)
        self.blocks = nn.Sequential(*(_Block(size.width, size.heads) for _ in range(size.layers)))
        self.norm, self.scores = nn.LayerNorm(size.width), nn.Linear(size.width, n_outputs)
        for layer in self.modules():
            if isinstance(layer, (nn.Linear, nn.Embedding)):
                nn.init.normal_(layer.weight, std=FIRST_DEVIATION)
            if isinstance(layer, nn.Linear):
                nn.init.zeros_(layer.bias)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the scores of the token after each position [n, l, tokens], or after the last [n, tokens]."""
        outputs = self.norm(self.blocks(self.embedding(tokens) + self.position.weight[: tokens.shape[1]]))
        return self.scores(outputs if self.every_position else outputs[:, -1])


class Transformer(NeuralNetwork):
    """Predicts the next token of a window, or the one after each position, by causal attention; takes [n, length].

    Reference: Vaswani et al., Attention Is All You Need, NeurIPS 2017, with the norms of Radford et al., 2019 (GPT-2).

    Differs from GPT-2: 1. the scores have weights of their own; there they are those of the embedding. 2. no dropout.
    3. first weights of the last layer of a residual part are not divided by the square root of their number.
    """

    all_trained: ClassVar[bool] = True
    kind: Literal["transformer"] = "transformer"
    width: Width = Field(128, description="length of the vector of a position")
    heads: int = Field(4, ge=1, le=1024, description="heads of the attention, which divide the width")
    layers: int = Field(4, ge=1, le=100, description="blocks of attention and a perceptron of four times the width")

    @model_validator(mode="after")
    def _heads_divide_the_width(self) -> Self:
        if self.width % self.heads:
            raise ValueError(f"width = {self.width} is no multiple of heads = {self.heads}; change one of them")
        return self

    def module(self, data: Samples) -> nn.Module:
        """Return embeddings of tokens and positions, the blocks, and a linear layer on the last or on each position."""
        shape = shape_of_sample(data, self.kind)
        if not data.n_classes or len(shape) != 1 or one_array(data.train.features).dtype.kind != "i":
            raise UserError(
                f"model.kind = {self.kind} takes windows of tokens, and samples of {data.name} are none; use "
                "mlp, or data such as shakespeare and python-docs"
            )
        return _Scores(data.n_classes, shape[0], self.n_outputs(data), self, every_position=data.targets == "tokens")
