import gzip
import hashlib
import struct
from pathlib import Path

import numpy as np
import pytest

from labelled_sets import check_dealt
from narrowcast.platform.data.image_sets import MNIST, FashionMNIST, read_idx
from narrowcast.platform.errors import UserError
from small_sets import idx, write_idx


@pytest.mark.data("mnist", "fashion-mnist")
@pytest.mark.parametrize(
    ("model", "name", "pixels"), [(MNIST, "mnist", 33.318421), (FashionMNIST, "fashion-mnist", 72.940352)]
)
def test_idx_sets(model: type[MNIST | FashionMNIST], name: str, pixels: float) -> None:
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


def test_a_million_clients_share_the_same_samples(root: Path) -> None:
    write_idx(root / "mnist", train=6000)
    data = MNIST(clients=1_000_000).load()
    check_dealt(data)
    assert data.n_clients == 1_000_000
    assert data.order.nbytes + data.indptr.nbytes < 10e6


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


@pytest.mark.usefixtures("tiny")
def test_some_classes_are_kept_and_numbered_in_their_order() -> None:
    data = MNIST(clients=2, validation_share=0, classes=(5, 1, 3)).load()
    check_dealt(data)
    assert (data.n_classes, data.train.labels.tolist(), data.test.labels.tolist()) == (3, [1, 2, 0], [1, 2])
    assert data.train.features[0].tobytes() == MNIST(validation_share=0).load().train.features[1].tobytes()
    with pytest.raises(UserError, match=r"names a class twice: \[1, 1\]; name each once"):
        MNIST(classes=(1, 1))


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
