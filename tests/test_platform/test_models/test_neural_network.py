"""Losses and metrics of networks against formulas, on classes, tokens and numbers, and what a network refuses."""

from __future__ import annotations

import math
import subprocess
import sys
from typing import Any, Literal

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose
from scipy import stats
from torch import Tensor, nn

from narrowcast.laws.small_tasks import numbers, samples, sequences
from narrowcast.platform.data.samples import Samples
from narrowcast.platform.errors import UserError
from narrowcast.platform.models import neural_network
from narrowcast.platform.models.measures import (
    ROCAUC,
    AbsoluteLoss,
    Accuracy,
    CrossEntropy,
    Huber,
    Loss,
    Metric,
    Perplexity,
    SquaredLoss,
)
from narrowcast.platform.models.networks import CNN, MLP, CharLSTM, Softmax

COUNTS = np.full(11, 4)


class Spread(Loss):
    """A mean and a log-variance for each number: the negative log-likelihood of a normal distribution."""

    kind: Literal["spread"] = "spread"

    def n_outputs(self, data: Samples) -> int:
        return 2 * data.n_outputs

    def per_sample(self, outputs: Tensor, targets: Tensor) -> Tensor:
        mean, log_variance = outputs.chunk(2, dim=1)
        return nn.functional.gaussian_nll_loss(mean, targets, log_variance.exp(), reduction="none").mean(1)


class Whole(Loss):
    kind: Literal["whole"] = "whole"

    def per_sample(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs - targets).square().mean()


class Counted(Loss):
    kind: Literal["counted"] = "counted"

    def per_sample(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs > targets).float().mean(1)


class Plain(Loss):
    kind: Literal["plain"] = "plain"

    def per_sample(self, outputs: Tensor, targets: Tensor) -> Any:
        return 1.0


class Hit(Metric):
    kind: Literal["hit"] = "hit"

    def per_sample(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs.sign() == targets.sign()).float().mean(1)


def outputs_of(model: Any, data: Samples) -> Tensor:
    module = model.module(data)
    module.load_state_dict({name: torch.from_numpy(values) for name, values in model.init_server(data, 3).items()})
    features = data.test.features / 255 if data.test.features.dtype == np.uint8 else data.test.features
    with torch.no_grad():
        outputs: Tensor = module(
            torch.from_numpy(features.astype(np.float32 if data.targets != "tokens" else np.int64))
        )
    return outputs.to(torch.float64)


def measured(model: Any, data: Samples) -> dict[str, float]:
    model.check(data)
    return dict(model.evaluate(model.init_server(data, 3), {}, data, "test"))


def test_metrics_of_numbers() -> None:
    data, model = numbers(COUNTS), MLP(hidden=(4,))
    found, outputs = measured(model, data), outputs_of(model, data).numpy()
    error = outputs - data.test.labels
    assert list(found) == ["rmse", "mae", "r2", "loss"]
    assert_allclose(found["rmse"], np.sqrt((error**2).mean()), rtol=1e-6)
    assert_allclose(found["mae"], np.abs(error).mean(), rtol=1e-6)
    assert_allclose(found["r2"], (1 - (error**2).mean(0) / data.test.labels.var(0)).mean(), rtol=1e-5)
    assert_allclose(found["loss"], (error**2).mean(), rtol=1e-6)
    assert model.lower_is_better == {"loss", "rmse", "mae", "perplexity"}


def test_metrics_of_tokens() -> None:
    data, model = sequences(COUNTS), CharLSTM(hidden=5, layers=1)
    found, scores = measured(model, data), outputs_of(model, data)
    assert scores.shape == (20, 10, 7)
    logs = scores.log_softmax(2).gather(2, torch.from_numpy(data.test.labels)[..., None])
    right = scores.argmax(2).numpy() == data.test.labels
    assert_allclose(found["loss"], -float(logs.mean()), rtol=1e-6)
    assert_allclose(found["perplexity"], math.exp(-float(logs.mean())), rtol=1e-6)
    assert_allclose(found["accuracy"], right.mean(), rtol=1e-6)


