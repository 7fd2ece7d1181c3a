"""Membership by loss: the measures beside independent ones, Yeom's identity, and runs with their controls."""

from __future__ import annotations

from functools import cache
from itertools import product

import numpy as np
import pytest
import torch
from scipy import stats

from narrowcast.algorithms.attacks.membership import (
    Separation,
    chance_advantage,
    losses,
    scores_of_change,
    scores_of_model,
)
from narrowcast.algorithms.attacks.network_transcript import NetworkRound
from narrowcast.platform.contracts import Task
from narrowcast.platform.data.samples import Labelled, Samples, one_array
from narrowcast.platform.errors import UserError
from narrowcast.platform.models.neural_network import NeuralNetwork
from narrowcast.platform.types import FloatArray, IntArray
from narrowcast.runs.attack_trial import record_network
from narrowcast_papers.leakage.observed import ENCODINGS, FLOAT32, SUM, dealt, experiment
from secure_rounds import experiment as rows_experiment


def test_measures_are_those_of_every_threshold_by_hand() -> None:
    random = np.random.default_rng(0)
    members, others = random.integers(0, 12, 60) / 4 + 0.5, random.integers(0, 12, 90) / 4
    separation = Separation.of(members, others)
    by_hand = [((members >= at).mean(), (others >= at).mean()) for at in [*np.unique([*members, *others]), 99]]
    assert separation.advantage == pytest.approx(max(true - false for true, false in by_hand))
    assert separation.tpr_at_1_percent == pytest.approx(max(true for true, false in by_hand if false <= 0.01))
    above = np.mean([(a > b) + (a == b) / 2 for a, b in product(members, others)])
    assert separation.auc == pytest.approx(above)
    assert separation.advantage == pytest.approx(stats.ks_2samp(members, others, alternative="less").statistic)


def test_scores_that_say_nothing_exceed_the_chance_advantage_as_often_as_it_says() -> None:
    random = np.random.default_rng(1)
    drawn = [Separation.of(*random.standard_normal((2, 150))).advantage for _ in range(1500)]
    exceeded = float(np.mean(np.array(drawn) > chance_advantage(150, 150)))
    assert 0.025 < exceeded < 0.065  # the limit's tail is a little above that of 150 samples


@cache
def trained(encoding: str) -> tuple[NetworkRound, Task, IntArray, IntArray]:
    """Return the last round of ten clients that overfit 20 images each, their rows, and rows that no client has."""
    planned = experiment(
        ENCODINGS[encoding], "MLP", 0, {"learning_rate": 0.5, "batch_size": "all", "epochs": 30}, rounds=6
    )
    data, rows, others = dealt(planned, 20, 0)
    seen, task = record_network(planned, data)
    return seen[-1], task, rows, others


def data_of(task: Task) -> Samples:
    assert isinstance(task.data, Samples)
    return task.data


def by_change(encoding: str, images: Labelled) -> FloatArray:
    """Return what each client's change, or the opened mean, says of the images, [10, n]."""
    seen, task, _, _ = trained(encoding)
    observed = [seen.mean if encoding == SUM else seen.uploads[client] for client in range(10)]
    return np.stack([scores_of_change(task, seen.model, change.change, images) for change in observed if change])


def test_losses_are_those_of_torch() -> None:
    seen, task, _, _ = trained(FLOAT32)
    module = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    module.load_state_dict({name: torch.from_numpy(np.array(values)) for name, values in seen.model.items()})
    samples = data_of(task).test
    with torch.no_grad():
        scores = module(torch.from_numpy(one_array(samples.features))).log_softmax(1).numpy()
    expected = -scores[np.arange(len(samples)), samples.labels]
    np.testing.assert_allclose(losses(task, seen.model, samples), expected, atol=1e-5)


def test_the_advantage_of_the_0_1_loss_is_the_generalisation_gap() -> None:
    """Theorem 2 of Yeom et al., an identity: who is right is called a member."""
    seen, task, rows, _ = trained(FLOAT32)
    data, network = data_of(task), task.model
    assert isinstance(network, NeuralNetwork)
    held = data.train.take(rows.ravel())
    module = network.loaded(seen.model, data)
    right = []
    for samples in (held, data.test):
        with torch.no_grad():
            right.append(module(torch.from_numpy(one_array(samples.features))).argmax(1).numpy() == samples.labels)
    gap = right[0].mean() - network.evaluate(seen.model, {}, data, "test")["accuracy"]
    assert gap > 0
    assert Separation.of(*(values.astype(float) for values in right)).advantage == pytest.approx(gap)


def test_a_model_tells_its_images_and_none_that_it_was_never_trained_on() -> None:
    seen, task, rows, others = trained(FLOAT32)
    data = data_of(task)
    outside = scores_of_model(task, seen.model, data.test)
    of_members, of_control = (
        Separation.of(scores_of_model(task, seen.model, data.train.take(part.ravel())), outside)
        for part in (rows, others)
    )
    chance = chance_advantage(rows.size, len(data.test))
    assert of_members.advantage > chance > of_control.advantage


@pytest.mark.parametrize("encoding", [FLOAT32, "2 bits", "Top-K 1 %", "SVD, rank 1", "CoLR, rank 1"])
def test_a_change_tells_its_clients_images_through_every_codec(encoding: str) -> None:
    _, task, rows, others = trained(encoding)
    data = data_of(task)
    own = np.concatenate(np.diagonal(by_change(encoding, data.train.take(rows.ravel())).reshape(10, 10, 20)).T)
    outside = by_change(encoding, data.test).ravel()
    control = by_change(encoding, data.train.take(others[0])).ravel()
    # 200 images at most are independent of one another: each is scored by ten changes.
    chance = chance_advantage(20, len(data.test))
    assert Separation.of(own, outside).advantage > chance_advantage(200, len(data.test)) + 0.1
    assert Separation.of(control, outside).advantage < chance


@pytest.mark.slow
def test_a_sum_does_not_say_whose_an_image_is() -> None:
    """All clients have the same score for an image, so that the owner's is above another's half of the time."""
    _, task, rows, _ = trained(SUM)
    held = data_of(task).train.take(rows.ravel())
    owners = np.eye(10, dtype=bool).repeat(20, axis=1)
    under_masks, readable = by_change(SUM, held), by_change(FLOAT32, held)
    assert Separation.of(under_masks[owners], under_masks[~owners]).auc == 0.5
    assert Separation.of(readable[owners], readable[~owners]).auc > 0.65


def test_other_models_are_refused_in_one_line() -> None:
    seen, task, _, _ = trained(FLOAT32)
    chosen = rows_experiment("none")
    with pytest.raises(UserError, match="losses of samples are those of networks; use mlp or cnn"):
        losses(chosen.task(chosen.data_source.load()), seen.model, data_of(task).test)
