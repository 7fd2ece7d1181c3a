"""The catalog of the package: kind -> class, for every registry.

A kind is added by its file and its line here; the laws of its registry then apply to it. Contracts and classes are
text, `module:Class` below `narrowcast`, imported when they are asked for: fields of any module may name a registry, and
a command that lists kinds imports none of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from narrowcast.platform.config.kinds import Registry

ALGORITHMS = Registry(
    "algorithm",
    "platform.contracts:Algorithm",
    {
        "fedavg": "algorithms.federated.fedavg:FedAvg",
        "fedprox": "algorithms.federated.fedprox:FedProx",
        "scaffold": "algorithms.federated.scaffold:Scaffold",
        "fednova": "algorithms.federated.fednova:FedNova",
        "feddyn": "algorithms.federated.feddyn:FedDyn",
        "qffl": "algorithms.federated.fairness:QFFL",
        "afl": "algorithms.federated.fairness:AFL",
        "local": "algorithms.federated.local:Local",
        "fine_tune": "algorithms.federated.fine_tune:FineTune",
        "apfl": "algorithms.federated.apfl:APFL",
        "ditto": "algorithms.federated.ditto:Ditto",
        "partial": "algorithms.federated.partial:Partial",
        "per_fedavg": "algorithms.federated.per_fedavg:PerFedAvg",
        "pfedme": "algorithms.federated.pfedme:PFedMe",
        "fedmf": "algorithms.federated.fedmf:FedMF",
        "fedmavg": "algorithms.federated.fedmavg:FedMAvg",
        "sfmf": "algorithms.federated.fedmavg:SFMF",
        "fedpara": "algorithms.federated.fedpara:FedPara",
        "lora": "algorithms.federated.lora:LoRA",
        "submodel": "algorithms.federated.submodel:Submodel",
        "fedma": "algorithms.federated.fedma:FedMA",
        "fedmd": "algorithms.federated.fedmd:FedMD",
        "colr": "algorithms.federated.low_rank:CoLR",
        "scolr": "algorithms.federated.low_rank:SCoLR",
        "adaptive_svd": "algorithms.federated.adaptive_svd:AdaptiveSVD",
        "adaptive_atomo": "algorithms.federated.adaptive_atomo:AdaptiveAtomo",
        "semi_supervised": "algorithms.federated.semi_supervised:SemiSupervised",
        "fedmatch": "algorithms.federated.fedmatch:FedMatch",
        "server_free": "algorithms.federated.server_free:ServerFree",
        "d_psgd": "algorithms.federated.d_psgd:DPSGD",
        "choco_sgd": "algorithms.federated.choco_sgd:ChocoSGD",
        "dcd_psgd": "algorithms.federated.dcd_psgd:DCDPSGD",
        "push_sum": "algorithms.federated.push_sum:PushSum",
        "dynamic_averaging": "algorithms.federated.dynamic_averaging:DynamicAveraging",
    },
)
TRAININGS = Registry(
    "training",
    "platform.contracts:Training",
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
    "platform.data.dataset:DataSource",
    {
        "ml-100k": "platform.data.movielens:MovieLens100K",
        "ml-1m": "platform.data.movielens:MovieLens1M",
        "ml-latest-small": "platform.data.movielens:MovieLensLatestSmall",
        "pinterest": "platform.data.movielens:Pinterest",
        "ncf": "platform.data.ncf:NCF",
        "ratings": "platform.data.ratings:Ratings",
        "explicit_ratings": "platform.data.rating_matrix:ExplicitRatings",
        "rated_items": "platform.data.rated_items:RatedItems",
        "sample_columns": "platform.data.rating_matrix:SampleColumns",
        "digits": "platform.data.scikit_learn:Digits",
        "diabetes": "platform.data.scikit_learn:Diabetes",
        "least_squares": "platform.data.synthetic:LeastSquares",
        "mnist": "platform.data.image_sets:MNIST",
        "fashion-mnist": "platform.data.image_sets:FashionMNIST",
        "cifar-10": "platform.data.image_sets:CIFAR10",
        "southwest": "platform.data.image_sets:Southwest",
        "image_folder": "platform.data.image_sets:ImageFolder",
        "npz": "platform.data.formats:NPZ",
        "hugging_face": "platform.data.formats:HuggingFace",
        "torch": "platform.data.formats:TorchDataset",
        "shakespeare": "platform.data.text:Shakespeare",
        "python-docs": "platform.data.text:PythonDocs",
        "text_files": "platform.data.text:TextFiles",
        "state-of-the-union": "platform.data.addresses:StateOfTheUnion",
        "watch-exercises": "platform.data.watch:WatchExercises",
        "spam-assassin": "platform.data.mail:SpamAssassin",
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
    "platform.contracts:Fleet",
    {
        "tiers": "platform.rounds.fleet:Tiers",
        "lognormal": "platform.rounds.fleet:LogNormalFleet",
        "trace": "platform.rounds.fleet:TraceFleet",
    },
    "tiers",
)
BACKENDS = Registry(
    "backend",
    "platform.rounds.loop:Backend",
    {"local": "platform.rounds.loop:LocalBackend", "ray": "cluster.backend:RayBackend"},
    "ray",
)
PROBLEMS = Registry(
    "problem",
    "platform.solving:ProblemSource",
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
    "platform.solving:Solver",
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

PARTITIONS = Registry(
    "partition",
    "platform.data.partition:Partitioner",
    {
        "iid": "platform.data.partition:IID",
        "quantity": "platform.data.partition:Quantity",
        "dirichlet": "platform.data.partition:Dirichlet",
        "shards": "platform.data.partition:Shards",
        "similarity": "platform.data.partition:Similarity",
        "natural": "platform.data.partition:Natural",
    },
)
MODELS = Registry(
    "model",
    "platform.models.model:Model",
    {
        "matrix_factorisation": "platform.models.factorisation:MatrixFactorisation",
        "masked_factorisation": "platform.models.factorisation:MaskedFactorisation",
        "softmax": "platform.models.networks:Softmax",
        "mlp": "platform.models.networks:MLP",
        "cnn": "platform.models.networks:CNN",
        "vgg9": "platform.models.networks:VGG9",
        "char_lstm": "platform.models.networks:CharLSTM",
        "item_embedding": "platform.models.networks:ItemEmbedding",
        "transformer": "platform.models.transformer:Transformer",
        "gcn": "platform.models.graph:GCN",
        "torch": "platform.models.networks:TorchModule",
        "transformers": "platform.models.transformers_model:TransformersModel",
        "adapters": "platform.models.adapters:Adapters",
    },
    "matrix_factorisation",
)
LOSSES = Registry(
    "loss",
    "platform.models.measures:Loss",
    {
        "cross_entropy": "platform.models.measures:CrossEntropy",
        "squared_error": "platform.models.measures:SquaredLoss",
        "absolute_error": "platform.models.measures:AbsoluteLoss",
        "huber": "platform.models.measures:Huber",
    },
)
METRICS = Registry(
    "metric",
    "platform.models.measures:Metric",
    {
        "accuracy": "platform.models.measures:Accuracy",
        "roc_auc": "platform.models.measures:ROCAUC",
        "perplexity": "platform.models.measures:Perplexity",
        "rmse": "platform.models.measures:RMSE",
        "mae": "platform.models.measures:MAE",
        "r2": "platform.models.measures:R2",
    },
)
LEARNING_RATE_SCHEDULES = Registry(
    "learning_rate_schedule",
    "algorithms.local_training.rules:LearningRateSchedule",
    {
        "constant": "algorithms.local_training.rules:Constant",
        "step": "algorithms.local_training.rules:StepDecay",
        "milestones": "algorithms.local_training.rules:Milestones",
        "cosine": "algorithms.local_training.rules:Cosine",
        "inverse_time": "algorithms.local_training.rules:InverseTime",
        "warmup": "algorithms.local_training.rules:Warmup",
    },
)
CHANNELS = Registry(
    "channel",
    "algorithms.channel.links:Channel",
    {
        "fixed": "algorithms.channel.given:Fixed",
        "lognormal": "algorithms.channel.given:LogNormalRates",
        "rayleigh": "algorithms.channel.fading:Rayleigh",
        "located_rayleigh": "algorithms.channel.fading:LocatedRayleigh",
        "trace": "algorithms.channel.given:Trace",
        "multiple_access": "algorithms.channel.fading:MultipleAccess",
        "table": "algorithms.channel.fading:RateTable",
        "single_user": "algorithms.channel.fading:SingleUser",
        "two_bands": "algorithms.channel.two_bands:TwoBands",
    },
)
DOWNLINKS = Registry(
    "downlink",
    "algorithms.channel.radio:Downlink",
    {
        "unicast": "algorithms.channel.radio:Unicast",
        "broadcast": "algorithms.channel.radio:BroadcastLink",
    },
)
ALLOCATIONS = Registry(
    "allocation",
    "algorithms.channel.allocation:Allocation",
    {
        "min_error": "algorithms.channel.allocation:MinError",
        "max_min": "algorithms.channel.allocation:MaxMin",
        "proportional": "algorithms.channel.allocation:Proportional",
        "equal": "algorithms.channel.allocation:Equal",
    },
)
SAMPLINGS = Registry(
    "sampling",
    "platform.rounds.sampling:Sampling",
    {
        "round_robin": "platform.rounds.sampling:RoundRobin",
        "uniform": "platform.rounds.sampling:Uniform",
        "by_examples": "platform.rounds.sampling:ByExamples",
        "poisson": "platform.rounds.sampling:Poisson",
        "fedcs": "platform.rounds.sampling:FedCS",
    },
)
AVAILABILITIES = Registry(
    "availability",
    "platform.rounds.sampling:Availability",
    {
        "always": "platform.rounds.sampling:Always",
        "bernoulli": "platform.rounds.sampling:Bernoulli",
        "diurnal": "platform.rounds.sampling:Diurnal",
        "trace": "platform.rounds.sampling:AvailabilityTrace",
    },
)
SCHEDULES = Registry(
    "schedule",
    "platform.rounds.plan:Schedule",
    {
        "synchronous": "platform.rounds.plan:Synchronous",
        "buffered": "platform.rounds.plan:Buffered",
    },
)
SECURES = Registry(
    "secure",
    "algorithms.secure.schemes:Protection",
    {
        "none": "algorithms.secure.schemes:NoProtection",
        "plain": "algorithms.secure.schemes:Plain",
        "masked": "algorithms.secure.schemes:Masked",
        "ckks": "algorithms.secure.ckks:CKKS",
        "paillier": "algorithms.secure.paillier:Paillier",
    },
)
RANK_POLICIES = Registry(
    "rank_policy",
    "algorithms.federated.rank_policy:RankPolicy",
    {
        "uniform": "algorithms.federated.rank_policy:UniformRank",
        "bandwidth": "algorithms.federated.rank_policy:BandwidthRank",
        "channel": "algorithms.federated.rank_policy:ChannelRank",
    },
    "uniform",
)
SERVER_OPTIMIZERS = Registry(
    "server_optimizer",
    "algorithms.federated.server_optimizer:ServerOptimizer",
    {
        "momentum": "algorithms.federated.server_optimizer:Momentum",
        "adam": "algorithms.federated.server_optimizer:Adam",
        "yogi": "algorithms.federated.server_optimizer:Yogi",
        "adagrad": "algorithms.federated.server_optimizer:Adagrad",
    },
)
AGGREGATORS = Registry(
    "aggregator",
    "algorithms.federated.aggregator:Aggregator",
    {
        "median": "algorithms.federated.aggregator:CoordinateMedian",
        "trimmed_mean": "algorithms.federated.aggregator:TrimmedMean",
        "geometric_median": "algorithms.federated.aggregator:GeometricMedian",
        "krum": "algorithms.federated.aggregator:Krum",
        "bulyan": "algorithms.federated.aggregator:Bulyan",
        "norm_clip": "algorithms.federated.aggregator:NormClip",
        "centred_clip": "algorithms.federated.aggregator:CentredClip",
        "sign_majority": "algorithms.federated.aggregator:SignMajority",
        "fltrust": "algorithms.federated.aggregator:FLTrust",
        "nnm": "algorithms.federated.aggregator:NearestNeighbourMixing",
        "bucketing": "algorithms.federated.aggregator:Bucketing",
    },
)
TOPOLOGIES = Registry(
    "topology",
    "algorithms.federated.topology:Topology",
    {
        "ring": "algorithms.federated.topology:Ring",
        "path": "algorithms.federated.topology:PathGraph",
        "torus": "algorithms.federated.topology:Torus",
        "star": "algorithms.federated.topology:Star",
        "complete": "algorithms.federated.topology:Complete",
        "exponential": "algorithms.federated.topology:Exponential",
        "erdos_renyi": "algorithms.federated.topology:ErdosRenyi",
        "random_matching": "algorithms.federated.topology:RandomMatching",
        "edge_list": "algorithms.federated.topology:EdgeList",
        "intermittent": "algorithms.federated.topology:Intermittent",
        "unequal": "algorithms.federated.link_rates:Unequal",
    },
)
ATTACKS = Registry(
    "attack",
    "platform.rounds.adversary:Attack",
    {
        "label_flip": "algorithms.attacks.poisoning:LabelFlip",
        "random_labels": "algorithms.attacks.poisoning:RandomLabels",
        "negative": "algorithms.attacks.poisoning:Negative",
        "trigger": "algorithms.attacks.trigger:Trigger",
        "edge_case": "algorithms.attacks.edge_case:EdgeCase",
        "sign_flip": "algorithms.attacks.tampering:SignFlip",
        "gaussian": "algorithms.attacks.tampering:Gaussian",
        "replacement": "algorithms.attacks.tampering:Replacement",
        "omniscient": "algorithms.attacks.tampering:Omniscient",
        "inner_product": "algorithms.attacks.tampering:InnerProduct",
        "alie": "algorithms.attacks.tampering:ALIE",
        "min_max": "algorithms.attacks.tampering:MinMax",
        "min_sum": "algorithms.attacks.tampering:MinSum",
        "mimic": "algorithms.attacks.tampering:Mimic",
    },
)
CODECS = Registry(
    "codec",
    "algorithms.codecs.chain:Stage",
    {
        "error_feedback": "algorithms.codecs.sparsify:ErrorFeedback",
        "basis": "algorithms.codecs.low_rank:Basis",
        "svd": "algorithms.codecs.low_rank:SVD",
        "power_sgd": "algorithms.codecs.low_rank:PowerSGD",
        "atomo": "algorithms.codecs.atomo:Atomo",
        "top_k": "algorithms.codecs.sparsify:TopK",
        "threshold": "algorithms.codecs.sparsify:Threshold",
        "random_k": "algorithms.codecs.sparsify:RandomK",
        "rotate": "algorithms.codecs.eden:Rotate",
        "quantise": "algorithms.codecs.quantise:Quantise",
        "eden": "algorithms.codecs.eden:Eden",
        "cast": "algorithms.codecs.quantise:Cast",
        "entropy": "algorithms.codecs.entropy:Entropy",
    },
)
SAMPLERS = Registry(
    "sampler",
    "tuning.samplers:Sampler",
    {
        "tpe": "tuning.samplers:TPE",
        "gp": "tuning.samplers:GP",
        "nsga2": "tuning.samplers:NSGA2",
        "cma_es": "tuning.samplers:CMAES",
        "random": "tuning.samplers:RandomSearch",
        "grid": "tuning.samplers:GridSearch",
    },
    "tpe",
)
PRUNERS = Registry(
    "pruner",
    "tuning.pruning:Pruner",
    {
        "none": "tuning.pruning:NoPruning",
        "median": "tuning.pruning:MedianPruning",
        "successive_halving": "tuning.pruning:SuccessiveHalvingPruning",
        "hyperband": "tuning.pruning:HyperbandPruning",
        "threshold": "tuning.pruning:ThresholdPruning",
    },
    "none",
)

OF_STUDIES: Mapping[str, Registry] = {"sampler": SAMPLERS, "pruner": PRUNERS}
OF_EXPERIMENTS: Mapping[str, Registry] = {
    registry.name: registry
    for registry in (
        *(ALGORITHMS, CODECS, DATA, PARTITIONS, MODELS, LOSSES, METRICS, TRAININGS, LEARNING_RATE_SCHEDULES),
        FLEETS,
        *(CHANNELS, DOWNLINKS, ALLOCATIONS),
        *(SAMPLINGS, AVAILABILITIES, SCHEDULES, SECURES, BACKENDS, RANK_POLICIES, SERVER_OPTIMIZERS, AGGREGATORS),
        *(ATTACKS, TOPOLOGIES),
        *(PROBLEMS, SOLVERS),
    )
}
REGISTRIES: Mapping[str, Registry] = {**OF_EXPERIMENTS, **OF_STUDIES}
"""By name: those of experiments and solves, and those of studies."""

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
    **dict.fromkeys(("mnist", "fashion-mnist", "cifar-10", "southwest", "image_folder"), "cnn"),
    **dict.fromkeys(("shakespeare", "python-docs", "text_files", "state-of-the-union"), "char_lstm"),
    "rated_items": "item_embedding",
    "least_squares": "softmax",
    "synthetic": "softmax",
}
"""The kind of model per data set, where an experiment names none; `mlp` for all others."""
