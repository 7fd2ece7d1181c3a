"""What the change of a linear layer says of its inputs: all of a single image, through most codecs, and mixtures."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from narrowcast.algorithms.attacks.inversion import (
    cosines,
    matched,
    rows_over_bias,
    share_identified,
    single_input,
)
from narrowcast.algorithms.attacks.network_transcript import NetworkRound
from narrowcast.api import rounds
from narrowcast.extend import load_experiment
from narrowcast.platform.contracts import Task
from narrowcast.platform.data.samples import Samples, one_array
from narrowcast.platform.errors import UserError
from narrowcast.platform.types import FloatArray, IntArray
from narrowcast.runs.attack_trial import record_network
from narrowcast_papers.leakage.observed import ENCODINGS, FIRST_LAYER, FLOAT32, SUM, dealt, experiment
from secure_rounds import experiment as rows_experiment

SETS = ("mnist", "fashion-mnist")
STEP = {"learning_rate": 1.0, "batch_size": "all"}


@cache
def recorded(encoding: str, network: str, images: int, epochs: int = 1) -> tuple[NetworkRound, Task, IntArray]:
    """Return one round of ten clients, with the rows of each client's images, [10, images]."""
    planned = experiment(ENCODINGS[encoding], network, 0, {**STEP, "epochs": epochs}, rounds=1)
    data, rows, _ = dealt(planned, images, 0)
    (seen,), task = record_network(planned, data)
    return seen, task, rows


def pixels_of(task: Task) -> FloatArray:
    assert isinstance(task.data, Samples)
    return np.asarray(one_array(task.data.train.features), dtype=np.float64)


def single_images(encoding: str, network: str, epochs: int = 1) -> tuple[FloatArray, FloatArray, Task]:
    """Return the reconstruction of each client's only image, and the images, [10, 64]."""
    seen, task, rows = recorded(encoding, network, 1, epochs)
    estimates = np.stack([single_input(seen.uploads[client].change, FIRST_LAYER) for client in range(10)])
    return estimates, pixels_of(task)[rows[:, 0]], task


def mean_cosine(encoding: str, network: str) -> float:
    estimates, images, _ = single_images(encoding, network)
    return float(np.diag(cosines(estimates, images)).mean())


def mean_image_cosine() -> float:
    """Return the cosine of the ten images with the mean test image, the guess of a server that receives nothing."""
    _, images, task = single_images(FLOAT32, "MLP")
    assert isinstance(task.data, Samples)
    return float(cosines(one_array(task.data.test.features).mean(axis=0, keepdims=True), images).mean())


@pytest.mark.parametrize("network", ["MLP", "softmax"])
@pytest.mark.parametrize("epochs", [1, 5])
def test_a_single_image_is_recovered_exactly_whatever_the_number_of_steps(network: str, epochs: int) -> None:
    """The sum over steps of g_t x^T is a multiple of x^T in every row, as every single step is."""
    estimates, images, _ = single_images(FLOAT32, network, epochs)
    assert np.abs(estimates - images).max() < 1e-5


@pytest.mark.parametrize("network", ["MLP", "softmax"])
def test_rows_of_a_batch_are_the_mixtures_that_autograd_gives(network: str) -> None:
    seen, task, rows = recorded(FLOAT32, network, 4)
    assert isinstance(task.data, Samples)
    change = seen.uploads[3].change
    images, labels = pixels_of(task)[rows[3]], task.data.train.labels[rows[3]]
    module = torch.nn.Sequential(torch.nn.Flatten(), *_layers(network)).double()
    module.load_state_dict({name: torch.from_numpy(values) for name, values in seen.model.items()})
    by_image = []  # the derivative of each image's loss by the layer's outputs, which is that by its bias
    for image, label in zip(images, labels, strict=True):
        module.zero_grad()
        torch.nn.functional.cross_entropy(module(torch.from_numpy(image[None])), torch.tensor([label])).backward()
        bias = dict(module.named_parameters())[f"{FIRST_LAYER}.bias"].grad
        assert bias is not None
        by_image.append(bias.numpy().copy())
    excitation = np.stack(by_image)
    total = excitation.sum(axis=0)
    large = np.argsort(-np.abs(total))[:8]
    expected = (excitation[:, large].T @ images) / total[large, np.newaxis]
    np.testing.assert_allclose(rows_over_bias(change, FIRST_LAYER)[:8], expected, atol=2e-4)


