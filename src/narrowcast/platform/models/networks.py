"""Neural networks of the federated-learning literature, and any other torch module by its import path."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import prod
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field
from torch import Tensor, nn

from narrowcast.platform.config import plugins
from narrowcast.platform.config.kinds import Factory
from narrowcast.platform.data.samples import Samples
from narrowcast.platform.errors import UserError
from narrowcast.platform.models.hidden_units import HiddenUnits, UnitAxis, units_of_chain
from narrowcast.platform.models.neural_network import NeuralNetwork, skeleton

Width = Annotated[int, Field(ge=1, le=65536)]
"""Number of units or channels of a layer."""


class Softmax(NeuralNetwork):
    """Multinomial logistic regression; linear regression if the targets are numbers."""

    all_trained: ClassVar[bool] = True
    kind: Literal["softmax"] = "softmax"

    def module(self, data: Samples) -> nn.Module:
        """Return one linear layer on the flattened features."""
        return nn.Sequential(nn.Flatten(), nn.Linear(prod(shape_of_sample(data, self.kind)), self.n_outputs(data)))


class MLP(NeuralNetwork):
    """Multilayer perceptron: fully connected layers with ReLU between them."""

    all_trained: ClassVar[bool] = True
    kind: Literal["mlp"] = "mlp"
    hidden: tuple[Width, ...] = Field((64,), description="widths of the hidden layers")

    def module(self, data: Samples) -> nn.Module:
        """Return alternating linear layers and ReLU on the flattened features."""
        widths = (prod(shape_of_sample(data, self.kind)), *self.hidden)
        layers: list[nn.Module] = [nn.Flatten()]
        for before, after in pairwise(widths):
            layers += [nn.Linear(before, after), nn.ReLU()]
        return nn.Sequential(*layers, nn.Linear(widths[-1], self.n_outputs(data)))

    def hidden_units(self, data: Samples) -> HiddenUnits:
        """Return the units of the hidden layers."""
        return units_of_chain(skeleton(self, data))

    def narrowed(self, counts: Sequence[int]) -> Self:
        """Return the perceptron with hidden layers of these widths."""
        return self.model_copy(update={"hidden": tuple(counts)})


class CNN(NeuralNetwork):
    """Two 5 x 5 convolutions with 2 x 2 max-pooling, then one hidden layer, after LeNet-5.

    Takes [n, channels, height, width].

    Reference: LeCun et al., Gradient-Based Learning Applied to Document Recognition, Proc. IEEE 1998; McMahan et al.,
    AISTATS 2017 use channels (32, 64) and 512 hidden units.
    """

    all_trained: ClassVar[bool] = True
    kind: Literal["cnn"] = "cnn"
    channels: tuple[Width, Width] = Field((16, 32), description="output channels of the two convolutions")
    hidden: Width = Field(128, description="width of the hidden layer")

    def module(self, data: Samples) -> nn.Module:
        """Return two convolutions with pooling and two linear layers."""
        depth, height, width = _image_shape(data, self.kind)
        first, second = self.channels
        return nn.Sequential(
            nn.Conv2d(depth, first, 5, padding=2), nn.MaxPool2d(2), nn.ReLU(),  # ReLU commutes with the maximum
            nn.Conv2d(first, second, 5, padding=2), nn.MaxPool2d(2), nn.ReLU(),  # and costs a quarter after it
            nn.Flatten(), nn.Linear(second * (height // 4) * (width // 4), self.hidden), nn.ReLU(),
            nn.Linear(self.hidden, self.n_outputs(data)),
        )  # fmt: skip

    def hidden_units(self, data: Samples) -> HiddenUnits:
        """Return the channels of both convolutions and the units of the hidden layer."""
        return units_of_chain(skeleton(self, data))

    def narrowed(self, counts: Sequence[int]) -> Self:
        """Return the network with these numbers of channels, and of units in the hidden layer."""
        *channels, hidden = counts
        return self.model_copy(update={"channels": tuple(channels), "hidden": hidden})


class VGG9(NeuralNetwork):
    """Six 3 x 3 convolutions and three linear layers, without batch norm; takes [n, channels, height, width].

    Reference: the network that Wang et al., Federated Learning with Matched Averaging, ICLR 2020, train on CIFAR-10;
    first weights `he`: He et al., Delving Deep into Rectifiers, ICCV 2015.
    """

    all_trained: ClassVar[bool] = True
    kind: Literal["vgg9"] = "vgg9"
    channels: tuple[Width, Width, Width, Width, Width, Width] = Field(
        (32, 64, 128, 128, 256, 256), description="output channels of the six convolutions"
    )
    hidden: tuple[Width, Width] = Field((512, 512), description="widths of the two hidden layers")
    first_weights: Literal["torch", "he"] = Field(
        "torch", description="torch: its own, from which narrow layers learn slowly; he: normal, of variance 2 / inputs"
    )

    def module(self, data: Samples) -> nn.Module:
        """Return convolutions in pairs, each pair followed by pooling, and three linear layers."""
        depth, height, width = _image_shape(data, self.kind)
        layers: list[nn.Module] = []
        for index, (before, after) in enumerate(pairwise((depth, *self.channels))):
            layers += [nn.Conv2d(before, after, 3, padding=1), *([nn.MaxPool2d(2)] if index % 2 else []), nn.ReLU()]
        flat, (first, second) = self.channels[-1] * (height // 8) * (width // 8), self.hidden
        layers += [nn.Flatten(), nn.Linear(flat, first), nn.ReLU(), nn.Linear(first, second), nn.ReLU()]
        layers.append(nn.Linear(second, self.n_outputs(data)))
        for layer in layers if self.first_weights == "he" else ():
            if isinstance(layer, (nn.Conv2d, nn.Linear)):
                nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
        return nn.Sequential(*layers)

    def hidden_units(self, data: Samples) -> HiddenUnits:
        """Return the channels of all convolutions and the units of the hidden layers."""
        return units_of_chain(skeleton(self, data))

    def narrowed(self, counts: Sequence[int]) -> Self:
        """Return the network with these numbers of channels, and of units in the hidden layers."""
        return self.model_copy(update={"channels": tuple(counts[:6]), "hidden": tuple(counts[6:])})


class _TokenScores(nn.Module):
    def __init__(self, n_tokens: int, n_outputs: int, size: CharLSTM, *, every_position: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(n_tokens, size.embedding_dim)
        self.lstm = nn.LSTM(size.embedding_dim, size.hidden, size.layers, batch_first=True)
        self.scores = nn.Linear(size.hidden, n_outputs)
        self.every_position = every_position

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the scores of the token after each position [n, length, tokens], or after the last [n, tokens]."""
        outputs, _ = self.lstm(self.embedding(tokens))
        return self.scores(outputs if self.every_position else outputs[:, -1])


