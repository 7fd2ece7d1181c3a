"""Inputs by name from every format that has them: the same samples, and one line for what does not fit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from PIL import Image

from encoder import CLASSES, LENGTH, N_TOKENS, make_texts
from narrowcast.laws.data_laws import DATA_LAWS, DataCase
from narrowcast.platform.data.formats import NPZ, HuggingFace, TorchDataset
from narrowcast.platform.data.samples import Samples
from narrowcast.platform.errors import UserError
from narrowcast.runs.data_section import described

FIELDS = {"clients": 5, "seed": 3}


class Items(torch.utils.data.Dataset[Any]):
    """Items as they are given."""

    def __init__(self, items: list[Any]) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, row: int) -> Any:
        return self.items[row]


def picture(row: int) -> Image.Image:
    return Image.fromarray(np.full((4, 3), row, dtype=np.uint8))


FACTORIES: dict[str, Callable[[], list[Any]]] = {
    "pictures": lambda: [({"pixels": picture(row), "size": row / 2}, row % 2) for row in range(8)],
    "names": lambda: [({"a": [1], "b" if row == 3 else "c": [2]}, row % 2) for row in range(8)],
    "shapes": lambda: [({"a": [1] * (1 + (row == 3))}, row % 2) for row in range(8)],
    "mixed": lambda: [({"a": [1]} if row < 3 else [1], row % 2) for row in range(8)],
    "text": lambda: [({"a": ["word"]}, row % 2) for row in range(8)],
    "missing": lambda: [({"a": [np.nan if row == 3 else 1.0]}, row % 2) for row in range(8)],
    "large": lambda: [({"a": np.array([2**63], np.uint64)}, row % 2) for row in range(8)],
}


def make_items(items: str) -> Items:
    return Items(FACTORIES[items]())


def check_laws(source: Any) -> Samples:
    case = DataCase(source)
    for law in DATA_LAWS:
        law(case)
    return case.data


def arrays() -> dict[str, np.ndarray]:
    parts = make_texts()
    inputs = {f"x_{part}.{name}": values for part, each in parts.items() for name, values in each.inputs.items()}
    return inputs | {f"y_{part}": each.labels for part, each in parts.items()}


def test_every_format_gives_the_same_inputs(tmp_path: Path) -> None:
    np.savez(tmp_path / "texts.npz", **arrays())  # type: ignore[arg-type]
    columns = {
        part: datasets.Dataset.from_dict({**{k: v.tolist() for k, v in each.inputs.items()}, "label": each.labels})
        for part, each in make_texts().items()
    }
    datasets.DatasetDict(columns).save_to_disk(tmp_path / "texts")
    of_torch = check_laws(TorchDataset(factory="encoder:make_texts", **FIELDS))
    others = [
        NPZ(path=tmp_path / "texts.npz", **FIELDS),
        HuggingFace(path=tmp_path / "texts", features=["input_ids", "attention_mask"], by_name=True, **FIELDS),
    ]
    assert {name: (values.dtype, values.shape[1:]) for name, values in dict(of_torch.train.features).items()} == {
        "attention_mask": (np.dtype(bool), (LENGTH,)),
        "input_ids": (np.dtype(np.int64), (LENGTH,)),
    }
    assert of_torch.n_classes == CLASSES
    assert ("features", f"attention_mask [n, {LENGTH}] bool, input_ids [n, {LENGTH}] int64") in described(of_torch)
    for source in others:
        data = check_laws(source)
        for part in ("train", "validation", "test"):
            got, wanted = (getattr(each, part) for each in (data, of_torch))
            assert list(got.features) == list(wanted.features)
            assert all(np.array_equal(values, wanted.features[name]) for name, values in got.features.items())
            assert np.array_equal(got.labels, wanted.labels)


def test_an_npz_file_without_parts_has_inputs_by_name_too(tmp_path: Path) -> None:
    texts = make_texts()["train"]
    ids = texts.inputs["input_ids"]
    np.savez(tmp_path / "a.npz", **{"x.ids": ids.astype(np.int32), "x.weight": ids / 3, "y": texts.labels})
    data = check_laws(NPZ(path=tmp_path / "a.npz", test_share=0.25, **FIELDS))
    features = dict(data.train.features)
    assert {name: values.dtype for name, values in features.items()} == {"ids": np.int64, "weight": np.float32}
    assert np.allclose(features["weight"], features["ids"] / 3)
    assert len(data.test) == 30


def test_types_of_inputs_follow_one_rule(tmp_path: Path) -> None:
    n = 12
    values = np.arange(n * 4).reshape(n, 4) % 3
    given = {
        **{str(np.dtype(each)): values.astype(each) for each in ("u1", "i1", "u2", "i4", "u8", "f2", "f8", "?")},
        "image": np.arange(n * 4, dtype=np.uint8).reshape(n, 1, 2, 2),
        "number": np.arange(n) / 2,
    }
    np.savez(tmp_path / "a.npz", **{f"x.{name}": each for name, each in given.items()}, y=np.arange(n) % 2)
    features = dict(check_laws(NPZ(path=tmp_path / "a.npz", clients=2)).train.features)
    wanted = {name: np.dtype(np.int64) for name in ("uint8", "int8", "uint16", "int32", "uint64")}
    wanted |= {name: np.dtype(np.float32) for name in ("float16", "float64", "number")}
    wanted |= {"bool": np.dtype(bool), "image": np.dtype(np.uint8)}
    assert {name: each.dtype for name, each in features.items()} == wanted
    assert features["number"].ndim == 1


def test_tokens_that_follow_each_position_may_have_a_mask(tmp_path: Path) -> None:
    texts = make_texts()["train"].inputs
    labels = np.roll(texts["input_ids"], -1, axis=1)
    np.savez(tmp_path / "a.npz", **{f"x.{name}": each for name, each in texts.items()}, y=labels)
    data = check_laws(NPZ(path=tmp_path / "a.npz", tokens=True, **FIELDS))
    assert (data.targets, data.n_classes) == ("tokens", N_TOKENS)
    np.savez(tmp_path / "b.npz", **{f"x.{name}": each[:, :5] for name, each in texts.items()}, y=labels)
    with pytest.raises(
        UserError, match=r"tokens \[120, 10\] for features .*input_ids \[120, 5\].*; both have one shape"
    ):
        NPZ(path=tmp_path / "b.npz", tokens=True, **FIELDS).load()


def test_pictures_may_be_one_of_several_inputs() -> None:
    source = TorchDataset(factory="test_named_features:make_items", arguments={"items": "pictures"}, clients=2)
    data = check_laws(source)
    features = dict(data.train.features)
    assert features["pixels"].dtype == np.uint8
    assert features["pixels"].shape[1:] == (1, 4, 3)
    assert np.array_equal(features["size"], features["pixels"][:, 0, 0, 0].astype(np.float32) / 2)


@pytest.mark.parametrize(
    ("items", "message"),
    [
        ("names", "sample 3 has the inputs a, b, and the first a, c; give all samples the same"),
        ("mixed", "sample 3 has the inputs list, and the first a; give all samples the same"),
        ("shapes", r"a: sample 3 has the shape \[2\], and the first has \[1\]; bring all to one shape"),
        ("text", "a is <U4; convert it to numbers"),
        ("missing", "a: sample 3 has a feature that is not a finite float32 number; replace missing values"),
        ("large", r"a has whole numbers of 2\^63 or more"),
    ],
)
def test_items_that_do_not_fit_are_one_line(items: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        TorchDataset(factory="test_named_features:make_items", arguments={"items": items}, clients=2).load()


def test_arrays_that_do_not_fit_are_one_line(tmp_path: Path) -> None:
    good = arrays()
    for change, message in (
        ({"x_test.input_ids": good["x_test.input_ids"][:, :5]}, r"features of a sample are .*input_ids \[5\] of int64"),
        ({"x_train.input_ids": good["x_train.input_ids"][:9]}, "9 samples of input_ids have labels of the shape"),
        ({"x_train.input_ids": np.array(3)}, "features are a single number"),
    ):
        np.savez(tmp_path / "a.npz", **{**good, **change})  # type: ignore[arg-type]
        with pytest.raises(UserError, match=message):
            NPZ(path=tmp_path / "a.npz", **FIELDS).load()
