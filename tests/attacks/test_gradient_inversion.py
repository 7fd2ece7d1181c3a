"""Images that are reached by matching gradients: what the true ones reach, and what a small search finds."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from narrowcast.algorithms.attacks.gradient_inversion import GradientInversion, gradient_distances
from narrowcast.algorithms.attacks.inversion import cosines, matched, share_identified, single_input
from narrowcast.algorithms.attacks.network_transcript import NetworkRound
from narrowcast.experiment import Experiment
from narrowcast.platform.contracts import Task
from narrowcast.platform.data.samples import Samples, one_array
from narrowcast.platform.errors import UserError
from narrowcast.platform.types import FloatArray, IntArray
from narrowcast.runs.attack_trial import record_network
from narrowcast_papers.leakage.observed import ENCODINGS, FIRST_LAYER, FLOAT32, SUM, dealt, experiment
from secure_rounds import experiment as rows_experiment

SEARCH = GradientInversion(steps=120, total_variation=0.01, restarts=1, width=8)
Recorded = tuple[NetworkRound, Task, FloatArray, IntArray, FloatArray]


@cache
def recorded(encoding: str, images: int) -> Recorded:
    """Return a round, its task, the images [10, images, 64] and labels, and as many images that no client has."""
    planned = experiment(ENCODINGS[encoding], "MLP", 0, {"learning_rate": 1.0, "batch_size": "all"}, rounds=1)
    data, rows, others = dealt(planned, images, 0)
    (seen,), task = record_network(planned, data)
    pixels = np.asarray(one_array(data.train.features), dtype=np.float64)
    return seen, task, pixels[rows], data.train.labels[rows], pixels[others]


def mean_image(task: Task) -> FloatArray:
    assert isinstance(task.data, Samples)
    return np.asarray(one_array(task.data.test.features).mean(axis=0, keepdims=True))


@pytest.mark.parametrize(
    ("encoding", "largest"),
    [
        *((FLOAT32, 1e-5), ("8 bits", 1e-3), ("4 bits", 0.1), ("Top-K 1 %", 1e-5)),
        *(("CoLR, rank 1", 1e-5), ("SCoLR, rank 4", 1e-5), ("SVD, rank 1", 0.5)),
    ],
)
def test_the_true_images_explain_the_change_and_others_do_not(encoding: str, largest: float) -> None:
    """What the attacker computes of a gradient is what the client sent of it: the distance is the codec's error."""
    seen, task, images, labels, others = recorded(encoding, 2)
    observed = [seen.uploads[client] for client in range(10)]
    of_true = gradient_distances(task, seen.model, observed, images, labels)
    of_others = gradient_distances(task, seen.model, observed, others, labels)
    assert of_true.max() < largest
    assert (of_true < of_others).all()


def test_the_true_images_of_all_clients_explain_the_opened_sum() -> None:
    seen, task, images, labels, _ = recorded(SUM, 2)
    assert seen.mean is not None
    whole = images.reshape(1, 20, -1), labels.reshape(1, 20)
    assert gradient_distances(task, seen.model, [seen.mean], *whole)[0] < 1e-3  # 16 bits a value


@pytest.mark.parametrize("encoding", [FLOAT32, "2 bits"])
def test_a_search_finds_single_images_better_than_the_mean_image(encoding: str) -> None:
    seen, task, images, labels, others = recorded(encoding, 1)
    observed = [seen.uploads[client] for client in range(3)]
    estimates = SEARCH.images(task, seen.model, observed, labels[:3])[:, 0]
    truth, control = images[:3, 0], others[:3, 0]
    reached = np.diag(cosines(estimates, truth)).mean()
    assert reached > cosines(mean_image(task), truth).mean()
    assert reached > np.diag(cosines(estimates, control)).mean() + 0.1


def test_a_search_finds_what_a_basis_hides_from_the_first_layer_alone() -> None:
    """The changes of the other layers, and of biases, say more than the projection of the first layer's."""
    seen, task, images, labels, others = recorded("SCoLR, rank 4", 1)
    observed = [seen.uploads[client] for client in range(4)]
    estimates = SEARCH.images(task, seen.model, observed, labels[:4])[:, 0]
    reached, control = (np.diag(cosines(estimates, pixels[:4, 0])).mean() for pixels in (images, others))
    of_layer = np.stack([single_input(observation.change, FIRST_LAYER) for observation in observed])
    assert reached > np.diag(cosines(of_layer, images[:4, 0])).mean() + 0.2
    assert reached > control + 0.05


def test_a_search_tells_two_images_of_a_batch_apart() -> None:
    seen, task, images, labels, _ = recorded(FLOAT32, 2)
    assert isinstance(task.data, Samples)
    estimates = SEARCH.images(task, seen.model, [seen.uploads[0]], labels[:1])[0]
    nearest, reached = matched(estimates, images[0])
    assert reached.min() > 0.95
    pool = np.concatenate([images[0], np.asarray(one_array(task.data.test.features), dtype=np.float64)])
    assert share_identified(nearest, pool, np.arange(2)) == 1


def test_a_masked_upload_leads_to_nothing_better_than_the_mean_image() -> None:
    seen, task, images, labels, _ = recorded("masked, one upload", 1)
    observed = [seen.uploads[client] for client in range(3)]
    estimates = SEARCH.images(task, seen.model, observed, labels[:3])[:, 0]
    assert np.diag(cosines(estimates, images[:3, 0])).mean() < cosines(mean_image(task), images[:3, 0]).mean()


def test_the_best_start_is_kept_and_a_search_repeats() -> None:
    seen, task, _, labels, _ = recorded("2 bits", 1)
    observed, of_one = [seen.uploads[0]], labels[:1]
    once = replace(SEARCH, steps=20)
    several = replace(once, restarts=4)
    images = [search.images(task, seen.model, observed, of_one) for search in (once, several, several)]
    assert (images[1] == images[2]).all()
    distances = [gradient_distances(task, seen.model, observed, reached, of_one)[0] for reached in images]
    assert distances[1] <= distances[0] + 0.01  # the objective has the roughness of the images besides
    assert images[0].min() >= 0
    assert images[0].max() <= 1


def test_bad_input_is_refused_in_one_line() -> None:
    seen, task, _, labels, _ = recorded(FLOAT32, 2)
    with pytest.raises(UserError, match="labels of 2 changes, but 1 changes; give labels of each"):
        SEARCH.images(task, seen.model, [seen.uploads[0]], labels[:2])
    chosen: Experiment = rows_experiment("none")
    with pytest.raises(UserError, match="gradients of images are those of networks; use mlp or cnn"):
        SEARCH.images(chosen.task(chosen.data_source.load()), seen.model, [seen.uploads[0]], labels[:1])