class CharLSTM(NeuralNetwork):
    """Predicts the next character of a window, or the one after each position; takes tokens [n, length].

    Reference: McMahan et al., AISTATS 2017, and Caldas et al., LEAF, 2018: embedding 8, two layers of 256 units.
    """

    all_trained: ClassVar[bool] = True
    kind: Literal["char_lstm"] = "char_lstm"
    embedding_dim: Width = Field(8, description="length of a character's embedding")
    hidden: Width = Field(256, description="units per LSTM layer")
    layers: int = Field(2, ge=1, le=100, description="LSTM layers")

    def module(self, data: Samples) -> nn.Module:
        """Return an embedding, an LSTM, and a linear layer on its last output, or on each if these are the targets."""
        shape_of_sample(data, self.kind)
        if not data.n_classes:
            raise UserError(
                f"model.kind = {self.kind} predicts tokens, but the targets of {data.name} are numbers; use mlp"
            )
        return _TokenScores(data.n_classes, self.n_outputs(data), self, every_position=data.targets == "tokens")

    def hidden_units(self, data: Samples) -> HiddenUnits:
        """Return the units of the LSTM layers, each with four gates; the embedding has none of them."""
        del data
        axes = dict[str, tuple[UnitAxis | None, ...]]({"embedding.weight": (None,)})
        for layer in range(self.layers):
            gates, before = UnitAxis(layer, blocks=4), UnitAxis(layer - 1) if layer else None
            axes[f"lstm.weight_ih_l{layer}"] = (gates, before)
            axes[f"lstm.weight_hh_l{layer}"] = (gates, UnitAxis(layer))
            axes[f"lstm.bias_ih_l{layer}"] = axes[f"lstm.bias_hh_l{layer}"] = (gates,)
        axes |= {"scores.weight": (None, UnitAxis(self.layers - 1)), "scores.bias": (None,)}
        return HiddenUnits((self.hidden,) * self.layers, axes, ("scores.weight", "scores.bias"))

    def narrowed(self, counts: Sequence[int]) -> Self:
        """Return the model with LSTM layers of so many units, which is one number for all of them."""
        return self.model_copy(update={"hidden": counts[0]})

    def matched_units(self, data: Samples) -> HiddenUnits:
        """Return the dimensions of the embedding, then the units of the LSTM layer."""
        del data
        if self.layers > 1:
            raise UserError(
                f"model.layers = {self.layers}: matched layers differ in width, and those of char_lstm do not; use 1"
            )
        dimensions, gates, units = UnitAxis(0), UnitAxis(1, blocks=4), UnitAxis(1)
        axes: dict[str, tuple[UnitAxis | None, ...]] = {
            "embedding.weight": (None, dimensions),
            "lstm.weight_ih_l0": (gates, dimensions), "lstm.weight_hh_l0": (gates, units),
            "lstm.bias_ih_l0": (gates,), "lstm.bias_hh_l0": (gates,),
            "scores.weight": (None, units), "scores.bias": (None,),
        }  # fmt: skip
        return HiddenUnits((self.embedding_dim, self.hidden), axes, ("scores.weight", "scores.bias"))

    def resized(self, counts: Sequence[int]) -> Self:
        """Return the model with an embedding of so many dimensions, and an LSTM layer of so many units."""
        dimensions, units = counts
        return self.model_copy(update={"embedding_dim": dimensions, "hidden": units})


