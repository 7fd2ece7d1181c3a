"""Clients whose samples keep their labels in part: what is kept, what is lost, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from narrowcast.algorithms.federated.semi_supervised import SemiSupervised
from narrowcast.laws.small_tasks import run, samples, sha256, task_on
from narrowcast.platform.data.classification import LabelledPart
from narrowcast.platform.data.samples import Labelled, Samples, one_array
from narrowcast.platform.data.scikit_learn import Digits
from narrowcast.platform.errors import UserError
from narrowcast.platform.models.networks import Softmax
from narrowcast.platform.rounds.plan import Plan

COUNTS = np.array([12, 0, 7, 20])


def whole() -> Samples:
    return replace(samples(COUNTS), unlabelled=None, public=None)


def images(features: Any) -> list[bytes]:
    return [image.tobytes() for image in one_array(features)]


@pytest.mark.parametrize(("part", "kept"), [({"share": 0.25}, [3, 0, 2, 5]), ({"share": 0.01}, [1, 0, 1, 1])])
def test_each_client_keeps_its_samples_and_loses_labels(part: Any, kept: list[int]) -> None:
    data, dealt = whole(), LabelledPart(**part).of(whole())
    assert dealt.unlabelled is not None
    assert dealt.examples.tolist() == kept
    assert dealt.unlabelled.examples.tolist() == (COUNTS - kept).tolist()
    before = images(data.train.features)
    label_of = dict(zip(before, data.train.labels.tolist(), strict=True))
    with_labels, without = images(dealt.train.features), images(dealt.unlabelled.features)
    assert [label_of[image] for image in with_labels] == dealt.train.labels.tolist()
    for client in range(len(COUNTS)):
        own, others = (index.order[slice(*index.indptr[client : client + 2])] for index in (dealt, dealt.unlabelled))
        has = [before[row] for row in data.order[data.indptr[client] : data.indptr[client + 1]]]
        assert sorted([*(with_labels[row] for row in own), *(without[row] for row in others)]) == sorted(has)
    assert np.array_equal(dealt.examples_of("test"), data.examples_of("test"))
    assert dealt.digest != data.digest


def test_labels_that_are_lost_change_no_parameter_and_those_that_are_kept_do() -> None:
    part = LabelledPart(share=0.3)
    kept = set(images(part.of(whole()).train.features))
    data, shas = whole(), []
    for rows in (np.array([image not in kept for image in images(data.train.features)]), None):
        for shift in (0, 1):
            labels = data.train.labels + (shift if rows is None else shift * rows)
            dealt = part.of(replace(data, train=Labelled(data.train.features, labels % data.n_classes)))
            algorithm = SemiSupervised(consistency={"kind": "uda", "threshold": 0.2, "ratio": 1})  # type: ignore[arg-type]
            plan = Plan(rounds=1, clients_per_round=4, chunk_size=4, checkpoint_every=1)
            shas.append((dealt.digest, sha256(algorithm, run(plan, algorithm, task_on(dealt, Softmax())))))
    assert shas[0] == shas[1]
    assert shas[2][0] != shas[3][0]
    assert shas[2][1] != shas[3][1]


def test_the_server_alone_may_have_labels() -> None:
    settings: Any = {"clients": 7, "server": {"samples": 60}}
    data, with_labels = Digits(**settings, labelled={"samples": 0}).load(), Digits(**settings).load()  # type: ignore[arg-type]
    assert data.unlabelled is not None
    assert not data.labels_at_clients
    assert data.sizes["training_samples"] == 0
    assert np.array_equal(data.examples, with_labels.examples)
    assert np.array_equal(one_array(data.unlabelled.features), one_array(with_labels.train.features))
    assert np.array_equal(data.examples_of("test"), with_labels.examples_of("test"))


def test_what_cannot_be_is_refused_in_one_line() -> None:
    with pytest.raises(UserError, match=r"data\.labelled\.samples = 8: client 1 has 0 samples; use at most these, "):
        LabelledPart(samples=8).of(whole())
    with pytest.raises(UserError, match=r"data\.labelled\.samples = 0 leaves no label anywhere; give data\.server"):
        LabelledPart(samples=0).of(replace(whole(), server=None))
    for settings in ({}, {"samples": 3, "share": 0.1}):
        with pytest.raises(UserError, match="labelled is a number of samples or a share of them"):
            LabelledPart(**settings)  # type: ignore[arg-type]
