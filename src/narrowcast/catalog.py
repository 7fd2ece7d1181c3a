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
from narrowcast.algorithms.federated.aggregator import AGGREGATORS
from narrowcast.algorithms.federated.rank_policy import RANK_POLICIES
from narrowcast.algorithms.federated.server_optimizer import SERVER_OPTIMIZERS
from narrowcast.algorithms.local_training.learning_rate import LEARNING_RATE_SCHEDULES
from narrowcast.algorithms.secure.schemes import SCHEMES as SECURES
from narrowcast.platform.backend import Backend
from narrowcast.platform.contracts import Algorithm, DataSource, Fleet, Training
from narrowcast.platform.data.partition import PARTITIONS
from narrowcast.platform.kinds import Registry
from narrowcast.platform.models.losses import LOSSES
from narrowcast.platform.models.metrics import METRICS
from narrowcast.platform.models.model_kinds import MODELS
from narrowcast.platform.schedule import SCHEDULES
from narrowcast.platform.simulation.availability import AVAILABILITIES
from narrowcast.platform.solver_contracts import ProblemSource, Solver

ALGORITHMS = Registry(
    "algorithm",
    Algorithm,
    {
        "fedavg": "algorithms.federated.fedavg:FedAvg",
        "fedprox": "algorithms.federated.fedprox:FedProx",
        "scaffold": "algorithms.federated.scaffold:Scaffold",
        "fednova": "algorithms.federated.fednova:FedNova",
        "feddyn": "algorithms.federated.feddyn:FedDyn",
        "qffl": "algorithms.federated.qffl:QFFL",
        "afl": "algorithms.federated.afl:AFL",
        "apfl": "algorithms.federated.apfl:APFL",
        "fedmf": "algorithms.federated.fedmf:FedMF",
        "fedmavg": "algorithms.federated.fedmavg:FedMAvg",
        "sfmf": "algorithms.federated.sfmf:SFMF",
        "fedpara": "algorithms.federated.fedpara:FedPara",
        "submodel": "algorithms.federated.submodel:Submodel",
        "fedma": "algorithms.federated.fedma:FedMA",
        "fedmd": "algorithms.federated.fedmd:FedMD",
        "colr": "algorithms.federated.colr:CoLR",
        "scolr": "algorithms.federated.scolr:SCoLR",
        "adaptive_svd": "algorithms.federated.adaptive_svd:AdaptiveSVD",
        "adaptive_atomo": "algorithms.federated.adaptive_atomo:AdaptiveAtomo",
    },
)
TRAININGS = Registry(
    "training",
    Training,
    {
        "factorisation_sgd": "algorithms.local_training.factorisation_sgd:FactorisationSGD",
        "sgd": "algorithms.local_training.sgd:SGD",
        "adam": "algorithms.local_training.adam:Adam",
        "adamw": "algorithms.local_training.adam:AdamW",
        "alternating_gradient": "algorithms.local_training.alternating_gradient:AlternatingGradient",
        "rating_sgd": "algorithms.local_training.rating_sgd:RatingSGD",
        "graph": "algorithms.local_training.graph_training:GraphTraining",
    },
    "factorisation_sgd",
)
DATA = Registry(
    "data",
    DataSource,
    {
        "ml-100k": "platform.data.movielens:MovieLens100K",
        "ml-1m": "platform.data.movielens:MovieLens1M",
        "ml-latest-small": "platform.data.movielens:MovieLensLatestSmall",
        "pinterest": "platform.data.pinterest:Pinterest",
        "ncf": "platform.data.ncf:NCF",
        "ratings": "platform.data.ratings:Ratings",
        "explicit_ratings": "platform.data.explicit_ratings:ExplicitRatings",
        "sample_columns": "platform.data.sample_columns:SampleColumns",
        "digits": "platform.data.digits:Digits",
        "diabetes": "platform.data.diabetes:Diabetes",
        "least_squares": "platform.data.least_squares:LeastSquares",
        "mnist": "platform.data.idx:MNIST",
        "fashion-mnist": "platform.data.idx:FashionMNIST",
        "cifar-10": "platform.data.cifar:CIFAR10",
        "image_folder": "platform.data.image_folder:ImageFolder",
        "npz": "platform.data.npz:NPZ",
        "hugging_face": "platform.data.hugging_face:HuggingFace",
        "torch": "platform.data.torch_dataset:TorchDataset",
        "shakespeare": "platform.data.shakespeare:Shakespeare",
        "python-docs": "platform.data.python_docs:PythonDocs",
        "text_files": "platform.data.text_files:TextFiles",
        "synthetic": "platform.data.synthetic:Synthetic",
        "cora": "platform.data.planetoid:Cora",
        "citeseer": "platform.data.planetoid:CiteSeer",
        "pubmed": "platform.data.planetoid:PubMed",
        "block_model": "platform.data.block_model:BlockModel",
        "graph_npz": "platform.data.graph_npz:GraphNPZ",
    },
)
FLEETS = Registry(
    "fleet",
    Fleet,
    {
        "tiers": "platform.simulation.fleet:Tiers",
        "lognormal": "platform.simulation.fleet:LogNormalFleet",
        "trace": "platform.simulation.fleet:TraceFleet",
    },
    "tiers",
)
BACKENDS = Registry(
    "backend", Backend, {"local": "platform.local_backend:LocalBackend", "ray": "cluster.ray_backend:RayBackend"}, "ray"
)
PROBLEMS = Registry(
    "problem",
    ProblemSource,
    {
        "synthetic_completion": "algorithms.completion.synthetic_completion:SyntheticCompletion",
        "rating_completion": "algorithms.completion.rating_completion:RatingCompletion",
        "image_completion": "algorithms.completion.image_completion:ImageCompletion",
        "entry_completion": "algorithms.completion.entry_completion:EntryCompletion",
        "max_cut": "algorithms.sdp.max_cut:MaxCutFile",
        "random_max_cut": "algorithms.sdp.max_cut:RandomMaxCut",
        "torus_max_cut": "algorithms.sdp.max_cut:TorusMaxCut",
        "sdpa": "algorithms.sdp.sdpa:SDPAFile",
        "sensor_localisation": "algorithms.sdp.sensor_localisation:SensorLocalisation",
        "sensor_distances": "algorithms.sdp.sensor_localisation:SensorDistances",
    },
)
SOLVERS = Registry(
    "solver",
    Solver,
    {
        "fgd": "algorithms.completion.fgd:FGD",
        "afgd": "algorithms.completion.afgd:AFGD",
        "scaled_gd": "algorithms.completion.scaled_gd:ScaledGD",
        "asd": "algorithms.completion.asd:ASD",
        "scaled_asd": "algorithms.completion.scaled_asd:ScaledASD",
        "lmafit": "algorithms.completion.lmafit:LMaFit",
        "power_factorisation": "algorithms.completion.power_factorisation:PowerFactorisation",
        "als": "algorithms.completion.als:ALS",
        "niht": "algorithms.completion.niht:NIHT",
        "cgiht": "algorithms.completion.cgiht:CGIHT",
        "alps": "algorithms.completion.alps:ALPS",
        "r3mc": "algorithms.completion.r3mc:R3MC",
        "matrix_irls": "algorithms.completion.matrix_irls:MatrixIRLS",
        "gauss_newton": "algorithms.completion.gauss_newton:GaussNewton",
        "soft_impute": "algorithms.completion.soft_impute:SoftImpute",
        "in_face_frank_wolfe": "algorithms.completion.in_face_frank_wolfe:InFaceFrankWolfe",
        "hazan": "algorithms.sdp.hazan:Hazan",
        "mixing": "algorithms.sdp.mixing:Mixing",
        "burer_monteiro": "algorithms.sdp.burer_monteiro:BurerMonteiro",
        "lifted_stress": "algorithms.sdp.lifted_stress:LiftedStress",
        "program": "algorithms.programs.program:Program",
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