class ItemEmbedding(NeuralNetwork):
    """Predicts what a user gives an item from the item's number; takes [n, 1] int64 of `rated_items`.

    With a head of its own for each client (`algorithm: {kind: partial, kept: head}`) clients share the items' vectors
    and keep what they like.
    """

    all_trained: ClassVar[bool] = True
    kind: Literal["item_embedding"] = "item_embedding"
    embedding_dim: Width = Field(8, description="length of an item's vector")
    hidden: tuple[Width, ...] = Field((), description="widths of the hidden layers after it, with ReLU")

    def module(self, data: Samples) -> nn.Module:
        """Return an embedding of the items, ReLU after each hidden layer, and a linear layer."""
        if not data.n_items:
            raise UserError(f"model.kind = {self.kind} takes items, and samples of {data.name} are none; use mlp")
        layers: list[nn.Module] = [nn.Embedding(data.n_items, self.embedding_dim), nn.Flatten()]
        widths = (self.embedding_dim, *self.hidden)
        for before, after in pairwise(widths):
            layers += [nn.Linear(before, after), nn.ReLU()]
        return nn.Sequential(*layers, nn.Linear(widths[-1], self.n_outputs(data)))


class TorchModule(NeuralNetwork):
    """A user's torch module: `factory` is called with `arguments` and returns the module.

    The module is called with a batch of features, or with keyword arguments if the samples have inputs by name, and
    returns scores [n, classes]; for other targets and losses, see `NeuralNetwork`. Features are [n, channels, height,
    width] float32 from 0 to 1 for image sets ([n, 1, 28, 28] for `mnist`, [n, 3, 32, 32] for `cifar-10`), [n, 64]
    float32 for `digits`, [n, 60] float32 for `synthetic`, [n, 80] int64 tokens for `shakespeare`. Modules with
    dropout are trained client by client, with keyed draws; modules with batch norm need `statistics`. Parameters with
    `requires_grad` are trained and sent; frozen ones and buffers stay as the factory gives them under the run's seed.

    Importing the factory runs its module's code, so name only code that you would run yourself.
    """

    kind: Literal["torch"] = "torch"
    factory: Factory = Field(description="import path, such as my_package.models:make")
    arguments: dict[str, Any] = Field({}, description="keyword arguments of the factory")
    output: str | int | None = Field(
        None,
        description="the part of what the module returns that is its scores: a name in a mapping or an object, or a "
        "place in a tuple; null: it returns a tensor",
    )

    def module(self, data: Samples) -> nn.Module:
        """Import the factory and call it."""
        del data
        instance: nn.Module = plugins.load(self.factory)(**self.arguments)
        return instance

    @property
    def named(self) -> str:
        """The factory, for errors."""
        return f"model.factory = {self.factory}"


def shape_of_sample(data: Samples, kind: str) -> tuple[int, ...]:
    """Return the shape of a sample; raise `UserError` if it has several inputs."""
    features = data.train.features
    if isinstance(features, Mapping):
        raise UserError(
            f"model.kind = {kind} takes one array, and {data.name} has inputs by name ({', '.join(features)}); use "
            "model.kind = torch, whose module takes them as keyword arguments"
        )
    return features.shape[1:]


def _image_shape(data: Samples, kind: str) -> tuple[int, int, int]:
    shape = shape_of_sample(data, kind)
    if len(shape) != 3:
        raise UserError(
            f"{data.name} has features of shape {list(shape)}, but a convolution needs [channels, height, width]; "
            "use softmax or mlp"
        )
    return int(shape[0]), int(shape[1]), int(shape[2])
