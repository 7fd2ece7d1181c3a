"""The catalog of the package: kind -> class, for every registry.

A kind is added by its file and its line here; the laws of its registry then apply to it. Registries of fields of
other packages (codec stages, the radio's parts, server optimizers, availability, schedules, secure schemes, rank
policies, partitions) are defined with these fields and listed here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from narrowcast.algorithms.channel.radio import ALLOCATIONS, CHANNELS, DOWNLINKS
from narrowcast.algorithms.codecs.stages import STAGES as CODECS
from narrowcast.algorithms.completion.afgd import AFGD
from narrowcast.algorithms.completion.alps import ALPS
from narrowcast.algorithms.completion.als import ALS
from narrowcast.algorithms.completion.asd import ASD
from narrowcast.algorithms.completion.cgiht import CGIHT
from narrowcast.algorithms.completion.entry_completion import EntryCompletion
from narrowcast.algorithms.completion.fgd import FGD
from narrowcast.algorithms.completion.gauss_newton import GaussNewton
from narrowcast.algorithms.completion.image_completion import ImageCompletion
from narrowcast.algorithms.completion.in_face_frank_wolfe import InFaceFrankWolfe
from narrowcast.algorithms.completion.lmafit import LMaFit
from narrowcast.algorithms.completion.matrix_irls import MatrixIRLS
from narrowcast.algorithms.completion.niht import NIHT
from narrowcast.algorithms.completion.power_factorisation import PowerFactorisation
from narrowcast.algorithms.completion.r3mc import R3MC
from narrowcast.algorithms.completion.rating_completion import RatingCompletion
from narrowcast.algorithms.completion.scaled_asd import ScaledASD
from narrowcast.algorithms.completion.scaled_gd import ScaledGD
from narrowcast.algorithms.completion.soft_impute import SoftImpute
from narrowcast.algorithms.completion.synthetic_completion import SyntheticCompletion
from narrowcast.algorithms.federated.adaptive_atomo import AdaptiveAtomo
from narrowcast.algorithms.federated.adaptive_svd import AdaptiveSVD
from narrowcast.algorithms.federated.afl import AFL
from narrowcast.algorithms.federated.aggregator import AGGREGATORS
from narrowcast.algorithms.federated.apfl import APFL
from narrowcast.algorithms.federated.colr import CoLR
from narrowcast.algorithms.federated.fedavg import FedAvg
from narrowcast.algorithms.federated.feddyn import FedDyn
from narrowcast.algorithms.federated.fedma import FedMA
from narrowcast.algorithms.federated.fedmavg import FedMAvg
from narrowcast.algorithms.federated.fedmd import FedMD
from narrowcast.algorithms.federated.fedmf import FedMF
from narrowcast.algorithms.federated.fednova import FedNova
from narrowcast.algorithms.federated.fedpara import FedPara
from narrowcast.algorithms.federated.fedprox import FedProx
from narrowcast.algorithms.federated.qffl import QFFL
from narrowcast.algorithms.federated.rank_policy import RANK_POLICIES
from narrowcast.algorithms.federated.scaffold import Scaffold
from narrowcast.algorithms.federated.scolr import SCoLR
from narrowcast.algorithms.federated.server_optimizer import SERVER_OPTIMIZERS
from narrowcast.algorithms.federated.sfmf import SFMF
from narrowcast.algorithms.federated.submodel import Submodel
from narrowcast.algorithms.local_training.adam import Adam, AdamW
from narrowcast.algorithms.local_training.alternating_gradient import AlternatingGradient
from narrowcast.algorithms.local_training.factorisation_sgd import FactorisationSGD
from narrowcast.algorithms.local_training.graph_training import GraphTraining
from narrowcast.algorithms.local_training.learning_rate import LEARNING_RATE_SCHEDULES
from narrowcast.algorithms.local_training.rating_sgd import RatingSGD
from narrowcast.algorithms.local_training.sgd import SGD
from narrowcast.algorithms.programs.program import Program
from narrowcast.algorithms.sdp.burer_monteiro import BurerMonteiro
from narrowcast.algorithms.sdp.hazan import Hazan
from narrowcast.algorithms.sdp.lifted_stress import LiftedStress
from narrowcast.algorithms.sdp.max_cut import MaxCutFile, RandomMaxCut, TorusMaxCut
from narrowcast.algorithms.sdp.mixing import Mixing
from narrowcast.algorithms.sdp.sdpa import SDPAFile
from narrowcast.algorithms.sdp.sensor_localisation import SensorDistances, SensorLocalisation
from narrowcast.algorithms.secure.schemes import SCHEMES as SECURES
from narrowcast.cluster.ray_backend import RayBackend
from narrowcast.platform.backend import Backend
from narrowcast.platform.contracts import Algorithm, AlgorithmDefaults, DataSource, Fleet, Training
from narrowcast.platform.data.block_model import BlockModel
from narrowcast.platform.data.cifar import CIFAR10
from narrowcast.platform.data.diabetes import Diabetes
from narrowcast.platform.data.digits import Digits
from narrowcast.platform.data.explicit_ratings import ExplicitRatings
from narrowcast.platform.data.graph_npz import GraphNPZ
from narrowcast.platform.data.hugging_face import HuggingFace
from narrowcast.platform.data.idx import MNIST, FashionMNIST
from narrowcast.platform.data.image_folder import ImageFolder
from narrowcast.platform.data.least_squares import LeastSquares
from narrowcast.platform.data.movielens import MovieLens1M, MovieLens100K, MovieLensLatestSmall
from narrowcast.platform.data.ncf import NCF
from narrowcast.platform.data.npz import NPZ
from narrowcast.platform.data.partition import PARTITIONS
from narrowcast.platform.data.pinterest import Pinterest
from narrowcast.platform.data.planetoid import CiteSeer, Cora, PubMed
from narrowcast.platform.data.python_docs import PythonDocs
from narrowcast.platform.data.ratings import Ratings
from narrowcast.platform.data.sample_columns import SampleColumns
from narrowcast.platform.data.shakespeare import Shakespeare
from narrowcast.platform.data.synthetic import Synthetic
from narrowcast.platform.data.text_files import TextFiles
from narrowcast.platform.data.torch_dataset import TorchDataset
from narrowcast.platform.kinds import Registry
from narrowcast.platform.local_backend import LocalBackend
from narrowcast.platform.models.losses import LOSSES
from narrowcast.platform.models.metrics import METRICS
from narrowcast.platform.models.model_kinds import MODELS
from narrowcast.platform.schedule import SCHEDULES
from narrowcast.platform.simulation.availability import AVAILABILITIES
from narrowcast.platform.simulation.fleet import LogNormalFleet, Tiers, TraceFleet
from narrowcast.platform.solver_contracts import ProblemSource, Solver

ALGORITHMS = Registry(
    "algorithm",
    Algorithm,
    {
        "fedavg": FedAvg,
        "fedprox": FedProx,
        "scaffold": Scaffold,
        "fednova": FedNova,
        "feddyn": FedDyn,
        "qffl": QFFL,
        "afl": AFL,
        "apfl": APFL,
        "fedmf": FedMF,
        "fedmavg": FedMAvg,
        "sfmf": SFMF,
        "fedpara": FedPara,
        "submodel": Submodel,
        "fedma": FedMA,
        "fedmd": FedMD,
        "colr": CoLR,
        "scolr": SCoLR,
        "adaptive_svd": AdaptiveSVD,
        "adaptive_atomo": AdaptiveAtomo,
    },
    optional=AlgorithmDefaults,
)
TRAININGS = Registry(
    "training",
    Training,
    {
        "factorisation_sgd": FactorisationSGD,
        "sgd": SGD,
        "adam": Adam,
        "adamw": AdamW,
        "alternating_gradient": AlternatingGradient,
        "rating_sgd": RatingSGD,
        "graph": GraphTraining,
    },
    "factorisation_sgd",
)
DATA = Registry(
    "data",
    DataSource,
    {
        "ml-100k": MovieLens100K,
        "ml-1m": MovieLens1M,
        "ml-latest-small": MovieLensLatestSmall,
        "pinterest": Pinterest,
        "ncf": NCF,
        "ratings": Ratings,
        "explicit_ratings": ExplicitRatings,
        "sample_columns": SampleColumns,
        "digits": Digits,
        "diabetes": Diabetes,
        "least_squares": LeastSquares,
        "mnist": MNIST,
        "fashion-mnist": FashionMNIST,
        "cifar-10": CIFAR10,
        "image_folder": ImageFolder,
        "npz": NPZ,
        "hugging_face": HuggingFace,
        "torch": TorchDataset,
        "shakespeare": Shakespeare,
        "python-docs": PythonDocs,
        "text_files": TextFiles,
        "synthetic": Synthetic,
        "cora": Cora,
        "citeseer": CiteSeer,
        "pubmed": PubMed,
        "block_model": BlockModel,
        "graph_npz": GraphNPZ,
    },
)
FLEETS = Registry("fleet", Fleet, {"tiers": Tiers, "lognormal": LogNormalFleet, "trace": TraceFleet}, "tiers")
BACKENDS = Registry("backend", Backend, {"local": LocalBackend, "ray": RayBackend}, "ray")
PROBLEMS = Registry(
    "problem",
    ProblemSource,
    {
        "synthetic_completion": SyntheticCompletion,
        "rating_completion": RatingCompletion,
        "image_completion": ImageCompletion,
        "entry_completion": EntryCompletion,
        "max_cut": MaxCutFile,
        "random_max_cut": RandomMaxCut,
        "torus_max_cut": TorusMaxCut,
        "sdpa": SDPAFile,
        "sensor_localisation": SensorLocalisation,
        "sensor_distances": SensorDistances,
    },
)
SOLVERS = Registry(
    "solver",
    Solver,
    {
        "fgd": FGD,
        "afgd": AFGD,
        "scaled_gd": ScaledGD,
        "asd": ASD,
        "scaled_asd": ScaledASD,
        "lmafit": LMaFit,
        "power_factorisation": PowerFactorisation,
        "als": ALS,
        "niht": NIHT,
        "cgiht": CGIHT,
        "alps": ALPS,
        "r3mc": R3MC,
        "matrix_irls": MatrixIRLS,
        "gauss_newton": GaussNewton,
        "soft_impute": SoftImpute,
        "in_face_frank_wolfe": InFaceFrankWolfe,
        "hazan": Hazan,
        "mixing": Mixing,
        "burer_monteiro": BurerMonteiro,
        "lifted_stress": LiftedStress,
        "program": Program,
    },
)

REGISTRIES: Mapping[str, Registry] = {
    each.name: each
    for each in (
        *(ALGORITHMS, CODECS, DATA, PARTITIONS, MODELS, LOSSES, METRICS, TRAININGS, LEARNING_RATE_SCHEDULES),
        FLEETS,
        *(CHANNELS, DOWNLINKS, ALLOCATIONS),
        *(AVAILABILITIES, SCHEDULES, SECURES, BACKENDS, RANK_POLICIES, SERVER_OPTIMIZERS, AGGREGATORS),
        *(PROBLEMS, SOLVERS),
    )
}
"""All but those of studies, which `tuning` has: samplers and pruners."""

_GRAPHS = ("cora", "citeseer", "pubmed", "block_model", "graph_npz")
_FACTORISATION = {"kind": "factorisation_sgd", "learning_rate": 0.5, "weight_decay": 5e-4, "epochs": 2}
TRAINING_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "ml-100k": {**_FACTORISATION, "batch_size": 64},
    "ml-1m": {**_FACTORISATION, "batch_size": 256},
    "ml-latest-small": {**_FACTORISATION, "batch_size": 64},
    "pinterest": {**_FACTORISATION, "learning_rate": 0.25, "weight_decay": 1e-4, "batch_size": 64},
    "ncf": _FACTORISATION,
    "ratings": _FACTORISATION,
    "explicit_ratings": {"kind": "alternating_gradient", "weight_decay": 1.0},
    "sample_columns": {"kind": "alternating_gradient"},
    **{kind: {"kind": "graph"} for kind in _GRAPHS},
}
"""Local training per data set. ml-1m, pinterest: the code released with CoLR (Nguyen et al., WWW 2024)."""
MODEL_DEFAULTS: Mapping[str, str] = {
    **dict.fromkeys(TRAINING_DEFAULTS, "matrix_factorisation"),
    **dict.fromkeys(("explicit_ratings", "sample_columns"), "masked_factorisation"),
    **dict.fromkeys(_GRAPHS, "gcn"),
    **dict.fromkeys(("mnist", "fashion-mnist", "cifar-10", "image_folder"), "cnn"),
    **dict.fromkeys(("shakespeare", "python-docs", "text_files"), "char_lstm"),
    "least_squares": "softmax",
    "synthetic": "softmax",
}
"""The kind of model per data set, where an experiment names none; `mlp` for all others."""
