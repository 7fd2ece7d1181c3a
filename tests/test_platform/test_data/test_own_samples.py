"""Labelled samples of one's own, from every format: the same samples give the same clients."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from PIL import Image

from labelled_sets import check_dealt
from narrowcast.laws.data_laws import DATA_LAWS, DataCase
from narrowcast.platform.data.formats import NPZ, HuggingFace, TorchDataset
from narrowcast.platform.data.partition import Dirichlet, Natural
from narrowcast.platform.data.samples import Samples
from narrowcast.platform.data.synthetic import Synthetic
from narrowcast.platform.errors import UserError

RANDOM = np.random.default_rng(5)
N, N_TEST = 90, 20
IMAGES, TEST_IMAGES = (RANDOM.integers(0, 256, (n, 3, 6, 5), dtype=np.uint8) for n in (N, N_TEST))
LABELS, TEST_LABELS = RANDOM.permutation(np.arange(N) % 4), np.arange(N_TEST) % 4
USERS = np.array([f"user {each}" for each in RANDOM.integers(0, 7, N)])
PARTS = {"train": (IMAGES, LABELS), "test": (TEST_IMAGES, TEST_LABELS)}

Write = Callable[..., Any]


def make_dataset(image: str = "tensor", users: bool = False, broken: str = "") -> Mapping[str, Any]:
    """A factory as a user writes it."""
    how: dict[str, Callable[[Any], Any]] = {
        "tensor": torch.from_numpy,
        "array": lambda pixels: pixels,
        "pil": lambda pixels: Image.fromarray(pixels.transpose(1, 2, 0)),
    }

    class Pictures(torch.utils.data.Dataset[Any]):
        def __init__(self, part: str) -> None:
            self.images, self.labels = PARTS[part]

        def __len__(self) -> int:
            return 0 if broken == "empty" else len(self.labels)

        def __getitem__(self, row: int) -> Any:
            if row == 3 and broken == "raises":
                raise IndexError("no such file")
            pixels = self.images[row, :, : 4 if row == 3 and broken == "shape" else None]
            item = (how[image](pixels), torch.tensor(self.labels[row]), USERS[row % N])
            return item if users else item[: 1 if broken == "single" else 2]

    if broken == "factory":
        raise RuntimeError("no disk")
    parts = ("train", "test")
    return {"trian" if broken == "name" else part: Pictures(part) for part in parts}


def not_a_dataset() -> object:
    return iter([(1, 2)])


def write_npz(path: Path, **changes: Any) -> Path:
    arrays = {"x_train": IMAGES, "y_train": LABELS, "x_test": TEST_IMAGES, "y_test": TEST_LABELS, "u_train": USERS}
    np.savez(path, **{name: value for name, value in {**arrays, **changes}.items() if value is not None})
    return path


def write_hugging_face(path: Path) -> Path:
    features = datasets.Features(
        img=datasets.Image(), label=datasets.ClassLabel(names=list("abcd")), who=datasets.Value("string")
    )
    parts = {}
    for part, (images, labels) in PARTS.items():
        pictures = [Image.fromarray(pixels.transpose(1, 2, 0)) for pixels in images]
        columns = {"img": pictures, "label": labels, "who": USERS[: len(labels)]}
        parts[part] = datasets.Dataset.from_dict(columns, features=features)
    datasets.DatasetDict(parts).save_to_disk(path)
    return path


def check_laws(source: Any) -> Samples:
    case = DataCase(source)
    for law in DATA_LAWS:
        law(case)
    check_dealt(case.data)
    return case.data


def test_every_format_gives_the_same_samples(root: Path) -> None:
    fields = {"clients": 6, "partition": Dirichlet(alpha=0.5), "seed": 3}
    npz = check_laws(NPZ(path=write_npz(root / "a.npz"), **fields))
    last = write_npz(root / "b.npz", x_train=IMAGES.transpose(0, 2, 3, 1), x_test=TEST_IMAGES.transpose(0, 2, 3, 1))
    others = [
        NPZ(path=last, channels_last=True, **fields),
        HuggingFace(path=write_hugging_face(root / "c"), features="img", **fields),
        *(
            TorchDataset(factory="test_own_samples:make_dataset", arguments={"image": image}, **fields)
            for image in ("tensor", "array", "pil")
        ),
    ]
    assert (npz.n_clients, npz.n_classes, len(npz.train), len(npz.test)) == (6, 4, 81, 20)
    assert np.array_equal(npz.test.features, TEST_IMAGES)
    for source in others:
        data = check_laws(source)
        for part in ("train", "validation", "test"):
            assert np.array_equal(getattr(data, part).features, getattr(npz, part).features)
            assert np.array_equal(getattr(data, part).labels, getattr(npz, part).labels)
        assert np.array_equal(data.order, npz.order)


def test_users_are_clients(root: Path) -> None:
    sources: list[Any] = [
        NPZ(path=write_npz(root / "a.npz"), users="u"),
        HuggingFace(path=write_hugging_face(root / "b"), features=["img"], users="who"),
        TorchDataset(factory="test_own_samples:make_dataset", arguments={"users": True}, partition=Natural()),
    ]
    for source in sources:
        assert isinstance(source.partition, Natural)
        data = check_laws(source)
        assert data.n_clients == 7
        for client, user in enumerate(sorted(set(USERS))):
            rows = data.order[data.indptr[client] : data.indptr[client + 1]]
            theirs = {pixels.tobytes() for pixels in IMAGES[user == USERS]}
            assert {pixels.tobytes() for pixels in data.train.features[rows]} <= theirs
    assert len({source.load().examples.tobytes() for source in sources}) == 1
    some = check_laws(NPZ(path=root / "a.npz", users="u", clients=3))
    assert some.n_clients == 3
    assert (some.examples > 0).all()
    with pytest.raises(UserError, match=r"data.clients is 9, but the data have 7 users; omit it"):
        NPZ(path=root / "a.npz", users="u", clients=9).load()
    assert NPZ(path=root / "a.npz", users="u", partition="iid").load().n_clients == 100


def test_the_arrays_of_a_built_in_set_are_that_set(root: Path) -> None:
    built_in = Synthetic(clients=8, validation_share=0).load()
    arrays = {"u_train": np.empty(len(built_in.train), dtype=np.int64)}
    arrays["u_train"][built_in.order] = np.repeat(np.arange(8), built_in.examples)
    for part in ("train", "test"):
        samples = getattr(built_in, part)
        arrays |= {f"x_{part}": samples.features.astype(np.float64), f"y_{part}": samples.labels}
    np.savez(root / "synthetic(0,0).npz", **arrays)
    own = NPZ(path=root / "synthetic(0,0).npz", users="u").load()
    assert own.digest == Synthetic(clients=8).load().digest


def test_without_a_test_set_some_samples_are_held_out_whatever_the_seed(root: Path) -> None:
    np.savez(root / "all.npz", x=IMAGES / 7, y=USERS)
    first, second = (check_laws(NPZ(path=root / "all.npz", clients=5, seed=seed)) for seed in (0, 1))
    assert (len(first.train), len(first.validation), len(first.test), first.n_classes) == (65, 7, 18, 7)
    assert first.train.features.dtype == np.float32
    assert np.array_equal(first.test.features, second.test.features)
    assert not np.array_equal(first.validation.features, second.validation.features)
    assert len(NPZ(path=root / "all.npz", clients=5, test_share=0).load().test) == 0


def test_whole_numbers_are_quantities_unless_they_are_tokens(root: Path) -> None:
    np.savez(root / "text.npz", x=IMAGES.reshape(N, -1).astype(np.int32), y=LABELS)
    assert NPZ(path=root / "text.npz").load().train.features.dtype == np.float32
    assert check_laws(NPZ(path=root / "text.npz", tokens=True)).train.features.dtype == np.int64
    with pytest.raises(UserError, match=r"features are float64, not whole numbers; omit data.tokens"):
        NPZ(path=write_npz(root / "a.npz", x_train=IMAGES / 2), tokens=True).load()


def test_labels_that_are_fractions_are_numbers_to_be_predicted(root: Path) -> None:
    fields = {"clients": 5, "validation_share": 0}
    heights = LABELS / 3 + 1
    path = write_npz(root / "heights.npz", y_train=heights, y_test=TEST_LABELS)
    case = DataCase(NPZ(path=path, **fields))
    for law in DATA_LAWS:
        law(case)
    assert (case.data.targets, case.data.n_outputs, case.data.train.labels.dtype) == ("numbers", 1, np.float32)
    assert np.array_equal(case.data.train.labels[:, 0], heights.astype(np.float32))
    pairs = {"y_train": np.stack([heights, LABELS], axis=1), "y_test": np.zeros((N_TEST, 2))}
    assert NPZ(path=write_npz(path, **pairs), **fields).load().n_outputs == 2
    assert NPZ(path=write_npz(path), targets="numbers", **fields).load().targets == "numbers"
    columns = {"age": list(range(8)), "income": [float(each) / 3 for each in range(8)]}
    datasets.Dataset.from_dict(columns).save_to_disk(root / "table")
    data = HuggingFace(path=root / "table", features="age", labels="income", **fields).load()
    assert (data.targets, len(data.train), len(data.test)) == ("numbers", 6, 2)


def test_labels_of_tokens_are_the_tokens_that_follow(root: Path) -> None:
    text = np.arange(400).reshape(40, 10) % 37
    path = root / "text.npz"
    np.savez(path, x=text[:, :-1], y=text[:, 1:])
    data = NPZ(path=path, tokens=True, clients=4).load()
    assert (data.targets, data.n_classes) == ("tokens", 37)
    assert (data.train.labels[:, :-1] == data.train.features[:, 1:]).all()
    np.savez(path, x=text[:, :-1], y=text)
    with pytest.raises(UserError, match=r"labels are tokens \[40, 10\] for features \[40, 9\]; both have one shape"):
        NPZ(path=path, tokens=True).load()


def test_columns_of_numbers_make_up_a_vector(root: Path) -> None:
    columns = {"height": [1.0, 2.5, 3.0, 4.0], "age": [4, 5, 6, 7], "pair": [[1, 2]] * 4, "kind": ["x", "y", "x", "y"]}
    datasets.Dataset.from_dict(columns).save_to_disk(root / "table")
    fields = {"path": root / "table", "labels": "kind", "clients": 2, "validation_share": 0, "test_share": 0}
    data = check_laws(HuggingFace(features=("height", "age"), **fields))
    assert data.train.features.tolist() == [[1, 4], [2.5, 5], [3, 6], [4, 7]]
    assert data.train.labels.tolist() == [0, 1, 0, 1]
    assert check_laws(HuggingFace(features="pair", **fields)).train.features.shape == (4, 2)
    assert check_laws(HuggingFace(features="age", **fields)).train.features.shape == (4, 1)
    for features, message in ((("age", "pair"), "column pair is not a column of numbers; give it alone"),
                              (("kind",), r"column kind holds Value \(.*\), no numbers or images"),
                              (("img",), "no column img, only height, age, pair, kind; name the columns")):  # fmt: skip
        with pytest.raises(UserError, match=message):
            HuggingFace(features=features, **fields).load()


@pytest.mark.parametrize(
    ("changes", "fields", "message"),
    [
        ({"y_train": None}, {}, "has no array y_train, only x_train, x_test, y_test, u_train; name the arrays"),
        ({"x_train": None}, {}, "has no array x, only y_train"),
        ({}, {"users": "who"}, "has no array who_train"),
        (
            {"y_train": LABELS[:-1]},
            {},
            r"x_train: 90 samples have labels of the shape \[89\]; give one class, .* for each",
        ),
        ({"y_train": 2 * np.eye(4, dtype=int)[LABELS]}, {}, r"labels of the shape \[90, 4\]; give one class"),
        (
            {"y_train": np.eye(4)[LABELS] / 2},
            {},
            r"x_test: labels of a sample are \[1\] of float32, .* \[4\] of float32",
        ),
        ({"y_train": np.full(N, np.inf)}, {}, r"sample \d+ has a label that is not a finite float32 number"),
        ({}, {"targets": "tokens"}, r"labels of the shape \[90\]; give the token that follows each position"),
        ({"u_train": USERS[:-1]}, {"users": "u"}, r"90 samples have users of the shape \[89\]"),
        ({"y_train": LABELS * 1j}, {}, "labels are complex128; give one class, a whole number or text, for each"),
        ({"y_train": USERS}, {"targets": "numbers"}, "labels are <U6; give one number, or several, for each"),
        ({"y_test": TEST_LABELS + 1}, {}, r"x_test: label 4 of sample 3 is not a class of the .* \(0, 1, 2, 3\)"),
        (
            {"x_test": TEST_IMAGES[:, :2]},
            {},
            r"x_test: features of a sample are \[2, 6, 5\] of uint8, .*\[3, 6, 5\]",
        ),
        ({"x_test": TEST_IMAGES / 2}, {}, r"features of a sample are \[3, 6, 5\] of float32, .* of uint8"),
        ({"x_train": np.full(IMAGES.shape, np.nan)}, {}, "sample 0 has a feature that is not a finite float32 number"),
        ({"x_train": np.full(IMAGES.shape, 1e300)}, {}, "sample 0 has a feature that is not a finite float32 number"),
        ({"x_train": np.arange(N)}, {}, r"features have the shape \[90\], expected \[samples, features\] or more"),
        ({"x_train": USERS[:, None]}, {}, "features are <U6; convert them to numbers"),
        ({"x_train": IMAGES[:0], "y_train": LABELS[:0]}, {}, "x_train: has no samples"),
        ({"x_train": np.array([{}] * N)}, {}, "Object arrays cannot be loaded when allow_pickle=False"),
        ({"x_train": IMAGES[:, 0, 0]}, {"channels_last": True}, r"has the shape \[90, 5\]; omit data.channels_last"),
    ],
)
def test_bad_arrays_are_user_errors(root: Path, changes: dict[str, Any], fields: dict[str, Any], message: str) -> None:
    path = write_npz(root / "bad.npz", **changes)
    with pytest.raises(UserError, match=message) as caught:
        NPZ(path=path, **fields).load()
    assert "\n" not in str(caught.value)


def test_bad_npz_files_are_user_errors(root: Path) -> None:
    path = write_npz(root / "bad.npz")
    content = path.read_bytes()
    path.write_bytes(content.replace(b"NUMPY", b"NUMPI"))
    with pytest.raises(UserError, match=r"bad.npz: .*; save it again with numpy.savez"):
        NPZ(path=path).load()
    path.write_bytes(content[:-40])
    with pytest.raises(UserError, match=r"bad.npz: is not a .npz file; write features and labels with numpy.savez"):
        NPZ(path=path).load()
    np.save(root / "one.npy", IMAGES)
    with pytest.raises(UserError, match=r"one.npy: is not a .npz file; write features and labels with numpy.savez"):
        NPZ(path=root / "one.npy").load()


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ("raises", r"\(train\): sample 3 failed: IndexError: no such file \(test_own_samples.py, line \d+\)"),
        ("shape", r"\(train\): sample 3 has the shape \[3, 4, 5\], and the first has \[3, 6, 5\]; bring all"),
        ("single", r"\(train\): sample 0 must be \(features, label\), or \(features, label, user\)"),
        ("empty", r"\(train\): has no samples"),
        ("factory", r"failed: RuntimeError: no disk \(test_own_samples.py, line \d+\)"),
        ("name", "returned trian; it must return train, validation and test"),
    ],
)
def test_bad_torch_datasets_are_user_errors(broken: str, message: str) -> None:
    source = TorchDataset(factory="test_own_samples:make_dataset", arguments={"broken": broken})
    with pytest.raises(UserError, match=rf"^data.factory = test_own_samples:make_dataset.*{message}"):
        source.load()


def test_factories_that_do_not_fit_are_refused() -> None:
    with pytest.raises(UserError, match=r"failed: TypeError: make_dataset\(\) got an unexpected keyword argument 'x'"):
        TorchDataset(factory="test_own_samples:make_dataset", arguments={"x": 1}).load()
    with pytest.raises(UserError, match=r"is list_iterator|it must be a Dataset with a length"):
        TorchDataset(factory="test_own_samples:not_a_dataset").load()
    with pytest.raises(UserError, match=r"should be package.module:name, such as my_models:make"):
        TorchDataset(factory="nothing")
    with pytest.raises(UserError, match="has no nothing"):
        TorchDataset(factory="test_own_samples:nothing")


def test_folders_that_save_to_disk_did_not_write_are_user_errors(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (root / "empty").mkdir()
    with pytest.raises(UserError, match=r"empty: .*; write it with save_to_disk"):
        HuggingFace(path=root / "empty", features="x").load()
    split = datasets.Dataset.from_dict({"x": [1], "label": [0]})
    datasets.DatasetDict(unsupervised=split).save_to_disk(root / "other")
    with pytest.raises(UserError, match=r"other: has no split train, only unsupervised"):
        HuggingFace(path=root / "other", features="x").load()
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UserError, match=r"needs datasets; pip install 'narrowcast\[datasets\]'$"):
        HuggingFace(path=root / "other", features="x").load()
