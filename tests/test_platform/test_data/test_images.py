import gzip
import hashlib
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from pydantic import ValidationError

from narrowcast.platform.data import fetch
from narrowcast.platform.data.cifar import CIFAR10
from narrowcast.platform.data.classification import Classification, hold_out
from narrowcast.platform.data.digits import Digits
from narrowcast.platform.data.idx import MNIST, FashionMNIST, read_idx
from narrowcast.platform.data.image_folder import ImageFolder
from narrowcast.platform.data.samples import Samples
from narrowcast.platform.errors import UserError


def need(name: str) -> None:
    if next(row.found for row in fetch.status() if row.name == name) is None:
        pytest.skip(f"{name} was not found; run: narrowcast data fetch {name}")


def check_dealt(data: Samples) -> None:
    """Every training sample belongs to one client, and labels fit the classes."""
    assert np.array_equal(np.sort(data.order), np.arange(len(data.train)))
    assert data.indptr[-1] == len(data.train)
    for part in (data.train, data.validation, data.test):
        assert len(part.features) == len(part.labels)
        assert part.labels.dtype == np.int64
        assert part.labels.min(initial=0) >= 0
        assert part.labels.max(initial=0) < data.n_classes
        assert part.features.dtype == data.train.features.dtype
        assert part.features.shape[1:] == data.train.features.shape[1:]
        assert part.features.flags.c_contiguous
        assert part.features.flags.writeable
    assert len(data.digest) == 64


def test_digits_are_always_there() -> None:
    data = Digits().load()
    check_dealt(data)
    assert (data.n_clients, data.n_classes) == (20, 10)
    assert (len(data.train), len(data.validation), len(data.test)) == (1293, 144, 360)
    assert data.train.features.dtype == np.float32
    assert (data.train.features.min(), data.train.features.max()) == (0.0, 1.0)
    assert sum(part.features.sum(dtype=np.float64) * 16 for part in (data.train, data.validation, data.test)) == 561718
    assert len(Digits(validation_share=0).load().train) == 1437


def test_the_seed_moves_validation_and_partition_but_not_the_test_set() -> None:
    first, again, other = (Digits(seed=seed).load() for seed in (1, 1, 2))
    assert first.digest == again.digest != other.digest
    assert np.array_equal(first.test.features, other.test.features)
    assert not np.array_equal(first.validation.features, other.validation.features)
    assert np.array_equal(first.validation.labels, Digits(seed=1, partition="dirichlet").load().validation.labels)


def test_more_clients_than_samples_leave_some_empty() -> None:
    data = Digits(clients=2000).load()
    check_dealt(data)
    assert (data.examples == 0).sum() == 2000 - 1293


@pytest.mark.parametrize(
    ("model", "name", "pixels"), [(MNIST, "mnist", 33.318421), (FashionMNIST, "fashion-mnist", 72.940352)]
)
def test_idx_sets(model: type[MNIST | FashionMNIST], name: str, pixels: float) -> None:
    need(name)
    data = model(validation_share=0, partition="shards").load()
    check_dealt(data)
    assert (data.name, data.n_clients, data.n_classes) == (name, 100, 10)
    assert data.train.features.shape == (60_000, 1, 28, 28)
    assert data.test.features.shape == (10_000, 1, 28, 28)
    assert data.validation.features.shape == (0, 1, 28, 28)
    assert data.train.features.dtype == np.uint8
    assert data.train.features.mean() == pytest.approx(pixels, abs=1e-6)
    digest = hashlib.sha256(struct.pack(">4B3I", 0, 0, 8, 3, 60_000, 28, 28) + data.train.features.tobytes())
    published = {
        "mnist": "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
        "fashion-mnist": "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
    }
    assert digest.hexdigest() == published[name]
    classes = [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949] if name == "mnist" else [6000] * 10
    assert np.bincount(data.train.labels).tolist() == classes


def test_a_million_clients_share_the_same_samples() -> None:
    need("mnist")
    data = MNIST(clients=1_000_000).load()
    check_dealt(data)
    assert data.n_clients == 1_000_000
    assert data.order.nbytes + data.indptr.nbytes < 10e6


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only place where data is looked for."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv(fetch.VARIABLE, str(tmp_path))
    return tmp_path


def idx(values: Any) -> bytes:
    array = np.asarray(values, dtype=np.uint8)
    return struct.pack(f">4B{array.ndim}I", 0, 0, 8, array.ndim, *array.shape) + array.tobytes()


@pytest.fixture
def tiny(root: Path) -> Path:
    """An IDX set of eight and four images, half of its files gzipped."""
    folder = root / "mnist"
    folder.mkdir()
    for prefix, n in (("train", 8), ("t10k", 4)):
        pixels = np.arange(n * 784, dtype=np.uint64).reshape(n, 28, 28) % 256
        (folder / f"{prefix}-images-idx3-ubyte").write_bytes(idx(pixels))
        (folder / f"{prefix}-labels-idx1-ubyte.gz").write_bytes(gzip.compress(idx(np.arange(n) % 10)))
    return folder


