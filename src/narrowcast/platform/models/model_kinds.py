"""The models that come with the package."""

from __future__ import annotations

from narrowcast.platform.contracts import Model
from narrowcast.platform.kinds import Registry
from narrowcast.platform.models.graph_convolution import GCN
from narrowcast.platform.models.masked_factorisation import MaskedFactorisation
from narrowcast.platform.models.matrix_factorisation import MatrixFactorisation
from narrowcast.platform.models.networks import CNN, MLP, VGG9, CharLSTM, Softmax, TorchModule

MODELS = Registry(
    "model",
    Model,
    {
        "matrix_factorisation": MatrixFactorisation,
        "masked_factorisation": MaskedFactorisation,
        "softmax": Softmax,
        "mlp": MLP,
        "cnn": CNN,
        "vgg9": VGG9,
        "char_lstm": CharLSTM,
        "gcn": GCN,
        "torch": TorchModule,
    },
    "matrix_factorisation",
)
