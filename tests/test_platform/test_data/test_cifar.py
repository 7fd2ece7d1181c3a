from pathlib import Path

import numpy as np
import pytest

from labelled_sets import check_dealt
from narrowcast.platform.data.image_sets import CIFAR10
from narrowcast.platform.errors import UserError


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
        (good[:-1], "has 6145 bytes, which is not a multiple of 3073"),
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
