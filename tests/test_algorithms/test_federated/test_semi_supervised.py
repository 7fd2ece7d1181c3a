"""FixMatch and UDA in FedAvg: steps of a plain reference, the controls that they contain, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy, log_softmax, softmax

from narrowcast.algorithms.client.sums import TENSORS
from narrowcast.algorithms.federated.fedavg import FedAvg
from narrowcast.algorithms.federated.semi_supervised import SemiSupervised
from narrowcast.algorithms.local_training.sgd import SGD
from narrowcast.laws.small_tasks import (
    PLAN,
    local_call,
    run,
    samples,
    sha256,
    stepped,
    task_on,
    train_everyone,
    trained,
)
from narrowcast.platform.contracts import Task
from narrowcast.platform.data.samples import Samples, Unlabelled, one_array
from narrowcast.platform.errors import UserError
from narrowcast.platform.models.networks import MLP, Softmax
from narrowcast.platform.rounds.state import Run
from narrowcast.platform.types import LocalTerms, Phase

COUNTS = np.array([5, 9, 0, 3])
STILL = {"shift": 0, "operations": 0, "cutout": 0}
RATE, WEIGHT, SURE = 0.5, 2.0, 0.43


def task(training: Any = None, *, labels: bool = True) -> Task:
    data = samples(COUNTS)
    if not labels:
        assert data.server is not None
        nobody = np.zeros(0, dtype=np.int64)
        data = replace(data, train=data.server, order=nobody, indptr=np.zeros(5, dtype=np.int64))
    return task_on(data, Softmax(), training=training or SGD(batch_size="all", learning_rate=RATE))


def semi_supervised(kind: str, **fields: Any) -> SemiSupervised:
    consistency = {"kind": kind, "weight": WEIGHT, "views": STILL, **fields}
    return SemiSupervised.model_validate({"consistency": consistency})


def inputs(features: Any) -> torch.Tensor:
    return torch.from_numpy(one_array(features).astype(np.float32) / 255).flatten(1)


def reference(task: Task, client: int, kind: str, threshold: float) -> list[np.ndarray]:
    """Return a client's change of weight and bias by one step of autograd on all of its samples."""
    data: Samples = task.data
    unlabelled: Unlabelled | None = data.unlabelled
    assert unlabelled is not None
    weight, bias = (torch.from_numpy(values.copy()).requires_grad_() for values in task.initial_parameters().values())
    rows = data.order[data.indptr[client] : data.indptr[client + 1]]
    others = unlabelled.order[unlabelled.indptr[client] : unlabelled.indptr[client + 1]]
    loss = torch.zeros(())
    if len(rows):
        labelled = inputs(data.train.features)[rows]
        loss = cross_entropy(labelled @ weight.T + bias, torch.from_numpy(data.train.labels[rows]))
    if len(others):
        outputs = inputs(unlabelled.features)[others] @ weight.T + bias
        sure = softmax(outputs, 1).max(1)[0] >= threshold
        if kind == "fixmatch":
            of_samples = cross_entropy(outputs, outputs.argmax(1), reduction="none")
        else:
            of_samples = -(softmax(outputs.detach() / 0.4, 1) * log_softmax(outputs, 1)).sum(1)
        loss = loss + WEIGHT * (of_samples * sure).mean()
    return [-RATE * slope.numpy() for slope in torch.autograd.grad(loss, [weight, bias])]


@pytest.mark.parametrize("execution", ["batched", "per_client"])
@pytest.mark.parametrize("labels", [True, False])
@pytest.mark.parametrize("kind", ["fixmatch", "uda"])
def test_a_step_is_that_of_the_sum_of_both_losses(kind: str, labels: bool, execution: Any) -> None:
    given = task(SGD(batch_size="all", learning_rate=RATE, execution=execution), labels=labels)
    algorithm = semi_supervised(kind, threshold=SURE)
    for client in np.flatnonzero(given.data.examples):
        result = train_everyone(algorithm, given, [client])
        n = given.data.examples[client]
        got = [values / n for values in TENSORS.of(result.partial).values()]
        for change, wanted in zip(got, reference(given, int(client), kind, SURE), strict=True):
            np.testing.assert_allclose(change, wanted, rtol=1e-4, atol=1e-6)


