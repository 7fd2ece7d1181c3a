"""Shifts between groups of clients: each sample is changed as its client's group says, in every split."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import narrowcast as nc
from narrowcast.platform.data.formats import NPZ
from narrowcast.platform.data.samples import Samples
from narrowcast.platform.data.scikit_learn import Diabetes, Digits
from narrowcast.platform.errors import UserError
from narrowcast.platform.rounds.client_contracts import ClientSplit


def _images(folder: Path) -> Path:
    """Write the digits as images [1, 8, 8]."""
    digits = Digits(clients=1, validation_share=0).load()
    arrays = {
        f"{axis}_{part}": values
        for part, samples in (("train", digits.train), ("test", digits.test))
        for axis, values in (("x", np.asarray(samples.features).reshape(-1, 1, 8, 8)), ("y", samples.labels))
    }
    np.savez(folder / "digits.npz", **arrays)
    return folder / "digits.npz"


def _owners(data: Samples, split: ClientSplit) -> np.ndarray:
    index = data.of_clients(split)
    owners = np.full(len(getattr(data, split)), -1)
    for client in range(data.n_clients):
        owners[index.order[index.indptr[client] : index.indptr[client + 1]]] = client
    return owners


SPLITS: tuple[ClientSplit, ...] = ("train", "validation", "test")


def test_images_of_a_group_are_turned_by_its_quarters_in_every_split(tmp_path: Path) -> None:
    fields: dict[str, Any] = {"path": _images(tmp_path), "clients": 6, "seed": 3}
    plain, turned = NPZ(**fields).load(), NPZ(**fields, shift={"kind": "rotated"}).load()
    for split in SPLITS:
        before, after = getattr(plain, split), getattr(turned, split)
        np.testing.assert_array_equal(before.labels, after.labels)
        owners = _owners(plain, split)
        np.testing.assert_array_equal(_owners(turned, split), owners)
        for image, changed, owner in zip(before.features, after.features, owners, strict=True):
            x = image[0]
            expected = (x, x.T[::-1], x[::-1, ::-1], x.T[:, ::-1])[owner % 4]  # by 0, 90, 180 and 270 degrees
            np.testing.assert_array_equal(changed[0], expected)


def test_a_group_permutes_the_classes_alike_in_every_split_and_the_first_keeps_them() -> None:
    plain = Digits(clients=6, seed=3).load()
    permuted = Digits(clients=6, seed=3, shift={"kind": "permuted_labels", "groups": 3}).load()
    names: dict[int, dict[int, int]] = {group: {} for group in range(3)}
    for split in SPLITS:
        before, after = getattr(plain, split), getattr(permuted, split)
        np.testing.assert_array_equal(before.features, after.features)
        for old, new, owner in zip(before.labels, after.labels, _owners(plain, split), strict=True):
            assert names[owner % 3].setdefault(int(old), int(new)) == new
    assert names[0] == {label: label for label in range(10)}
    for group in (1, 2):
        assert sorted(names[group].values()) == list(range(10)), "a permutation"
    assert names[1] != names[2]


def test_a_global_model_fits_one_group_where_models_of_clients_fit_theirs() -> None:
    shift = {"data": {"kind": "digits", "shift": {"kind": "permuted_labels", "groups": 2}}}
    local = shift | {"clients_per_round": 20, "rounds": 40, "evaluate_every": 40, "evaluate_clients": ["test"]}
    accuracy = {}
    for kind in ("fedavg", "apfl"):
        overrides = local | {"algorithm": {"kind": kind, **({"alpha": 1.0} if kind == "apfl" else {})}}
        *_, last = nc.rounds("fedavg-digits", overrides, backend="local")
        accuracy[kind] = float(np.nanmean(last.client_metrics["test.accuracy"]))
    assert accuracy["apfl"] > accuracy["fedavg"] + 0.2, accuracy


def test_a_shift_that_does_not_fit_is_one_line() -> None:
    with pytest.raises(UserError, match=r"turns square images .*; digits has features \[64\]; use permuted_labels"):
        Digits(shift={"kind": "rotated"}).load()
    with pytest.raises(UserError, match="permutes classes; diabetes has numbers; use rotated"):
        Diabetes(shift={"kind": "permuted_labels"}).load()
    with pytest.raises(UserError, match=r"shift.groups = 5: should be less than or equal to 4"):
        Digits(shift={"kind": "rotated", "groups": 5})