def _layers(network: str) -> list[torch.nn.Module]:
    if network == "softmax":
        return [torch.nn.Linear(64, 10)]
    return [torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10)]


def test_rank_one_protects_no_single_image() -> None:
    """The gradient of one image has rank one, so that an SVD of rank one sends it whole."""
    seen, _, _ = recorded(FLOAT32, "MLP", 1)
    singular = np.linalg.svd(seen.uploads[0].change[f"{FIRST_LAYER}.weight"], compute_uv=False)
    assert singular[1] < 1e-6 * singular[0]
    estimates, images, _ = single_images("SVD, rank 1", "MLP")
    assert np.abs(estimates - images).max() < 1e-4
    batch, task, rows = recorded("SVD, rank 1", "MLP", 4)
    whole, _, _ = recorded(FLOAT32, "MLP", 4)
    pixels = pixels_of(task)
    through, exact = (
        np.mean(
            [matched(rows_over_bias(observed.uploads[u].change, FIRST_LAYER), pixels[rows[u]])[1] for u in range(10)]
        )
        for observed in (batch, whole)
    )
    assert through < exact - 0.05


def test_fewer_bits_leave_less_and_two_still_more_than_the_mean_image() -> None:
    by_bits = [mean_cosine(encoding, "MLP") for encoding in (FLOAT32, "8 bits", "4 bits", "2 bits")]
    assert by_bits == sorted(by_bits, reverse=True)
    assert by_bits[1] > 0.9999
    assert by_bits[2] > 0.998
    assert by_bits[3] > 0.92 > mean_image_cosine()


def test_a_basis_hides_the_side_that_it_is_on_and_no_other() -> None:
    """B is on the shorter side of a weight: classes of softmax regression, whose inputs are then sent as they are."""
    assert mean_cosine("CoLR, rank 1", "softmax") > 0.99999
    seen, task, rows = recorded("CoLR, rank 1", "MLP", 1)
    images = pixels_of(task)[rows[:, 0]]
    for client, image in enumerate(images):
        observed = seen.uploads[client]
        direction = np.linalg.svd(observed.projections[f"{FIRST_LAYER}.weight"])[0][:, 0]
        estimate = single_input(observed.change, FIRST_LAYER)
        share = abs(direction @ image) / np.linalg.norm(image)
        assert abs(cosines(estimate[None], image[None])[0, 0]) == pytest.approx(share, abs=1e-4)
    assert mean_cosine("CoLR, rank 1", "MLP") < 0.3 < mean_image_cosine()


def test_a_masked_upload_is_uniform_and_says_less_than_the_mean_image() -> None:
    seen, task, rows = recorded("masked, one upload", "MLP", 1)
    pixels = pixels_of(task)
    assert not seen.readable
    for client in range(10):
        weight = seen.uploads[client].change[f"{FIRST_LAYER}.weight"].astype(np.float64).ravel()
        low, high = weight.min(), weight.max()
        assert stats.kstest(weight, stats.uniform(low, high - low).cdf).pvalue > 1e-6
        reached = matched(rows_over_bias(seen.uploads[client].change, FIRST_LAYER), pixels[rows[client]])[1]
        assert reached.mean() < mean_image_cosine()


def test_the_opened_mean_is_that_of_the_uploads_and_gives_images_of_a_small_sum_away() -> None:
    """Masks hide whose an image is, not what it is: a unit that one image of the sum excites has that image."""
    seen, task, rows = recorded(SUM, "MLP", 1)
    plain, _, _ = recorded(FLOAT32, "MLP", 1)
    assert seen.mean is not None
    for name, values in seen.mean.change.items():
        expected = np.mean([plain.uploads[client].change[name] for client in range(10)], axis=0)
        np.testing.assert_allclose(values, expected, atol=2**-15)  # a step of the integers
    pixels, of_round = pixels_of(task), rows[:, 0]
    estimates, reached = matched(rows_over_bias(seen.mean.change, FIRST_LAYER), pixels[of_round])
    assert reached.mean() > mean_image_cosine() + 0.05
    assert share_identified(estimates, pixels, of_round) > 0.5


