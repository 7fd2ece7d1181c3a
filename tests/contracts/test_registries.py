"""Every class of every registry keeps the laws of its registry; those of algorithms have a file of their own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

import pytest

from narrowcast.algorithms.federated.fedavg import FedAvg
from narrowcast.laws.law import title
from narrowcast.laws.registries import CONFIGURATION_LAWS, LAWS, RegistryCase, verdicts
from narrowcast.platform.config.catalog import REGISTRIES
from narrowcast.platform.data.partition import IID
from narrowcast.platform.errors import UserError
from narrowcast.platform.rounds.sampling import Bernoulli

FIELDS: Mapping[tuple[str, str], Mapping[str, Any]] = {
    ("allocation", "min_error"): {},
    ("channel", "single_user"): {"dimension": 5},
    ("data", "synthetic"): {"clients": 30},
    ("pruner", "hyperband"): {"max_steps": 8},
    ("pruner", "threshold"): {"at_least": 0.1},
    ("codec", "basis"): {"rank": 2},
    ("model", "transformer"): {"width": 16, "heads": 2, "layers": 1},
    ("topology", "erdos_renyi"): {"probability": 0.6},
    ("learning_rate_schedule", "step"): {"every": 3},
    ("learning_rate_schedule", "milestones"): {"rounds": [5, 8]},
    ("learning_rate_schedule", "cosine"): {"rounds": 50},
    ("learning_rate_schedule", "inverse_time"): {"alpha": 0.5, "gamma": 9},
    ("learning_rate_schedule", "warmup"): {"steps": 40, "schedule": {"kind": "cosine", "rounds": 50}},
}
"""What a kind needs to be given."""
FILES = {
    *(
        ("channel", "trace"),
        ("channel", "located_rayleigh"),
        ("availability", "trace"),
        ("fleet", "trace"),
        ("channel", "table"),
        ("topology", "edge_list"),
    ),
    *(
        ("model", "torch"),
        ("model", "transformers"),
        ("data", "image_folder"),
        ("data", "text_files"),
        ("data", "ratings"),
    ),
    ("data", "explicit_ratings"),
    ("attack", "edge_case"),
    *(
        ("data", "graph_npz"),
        ("data", "npz"),
        ("data", "hugging_face"),
        ("data", "torch"),
        ("problem", "entry_completion"),
    ),
    *(
        ("problem", "rating_completion"),
        ("problem", "max_cut"),
        ("problem", "sensor_distances"),
        ("problem", "sdpa"),
        ("solver", "program"),
    ),
}
"""Kinds that describe a file, a module or a certain number of clients: their own tests have some."""
NOT_HERE = {"algorithm", "backend"}
DEAR = {("secure", "paillier")}
"""Kinds that would take a minute here, and are compared with others in a small round by their own tests."""
LARGE = {
    *("ml-100k", "ml-1m", "ml-latest-small", "pinterest", "ncf", "rated_items"),
    *("mnist", "fashion-mnist", "cifar-10", "southwest", "shakespeare"),
    *("cora", "citeseer", "pubmed", "watch-exercises", "state-of-the-union", "spam-assassin"),
}
"""Data sets that are files, and are tested with them."""


def objects() -> Iterator[Any]:
    for name, registry in REGISTRIES.items():
        for kind, found in registry.items():
            if (name, kind) not in FILES and not (name == "data" and kind in LARGE):
                value = found.model_validate({"kind": kind, **FIELDS.get((name, kind), {})})
                yield pytest.param(registry, value, id=f"{name}-{kind}")


@pytest.mark.parametrize(("registry", "value"), list(objects()))
def test_every_class_is_its_configuration(registry: Any, value: Any) -> None:
    for law in CONFIGURATION_LAWS:
        law(RegistryCase(registry, value))
    assert value.kind == registry.kind_of(value)


def tried() -> Iterator[Any]:
    for each in objects():
        registry, value = each.values
        if registry.name not in NOT_HERE and (registry.name, value.kind) not in DEAR:
            yield each


@pytest.mark.parametrize(("registry", "value"), list(tried()))
def test_every_class_keeps_the_laws_of_its_registry(registry: Any, value: Any) -> None:
    laws = LAWS[registry.name]
    cases = laws.cases(value)
    assert cases or value.kind == "none"
    for label, case in cases.items():
        for law in laws.laws:
            try:
                law(case)
            except Exception as error:
                raise AssertionError(f"{label}: {title(law)}: {error}") from error


def test_every_registry_has_its_laws() -> None:
    assert set(LAWS) == set(REGISTRIES)


class Crashing(Bernoulli):
    """Has a check that raises."""

    kind: Literal["crashing"] = "crashing"  # type: ignore[assignment]

    def check(self, n_clients: int) -> None:
        raise ZeroDivisionError("by no clients")


class Choosy(IID):
    """Deals to hundreds of clients only."""

    kind: Literal["choosy"] = "choosy"  # type: ignore[assignment]

    def deal(self, labels: Any, n_clients: int, seed: int, users: Any = None) -> Any:
        raise UserError("too few clients")


class Describing(FedAvg):
    """Has traits that are a mapping."""

    kind: Literal["describing"] = "describing"  # type: ignore[assignment]

    @property
    def traits(self) -> Any:
        return {"grows": True}


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        (
            "algorithm",
            Describing(),
            "test_registries:Describing.traits returned a dict; return Traits of narrowcast.extend",
        ),
        ("availability", Crashing(), "ZeroDivisionError: by no clients"),
        ("partition", Choosy(), "it refuses 1200 samples of ten classes for twelve clients"),
    ],
)
def test_what_raises_before_it_is_tried_is_a_broken_law(name: str, value: Any, reason: str) -> None:
    assert [each.reason for each in verdicts(REGISTRIES[name], value) if each.reason] == [reason]


@pytest.mark.slow
def test_what_cannot_be_tried_is_a_broken_law() -> None:
    trace = REGISTRIES["availability"].resolve("bernoulli")()
    assert all(each.reason is None for each in verdicts(REGISTRIES["availability"], trace))
    with pytest.raises(UserError, match="unknown; known: always"):
        REGISTRIES["availability"].resolve("nobody")
