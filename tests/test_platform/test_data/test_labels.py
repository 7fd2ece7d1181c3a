"""Labels as files have them: what is classes, what is numbers, and what is refused, in arrays and Hugging Face sets."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest

from narrowcast.platform.data.formats import NPZ, HuggingFace, TorchDataset
from narrowcast.platform.data.graph import GraphNPZ
from narrowcast.platform.data.ncf import NCF
from narrowcast.platform.errors import UserError

N = 60
ROWS = np.arange(N)
FEATURES = np.random.default_rng(0).normal(size=(N, 5)).astype(np.float32)
WHOLE = {"clients": 2, "validation_share": 0, "test_share": 0}


def loaded(folder: Path, labels: Any, *, fields: dict[str, Any] | None = None, **arrays: Any) -> Any:
    np.savez(folder / "a.npz", x=FEATURES, y=labels, **arrays)
    return NPZ(path=folder / "a.npz", **WHOLE | (fields or {})).load()


CLASSES: dict[str, tuple[Any, list[int]]] = {
    "whole numbers as floats": ((ROWS % 3).astype(float), [0, 1, 2]),
    "float16": ((ROWS % 3).astype(np.float16), [0, 1, 2]),
    "with gaps, as floats": (np.array([3.0, 17.0, 99.0])[ROWS % 3], [0, 1, 2]),
    "-1 and 1": (ROWS % 2 * 2 - 1, [0, 1, 0]),
    "-1.0 and 1.0": (ROWS % 2 * 2.0 - 1, [0, 1, 0]),
    "bool": (ROWS % 2 == 1, [0, 1, 0]),
    "text": (np.array(["b", "a", "ü"])[ROWS % 3], [1, 0, 2]),
    "bytes": (np.array([b"b", b"a", "ü".encode()])[ROWS % 3], [1, 0, 2]),
    "one column": ((ROWS % 3)[:, np.newaxis].astype(np.uint8), [0, 1, 2]),
    "one column of floats": ((ROWS % 3)[:, np.newaxis].astype(float), [0, 1, 2]),
    "one-hot": (np.eye(3, dtype=np.int64)[ROWS % 3], [0, 1, 2]),
    "one-hot floats": (np.eye(3, dtype=np.float32)[ROWS % 3], [0, 1, 2]),
    "one-hot bool": (np.eye(3, dtype=bool)[ROWS % 3], [0, 1, 2]),
    "unsigned beyond int64": (np.array([2**63, 2**63 + 1], np.uint64)[ROWS % 2], [0, 1, 0]),
}


@pytest.mark.parametrize("kind", CLASSES)
def test_these_are_classes(tmp_path: Path, kind: str) -> None:
    labels, expected = CLASSES[kind]
    data = loaded(tmp_path, labels)
    assert data.targets == "classes"
    assert data.train.labels[:3].tolist() == expected
    assert data.n_classes == max(expected) + 1


def test_a_one_hot_column_without_a_sample_is_a_class(tmp_path: Path) -> None:
    assert loaded(tmp_path, np.eye(4)[ROWS % 3]).n_classes == 4


NUMBERS: dict[str, Any] = {
    "fractions": ROWS / 7,
    "whole, but each its own": ROWS.astype(float),
    "ages": np.array([23.0, 41.0, 64.0])[ROWS % 3] + ROWS // 3,
    "several": np.stack([ROWS, ROWS * 2.0], axis=1),
    "shares": np.full((N, 2), 0.5),
}


@pytest.mark.parametrize("kind", NUMBERS)
def test_these_are_numbers(tmp_path: Path, kind: str) -> None:
    data = loaded(tmp_path, NUMBERS[kind])
    assert data.targets == "numbers"
    assert (data.train.labels == np.reshape(NUMBERS[kind], (N, -1)).astype(np.float32)).all()


def test_a_field_decides(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    stars = (ROWS % 5 + 1).astype(float)
    with caplog.at_level(logging.WARNING):
        assert loaded(tmp_path, stars).n_classes == 5
    assert "labels are whole numbers stored as float64, and taken for 5 classes; data.targets=numbers" in caplog.text
    caplog.clear()
    assert loaded(tmp_path, stars, fields={"targets": "numbers"}).train.labels[:2].tolist() == [[1], [2]]
    assert loaded(tmp_path, ROWS, fields={"targets": "numbers"}).targets == "numbers"
    assert loaded(tmp_path, ROWS.astype(float), fields={"targets": "classes"}).n_classes == N
    assert loaded(tmp_path, np.eye(3)[ROWS % 3], fields={"targets": "numbers"}).train.labels.shape == (N, 3)
    assert not caplog.text
    many = np.tile(np.arange(30.0), 10)
    np.savez(tmp_path / "m.npz", x=np.zeros((300, 2)), y=many)
    with pytest.raises(UserError, match=r"0 to 29 stored as float64; set data.targets=classes or data.targets=numbers"):
        NPZ(path=tmp_path / "m.npz", **WHOLE).load()


@pytest.mark.parametrize(
    ("labels", "test_labels", "fields", "message"),
    [
        (np.where(ROWS == 7, np.nan, ROWS % 3), None, {}, "sample 7 has a label that is not a finite float32 number"),
        (
            np.where(ROWS == 7, np.nan, ROWS % 3),
            None,
            {"targets": "classes"},
            "label nan of sample 7 is not a whole number, as classes are; .*data.targets=numbers",
        ),
        ((ROWS % 3).astype(float), ROWS / 2, {}, "x_test: label 0.5 of sample 1 is not a whole number"),
        (ROWS % 3, ROWS % 4, {}, r"x_test: label 3 of sample 3 is not a class of the training samples \(0, 1, 2\)"),
        (ROWS % 3, (ROWS % 3).astype(str), {}, "x_test: labels are text, such as 0, and those of .* numbers; write"),
        (
            (ROWS % 3).astype(str),
            ROWS % 3,
            {},
            "x_test: labels are numbers, such as 0, and those of .* text; write",
        ),
        (np.array([b"\xff", b"a"])[ROWS % 2], None, {}, "labels are bytes that are not UTF-8"),
        ((ROWS % 3).astype(object), None, {}, "Object arrays cannot be loaded"),
        (ROWS * 0.0, None, {}, "all samples are of one class"),
        (np.array(["a", "", "b"])[ROWS % 3], None, {}, "sample 1 has no label; remove such samples"),
        (ROWS.astype(complex), None, {}, "labels are complex128"),
        (ROWS.astype("M8[s]"), None, {}, "labels are datetime64"),
        (np.ones((N, 2), int), None, {}, r"samples have labels of the shape \[60, 2\]; give one class"),
    ],
)
def test_other_labels_are_one_line(
    tmp_path: Path, labels: Any, test_labels: Any, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message) as caught:
        loaded(
            tmp_path,
            labels,
            fields=fields,
            **({} if test_labels is None else {"x_test": FEATURES, "y_test": test_labels}),
        )
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("end", ["validation", "valid", "val", "dev"])
def test_arrays_of_parts_go_by_usual_names(tmp_path: Path, end: str, caplog: pytest.LogCaptureFixture) -> None:
    arrays = {f"x_{end}": FEATURES[:7], f"y_{end}": ROWS[:7] % 3, "x_test": FEATURES[:9], "y_test": ROWS[:9] % 3}
    data = loaded(tmp_path, ROWS % 3, **arrays, feature_names=np.array(list("abcde")))
    assert [len(data.train), len(data.validation), len(data.test)] == [N, 7, 9]
    assert "left out: arrays feature_names" in caplog.text
    with pytest.raises(UserError, match="x_: val and valid are both validation samples"):
        loaded(tmp_path, ROWS % 3, x_val=FEATURES, x_valid=FEATURES)
    with pytest.raises(UserError, match=f"has no array y_{end}"):
        loaded(tmp_path, ROWS % 3, **{f"x_{end}": FEATURES})


def hub(folder: Path, columns: dict[str, Any], fields: dict[str, Any] | None = None, **splits: Any) -> Any:
    datasets.disable_progress_bars()
    made = {"train": columns, **splits}
    parts = {
        name: each if isinstance(each, datasets.Dataset) else datasets.Dataset.from_dict(each)
        for name, each in made.items()
    }
    datasets.DatasetDict(parts).save_to_disk(folder / "hub")
    return HuggingFace(path=folder / "hub", **{"features": "x"} | WHOLE | (fields or {})).load()


def test_columns_of_hugging_face_sets(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    x = FEATURES.tolist()
    names = datasets.ClassLabel(names=["no", "yes"])
    coded = datasets.Dataset.from_dict({"x": x, "label": ROWS % 2}).cast_column("label", names)
    data = hub(tmp_path, {}, train=coded, dev={"x": x[:4], "label": [0, 1, 0, 1]}, unlabelled={"x": x})
    assert [len(data.train), len(data.validation), data.n_classes] == [N, 4, 2]
    assert "left out: split unlabelled" in caplog.text
    assert hub(tmp_path, {"x": x, "label": (ROWS % 3).astype(float)}).n_classes == 3
    assert hub(tmp_path, {"x": x, "label": np.eye(3)[ROWS % 3].tolist()}).n_classes == 3
    assert hub(tmp_path, {"x": x, "label": (ROWS % 2 == 1).tolist()}).n_classes == 2


def with_none(values: Any, place: int = 5) -> list[Any]:
    return [None if row == place else value for row, value in enumerate(values)]


@pytest.mark.parametrize(
    ("columns", "fields", "message"),
    [
        ({"label": with_none((ROWS % 2).tolist())}, {}, "sample 5 has no value in column label; remove such samples"),
        ({"label": with_none(["a", "b"] * 30)}, {}, "sample 5 has no value in column label"),
        ({"who": with_none(["u", "v"] * 30)}, {"users": "who"}, "sample 5 has no value in column who"),
        ({"x": with_none((ROWS * 1.0).tolist())}, {"features": ["x", "z"]}, "sample 5 has a feature that is not a"),
        ({"x": with_none(FEATURES.tolist())}, {}, "(?s)x: sample 5 has the shape"),
        ({"x": [[1.0] * (1 + row % 2) for row in ROWS]}, {}, r"sample 1 has the shape \[2\], and the first has \[1\]"),
        ({"label": [[0] * (1 + row % 2) for row in ROWS]}, {}, "column label has lists of different lengths"),
        ({"x": ["a"] * N}, {}, "column x holds Value"),
    ],
)
def test_missing_values_of_hugging_face_sets_are_one_line(
    tmp_path: Path, columns: dict[str, Any], fields: dict[str, Any], message: str
) -> None:
    whole = {"x": FEATURES.tolist(), "label": (ROWS % 2).tolist(), "z": ROWS.tolist(), **columns}
    with pytest.raises(UserError, match=message) as caught:
        hub(tmp_path, whole, fields)
    assert "\n" not in str(caught.value)


def test_missing_and_mixed_images_of_hugging_face_sets(tmp_path: Path) -> None:
    from PIL import Image

    grey, coloured = Image.new("L", (4, 4), 50), Image.new("RGB", (4, 4), (9, 8, 7))
    feature = datasets.Features({"x": datasets.Image(), "label": datasets.Value("int64")})

    def images(*values: Any) -> datasets.Dataset:
        return datasets.Dataset.from_dict({"x": list(values), "label": [0, 1] * (len(values) // 2)}, feature)

    data = hub(tmp_path, {}, train=images(grey, coloured), test=images(grey, grey))
    assert data.train.features[:, :, 0, 0].tolist() == [[50] * 3, [9, 8, 7]]
    assert data.test.features[:, :, 0, 0].tolist() == [[50] * 3] * 2
    assert hub(tmp_path, {}, train=images(grey, grey)).train.features.shape == (2, 1, 4, 4)
    with pytest.raises(UserError, match="sample 1 has no image in column x; remove such samples"):
        hub(tmp_path, {}, train=images(grey, None))
    with pytest.raises(UserError, match=r"image x of sample 0: is not a readable image \(.*\); replace it$"):
        hub(tmp_path, {}, train=images({"bytes": b"nonsense", "path": None}, grey))
    with pytest.raises(UserError, match=r"sample 1 has the shape \[1, 5, 4\]"):
        hub(tmp_path, {}, train=images(grey, Image.new("L", (4, 5))))


@pytest.mark.parametrize("users", [np.where(ROWS == 4, np.nan, ROWS % 3), np.where(ROWS == 4, "", "u")])
def test_a_missing_user_is_no_client(tmp_path: Path, users: Any) -> None:
    with pytest.raises(UserError, match="sample 4 has no user; remove such samples"):
        loaded(tmp_path, ROWS % 3, fields={"users": "who", "clients": None}, who=users)


def test_features_without_values_are_one_line(tmp_path: Path) -> None:
    np.savez(tmp_path / "e.npz", x=FEATURES[:, :0], y=ROWS % 3)
    with pytest.raises(UserError, match=r"features have the shape \[60, 0\], with no values in a sample"):
        NPZ(path=tmp_path / "e.npz", **WHOLE).load()


def torch_dataset(folder: Path, body: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    name = f"data_of_{folder.name}_{len(body)}"
    (folder / f"{name}.py").write_text(f"import numpy as np\nimport torch\ndef make():\n    return {body}\n")
    monkeypatch.syspath_prepend(folder)
    return TorchDataset(factory=f"{name}:make", **WHOLE).load()


def test_items_of_torch_datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    body = "[(torch.ones(3, dtype=torch.bfloat16), torch.tensor(float(i % 2))) for i in range(9)]"
    assert torch_dataset(tmp_path, body, monkeypatch).n_classes == 2
    data = torch_dataset(
        tmp_path, "{k: [(np.ones(3), i % 2) for i in range(4)] for k in ('train', 'val')}", monkeypatch
    )
    assert [len(data.train), len(data.validation)] == [4, 4]
    with pytest.raises(UserError, match="sample 0 has a number, and sample 1 has text; give one"):
        torch_dataset(tmp_path, "[(np.ones(3), 'a' if i == 1 else i) for i in range(4)]", monkeypatch)
    with pytest.raises(UserError, match="sample 3 has None; remove such samples"):
        torch_dataset(tmp_path, "[(np.ones(3), None if i == 3 else i % 2) for i in range(8)]", monkeypatch)


def test_huge_numbers_are_one_line(tmp_path: Path) -> None:
    tokens = np.full((4, 3), 10**12)
    np.savez(tmp_path / "t.npz", x=tokens, y=tokens)
    with pytest.raises(UserError, match="has the token 1000000000000; number tokens from 0, up to 9999999"):
        NPZ(path=tmp_path / "t.npz", tokens=True, **WHOLE).load()
    nodes = {"train": np.array([0]), "validation": np.array([1]), "test": np.array([2])}
    np.savez(tmp_path / "g.npz", features=np.eye(3), edges=np.array([[0, 1]]), labels=np.array([0, 1, 10**12]), **nodes)
    with pytest.raises(UserError, match="label 1000000000000 is more than 3 nodes can have; number classes from 0"):
        GraphNPZ(path=tmp_path / "g.npz").load()
    (tmp_path / "n.train.rating").write_text("0\t1\t1\t1\n")
    (tmp_path / "n.test.rating").write_text(f"0\t{10**12}\t1\t1\n")
    (tmp_path / "n.test.negative").write_text("\t".join([f"(0,{10**12})", *map(str, range(2, 101))]) + "\n")
    with pytest.raises(UserError, match="has the item 1000000000000; number the items from 0, up to 99999999"):
        NCF(path=tmp_path / "n").load()