@pytest.mark.slow
@pytest.mark.parametrize("encoding", [FLOAT32, "SCoLR, rank 4", SUM])
def test_a_tapped_network_trains_as_it_would(encoding: str) -> None:
    planned = experiment(ENCODINGS[encoding], "MLP", 0, STEP, rounds=2)
    (_, second), _ = record_network(planned)
    first_outcome = next(iter(rounds(planned.model_copy(update={"checkpoint_every": 1}))))
    assert first_outcome.state is not None
    for name, values in second.model.items():
        np.testing.assert_allclose(values, np.asarray(first_outcome.state.server[name]), atol=2e-6)


@pytest.mark.parametrize("images", [pytest.param(name, marks=pytest.mark.data(name)) for name in SETS])
def test_wide_images_are_read_through_rank_one_and_a_basis(images: str) -> None:
    """784 pixels are the longer side of a layer of 64 units, so that the basis of CoLR is on the units' side."""
    whole = load_experiment("scolr-mnist", [f"data.kind={images}"]).data_source.load()
    assert isinstance(whole, Samples)
    data = replace(whole, order=np.arange(10), indptr=np.arange(11))  # ten clients with an image each
    pixels = one_array(data.train.features)[:10].reshape(10, -1) / 255.0
    tests = one_array(data.test.features)
    guess = cosines(tests.reshape(len(tests), -1).mean(axis=0, keepdims=True), pixels).mean()
    reached = {}
    for encoding in (FLOAT32, "SVD, rank 1", "CoLR, rank 1", "2 bits"):
        (seen,), _ = record_network(experiment(ENCODINGS[encoding], "MLP", 0, STEP, rounds=1), data)
        estimates = np.stack([single_input(seen.uploads[client].change, FIRST_LAYER) for client in range(10)])
        reached[encoding] = float(np.diag(cosines(estimates, pixels)).mean())
    assert min(reached[encoding] for encoding in (FLOAT32, "SVD, rank 1", "CoLR, rank 1")) > 0.9999
    assert reached["2 bits"] > guess + 0.1


def test_matching_uses_an_estimate_once_and_zeros_identify_nothing() -> None:
    truth = np.eye(3)
    estimates, reached = matched(np.array([[0.9, 0.1, 0.0], [1.0, 0.0, 0.0]]), truth)
    np.testing.assert_allclose(reached, [1.0, 0.1 / np.hypot(0.9, 0.1), 0.0])
    assert share_identified(estimates, truth, np.arange(3)) == pytest.approx(1 / 3)
    assert share_identified(np.zeros((3, 3)), truth, np.arange(3)) == 0


def test_bad_input_is_refused_in_one_line() -> None:
    seen, _, _ = recorded(FLOAT32, "MLP", 1)
    with pytest.raises(UserError, match='no layer "0" with weight and bias; give one of 1, 3'):
        single_input(seen.uploads[0].change, "0")
    with pytest.raises(UserError, match="a weight of 4 dimensions; give a linear layer"):
        rows_over_bias({"0.weight": np.ones((2, 1, 3, 3)), "0.bias": np.ones(2)}, "0")
    with pytest.raises(UserError, match="use record_transcript"):
        record_network(rows_experiment("none"))
    with pytest.raises(UserError, match=r"algorithm\.kind = scaffold: its server does not add changes up"):
        record_network(experiment(ENCODINGS[FLOAT32], "MLP", 0, STEP, 1).model_copy(update={"algorithm": _scaffold()}))


def _scaffold() -> Any:
    return experiment(type(ENCODINGS[FLOAT32])({"kind": "scaffold"}), "MLP", 0, STEP, 1).algorithm