def test_idx_files_may_be_plain_or_gzipped(tiny: Path) -> None:
    data = MNIST(clients=3, validation_share=0.25).load()
    check_dealt(data)
    assert (len(data.train), len(data.validation), len(data.test), data.source) == (6, 2, 4, str(tiny))
    assert np.array_equal(data.test.features.ravel(), np.arange(4 * 784) % 256)
    assert data.test.labels.tolist() == [0, 1, 2, 3]


GOOD = idx(np.zeros((8, 28, 28)))


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        (
            "train-images-idx3-ubyte",
            b"",
            "begins with nothing, but an IDX file of bytes in 3 dimensions begins with 00000803",
        ),
        ("train-images-idx3-ubyte", GOOD[:10], "begins with 00000803"),
        ("train-images-idx3-ubyte", b"\0\0\x0d\3" + GOOD[4:], "begins with 00000d03"),
        ("train-images-idx3-ubyte", b"<html>" + GOOD, "begins with 3c68746d"),
        ("train-images-idx3-ubyte", GOOD[:-1], r"has 6271 values, but its header says \[8, 28, 28\]"),
        ("train-images-idx3-ubyte", GOOD + b"x", r"has more than 6272 values, but its header says \[8, 28, 28\]"),
        ("train-images-idx3-ubyte", b"\0\0\x08\3" + b"\xff" * 12 + GOOD, "download the file again"),
        ("train-images-idx3-ubyte", idx(np.zeros((8, 28, 27))), "has images of 28x27, expected 28x28"),
        ("train-labels-idx1-ubyte", idx(np.zeros(7)), "has 7 labels for 8 images; download both files again"),
        ("train-labels-idx1-ubyte", idx([0, 1, 10, 2, 3, 4, 5, 6]), "label 10 of sample 2 is not one of 0 to 9"),
        ("t10k-labels-idx1-ubyte.gz", gzip.compress(idx(np.zeros(4)), mtime=0)[:-9], "Compressed file ended"),
        ("t10k-labels-idx1-ubyte.gz", b"no gzip", "Not a gzipped file"),
        ("t10k-labels-idx1-ubyte.gz", gzip.compress(idx(np.zeros(400)), mtime=0)[:14] + b"#" * 20, "Error -3"),
        ("t10k-labels-idx1-ubyte.gz", None, r"has neither t10k-labels-idx1-ubyte nor t10k.*; move it"),
    ],
)
def test_malformed_idx_files_are_user_errors(tiny: Path, file: str, content: bytes | None, message: str) -> None:
    (tiny / file).unlink(missing_ok=True)
    if content is not None:
        (tiny / file).write_bytes(content)
    with pytest.raises(UserError, match=f"^{tiny}.*{message}") as caught:
        MNIST(clients=2).load()
    assert "\n" not in str(caught.value)