def test_an_evaluation_in_small_batches_measures_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model of many tokens has few samples at once."""
    data, model = sequences(COUNTS), CharLSTM(hidden=5, layers=1)
    whole, sizes = measured(model, data), list[int]()
    entropy = CrossEntropy.per_sample

    def counted(self: CrossEntropy, outputs: Tensor, targets: Tensor) -> Tensor:
        sizes.append(len(outputs))
        return entropy(self, outputs, targets)

    monkeypatch.setattr(CrossEntropy, "per_sample", counted)
    monkeypatch.setattr(neural_network, "_OUTPUTS_AT_ONCE", 3 * 10 * 7)
    model.check(data)
    sizes.clear()
    parts = dict(model.evaluate(model.init_server(data, 3), {}, data, "test"))
    assert max(sizes) == 3
    assert parts.keys() == whole.keys()
    assert_allclose(list(parts.values()), list(whole.values()), rtol=1e-6)


def test_metrics_of_classes_by_name() -> None:
    data, model = samples(COUNTS), Softmax(metrics=(Accuracy(), Accuracy(k=2), Perplexity()))
    found, scores = measured(model, data), outputs_of(model, data).numpy()
    own = np.take_along_axis(scores, data.test.labels[:, None], 1)
    assert list(found) == ["accuracy", "accuracy@2", "perplexity", "loss"]
    assert found["accuracy"] == (scores.argmax(1) == data.test.labels).mean()
    assert found["accuracy@2"] == ((scores > own).sum(1) < 2).mean()


def test_the_roc_area_is_the_share_of_pairs_in_order() -> None:
    """Mann and Whitney's statistic counts the pairs; log-odds that are multiples of a bin's width are tied alike."""
    draws = np.random.default_rng(5)
    labels = draws.integers(0, 2, 300)
    odds = 0.25 * np.round(4 * (draws.normal(size=300) + labels))
    of_0 = draws.integers(-8, 8, 300) / 4
    scores = torch.from_numpy(np.stack([of_0, of_0 + odds], axis=1))
    area = ROCAUC(nats=0.25)
    values = area.per_sample(scores, torch.from_numpy(labels))
    pairs = stats.mannwhitneyu(odds[labels == 1], odds[labels == 0]).statistic
    expected = pairs / (labels.sum() * (1 - labels).sum())
    assert_allclose(area.of_means(values.mean(0).numpy()), expected, rtol=1e-12)
    coarse = ROCAUC(nats=1.0)  # off by at most half the pairs that share a bin
    same = (np.floor(odds[labels == 1])[:, None] == np.floor(odds[labels == 0])).mean()
    values = coarse.per_sample(scores, torch.from_numpy(labels))
    assert abs(coarse.of_means(values.mean(0).numpy()) - expected) <= same / 2


def test_the_roc_area_of_scores_beyond_all_bins_of_one_class_and_of_nan() -> None:
    area, labels = ROCAUC(), torch.tensor([0, 1, 0, 1])
    scores = torch.tensor([[0.0, -1e9], [0.0, torch.inf], [0.0, 1.0], [0.0, 2.0]])
    assert area.of_means(area.per_sample(scores, labels).mean(0).numpy()) == 1.0
    assert math.isnan(area.of_means(area.per_sample(scores, torch.zeros(4, dtype=torch.int64)).mean(0).numpy()))
    assert math.isnan(area.of_means(area.per_sample(scores * torch.nan, labels).mean(0).numpy()))


def test_huber_is_half_the_squared_error_up_to_delta() -> None:
    outputs, targets = torch.tensor([[0.5], [3.0]]), torch.zeros(2, 1)
    assert_allclose(Huber().per_sample(outputs, targets), [0.125, 2.5])
    assert_allclose(SquaredLoss().per_sample(outputs, targets), [0.25, 9.0])


def test_the_absolute_error_is_the_mean_over_the_numbers_of_a_sample() -> None:
    outputs, targets = torch.tensor([[0.5, -2.0], [3.0, 0.0]]), torch.tensor([[1.0, 1.0], [0.0, 0.0]])
    assert_allclose(AbsoluteLoss().per_sample(outputs, targets), [1.75, 1.5])


def test_a_loss_decides_how_many_outputs_there_are() -> None:
    data, model = numbers(COUNTS), MLP(hidden=(4,), loss=Spread(), metrics=())
    assert outputs_of(model, data).shape == (20, 4)
    assert list(measured(model, data)) == ["loss"]


@pytest.mark.parametrize(
    ("model", "data", "message"),
    [
        (
            MLP(loss=CrossEntropy()),
            numbers(COUNTS),
            "cross_entropy takes classes or tokens, but the targets of tiny are",
        ),
        (MLP(metrics=(Accuracy(),)), numbers(COUNTS), "accuracy takes classes or tokens"),
        (
            Softmax(loss=SquaredLoss()),
            samples(COUNTS),
            "squared_error takes numbers, but the targets of tiny are classes",
        ),
        (Softmax(metrics=(Accuracy(k=4),)), samples(COUNTS), "accuracy@4 of 3 classes; use k up to 3"),
        (Softmax(metrics=(ROCAUC(),)), samples(COUNTS), "roc_auc of 3 classes; it is of 2: use accuracy"),
        (Softmax(metrics=(Accuracy(), Accuracy())), samples(COUNTS), "each name may occur once"),
        (
            MLP(loss=Spread()),
            numbers(COUNTS),
            r"metrics: rmse .* \(ValueError: outputs \[2, 4\] are not predictions of targets \[2, 2\]\)",
        ),
        (MLP(loss=Whole()), numbers(COUNTS), r"whole returns a tensor \[\], expected a tensor of one value for each"),
        (MLP(loss=Plain()), numbers(COUNTS), "plain returns float, expected a tensor of one value for each"),
        (MLP(loss=Counted()), numbers(COUNTS), "counted has no gradient"),
        (MLP(metrics=(Hit(),)), samples(COUNTS), r"hit does not take outputs \[2, 3\] and targets \[2\] of 2 samples"),
        (CharLSTM(), numbers(COUNTS), "char_lstm predicts tokens, but the targets of tiny are numbers; use mlp"),
        (MLP(), sequences(COUNTS), r"must map it to scores \[n, 10, 7\]"),
        (CNN(), numbers(COUNTS), "has features of shape"),
    ],
    ids=lambda value: "" if isinstance(value, str) else getattr(value, "kind", ""),
)
def test_what_does_not_fit_is_said_in_one_line(model: Any, data: Samples, message: str) -> None:
    with pytest.raises(UserError, match=message) as refused:
        model.check(data)
    assert "\n" not in str(refused.value)


SHAPES = """
import sys, torch
from narrowcast.platform.models.modules import shapes_alone
with shapes_alone():
    module = torch.nn.Sequential(torch.nn.Embedding(9, 4), torch.nn.LSTM(4, 5), torch.nn.Conv2d(1, 2, 3))
    torch.nn.init.trunc_normal_(module[0].weight)
shapes = [tuple(each.shape) for each in module.parameters()]
assert shapes == [(9, 4), (20, 4), (20, 5), (20,), (20,), (2, 1, 3, 3), (2,)], shapes
assert all(each.is_meta for each in module.parameters())
assert not {"torch._dynamo", "sympy"} & sys.modules.keys()
"""


@pytest.mark.slow
def test_shapes_are_had_without_torchs_compiler() -> None:
    """Normal initial values on "meta" import it: 100 MB, and seconds of a start."""
    subprocess.run([sys.executable, "-c", SHAPES], check=True)
