"""The catalog of the package: kind -> class, for every registry.

A kind is added by its file and its line here; the laws of its registry then apply to it. Registries of fields of
other packages (codec stages, the radio's parts, server optimizers, availability, schedules, secure schemes, rank
policies, partitions) are defined with these fields and listed here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from narrowcast.algorithms.channel.radio import ALLOCATIONS, CHANNELS, DOWNLINKS
from narrowcast.algorithms.codecs.chain import STAGES as CODECS
from narrowcast.algorithms.federated.aggregator import AGGREGATORS
from narrowcast.algorithms.federated.server_optimizer import SERVER_OPTIMIZERS
from narrowcast.algorithms.federated.shared_basis import RANK_POLICIES
from narrowcast.algorithms.local_training.rules import LEARNING_RATE_SCHEDULES
from narrowcast.algorithms.secure.schemes import SCHEMES as SECURES
from narrowcast.platform.config.kinds import Registry
from narrowcast.platform.contracts import Algorithm, Fleet, Training
from narrowcast.platform.data.dataset import DataSource
from narrowcast.platform.data.partition import PARTITIONS
from narrowcast.platform.models.measures import LOSSES, METRICS
from narrowcast.platform.models.model import MODELS
from narrowcast.platform.rounds.loop import Backend
from narrowcast.platform.rounds.plan import SCHEDULES
from narrowcast.platform.rounds.sampling import AVAILABILITIES
from narrowcast.platform.solving import ProblemSource, Solver

ALGORITHMS = Registry(
    "algorithm",
    Algorithm,
    {
        "fedavg": "algorithms.federated.fedavg:FedAvg",
        "fedprox": "algorithms.federated.fedprox:FedProx",
        "scaffold": "algorithms.federated.scaffold:Scaffold",
        "fednova": "algorithms.federated.fednova:FedNova",
        "feddyn": "algorithms.federated.feddyn:FedDyn",
        "qffl": "algorithms.federated.fairness:QFFL",
        "afl": "algorithms.federated.fairness:AFL",
        "apfl": "algorithms.federated.apfl:APFL",
        "fedmf": "algorithms.federated.fedmf:FedMF",
        "fedmavg": "algorithms.federated.fedmavg:FedMAvg",
        "sfmf": "algorithms.federated.fedmavg:SFMF",
        "fedpara": "algorithms.federated.fedpara:FedPara",
        "submodel": "algorithms.federated.submodel:Submodel",
        "fedma": "algorithms.federated.fedma:FedMA",
        "fedmd": "algorithms.federated.fedmd:FedMD",
        "colr": "algorithms.federated.low_rank:CoLR",
        "scolr": "algorithms.federated.low_rank:SCoLR",
        "adaptive_svd": "algorithms.federated.adaptive_svd:AdaptiveSVD",
        "adaptive_atomo": "algorithms.federated.adaptive_atomo:AdaptiveAtomo",
    },
)
TRAININGS = Registry(
    "training",
    Training,
    {
        "factorisation_sgd": "algorithms.local_training.factorisation:FactorisationSGD",
        "sgd": "algorithms.local_training.sgd:SGD",
        "adam": "algorithms.local_training.sgd:Adam",
        "adamw": "algorithms.local_training.sgd:AdamW",
        "alternating_gradient": "algorithms.local_training.ratings:AlternatingGradient",
        "rating_sgd": "algorithms.local_training.ratings:RatingSGD",
        "graph": "algorithms.local_training.graph:GraphTraining",
    },
    "factorisation_sgd",
    frozenset({"device", "epochs"}),
)
DATA = Registry(
    "data",
    DataSource,
    {
        "ml-100k": "platform.data.movielens:MovieLens100K",
        "ml-1m": "platform.data.movielens:MovieLens1M",
        "ml-latest-small": "platform.data.movielens:MovieLensLatestSmall",
        "pinterest": "platform.data.movielens:Pinterest",
        "ncf": "platform.data.ncf:NCF",
        "ratings": "platform.data.ratings:Ratings",
        "explicit_ratings": "platform.data.rating_matrix:ExplicitRatings",
        "sample_columns": "platform.data.rating_matrix:SampleColumns",
        "digits": "platform.data.scikit_learn:Digits",
        "diabetes": "platform.data.scikit_learn:Diabetes",
        "least_squares": "platform.data.synthetic:LeastSquares",
        "mnist": "platform.data.image_sets:MNIST",
        "fashion-mnist": "platform.data.image_sets:FashionMNIST",
        "cifar-10": "platform.data.image_sets:CIFAR10",
        "image_folder": "platform.data.image_sets:ImageFolder",
        "npz": "platform.data.formats:NPZ",
        "hugging_face": "platform.data.formats:HuggingFace",
        "torch": "platform.data.formats:TorchDataset",
        "shakespeare": "platform.data.text:Shakespeare",
        "python-docs": "platform.data.text:PythonDocs",
        "text_files": "platform.data.text:TextFiles",
        "synthetic": "platform.data.synthetic:Synthetic",
        "cora": "platform.data.planetoid:Cora",
        "citeseer": "platform.data.planetoid:CiteSeer",
        "pubmed": "platform.data.planetoid:PubMed",
        "block_model": "platform.data.synthetic:BlockModel",
        "graph_npz": "platform.data.graph:GraphNPZ",
    },
)
FLEETS = Registry(
    "fleet",
    Fleet,
    {
        "tiers": "platform.rounds.fleet:Tiers",
        "lognormal": "platform.rounds.fleet:LogNormalFleet",
        "trace": "platform.rounds.fleet:TraceFleet",
    },
    "tiers",
)
BACKENDS = Registry(
    "backend", Backend, {"local": "platform.rounds.loop:LocalBackend", "ray": "cluster.backend:RayBackend"}, "ray"
)
PROBLEMS = Registry(
    "problem",
    ProblemSource,
    {
        "synthetic_completion": "solves.completion_problems:SyntheticCompletion",
        "rating_completion": "solves.completion_problems:RatingCompletion",
        "image_completion": "solves.completion_problems:ImageCompletion",
        "entry_completion": "solves.completion_problems:EntryCompletion",
        "max_cut": "solves.max_cut:MaxCutFile",
        "random_max_cut": "solves.max_cut:RandomMaxCut",
        "torus_max_cut": "solves.max_cut:TorusMaxCut",
        "sdpa": "solves.semidefinite:SDPAFile",
        "sensor_localisation": "solves.localisation:SensorLocalisation",
        "sensor_distances": "solves.localisation:SensorDistances",
    },
)
SOLVERS = Registry(
    "solver",
    Solver,
    {
        "fgd": "solves.descent:FGD",
        "afgd": "solves.descent:AFGD",
        "scaled_gd": "solves.descent:ScaledGD",
        "asd": "solves.descent:ASD",
        "scaled_asd": "solves.descent:ScaledASD",
        "lmafit": "solves.alternating:LMaFit",
        "power_factorisation": "solves.alternating:PowerFactorisation",
        "als": "solves.alternating:ALS",
        "niht": "solves.thresholding:NIHT",
        "cgiht": "solves.thresholding:CGIHT",
        "alps": "solves.thresholding:ALPS",
        "r3mc": "solves.second_order:R3MC",
        "matrix_irls": "solves.second_order:MatrixIRLS",
        "gauss_newton": "solves.second_order:GaussNewton",
        "soft_impute": "solves.thresholding:SoftImpute",
        "in_face_frank_wolfe": "solves.frank_wolfe:InFaceFrankWolfe",
        "hazan": "solves.hazan:Hazan",
        "mixing": "solves.mixing:Mixing",
        "burer_monteiro": "solves.burer_monteiro:BurerMonteiro",
        "lifted_stress": "solves.localisation:LiftedStress",
        "program": "solves.program:Program",
    },
)

REGISTRIES: Mapping[str, Registry] = {
    registry.name: registry
    for registry in (
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
