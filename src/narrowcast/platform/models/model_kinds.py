"""The models that come with the package."""

from __future__ import annotations

from narrowcast.platform.config.kinds import Registry
from narrowcast.platform.contracts import Model

MODELS = Registry(
    "model",
    Model,
    {
        "matrix_factorisation": "platform.models.factorisation:MatrixFactorisation",
        "masked_factorisation": "platform.models.factorisation:MaskedFactorisation",
        "softmax": "platform.models.networks:Softmax",
        "mlp": "platform.models.networks:MLP",
        "cnn": "platform.models.networks:CNN",
        "vgg9": "platform.models.networks:VGG9",
        "char_lstm": "platform.models.networks:CharLSTM",
        "gcn": "platform.models.graph:GCN",
        "torch": "platform.models.networks:TorchModule",
    },
    "matrix_factorisation",
)
