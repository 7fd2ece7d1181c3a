"""Public samples and those of the server: apart from all others, and refused where they do not fit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from narrowcast.platform.data.image_sets import MNIST
from narrowcast.platform.data.samples import Labelled, Samples, held_by
from narrowcast.platform.data.scikit_learn import Digits
from narrowcast.platform.data.synthetic import Synthetic
from narrowcast.platform.errors import UserError
from small_sets import write_idx


def lines(part: Labelled) -> list[bytes]:
    return sorted(features.tobytes() for features in part.features)


def public_of(data: Samples) -> Labelled:
    assert data.public is not None
    return data.public


def test_they_are_held_out_and_nobodys_own() -> None:
    with_them = Digits(clients=7, public={"samples": 150}).load()  # type: ignore[arg-type]
    without, public = Digits(clients=7).load(), public_of(with_them)
    assert len(public) == with_them.sizes["public_samples"] == 150
    assert lines(without.train) == sorted([*lines(with_them.train), *lines(public)])
    assert with_them.examples.sum() == len(with_them.train) == len(without.train) - 150
    assert lines(without.test) == lines(with_them.test)
    assert lines(without.validation) == lines(with_them.validation)
    assert with_them.digest != without.digest != replace(with_them, public=None).digest != with_them.digest
    assert "public_samples" not in without.sizes


def test_the_seed_of_the_data_draws_them() -> None:
    settings: Any = {"samples": 30}
    first, again, other = (public_of(Digits(public=settings, seed=seed).load()) for seed in (0, 0, 1))
    assert np.array_equal(first.features, again.features)
    assert not np.array_equal(first.features, other.features)


def test_users_keep_their_other_samples() -> None:
    settings: Any = {"samples": 40}
    data, whole = (Synthetic(clients=10, public=public).load() for public in (settings, None))
    assert data.examples.sum() == whole.examples.sum() - 40
    assert (data.examples <= whole.examples).all()


def test_another_set_takes_nothing_from_the_clients(root: Path) -> None:
    write_idx(root / "mnist")
    write_idx(root / "fashion-mnist", seed=1)
    data = MNIST(clients=5, public={"samples": 20, "set": "fashion-mnist"}).load()  # type: ignore[arg-type]
    assert data.examples.sum() == len(MNIST(clients=5).load().train)
    assert not set(lines(public_of(data))) & set(lines(data.train))


def test_more_than_there_are_is_refused() -> None:
    with pytest.raises(UserError, match=r"data\.public\.samples = 1293: there are 1293; use at most 1292"):
        Digits(public={"samples": 1293}).load()  # type: ignore[arg-type]


def test_a_set_of_other_features_is_refused(root: Path) -> None:
    write_idx(root / "fashion-mnist")
    message = (
        r"^data.public.set = fashion-mnist: its samples are \[n, 1, 28, 28\] uint8 in 10 classes, "
        r"those of the clients \[n, 64\] float32 in 10 classes; use another$"
    )
    with pytest.raises(UserError, match=message):
        Digits(public={"set": "fashion-mnist"}).load()  # type: ignore[arg-type]


def test_samples_of_the_server_are_held_out_and_nobody_elses() -> None:
    settings: Any = {"public": {"samples": 150}, "server": {"samples": 60}}
    data, without = Digits(clients=7, **settings).load(), Digits(clients=7, public=settings["public"]).load()
    assert data.server is not None
    assert lines(without.train) == sorted([*lines(data.train), *lines(data.server)])
    assert data.examples.sum() == len(without.train) - data.sizes["server_samples"] == len(without.train) - 60
    for split in ("validation", "test", "public"):
        assert lines(getattr(data, split)) == lines(getattr(without, split))
    own = data.of_server
    assert own is not None
    assert without.of_server is None
    assert own.examples.tolist() == [60]
    assert np.array_equal(own.train.features, data.server.features)
    swapped = replace(data, public=data.server, server=data.public)
    assert len({each.digest for each in (data, without, swapped, replace(data, server=None))}) == 4
    with pytest.raises(UserError, match=r"data\.server\.samples = 1293: there are 1293; use at most 1292"):
        Digits(server={"samples": 1293}).load()  # type: ignore[arg-type]


def test_they_are_the_samples_of_the_clients_that_are_asked_for() -> None:
    data = Digits(clients=6, public={"samples": 9}).load()  # type: ignore[arg-type]
    clients = np.array([1, 4])
    shared = held_by(clients, data, public_of(data))
    assert shared.examples.tolist() == [0, 9, 0, 0, 9, 0]
    for client in clients.tolist():
        rows, _ = shared.of_clients("train").rows(np.array([client]))
        assert np.array_equal(shared.train.features[rows], public_of(data).features)
