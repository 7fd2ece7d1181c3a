"""The laws of algorithms, for every algorithm of the catalog on every model that it trains and through every codec."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from itertools import cycle
from typing import Any

import pytest
from pydantic import ValidationError

from narrowcast.laws import algorithm_cases, algorithm_laws, registries
from narrowcast.laws.algorithm_cases import CODECS, AlgorithmCase
from narrowcast.laws.algorithm_laws import LAWS, UNCODED
from narrowcast.laws.execution_laws import SUM_LAWS
from narrowcast.platform.compiled import one_thread
from narrowcast.platform.config.catalog import ALGORITHMS
from sampling import sampled

FIELDS: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "adaptive_svd": {"-rank3": {"rank": 3}, "-rank3-uninformed": {"rank": 3, "informs_allocation": False}},
    "adaptive_atomo": {"-rank3": {"rank": 3}},
    "server_free": {"-ring": {"exchange": "ring"}},
    "lora": {
        "-alternate": {"share": "alternate"},
        "-stack": {"combine": "stack"},
        "-residual": {"combine": "residual"},
        "-padded": {"combine": "padded", "rank_policy": "uniform"},
        "-pruned": {"combine": "padded", "rank_policy": "uniform", "pruning": {"kept": 0.5, "weight": 0.1}},
        "-ranks": {"rank_policy": "uniform"},
        "-refined": {"combine": "refined"},
    },
}
"""Values, besides the defaults, with which algorithms are tried: fewer directions than there are, another sum."""
WITHOUT_CODECS = {"fedma", "local", "dynamic_averaging"}
"""Algorithms whose clients send no changes, or nothing."""
OF_ADAPTERS = ("-stack", "-residual", "-padded", "-pruned", "-ranks", "-refined")
"""Settings of `lora` that tests of adapters try in CI by some laws."""
ON_CONVOLUTIONS = {"fedavg", "scolr"}
"""Algorithms that CI tries on convolutions, the dearest models: a sum of changes, and factors of them."""
WITH_EVERY_CODEC = {"fedavg", "scaffold", "fedmf", "scolr"}
"""Algorithms that CI tries through every codec; of the others, each through one."""
REMEMBERED = {"fedavg", "fedmf", "scolr"}
"""Algorithms that CI tries with every server that remembers more than the model."""


def cases(codecs: Mapping[str, list[Any]] = CODECS) -> Iterator[tuple[str, AlgorithmCase]]:
    for kind, algorithm in ALGORITHMS.items():
        variants = {}
        for codec, stages in codecs.items():
            for suffix, fields in {"": {}, **FIELDS.get(kind, {})}.items():
                with suppress(ValidationError):
                    of_codec = {"codec": stages} if stages or "codec" in algorithm.model_fields else {}
                    variants[codec + suffix] = algorithm.model_validate({**of_codec, **fields})
        for label, case in algorithm_cases.cases(variants).items():
            yield f"{kind}-{label}", case


CASES = dict(cases())
FLOAT32 = dict(cases({"float32": []}))
REMEMBERING = {
    f"{kind}-{label}": case
    for kind, algorithm in ALGORITHMS.items()
    for label, case in algorithm_cases.cases(algorithm_cases.server_variants(algorithm())).items()
}


@pytest.fixture(autouse=True)
def _on_one_thread() -> Iterator[None]:
    """Train on one thread, as runs and `narrowcast check` do."""
    with one_thread():
        yield


def by_name(laws: tuple[Callable[[AlgorithmCase], None], ...]) -> Any:
    return pytest.mark.parametrize("law", laws, ids=lambda law: law.__name__)


def dear(name: str) -> bool:
    """Return whether a case takes long and is like another."""
    return name.endswith(OF_ADAPTERS) or ("-cnn-" in name and name.partition("-")[0] not in ON_CONVOLUTIONS)


def through_one_codec() -> Iterator[str]:
    """Yield the cases without a codec, and, of methods in turn, those through one and through the other."""
    coded = [codec for codec in CODECS if codec != "float32"]
    turns = dict(zip(ALGORITHMS, cycle(coded), strict=False))
    for name in CASES:
        kind, _, label = name.partition("-")
        if kind in WITH_EVERY_CODEC or not any(codec in label for codec in coded) or turns[kind] in label:
            yield name


@by_name((*UNCODED, *SUM_LAWS))
@pytest.mark.parametrize("name", sampled(FLOAT32, {name for name in FLOAT32 if not dear(name)}))
def test_without_a_codec(name: str, law: Callable[[AlgorithmCase], None]) -> None:
    law(FLOAT32[name])


@by_name(LAWS)
@pytest.mark.parametrize("name", sampled(CASES, {name for name in through_one_codec() if not dear(name)}))
def test_through_every_codec(name: str, law: Callable[[AlgorithmCase], None]) -> None:
    law(CASES[name])


@by_name(
    (
        algorithm_laws.the_model_changes_and_the_bits_add_up,
        algorithm_laws.a_round_in_which_nobody_delivers_leaves_the_server_as_it_is,
        algorithm_laws.a_lost_upload_is_counted_and_not_aggregated,
        algorithm_laws.a_resumed_run_equals_the_uninterrupted_run,
        *SUM_LAWS,
    )
)
@pytest.mark.parametrize(
    "name", sampled(REMEMBERING, {name for name in REMEMBERING if name.partition("-")[0] in REMEMBERED})
)
def test_with_servers_that_remember_more_than_the_model(name: str, law: Callable[[AlgorithmCase], None]) -> None:
    law(REMEMBERING[name])


@pytest.mark.parametrize(
    "name",
    [name for name in FLOAT32 if name.partition("-")[0] not in WITHOUT_CODECS and not name.endswith("-ring")],
)
def test_a_fine_quantiser_is_taken_where_float32_is(name: str) -> None:
    assert algorithm_laws.through_a_fine_quantiser(FLOAT32[name]) is not None


def test_every_algorithm_trains_some_model() -> None:
    assert {case.algorithm.kind for case in CASES.values()} == set(ALGORITHMS)


@pytest.mark.parametrize("kind", ALGORITHMS)
def test_an_algorithm_is_its_configuration_with_a_codec_too(kind: str) -> None:
    algorithm: Any = ALGORITHMS[kind]()
    assert hash(algorithm) == hash(ALGORITHMS[kind]())
    configured = [algorithm]
    if "codec" in type(algorithm).model_fields:
        configured.append(ALGORITHMS[kind].model_validate({"codec": CODECS["quantised"]}))
        assert configured[1] != algorithm
    for value in configured:
        assert type(value).model_validate_json(value.model_dump_json()) == value
        for law in registries.CONFIGURATION_LAWS:
            law(registries.RegistryCase(ALGORITHMS, value))


def test_those_that_can_count_updates_less_do() -> None:
    weighted = {
        case.algorithm.kind for case in CASES.values() if case.algorithm.weighted_by_staleness({}, 0.5) is not None
    }
    assert weighted >= {"fedavg", "fedprox"}
