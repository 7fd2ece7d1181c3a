from __future__ import annotations

import math

import pytest

from narrowcast.platform.tracking.metrics import (
    FractionMetrics,
    format_metric,
    metric_label,
    metrics_of,
    primary_metric,
)


@pytest.mark.parametrize(
    ("name", "label"),
    [
        ("test.hr@10", "test HR@10"),
        ("validation.ndcg@10", "validation NDCG@10"),
        ("test.accuracy", "test accuracy"),
        ("test.rmse", "test RMSE"),
        ("test.top_5_accuracy", "test top 5 accuracy"),
        ("loss", "loss"),
        ("test.hr@10.worst_10_percent", "test HR@10 worst 10 percent"),
        ("test.accuracy.gini", "test accuracy Gini"),
    ],
)
def test_a_metric_is_called_by_its_usual_name(name: str, label: str) -> None:
    assert metric_label(name) == label


@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [
        ("test.hr@10", 0.6841, "68.41 %"),
        ("test.worst_10_accuracy", 0.5, "50.00 %"),
        ("test.accuracy", 1.5, "1.5"),
        ("test.rmse", 0.6841, "0.6841"),
        ("test.loss", 2.30258, "2.303"),
        ("test.perplexity", 123456.0, "123,456.00"),
        ("test.accuracy", math.nan, "-"),
        ("test.accuracy", None, "-"),
        ("test.accuracy.worst_10_percent", 0.25, "25.00 %"),
        ("test.accuracy.variance", 0.25, "0.25"),
        ("test.accuracy.gini", 0.25, "0.25"),
        ("test.accuracy.clients", 1.0, "1"),
        ("test.variance", 0.25, "0.25"),
    ],
)
def test_only_a_share_is_shown_in_percent(name: str, value: float | None, shown: str) -> None:
    assert format_metric(name, value) == shown


@pytest.mark.parametrize(
    ("name", "shares", "shown"),
    [
        ("test.top_5", ["top_5"], "25.00 %"),
        ("test.top_5.mean", ["top_5"], "25.00 %"),
        ("test.top_5.variance", ["top_5"], "0.25"),
        ("test.recall", ["top_5"], "0.25"),
        ("test.accuracy", [], "0.25"),
        ("test.accuracy", None, "25.00 %"),
    ],
)
def test_what_a_model_declares_is_a_share_and_nothing_else(name: str, shares: FractionMetrics, shown: str) -> None:
    assert format_metric(name, 0.25, shares) == shown


def test_a_run_is_judged_by_its_first_test_metric_and_by_the_loss_only_if_it_has_nothing_else() -> None:
    names = ["loss", "validation.hr@10", "test.loss", "test.ndcg@10", "test.rmse", "test.hr@10"]
    assert metrics_of(names) == ["hr@10", "ndcg@10", "rmse", "loss"]
    assert metrics_of([*names, "test.hr@10.mean", "test.loss.gini"]) == metrics_of(names)
    assert primary_metric(names) == "test.hr@10"
    assert primary_metric(["test.loss", "test.rmse"]) == "test.rmse"
    assert primary_metric(["loss", "test.loss"]) == "test.loss"
    assert primary_metric(["loss", "validation.accuracy"]) is None
