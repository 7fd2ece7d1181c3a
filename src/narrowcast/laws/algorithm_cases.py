"""The algorithms on which laws are tried: each on every model that it trains, with every codec that it accepts."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from pydantic import ValidationError

from narrowcast.algorithms.local_training.ratings import AlternatingGradient, RatingSGD
from narrowcast.laws.small_tasks import PLAN, run, task_of, train_everyone
from narrowcast.platform.contracts import Task
from narrowcast.platform.errors import UserError
from narrowcast.platform.models.adapters import Adapters
from narrowcast.platform.models.factorisation import MaskedFactorisation, MatrixFactorisation
from narrowcast.platform.models.networks import CNN, MLP
from narrowcast.platform.rounds.contract_checks import check_traits
from narrowcast.platform.rounds.ledger import ChunkResult
from narrowcast.platform.rounds.outcome import Outcome
from narrowcast.platform.rounds.state import Run
from narrowcast.platform.types import Arrays

MODELS: Mapping[str, Any] = {
    "matrix_factorisation": MatrixFactorisation(embedding_dim=8),
    "masked_factorisation": MaskedFactorisation(rank=3),
    "mlp": MLP(hidden=(16,)),
    "cnn": CNN(channels=(4, 6), hidden=16),  # wide enough for the factors of FedPara
    "adapters": Adapters(base=MLP(hidden=(16,)), rank=3, alpha=0.3),
}
TRAININGS: Mapping[str, Any] = {"masked_factorisation": (AlternatingGradient(weight_decay=0.1), RatingSGD())}
"""The trainings of models that algorithms train in different ways."""
SERVER_FIELDS: Mapping[str, Mapping[str, Any]] = {
    "server": {"server_optimizer": {"kind": "momentum"}, "download": {"step": 0.01}},
    "robust": {"aggregator": {"kind": "median"}},
    "downlink": {"downlink_codec": ["error_feedback", {"kind": "top_k", "fraction": 0.05}]},
}
"""Fields, inherited ones included, with which a server remembers more than its model, or needs more than a sum."""
CODECS: Mapping[str, list[Any]] = {
    "float32": [],
    "quantised": [{"kind": "quantise", "levels": 5, "scale": "max"}, "entropy"],
    "feedback": ["error_feedback", {"kind": "top_k", "fraction": 0.05}],
}


@dataclass(frozen=True)
class AlgorithmCase:
    """An algorithm on a model that it trains."""

    algorithm: Any
    model: Any
    training: Any = None

    @cached_property
    def task(self) -> Task:
        """The task on which the laws are tried."""
        return self.task_at(0)

    def task_at(self, seed: int) -> Task:
        """Return the task with another seed."""
        return task_of(self.model, seed, self.training)

    @cached_property
    def free(self) -> ChunkResult:
        """The results of all clients in round 1 without limits."""
        return train_everyone(self.algorithm, self.task)

    @cached_property
    def straight(self) -> list[Outcome]:
        """The rounds of a run that nothing interrupts."""
        return run(PLAN, self.algorithm, self.task)

    @property
    def coded(self) -> bool:
        """Return whether updates go through a codec."""
        return bool(self.algorithm.traits.codec)

    @cached_property
    def before(self) -> Arrays:
        """The global parameters before round 1."""
        before: Arrays = self.algorithm.final(self.algorithm.init(self.task))
        return before


def variants(algorithm: Any) -> dict[str, Any]:
    """Return the algorithm through each codec that it takes, and with each of `SERVER_FIELDS` that it has."""
    coded = with_fields(algorithm, {name: {"codec": stages} for name, stages in CODECS.items()})
    return {**(coded or {"": algorithm}), **server_variants(algorithm)}


def server_variants(algorithm: Any) -> dict[str, Any]:
    """Return the algorithm with those of `SERVER_FIELDS` that it has and accepts."""
    return with_fields(algorithm, SERVER_FIELDS)


def with_fields(algorithm: Any, fields: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the algorithm with each of these sets of fields, of those that it has and accepts."""
    variants = {name: _with_those_it_has(algorithm, values) for name, values in fields.items()}
    return {name: variant for name, variant in variants.items() if variant is not None}


def _with_those_it_has(algorithm: Any, fields: Mapping[str, Any]) -> Any | None:
    settings, variant = algorithm.model_dump(exclude={"kind"}), None
    for name in fields:
        if name not in type(algorithm).model_fields:
            continue
        with suppress(ValidationError):
            variant = type(algorithm).model_validate({**settings, name: fields[name]})
            settings[name] = fields[name]
    return variant


def cases(algorithms: Mapping[str, Any]) -> dict[str, AlgorithmCase]:
    """Return each algorithm on each model that it trains."""
    cases: dict[str, AlgorithmCase] = {}
    for label, algorithm in algorithms.items():
        check_traits(algorithm)
        for name, model in MODELS.items():
            if name == "cnn" and (algorithm.traits.codec or label in SERVER_FIELDS):
                continue  # what is sent of a network does not depend on how it was trained
            if name == "adapters" and any(case.startswith("mlp") for case in cases):
                continue  # to a method of any network they are one more
            for training in TRAININGS.get(name, (None,)):
                case = AlgorithmCase(algorithm, model, training)
                with suppress(UserError):
                    Run(PLAN, algorithm, case.task).check()
                    cases["-".join(filter(None, (name, label)))] = case
    return cases
