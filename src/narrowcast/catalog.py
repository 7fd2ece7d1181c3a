"""What exists: kind -> class. To add one, write its file and add its line; the contract tests pick it up from here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from narrowcast.algorithms.channel import radio
from narrowcast.algorithms.codecs.stages import STAGES
from narrowcast.algorithms.federated.colr import CoLR
from narrowcast.algorithms.federated.fedavg import FedAvg
from narrowcast.algorithms.federated.fedmf import FedMF
from narrowcast.algorithms.federated.fedpara import FedPara
from narrowcast.algorithms.federated.fedprox import FedProx
from narrowcast.algorithms.federated.median import Median
from narrowcast.algorithms.federated.scaffold import Scaffold
from narrowcast.algorithms.federated.scolr import SCoLR
from narrowcast.algorithms.local_training.factorisation_sgd import FactorisationSGD
from narrowcast.algorithms.local_training.sgd import SGD
from narrowcast.algorithms.secure import schemes
from narrowcast.cluster.ray_backend import RayBackend
from narrowcast.platform import schedule
from narrowcast.platform.data.cifar import CIFAR10
from narrowcast.platform.data.digits import Digits
from narrowcast.platform.data.idx import MNIST, FashionMNIST
from narrowcast.platform.data.image_folder import ImageFolder
from narrowcast.platform.data.movielens import MovieLens1M, MovieLens100K, MovieLensLatestSmall
from narrowcast.platform.data.ncf import NCF
from narrowcast.platform.data.shakespeare import Shakespeare
from narrowcast.platform.data.synthetic import Synthetic
from narrowcast.platform.local_backend import LocalBackend
from narrowcast.platform.models.matrix_factorisation import MatrixFactorisation
from narrowcast.platform.models.networks import CNN, MLP, VGG9, CharLSTM, Softmax, TorchModule
from narrowcast.platform.simulation import availability
from narrowcast.platform.simulation.fleet import LogNormalFleet, Tiers, TraceFleet

Kinds = Mapping[str, type[BaseModel]]

ALGORITHMS: Kinds = {
    "fedavg": FedAvg,
    "fedprox": FedProx,
    "scaffold": Scaffold,
    "median": Median,
    "fedmf": FedMF,
    "fedpara": FedPara,
    "colr": CoLR,
    "scolr": SCoLR,
}
MODELS: Kinds = {
    "matrix_factorisation": MatrixFactorisation,
    "softmax": Softmax,
    "mlp": MLP,
    "cnn": CNN,
    "vgg9": VGG9,
    "char_lstm": CharLSTM,
    "torch": TorchModule,
}
TRAININGS: Kinds = {"factorisation_sgd": FactorisationSGD, "sgd": SGD}
DATA: Kinds = {
    "ml-100k": MovieLens100K,
    "ml-1m": MovieLens1M,
    "ml-latest-small": MovieLensLatestSmall,
    "ncf": NCF,
    "digits": Digits,
    "mnist": MNIST,
    "fashion-mnist": FashionMNIST,
    "cifar-10": CIFAR10,
    "image_folder": ImageFolder,
    "shakespeare": Shakespeare,
    "synthetic": Synthetic,
}
CODECS: Kinds = STAGES
SECURES: Kinds = schemes.SCHEMES
CHANNELS: Kinds = radio.CHANNELS
DOWNLINKS: Kinds = radio.DOWNLINKS
ALLOCATIONS: Kinds = radio.ALLOCATIONS
AVAILABILITIES: Kinds = availability.AVAILABILITIES
SCHEDULES: Kinds = schedule.SCHEDULES
FLEETS: Kinds = {"tiers": Tiers, "lognormal": LogNormalFleet, "trace": TraceFleet}
BACKENDS: Kinds = {"local": LocalBackend, "ray": RayBackend}

_FACTORISATION = {"kind": "factorisation_sgd", "learning_rate": 0.5, "weight_decay": 5e-4, "epochs": 2}
TRAINING_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "ml-100k": {**_FACTORISATION, "batch_size": 64},
    "ml-1m": {**_FACTORISATION, "batch_size": 256},
    "ml-latest-small": {**_FACTORISATION, "batch_size": 64},
    "ncf": _FACTORISATION,
}
"""Local training per data set. ml-1m: the code released with CoLR (Nguyen et al., WWW 2024)."""
