"""Experiments of version 0.1 with `basis: own` load as the algorithms that took its place."""

from __future__ import annotations

from typing import Any

import pytest

from narrowcast.experiment import load_experiment

CODEC = "algorithm.codec=[{kind: quantise, levels: 10, norms: column, rounding: dithered}, entropy]"
LEVELS = [{"kind": "quantise", "levels": 10, "norms": "column", "rounding": "dithered"}]


@pytest.mark.parametrize(
    ("name", "overrides", "wanted"),
    [
        (
            "scolr-channel-ml1m",
            ("algorithm.basis=own", "algorithm.rank=4", "algorithm.aggregation=per_item_mean"),
            {"kind": "adaptive_svd", "rank": 4, "server_learning_rate": 0.45, "most_error": 3.0},
        ),
        (
            "scolr-ml1m",
            ("algorithm.basis=own", CODEC),
            {"kind": "adaptive_svd", "rank": 8, "aggregation": "per_item_mean", "informs_allocation": False},
        ),
        (
            "colr-ml1m",
            ("algorithm={kind: colr, basis: own, aggregation: weighted}", CODEC),
            {"kind": "adaptive_svd", "rank": 4, "aggregation": "weighted", "informs_allocation": False},
        ),
        (
            "scolr-mnist",
            ("algorithm.basis=own", "algorithm.rank=64", "algorithm.rank_policy=channel", CODEC),
            {"kind": "adaptive_atomo", "rank": 64},
        ),
    ],
)
def test_basis_own_is_translated(
    name: str, overrides: tuple[str, ...], wanted: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    algorithm = load_experiment(name, overrides).plain()["algorithm"]
    assert {key: algorithm[key] for key in wanted} == wanted
    assert {key: algorithm["codec"][0][key] for key in LEVELS[0]} == LEVELS[0]
    assert f"algorithm.basis = own is now algorithm.kind = {wanted['kind']}" in caplog.text


@pytest.mark.parametrize("override", ["algorithm=median", "algorithm={kind: median, server_learning_rate: 0.5}"])
def test_the_median_is_an_aggregator_of_fedavg(override: str, caplog: pytest.LogCaptureFixture) -> None:
    algorithm = load_experiment("fedavg-digits", [override]).algorithm.model_dump()
    assert (algorithm["kind"], algorithm["aggregator"]) == ("fedavg", {"kind": "median"})
    assert algorithm["server_learning_rate"] == (0.5 if "0.5" in override else 1.0)
    assert "algorithm.kind = median is now algorithm.kind = fedavg with aggregator = median" in caplog.text