def test_some_predictions_of_the_reference_are_sure_and_others_are_not() -> None:
    given = task()
    weight, bias = given.initial_parameters().values()
    outputs = inputs(given.data.unlabelled.features) @ torch.from_numpy(weight).T + torch.from_numpy(bias)
    assert 0.1 < (softmax(outputs, 1).max(1)[0] >= SURE).float().mean() < 0.9


@pytest.mark.parametrize("consistency", [{"weight": 0}, {"threshold": 1.0}, None])
def test_without_sure_predictions_it_is_fedavg_on_the_labels(consistency: Any) -> None:
    given = task_on(samples(np.arange(11)), MLP(hidden=(6,)), training=SGD(batch_size=4, momentum=0.5))
    plan = PLAN.model_copy(update={"rounds": 2})
    wanted = sha256(FedAvg(), run(plan, FedAvg(), given))
    algorithm = semi_supervised("fixmatch", ratio=2, **(consistency or {"threshold": 0.3}))
    assert (sha256(algorithm, run(plan, algorithm, given)) == wanted) == (consistency is not None)


def test_a_server_trains_on_its_own_samples_after_the_mean() -> None:
    given = task(SGD(batch_size="all", learning_rate=RATE, epochs=3), labels=False)
    algorithm = semi_supervised("uda", weight=0)
    got = stepped(algorithm, given, train_everyone(algorithm, given, range(4)))
    weight, bias = (torch.from_numpy(values.copy()).requires_grad_() for values in given.initial_parameters().values())
    features, labels = inputs(given.data.server.features), torch.from_numpy(given.data.server.labels)
    for _ in range(3):
        slopes = torch.autograd.grad(cross_entropy(features @ weight.T + bias, labels), [weight, bias])
        weight, bias = ((part - RATE * slope).detach() for part, slope in zip((weight, bias), slopes, strict=True))
        weight, bias = weight.requires_grad_(), bias.requires_grad_()
    for values, wanted in zip(got.values(), (weight, bias), strict=True):
        np.testing.assert_allclose(values, wanted.detach().numpy(), rtol=1e-4, atol=1e-6)


def test_work_counts_samples_without_labels() -> None:
    given = task(SGD(batch_size=2))
    server, clients = FedAvg().init(given), np.array([0, 1])
    work = semi_supervised("uda", ratio=2).relative_work(server, given, clients)
    others = given.data.unlabelled.examples[clients]
    np.testing.assert_allclose(work, 1 + 4 / 3 * np.array([3, 5]) * np.minimum(4, others) / [5, 9])
    assert semi_supervised("uda", weight=0).relative_work(server, given, clients) is None


def test_what_it_cannot_train_is_refused_in_one_line() -> None:
    with_labels = replace(samples(COUNTS), unlabelled=None)
    flat = replace(with_labels, train=replace(with_labels.train, features=np.zeros((17, 4), np.float32)))
    for data, message in (
        (
            with_labels,
            r"^algorithm\.kind = semi_supervised needs samples without labels, and all of tiny have one; set",
        ),
        (flat, r"takes views of images \[channels, height, width\], and tiny has features \[4\]; use a data set of"),
    ):
        with pytest.raises(UserError, match=message):
            semi_supervised("fixmatch").check(task_on(data, Softmax()))
    with pytest.raises(UserError, match=r"^algorithm\.kind = fedavg needs samples with labels, and with data\."):
        Run(PLAN, FedAvg(), task(labels=False)).check()
    call = local_call(task(), task().initial_parameters(), [0])
    phased = LocalTerms(phases=(Phase(("0.weight",), 1),), consistency=semi_supervised("uda").consistency)
    with pytest.raises(
        UserError, match=r"^LocalTerms\.consistency: training in phases takes samples with labels alone"
    ):
        trained(replace(call, terms=phased))
