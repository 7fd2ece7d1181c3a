"""The models that come with the package."""

from __future__ import annotations

from narrowcast.platform.contracts import Model
from narrowcast.platform.kinds import Registry

MODELS = Registry(
    "model",
    Model,
    {
        "matrix_factorisation": "platform.models.matrix_factorisation:MatrixFactorisation",
        "masked_factorisation": "platform.models.masked_factorisation:MaskedFactorisation",
        "softmax": "platform.models.networks:Softmax",
        "mlp": "platform.models.networks:MLP",
        "cnn": "platform.models.networks:CNN",
        "vgg9": "platform.models.networks:VGG9",
        "char_lstm": "platform.models.networks:CharLSTM",
        "gcn": "platform.models.graph_convolution:GCN",
        "torch": "platform.models.networks:TorchModule",
    },
    "matrix_factorisation",
)
