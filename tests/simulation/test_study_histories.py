"""Simulated studies complete each configuration once, are the same each time, and notice programs that do not."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import optuna
import pytest
from optuna.trial import FrozenTrial
from study_histories import simulate_study

from narrowcast.tuning import client
from narrowcast.tuning.client import StudyClient
from narrowcast.tuning.trials import OWNER

_SEEDS = 100


@pytest.mark.slow
def test_every_configuration_is_complete_once_whoever_dies() -> None:
    histories = [simulate_study(seed) for seed in range(_SEEDS)]
    assert not "\n\n".join(str(each) for each in histories if each.broken)
    assert sum(each.deaths for each in histories) > 50
    assert sum(each.frozen for each in histories) > 50


def test_a_seed_has_one_history_of_a_study() -> None:
    first, second = simulate_study(3), simulate_study(3)
    assert first.log == second.log


def test_leases_by_the_wall_clock_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def lease(_: StudyClient, trial: FrozenTrial, attributes: Mapping[str, Any]) -> str:
        beat = attributes.get(client._HEARTBEAT + trial.user_attrs[OWNER], 0.0)
        return "active" if time.time() - beat < 60.0 else "expired"

    monkeypatch.setattr(StudyClient, "_lease", lease)
    assert any(simulate_study(seed).broken for seed in range(_SEEDS))


def test_lost_trials_that_are_not_tried_again_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optuna.Study, "enqueue_trial", lambda *_: None)
    assert any(simulate_study(seed).broken for seed in range(_SEEDS))
