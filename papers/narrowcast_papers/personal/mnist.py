"""The experiment of pFedMe's paper on MNIST: its clients, their pooled accuracy, and the published numbers.

Reference: Dinh, Tran and Nguyen, Personalized Federated Learning with Moreau Envelopes, NeurIPS 2020
(arXiv:2006.08848); the clients by the logic of its script (CharlieDinh/pFedMe @caf24b1f,
data/Mnist/generate_niid_20users.py).
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import Field

from narrowcast.platform.config.files import Section
from narrowcast.platform.data.dataset import DataSource
from narrowcast.platform.data.image_sets import MNIST, N_CLASSES
from narrowcast.platform.data.samples import Labelled, Samples, one_array
from narrowcast.platform.rounds.state import start
from narrowcast.platform.seeds import generator
from narrowcast.platform.tracking.figures import ORANGE, new_figure
from narrowcast.platform.types import IntArray
from narrowcast.runs.significance import compare_paired
from narrowcast.studies.comparison import ComparisonVerdicts, Tested, draw_groups
from narrowcast.studies.execution import LightRun
from narrowcast.studies.spec import RunSpec
from narrowcast.studies.verdicts import PaperVerdict, corrected, describe, mean_and_spread
from narrowcast_papers.personal.clients import samples_of

CLIENTS = 20
_SIZES_SEED, _TRAIN_SHARE = 1, 0.75
"""Those of the script."""
PUBLISHED = {"FedAvg": 93.96, "Per-FedAvg": 94.37, "pFedMe, global model": 94.18, "pFedMe, copies": 95.62}
"""Test accuracy of multinomial logistic regression in percent, quoted; its personal models are copies (`measured`)."""


class TwoDigitClients(DataSource, Section):
    """MNIST over 20 clients of two digits each, with 6 to 3268 images; three quarters are for training.

    Client u has images of the digits u and u + 1 modulo 10, numbers of images that the script draws, and none of a
    digit of which too few are left. Pixels are standardised over all 70,000 images.

    Differs from the script: 1. images are in the order of the IDX files, the training ones first, and not of OpenML. 2.
    which images of a client are for training is drawn by `seed`.
    """

    kind: Literal["narrowcast_papers.personal.mnist:TwoDigitClients"] = (
        "narrowcast_papers.personal.mnist:TwoDigitClients"
    )
    seed: int | None = Field(None, ge=0, description="seed of the training images of a client; null: that of the run")

    def load(self) -> Samples:
        """Return the clients' images."""
        source = MNIST(clients=1, validation_share=0.0).load()
        pixels = np.concatenate([one_array(part.features) for part in (source.train, source.test)])
        labels = np.concatenate([source.train.labels, source.test.labels])
        mean, deviation = pixels.mean(axis=0), pixels.std(axis=0)
        rows, owners = two_digits(labels)
        images = Labelled(((pixels[rows] - mean) / (deviation + 1e-3)).astype(np.float32), labels[rows])
        ends = np.cumsum(np.bincount(owners, minlength=CLIENTS))
        random, places = generator(self.seed or 0, "training images"), np.arange(len(rows))
        train, test = list[IntArray](), list[IntArray]()
        for own in np.split(places, ends[:-1]):
            mixed, n_train = random.permutation(own), int(_TRAIN_SHARE * len(own))
            train.append(mixed[:n_train])
            test.append(mixed[n_train:])
        parts = [(images, np.concatenate(part), owners[np.concatenate(part)]) for part in (train, test)]
        nobody = (images, np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64))
        return samples_of("mnist-two-digits", source.source, [parts[0], nobody, parts[1]], CLIENTS)


def two_digits(labels: IntArray) -> tuple[IntArray, IntArray]:
    """Return the rows of the clients' images and their owners, client by client.

    The script counts images of the digits 0 and 1 alone, and deals the counts in turn.
    """
    random = np.random.RandomState(_SIZES_SEED)
    of_digit = [np.flatnonzero(labels == digit) for digit in range(N_CLASSES)]
    counts = np.stack([_broken(len(of_digit[digit]), random) for digit in (0, 1)], axis=1)
    taken, rows, owners = np.zeros(N_CLASSES, dtype=int), list[IntArray](), list[IntArray]()
    for client, of_client in enumerate(counts.tolist()):
        for shift, count in enumerate(of_client):
            digit = (client + shift) % N_CLASSES
            if taken[digit] + count < len(of_digit[digit]):
                rows.append(of_digit[digit][taken[digit] : taken[digit] + count])
                owners.append(np.full(count, client))
                taken[digit] += count
    return np.concatenate(rows), np.concatenate(owners)


def _broken(total: int, random: np.random.RandomState) -> list[int]:
    """Return a total broken into a count for each client, each up to half of what the ones before left."""
    counts = list[int]()
    for _ in range(CLIENTS - 1):
        counts.append(int(random.randint(total // (CLIENTS + 1), total // 2)))
        total -= counts[-1]
    return [*counts, total]


def pooled(spec: RunSpec, seed: int, *, test: bool) -> dict[str, Any]:
    """Return the result of a run whose accuracy is over all test images, each by the model that its client uses."""
    light, began = LightRun(spec, seed, test=test), time.perf_counter()
    for outcome in light.experiment.backend.run(light.run, start(light.run)):
        light.saw(outcome)
    shares, images = outcome.client_metrics["test.accuracy"], light.run.task.data.examples_of("test")
    light.result["final"]["test.accuracy"] = float(np.average(shares, weights=images))
    return light.result | {"wall_seconds": round(time.perf_counter() - began, 2)}


def judge_split(tested: Tested) -> list[PaperVerdict]:
    """Compare each method with training alone, seed by seed, beside the published number."""
    reached = {finished.cell.name: finished.reached() for finished in tested.values()}
    (alone, control), *others = reached.items()
    tests = [compare_paired(values, control) for _, values in others]
    verdicts = [PaperVerdict(alone, "", mean_and_spread(control), "reference", "", control)]
    for (name, values), (test, p_level, p_zero) in zip(others, corrected(tests), strict=True):
        published = f"{PUBLISHED[name]:.2f}" if name in PUBLISHED else ""
        said = describe(test, p_level, p_zero, len(values))
        verdicts.append(
            PaperVerdict(name, published, mean_and_spread(values), said, f"{test.interval.mean:+.2f}", values)
        )
    return verdicts


def plot_split(tested: Tested, path: Path) -> None:
    """Plot the accuracy over all test images by method, with the published numbers."""
    figure, (axes,) = new_figure("Two digits a client: MNIST as in pFedMe's paper", panels=1)
    reached = {finished.cell.name: finished.reached() for finished in tested.values()}
    names = list(reached)
    draw_groups(axes, names, {"here": reached})
    shown = [name for name in names if name in PUBLISHED]
    places = [len(names) - 1 - names.index(name) for name in shown]
    axes.plot([PUBLISHED[name] for name in shown], places, "x", color=ORANGE, label="published")
    axes.set(xlabel="accuracy over all test images (%)")
    axes.legend(frameon=False)
    figure.savefig(path, dpi=100)


MNIST_SPLIT = ComparisonVerdicts(judge_split, plot_split)