def test_read_idx_takes_any_number_of_dimensions(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(idx(np.arange(24).reshape(2, 3, 2, 2)))
    assert np.array_equal(read_idx(tmp_path / "x", 4), np.arange(24).reshape(2, 3, 2, 2))


@pytest.mark.usefixtures("root")
def test_missing_sets_name_the_command() -> None:
    sets: tuple[Classification, ...] = (MNIST(), FashionMNIST(), CIFAR10())
    for model in sets:
        name = model.model_dump()["kind"]
        with pytest.raises(UserError, match=f"^{name} was not found: .*; run: narrowcast data fetch {name}$"):
            model.load()  # type: ignore[attr-defined]


def write_cifar(folder: Path) -> None:
    """Two records in each of the six batches; pixel p of record r in batch b is (b + r + p) % 256."""
    folder.mkdir(parents=True)
    for batch, name in enumerate([*(f"data_batch_{n}" for n in range(1, 6)), "test_batch"]):
        records = [[(batch + r) % 10, *((batch + r + np.arange(3072)) % 256)] for r in range(2)]
        (folder / f"{name}.bin").write_bytes(np.array(records, dtype=np.uint8).tobytes())


@pytest.mark.parametrize("below", ["", "cifar-10-batches-bin"])
def test_cifar_10_is_read_from_its_binary_version(root: Path, below: str) -> None:
    write_cifar(root / "cifar-10" / below)
    data = CIFAR10(clients=5, validation_share=0).load()
    check_dealt(data)
    assert data.train.features.shape == (10, 3, 32, 32)
    assert data.train.labels.tolist() == [0, 1, 1, 2, 2, 3, 3, 4, 4, 5]
    assert data.test.labels.tolist() == [5, 6]
    # Red, green and blue one after the other, each row by row.
    assert data.test.features[0, 1, 2, 3] == (5 + 1024 + 2 * 32 + 3) % 256


def test_damaged_cifar_batches_are_user_errors(root: Path) -> None:
    write_cifar(root / "cifar-10")
    path = root / "cifar-10" / "data_batch_3.bin"
    good = path.read_bytes()
    for content, message in (
        (good[:-1], "has 6145 bytes, no multiple of 3073"),
        (b"", "has 0 bytes"),
        (b"\x0a" + good[1:], "label 10 of sample 0 is not one of 0 to 9"),
    ):
        path.write_bytes(content)
        with pytest.raises(UserError, match=f"^{path}: {message}.*download the file again"):
            CIFAR10().load()
    path.unlink()
    with pytest.raises(UserError, match=f"^{path} does not exist; move {path.parent} away and run"):
        CIFAR10().load()


def test_pickled_cifar_is_refused_unread(root: Path, tmp_path: Path) -> None:
    folder = root / "cifar-10" / "cifar-10-batches-py"
    folder.mkdir(parents=True)
    # Unpickling this would make a file.
    (folder / "data_batch_1").write_bytes(f"cos\nmkdir\n(V{tmp_path / 'ran'}\ntR.".encode())
    with pytest.raises(UserError, match=r"is the Python version .* unpickling can run code; put the binary version"):
        CIFAR10().load()
    assert not (tmp_path / "ran").exists()


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    """Red cats and green dogs of 6x4 pixels, PNG and JPEG, some of them with other modes."""
    folder = tmp_path / "pictures"
    for part, n in (("train", 3), ("test", 1)):
        for name, colour in (("cat", (255, 0, 0)), ("dog", (0, 255, 0))):
            (folder / part / name).mkdir(parents=True)
            for index in range(n):
                Image.new("RGB", (6, 4), colour).save(folder / part / name / f"{index}.png")
    Image.new("RGBA", (6, 4), (255, 0, 0, 255)).save(folder / "train" / "cat" / "3.PNG")
    Image.new("L", (6, 4), 128).save(folder / "train" / "dog" / "4.jpg")
    (folder / "train" / "dog" / "notes.txt").write_text("not an image")
    return folder


def test_image_folders(pictures: Path) -> None:
    data = ImageFolder(path=pictures, clients=2, validation_share=0).load()
    check_dealt(data)
    assert (data.name, data.source, data.n_classes) == ("pictures", str(pictures), 2)
    assert data.train.features.shape == (8, 3, 4, 6)
    assert data.train.labels.tolist() == [0, 0, 0, 0, 1, 1, 1, 1]
    assert data.train.features[3, :, 0, 0].tolist() == [255, 0, 0]
    assert data.train.features[7, :, 0, 0].tolist() == [128, 128, 128]
    assert data.test.features[1, :, 0, 0].tolist() == [0, 255, 0]
    grey = ImageFolder(path=pictures, clients=2, channels=1).load()
    assert grey.train.features.shape[1:] == (1, 4, 6)


def test_an_image_folder_may_lack_a_test_set(pictures: Path) -> None:
    (pictures / "test").rename(pictures / "elsewhere")
    data = ImageFolder(path=pictures, clients=2).load()
    assert data.test.features.shape == (0, 3, 4, 6)


def test_images_that_do_not_fit_are_user_errors(pictures: Path) -> None:
    path = pictures / "train" / "dog" / "9.png"
    good = (pictures / "train" / "dog" / "0.png").read_bytes()
    Image.new("RGB", (5, 4)).save(path)
    odd = path.read_bytes()
    Image.new("I;16", (6, 4)).save(path)
    deep = path.read_bytes()
    for content, message in (
        (odd, "is 5x4, the first image is 6x4; resize all images to one size"),
        (deep, "has more than 8 bits a channel; convert it to 8 bits"),
        (b"GIF89a", "is not a readable PNG or JPEG image"),
        (b"", "is not a readable PNG or JPEG image"),
        (good[:50], "replace the file"),
        (good[:45] + b"#" * 20, "replace the file"),
    ):
        path.write_bytes(content)
        with pytest.raises(UserError, match=f"^{path}: .*{message}") as caught:
            ImageFolder(path=pictures).load()
        assert "\n" not in str(caught.value)
    path.unlink()
    (pictures / "test" / "cow").mkdir()
    with pytest.raises(UserError, match="cow: train has no class of this name; rename or remove the folder"):
        ImageFolder(path=pictures).load()
    with pytest.raises(UserError, match=r"has no train/CLASS/\*.png or \*.jpg"):
        ImageFolder(path=pictures / "train").load()


def test_holding_out() -> None:
    kept, held_out = hold_out(100, 0.25, 4)
    assert (len(kept), len(held_out)) == (75, 25)
    assert np.array_equal(np.sort(np.concatenate([kept, held_out])), np.arange(100))
    assert (np.diff(held_out) > 0).all()
    assert len(hold_out(100, 0, 4)[1]) == 0
    with pytest.raises(UserError, match=r"validation_share 0.9 leaves no training samples of 1; use a smaller"):
        hold_out(1, 0.9, 0)


@pytest.mark.parametrize(
    "wrong",
    [
        {"clients": 0},
        {"validation_share": 1},
        {"validation_share": -0.1},
        {"seed": -1},
        {"shards": 2},
        {"partition": "x"},
    ],
    ids=str,
)
def test_models_refuse_what_they_do_not_know(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        Digits.model_validate(wrong)
    with pytest.raises(UserError, match="the data set has no users"):
        Digits(partition="natural").load()
