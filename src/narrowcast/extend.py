"""The imports of a plugin: contracts and base classes of every kind, and the types between them.

```python
from narrowcast.extend import SERVER_ONLY, Averaging, PrefixedArrays
```

Names stay here when their modules move. Each is imported when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from narrowcast.algorithms.channel.allocation import Allocation
    from narrowcast.algorithms.channel.curves import DistortionCurves
    from narrowcast.algorithms.channel.links import Channel
    from narrowcast.algorithms.channel.radio import Downlink
    from narrowcast.algorithms.client.client_pass import Arrived, ClientPass, Contribution
    from narrowcast.algorithms.client.sums import EACH, Privacy
    from narrowcast.algorithms.client.uploads import Message
    from narrowcast.algorithms.codecs.chain import (
        NO_STATE,
        Codec,
        Quantiser,
        Shapes,
        Signal,
        Stage,
        SymbolStage,
        Tensors,
        Transform,
        ValueStage,
    )
    from narrowcast.algorithms.codecs.wire import Reader, varint
    from narrowcast.algorithms.federated.aggregator import AggregationContext, Aggregator, AggregatorTraits
    from narrowcast.algorithms.federated.fedavg import Averaging
    from narrowcast.algorithms.federated.gossip import Exchange, Gossip
    from narrowcast.algorithms.federated.low_rank import CoLR, SCoLR
    from narrowcast.algorithms.federated.personal import PartlyShared, Personal, PersonalState, adapted, check_adapted
    from narrowcast.algorithms.federated.rank_policy import RankPolicy
    from narrowcast.algorithms.federated.server_optimizer import SERVER_ONLY, ServerOptimizer
    from narrowcast.algorithms.federated.topology import Topology
    from narrowcast.algorithms.federated.unit_slices import joined_updates, joined_uploads
    from narrowcast.algorithms.local_training.rules import LearningRateSchedule
    from narrowcast.algorithms.secure.schemes import Masked, Plain, Protection
    from narrowcast.experiment import load_experiment
    from narrowcast.platform.contracts import Algorithm, Broadcast, Fleet, LocalCall, OwnModel, Task, Training
    from narrowcast.platform.data.dataset import Dataset, DataSource
    from narrowcast.platform.data.interactions import Interactions
    from narrowcast.platform.data.partition import Partitioner
    from narrowcast.platform.data.samples import Labelled, Samples
    from narrowcast.platform.errors import UserError
    from narrowcast.platform.models.hidden_units import HiddenUnits, UnitAxis
    from narrowcast.platform.models.measures import Loss, Metric
    from narrowcast.platform.models.model import Model
    from narrowcast.platform.models.neural_network import NeuralNetwork
    from narrowcast.platform.rounds.adversary import Attack, Seen
    from narrowcast.platform.rounds.ledger import ChunkResult, Weighted
    from narrowcast.platform.rounds.loop import Backend
    from narrowcast.platform.rounds.plan import Schedule
    from narrowcast.platform.rounds.sampling import Availability, Draw, PredictedSeconds, Sampling
    from narrowcast.platform.seeds import generator
    from narrowcast.platform.solving import Problem, ProblemSource, Solver, StepResult, Work
    from narrowcast.platform.traits import TrainingTraits, Traits
    from narrowcast.platform.types import (
        Arrays,
        BoolArray,
        Chunk,
        FloatArray,
        IntArray,
        LocalRule,
        LocalTerms,
        LocalUpdates,
        Payload,
        PayloadError,
        Phase,
        PrefixedArrays,
        Profiles,
        scaled,
    )
    from narrowcast.runs.attack_trial import attack_run, record_network, record_transcript
    from narrowcast.tuning.pruning import Pruner
    from narrowcast.tuning.samplers import Sampler


__all__ = [
    "EACH",
    "NO_STATE",
    "SERVER_ONLY",
    "AggregationContext",
    "Aggregator",
    "AggregatorTraits",
    "Algorithm",
    "Allocation",
    "Arrays",
    "Arrived",
    "Attack",
    "Availability",
    "Averaging",
    "Backend",
    "BoolArray",
    "Broadcast",
    "Channel",
    "Chunk",
    "ChunkResult",
    "ClientPass",
    "CoLR",
    "Codec",
    "Contribution",
    "DataSource",
    "Dataset",
    "DistortionCurves",
    "Downlink",
    "Draw",
    "Exchange",
    "Fleet",
    "FloatArray",
    "Gossip",
    "HiddenUnits",
    "IntArray",
    "Interactions",
    "Labelled",
    "LearningRateSchedule",
    "LocalCall",
    "LocalRule",
    "LocalTerms",
    "LocalUpdates",
    "Loss",
    "Masked",
    "Message",
    "Metric",
    "Model",
    "NeuralNetwork",
    "OwnModel",
    "Partitioner",
    "PartlyShared",
    "Payload",
    "PayloadError",
    "Personal",
    "PersonalState",
    "Phase",
    "Plain",
    "PredictedSeconds",
    "PrefixedArrays",
    "Privacy",
    "Problem",
    "ProblemSource",
    "Profiles",
    "Protection",
    "Pruner",
    "Quantiser",
    "RankPolicy",
    "Reader",
    "SCoLR",
    "Sampler",
    "Samples",
    "Sampling",
    "Schedule",
    "Seen",
    "ServerOptimizer",
    "Shapes",
    "Signal",
    "Solver",
    "Stage",
    "StepResult",
    "SymbolStage",
    "Task",
    "Tensors",
    "Topology",
    "Training",
    "TrainingTraits",
    "Traits",
    "Transform",
    "UnitAxis",
    "UserError",
    "ValueStage",
    "Weighted",
    "Work",
    "adapted",
    "attack_run",
    "check_adapted",
    "generator",
    "joined_updates",
    "joined_uploads",
    "load_experiment",
    "record_network",
    "record_transcript",
    "scaled",
    "varint",
]
_HOMES = {
    "Allocation": "algorithms.channel.allocation",
    "DistortionCurves": "algorithms.channel.curves",
    "Downlink": "algorithms.channel.radio",
    "Channel": "algorithms.channel.links",
    "Codec": "algorithms.codecs.chain",
    **dict.fromkeys(
        ("NO_STATE", "Quantiser", "Shapes", "Signal", "Stage", "SymbolStage", "Tensors", "Transform", "ValueStage"),
        "algorithms.codecs.chain",
    ),
    **dict.fromkeys(("Reader", "varint"), "algorithms.codecs.wire"),
    **dict.fromkeys(("AggregationContext", "Aggregator", "AggregatorTraits"), "algorithms.federated.aggregator"),
    "Averaging": "algorithms.federated.fedavg",
    **dict.fromkeys(("Exchange", "Gossip"), "algorithms.federated.gossip"),
    **dict.fromkeys(("CoLR", "SCoLR"), "algorithms.federated.low_rank"),
    **dict.fromkeys(
        ("PartlyShared", "Personal", "PersonalState", "adapted", "check_adapted"), "algorithms.federated.personal"
    ),
    "RankPolicy": "algorithms.federated.rank_policy",
    **dict.fromkeys(("SERVER_ONLY", "ServerOptimizer"), "algorithms.federated.server_optimizer"),
    "Topology": "algorithms.federated.topology",
    "LearningRateSchedule": "algorithms.local_training.rules",
    **dict.fromkeys(("Masked", "Plain", "Protection"), "algorithms.secure.schemes"),
    **dict.fromkeys(("Arrived", "ClientPass", "Contribution"), "algorithms.client.client_pass"),
    **dict.fromkeys(("EACH", "Privacy"), "algorithms.client.sums"),
    "Message": "algorithms.client.uploads",
    **dict.fromkeys(("joined_updates", "joined_uploads"), "algorithms.federated.unit_slices"),
    "load_experiment": "experiment",
    "Backend": "platform.rounds.loop",
    **dict.fromkeys(
        ("Algorithm", "Broadcast", "Fleet", "LocalCall", "OwnModel", "Task", "Training"), "platform.contracts"
    ),
    **dict.fromkeys(("TrainingTraits", "Traits"), "platform.traits"),
    **dict.fromkeys(("DataSource", "Dataset"), "platform.data.dataset"),
    "Interactions": "platform.data.interactions",
    "Partitioner": "platform.data.partition",
    **dict.fromkeys(("Labelled", "Samples"), "platform.data.samples"),
    "UserError": "platform.errors",
    **dict.fromkeys(("HiddenUnits", "UnitAxis"), "platform.models.hidden_units"),
    "Loss": "platform.models.measures",
    "Metric": "platform.models.measures",
    "Model": "platform.models.model",
    "NeuralNetwork": "platform.models.neural_network",
    **dict.fromkeys(("Attack", "Seen"), "platform.rounds.adversary"),
    **dict.fromkeys(("ChunkResult", "Weighted"), "platform.rounds.ledger"),
    "Schedule": "platform.rounds.plan",
    "generator": "platform.seeds",
    **dict.fromkeys(("Availability", "Draw", "PredictedSeconds", "Sampling"), "platform.rounds.sampling"),
    **dict.fromkeys(("Problem", "ProblemSource", "StepResult", "Solver", "Work"), "platform.solving"),
    **dict.fromkeys(
        (
            "Arrays",
            "BoolArray",
            "Chunk",
            "FloatArray",
            "IntArray",
            "LocalRule",
            "LocalTerms",
            "LocalUpdates",
            "Payload",
            "PayloadError",
            "Phase",
            "PrefixedArrays",
            "Profiles",
            "scaled",
        ),
        "platform.types",
    ),
    "attack_run": "runs.attack_trial",
    "record_network": "runs.attack_trial",
    "record_transcript": "runs.attack_trial",
    "Pruner": "tuning.pruning",
    "Sampler": "tuning.samplers",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'narrowcast.extend' has no attribute '{name}'; it has {', '.join(__all__)}")
    value = getattr(import_module(f"narrowcast.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
