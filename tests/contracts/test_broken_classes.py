"""Every law of every registry fails on a class that was made to break it."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import BaseModel, ConfigDict

import broken_algorithms
import broken_attacks
import broken_engines
import broken_scenes
import broken_solvers
import broken_topologies
from broken_law import Broken
from narrowcast.laws import registries, training_laws
from narrowcast.laws.law import evaluate_laws
from narrowcast.laws.registries import LAWS
from narrowcast.platform.errors import UserError

BROKEN = [
    *broken_algorithms.BROKEN,
    *broken_attacks.BROKEN,
    *broken_scenes.BROKEN,
    *broken_engines.BROKEN,
    *broken_solvers.BROKEN,
    *broken_topologies.BROKEN,
]


@pytest.mark.parametrize("broken", BROKEN, ids=lambda broken: f"{broken.law.__name__}-{broken.because}")
def test_the_law_is_broken(broken: Broken) -> None:
    cases = broken.cases()
    assert cases
    (verdict,) = evaluate_laws([broken.law], cases)
    assert broken.because in (verdict.reason or "the law holds")


@pytest.mark.parametrize("registry", LAWS)
def test_each_law_of_a_registry_is_broken_by_some_class(registry: str) -> None:
    laws = LAWS[registry].laws
    assert laws
    assert not {law.__name__ for law in laws} - {broken.law.__name__ for broken in BROKEN if broken.law in laws}


def test_each_law_of_configurations_is_broken_by_some_class() -> None:
    assert not set(registries.CONFIGURATION_LAWS) - {broken.law for broken in BROKEN}


def test_trainings_that_fit_nothing_have_no_case() -> None:
    class Refusing(BaseModel):
        model_config = ConfigDict(frozen=True)

        def check(self, task: Any) -> None:
            raise UserError("no")

    assert training_laws.cases(Refusing()) == {}
