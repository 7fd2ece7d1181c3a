"""MNIST and Fashion-MNIST, read from the IDX files in which they were published."""

from __future__ import annotations

import gzip
import math
import zlib
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, field_validator

from narrowcast.platform.data.classification import DEFAULT_CLIENTS, MOST_CLIENTS, Classification, check_labels
from narrowcast.platform.data.features import rows_of_inputs
from narrowcast.platform.data.fetch import find
from narrowcast.platform.data.samples import Labelled, Samples
from narrowcast.platform.errors import UserError

UNSIGNED_BYTES = 0x08
N_CLASSES, SIDE = 10, 28
PARTS = {"train": "train", "test": "t10k"}


class _IDX(Classification):
    """Four files, each plain or gzipped; features [n, 1, 28, 28] are uint8."""

    clients: int = Field(default=DEFAULT_CLIENTS, ge=1, le=MOST_CLIENTS, description="number of clients")
    classes: tuple[Annotated[int, Field(ge=0, lt=N_CLASSES)], ...] | None = Field(
        None, min_length=2, description="classes kept, numbered 0, 1, ... in this order; null: all"
    )

    @field_validator("classes")
    @classmethod
    def _each_once(cls, value: tuple[int, ...] | None) -> tuple[int, ...] | None:
        if value is not None and len(set(value)) < len(value):
            raise ValueError(f"names a class twice: {list(value)}; name each once")
        return value

    def _load(self, name: str) -> Samples:
        first = f"{PARTS['train']}-images-idx3-ubyte"
        folder = find(name, (first, f"{first}.gz"))
        parts = {}
        for part, prefix in PARTS.items():
            images = _existing(name, folder, f"{prefix}-images-idx3-ubyte")
            labels = _existing(name, folder, f"{prefix}-labels-idx1-ubyte")
            parts[part] = self._kept(_labelled(images, labels))
        n_classes = N_CLASSES if self.classes is None else len(self.classes)
        return self._dealt(name, str(folder), n_classes, parts["train"], parts["test"], clients=self.clients)

    def _kept(self, samples: Labelled) -> Labelled:
        """Return the samples of the classes that are kept, with their new numbers."""
        if self.classes is None:
            return samples
        numbers = np.full(N_CLASSES, -1)
        numbers[list(self.classes)] = np.arange(len(self.classes))
        rows = np.flatnonzero(numbers[samples.labels] >= 0)
        return Labelled(rows_of_inputs(samples.features, rows), numbers[samples.labels[rows]])


class MNIST(_IDX):
    """60,000 training and 10,000 test images of handwritten digits (LeCun, Cortes and Burges)."""

    kind: Literal["mnist"] = "mnist"

    def load(self) -> Samples:
        """Return the data set partitioned across clients; raise `UserError` if it is missing or malformed."""
        return self._load(self.kind)


class FashionMNIST(_IDX):
    """60,000 training and 10,000 test images of clothes (Xiao, Rasul and Vollgraf 2017)."""

    kind: Literal["fashion-mnist"] = "fashion-mnist"

    def load(self) -> Samples:
        """Return the data set partitioned across clients; raise `UserError` if it is missing or malformed."""
        return self._load(self.kind)


def read_idx(path: Path, dimensions: int) -> NDArray[np.uint8]:
    """Return the array of an IDX file of unsigned bytes, plain or gzipped; raise `UserError` if it is malformed.

    The format: two zero bytes, the type, the number of dimensions, each dimension as a big-endian 32-bit number, then
    the values.
    """
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            head = file.read(4 + 4 * dimensions)
            if head[:4] != bytes((0, 0, UNSIGNED_BYTES, dimensions)) or len(head) < 4 + 4 * dimensions:
                raise UserError(
                    f"{path}: begins with {head[:4].hex() or 'nothing'}, but an IDX file of bytes in {dimensions} "
                    f"dimensions begins with {bytes((0, 0, UNSIGNED_BYTES, dimensions)).hex()}; download the file again"
                )
            shape = np.frombuffer(head, ">u4", offset=4).tolist()
            values = file.read(math.prod(shape) + 1)
    except (OSError, EOFError, zlib.error, OverflowError, MemoryError) as error:
        raise UserError(f"{path}: {str(error) or 'too large'}; download the file again") from error
    if len(values) != math.prod(shape):
        size = f"{len(values)}" if len(values) < math.prod(shape) else f"more than {math.prod(shape)}"
        raise UserError(f"{path}: has {size} values, but its header says {shape}; download the file again")
    return np.frombuffer(values, np.uint8).reshape(shape).copy()  # torch needs a writable array


def _labelled(images: Path, labels: Path) -> Labelled:
    pixels, classes = read_idx(images, 3), read_idx(labels, 1).astype(np.int64)
    if pixels.shape[1:] != (SIDE, SIDE):
        size = "x".join(map(str, pixels.shape[1:]))
        raise UserError(f"{images}: has images of {size}, expected {SIDE}x{SIDE}; download the file again")
    if len(pixels) != len(classes):
        raise UserError(f"{labels}: has {len(classes)} labels for {len(pixels)} images; download both files again")
    check_labels(classes, N_CLASSES, str(labels))
    return Labelled(pixels[:, np.newaxis], classes)


def _existing(name: str, folder: Path, file: str) -> Path:
    for path in (folder / file, folder / f"{file}.gz"):
        if path.is_file():
            return path
    raise UserError(f"{folder} has neither {file} nor {file}.gz; move it away and run: narrowcast data fetch {name}")
