"""Data sets of images: MNIST, Fashion-MNIST, CIFAR-10 and planes of one airline; a user's, in folders of classes."""

from __future__ import annotations

import gzip
import logging
import math
import os
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal
from unicodedata import normalize

import numpy as np
import psutil
from numpy.typing import NDArray
from PIL import Image
from pydantic import Field, field_validator

from narrowcast.platform.data.classification import (
    DEFAULT_CLIENTS,
    MOST_CLIENTS,
    Classification,
    Splits,
    check_labels,
    hold_out,
)
from narrowcast.platform.data.download import find, located, roots
from narrowcast.platform.data.own import (
    SUFFIXES,
    TEST,
    TRAIN,
    VALIDATION,
    SixteenBits,
    channels_first,
    eight_bit_image,
    opened,
    part_names,
)
from narrowcast.platform.data.pickles import ADVICE, UNREADABLE, array_of, read_pickle
from narrowcast.platform.data.samples import Labelled, Samples, rows_of_inputs
from narrowcast.platform.errors import UserError
from narrowcast.platform.storage.disk import readable

UNSIGNED_BYTES = 0x08
N_CLASSES, SIDE = 10, 28
PARTS = {"train": "train", "test": "t10k"}


class _IDX(Classification):
    """Four IDX files as they were published, each plain or gzipped; features [n, 1, 28, 28] are uint8."""

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
            parts[part] = self._kept(_idx_labelled(images, labels))
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


def _idx_labelled(images: Path, labels: Path) -> Labelled:
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


NAME = "cifar-10"
FOLDER = "cifar-10-batches-bin"
CIFAR_TRAIN, CIFAR_TEST = tuple(f"data_batch_{batch}.bin" for batch in range(1, 6)), ("test_batch.bin",)
CIFAR_CLASSES, IMAGE = 10, (3, 32, 32)
RECORD = 1 + 3 * 32 * 32


class CIFAR10(Classification):
    """50,000 training and 10,000 test photographs in 10 classes (Krizhevsky 2009); features [n, 3, 32, 32] are uint8.

    The files are those of the binary version: the Python version is pickled, and unpickling can run code.
    `data_batch_1.bin` etc. may be in the archive's folder `cifar-10-batches-bin` or outside it.
    """

    kind: Literal["cifar-10"] = "cifar-10"
    clients: int = Field(default=DEFAULT_CLIENTS, ge=1, le=MOST_CLIENTS, description="number of clients")

    def load(self) -> Samples:
        """Return the data set partitioned across clients; raise `UserError` if it is missing, malformed or pickled."""
        candidates = (CIFAR_TRAIN[0], f"{FOLDER}/{CIFAR_TRAIN[0]}")
        try:
            folder = find(NAME, candidates)
        except UserError:
            _refuse_pickles()
            raise
        if not (folder / CIFAR_TRAIN[0]).is_file():
            folder /= FOLDER
        train, test = (_cifar_labelled([folder / name for name in names]) for names in (CIFAR_TRAIN, CIFAR_TEST))
        return self._dealt(NAME, str(folder), CIFAR_CLASSES, train, test, clients=self.clients)


def _cifar_labelled(paths: list[Path]) -> Labelled:
    """Read records of one label byte and 3072 pixel bytes: red, green, blue, each row by row."""
    batches = []
    for path in paths:
        if not path.is_file():
            raise UserError(f"{path} does not exist; move {path.parent} away and run: narrowcast data fetch {NAME}")
        values = np.fromfile(path, np.uint8)
        if len(values) == 0 or len(values) % RECORD:
            raise UserError(
                f"{path}: has {len(values)} bytes, which is not a multiple of {RECORD}; download the file again"
            )
        batch = values.reshape(-1, RECORD)
        check_labels(batch[:, 0].astype(np.int64), CIFAR_CLASSES, str(path))
        batches.append(batch)
    records = np.concatenate(batches)
    features = np.ascontiguousarray(records[:, 1:]).reshape(-1, *IMAGE)
    return Labelled(features, records[:, 0].astype(np.int64))


PLANES = "ood-southwest"
PLANE_FILES = tuple(f"southwest_images_new_{part}.pkl" for part in ("train", "test"))
AIRPLANE = 0
"""Class of CIFAR-10."""


class Southwest(Classification):
    """784 training and 196 test photographs of planes of Southwest Airlines, airplanes among the classes of CIFAR-10.

    CIFAR-10 has hardly any: they are the edge cases of `attack: edge_case`. Features [n, 3, 32, 32] are uint8. The
    files are pickles, which are not run.

    Reference: Wang et al., Attack of the Tails, NeurIPS 2020 (arXiv:2007.05084).
    """

    kind: Literal["southwest"] = "southwest"
    clients: int = Field(default=1, ge=1, le=MOST_CLIENTS, description="number of clients")
    validation_share: float = Field(
        default=0.0, ge=0, lt=1, description="share of the training samples held out for validation on the server"
    )

    def load(self) -> Samples:
        """Return the planes partitioned across clients; raise `UserError` if a file is missing or malformed."""
        folder = find(PLANES, PLANE_FILES[:1])
        train, test = (_planes(folder / name) for name in PLANE_FILES)
        return self._dealt(self.kind, str(folder), CIFAR_CLASSES, train, test, clients=self.clients)


def _planes(path: Path) -> Labelled:
    content = read_pickle(path)
    with readable(path, UNREADABLE, ADVICE):
        images = array_of(content)
    height_first = (*IMAGE[1:], IMAGE[0])
    if images.dtype != np.uint8 or images.shape[1:] != height_first or not len(images):
        raise UserError(f"{path}: has {list(images.shape)} {images.dtype}, not images {list(height_first)}; {ADVICE}")
    return Labelled(np.ascontiguousarray(np.moveaxis(images, -1, 1)), np.full(len(images), AIRPLANE))


def _refuse_pickles() -> None:
    for root in roots():
        folder = root / NAME
        pickles = [path for path in (folder / "cifar-10-batches-py", folder / "data_batch_1") if path.exists()]
        if pickles:
            raise UserError(
                f"{pickles[0]} is the Python version of CIFAR-10, which is not read because unpickling can run code; "
                f"put the binary version there ({FOLDER}), or move {folder} away and run: narrowcast data fetch {NAME}"
            )


_OF_SYSTEMS = (
    *("__macosx", "@eadir", "@tmp", "@recycle", "#recycle", "$recycle.bin", "system volume information", "lost+found"),
    *("thumbs.db", "ehthumbs.db", "desktop.ini", "icon\r", "__pycache__"),
)
"""Names of files and folders that operating systems, network storage and archives leave, in lower case."""
_SHOWN = 5
_log = logging.getLogger(__name__)


class ImageFolder(Classification):
    """Images in folders of their classes; features [n, channels, height, width] are uint8.

    The folders under `train`, in alphabetical order, are the classes, with the images in folders below them; `val` and
    `test` may lack some of them or be missing. Without `train`, the folders are the classes themselves, and
    `test_share` of the images is held out, the same for every seed. Images are turned as their EXIF data say. What
    systems leave is not read, and other files are counted.
    """

    kind: Literal["image_folder"] = "image_folder"
    path: Path = Field(
        description="folder of train/CLASS and, optionally, val/CLASS and test/CLASS, or of CLASS; also a data folder"
    )
    channels: Literal[1, 3] = Field(3, description="1 converts images to grey, 3 to RGB")
    size: int | None = Field(
        None,
        ge=1,
        le=4096,
        description="side in pixels of the square that images are scaled to; null: all have one size",
    )
    sixteen_bits: SixteenBits = Field(
        "refuse", description="grey images of 16 bits a pixel: refuse them, or keep the high_byte of each"
    )
    test_share: float = Field(
        0.2, ge=0, lt=1, description="share of the images held out for testing if there is neither train nor test"
    )
    clients: int = Field(default=DEFAULT_CLIENTS, ge=1, le=MOST_CLIENTS, description="number of clients")

    def load(self) -> Samples:
        """Return the images partitioned across clients; raise `UserError` that names the first unsuitable file."""
        folder = located(self.path, "path")
        if not folder.is_dir():
            raise UserError(f"data.path = {folder} is a file; unpack an archive, and give the folder of the classes")
        parts = _parts(folder)
        whole = not parts
        train = _ClassFolders.of(folder if whole else parts[TRAIN])
        classes = train.check(folder)
        held_out = {part: _ClassFolders.of(path) for part, path in parts.items() if part != TRAIN}
        files = {TRAIN: train.labelled(classes)} | {
            part: folders.labelled(classes) for part, folders in held_out.items()
        }
        _say_what_is_read(folder, [train, *held_out.values()], parts)
        with opened(files[TRAIN][0][0]) as first:
            width, height = (self.size, self.size) if self.size else eight_bit_image(first, 1, "high_byte").size
        self._check_memory(folder, sum(map(len, files.values())), width * height)
        ready = {part: self._read(files.get(part, ()), width, height) for part in (TRAIN, VALIDATION, TEST)}
        if whole:
            # Of no seed of the experiment's, so that runs with different seeds are tested on the same images.
            kept, tested = hold_out(len(ready[TRAIN]), self.test_share, 0, "test")
            ready |= {TRAIN: ready[TRAIN].take(kept), TEST: ready[TRAIN].take(tested)}
        name, source, n_classes = folder.name, str(folder), len(classes)
        if VALIDATION not in parts:
            return self._dealt(name, source, n_classes, ready[TRAIN], ready[TEST], clients=self.clients)
        splits = Splits(ready[TRAIN], ready[VALIDATION], ready[TEST])
        return self._indexed(name, source, n_classes, splits, clients=self.clients, users=None, held_out_users={})

    def _check_memory(self, folder: Path, n_images: int, n_pixels: int) -> None:
        needed, memory = n_images * n_pixels * self.channels, psutil.virtual_memory().total
        if needed > memory:
            raise UserError(
                f"{folder}: {n_images} images of {n_pixels} pixels need {needed / 1e9:.0f} GB, and this machine has "
                f"{memory / 1e9:.0f}; scale them with data.size=64"
            )

    def _read(self, files: Sequence[tuple[Path, int]], width: int, height: int) -> Labelled:
        features = np.empty((len(files), self.channels, height, width), dtype=np.uint8)
        frames = Counter[str]()
        for pixels, (path, _) in zip(features, files, strict=True):
            with opened(path) as image:
                if image.format in ("GIF", "TIFF", "WEBP", "PNG") and getattr(image, "n_frames", 1) > 1:
                    frames[path.name] += 1
                converted = eight_bit_image(image, self.channels, self.sixteen_bits)
                if self.size:
                    converted = converted.resize((width, height), Image.Resampling.BILINEAR)
                elif converted.size != (width, height):
                    got, side = "{}x{}".format(*converted.size), min(width, height)
                    raise UserError(
                        f"is {got}, the first image is {width}x{height}; resize all images to one size, such "
                        f"as {side}x{side} with data.size={side}"
                    )
                pixels[:] = channels_first(np.asarray(converted))
        if frames:
            name, _ = frames.most_common(1)[0]
            _log.warning("%d images, such as %s, have several frames; the first is read", frames.total(), name)
        return Labelled(features, np.array([label for _, label in files], dtype=np.int64))


@dataclass
class _ClassFolders:
    """The images in the folders of a folder by class, in the normal form NFC, and what else is there.

    `others` counts the other files of the classes by suffix, `loose` the images that are in no class, and `of_systems`
    the files and folders that systems leave.
    """

    path: Path
    images: dict[str, list[Path]] = field(default_factory=dict)
    others: Counter[str] = field(default_factory=Counter)
    loose: int = 0
    of_systems: int = 0

    @classmethod
    def of(cls, path: Path) -> _ClassFolders:
        """Look for images below a folder; raise `UserError` if two of its folders have one name but for its form."""
        folders = cls(path)
        for entry in sorted(path.iterdir()):
            if _is_of_systems(entry.name):
                folders.of_systems += 1
            elif entry.is_dir():
                name = normalize("NFC", entry.name)
                if name in folders.images:
                    raise UserError(f"{path}: has two folders {name}, which differ in their Unicode form; merge them")
                folders.images[name] = folders.below(entry)
            else:
                folders.loose += entry.suffix.lower() in SUFFIXES
        return folders

    def below(self, folder: Path) -> list[Path]:
        """Return the images below a folder, through links too, in the order of their paths."""
        images, seen = list[Path](), set[str]()
        for inner, folders, names in os.walk(folder, onerror=_refuse, followlinks=True):
            kept = [name for name in folders if not _is_of_systems(name)]
            self.of_systems += len(folders) - len(kept)
            seen.add(os.path.realpath(inner))
            folders[:] = [name for name in kept if os.path.realpath(Path(inner, name)) not in seen]
            for path in (Path(inner, name) for name in names):
                if _is_of_systems(path.name):
                    self.of_systems += 1
                elif path.suffix.lower() in SUFFIXES:
                    images.append(path)
                else:
                    self.others[path.suffix.lower() or "files without suffix"] += 1
        return sorted(images)

    def check(self, source: Path) -> list[str]:
        """Return the classes of the training images; raise `UserError` if there are not two with images or more."""
        if not any(self.images.values()):
            remark = f"; it has {self.loose} images, but in no folder of a class" if self.loose else ""
            remark = remark or (f"; it has only {_counted(self.others)}" if self.others else "")
            raise UserError(
                f"{source} has neither train/CLASS/*.png (or {', '.join(SUFFIXES[1:])}) nor CLASS/*.png{remark}; "
                "give the folder that holds train and test, or the folders of the classes"
            )
        if empty := [name for name, images in self.images.items() if not images]:
            remark = f" (of {len(empty)} such folders)" if len(empty) > 1 else ""
            only = f", and the classes have {_counted(self.others)}, which are not read" if self.others else ""
            raise UserError(f"{self.path / empty[0]}: has no images{remark}{only}; fill the folder or remove it")
        if len(self.images) == 1:
            (name,) = self.images
            raise UserError(
                f"{self.path}: all samples are of one class, {name}; there have to be two or more folders of classes "
                f"(if {name} holds them, give {source / name})"
            )
        self._refuse_parts()
        return list(self.images)

    def _refuse_parts(self) -> None:
        """Raise `UserError` if folders hold the same folders, so that they are parts of a set, not classes."""
        first: dict[str, str] = {}
        shared = Counter[tuple[str, str]]()
        for name, images in self.images.items():
            depth = len((self.path / name).parts)
            inner = {path.parts[depth] if len(path.parts) > depth + 1 else "" for path in images}
            if "" not in inner:
                shared.update(
                    (other, name) for subfolder in inner if (other := first.setdefault(subfolder, name)) != name
                )
        for (earlier, other), number in shared.items():
            if number > 1:
                raise UserError(
                    f"{self.path}: {earlier} and {other} hold {number} folders of the same names, so that they look "
                    "like parts of a data set; name its parts train, val and test, or give the folder of the classes"
                )

    def labelled(self, classes: Sequence[str]) -> list[tuple[Path, int]]:
        """Return the images with their class indices; raise `UserError` for a folder that is not a class."""
        if unknown := [name for name in self.images if name not in classes]:
            raise UserError(f"{self.path / unknown[0]}: train has no class of this name; rename or remove the folder")
        if self.loose and not any(self.images.values()):
            raise UserError(
                f"{self.path}: its {self.loose} images are in no folder of a class; sort them into the classes, or "
                "move the folder away"
            )
        return [(path, label) for label, name in enumerate(classes) for path in self.images.get(name, ())]


def _refuse(error: OSError) -> None:
    raise UserError(f"{error.filename}: {error.strerror}; make it readable, or remove it") from error


def _is_of_systems(name: str) -> bool:
    return name.startswith((".", "~$")) or name.casefold() in _OF_SYSTEMS


def _parts(folder: Path) -> Mapping[str, Path]:
    """Return the folders of train, validation and test, none if the folders are the classes themselves.

    Raise `UserError` if a part has two folders, or if there are parts but no train.
    """
    folders = [path for path in sorted(folder.iterdir()) if path.is_dir() and not _is_of_systems(path.name)]
    names = part_names([path.name for path in folders], str(folder))
    parts = {part: folder / name for part, name in names.items()}
    if TRAIN in parts:
        return parts
    if parts and (len(parts) == len(folders) or (folder / TEST).is_dir()):
        raise UserError(
            f"{folder}: has {' and '.join(path.name for path in parts.values())}, but no train/CLASS/*.png; give the "
            "folder that holds train and test, or the folders of the classes"
        )
    return {}


def _counted(counts: Counter[str]) -> str:
    shown = [f"{number} {suffix}" for suffix, number in counts.most_common(_SHOWN)]
    return ", ".join(shown) + (", ..." if len(counts) > _SHOWN else "")


def _say_what_is_read(folder: Path, class_folders: Sequence[_ClassFolders], parts: Mapping[str, Path]) -> None:
    others, loose = (
        sum((folders.others for folders in class_folders), Counter[str]()),
        sum(folders.loose for folders in class_folders),
    )
    if parts:
        of_parts = set(parts.values())
        inside = [path for path in folder.iterdir() if path not in of_parts and not _is_of_systems(path.name)]
        others.update(f"folder {path.name}" for path in inside if path.is_dir())
        loose += sum(path.suffix.lower() in SUFFIXES for path in inside if path.is_file())
    if loose:
        others["images in no folder of a class"] += loose
    if of_systems := sum(folders.of_systems for folders in class_folders):
        others["files and folders of operating systems"] += of_systems
    types = Counter(
        path.suffix.lower() for folders in class_folders for images in folders.images.values() for path in images
    )
    if len(types) > 1:
        _log.warning("%s: read %s", folder, _counted(types))
    if others:
        _log.warning("%s: left out: %s; images are %s", folder, _counted(others), ", ".join(SUFFIXES))
    if parts and TEST not in parts:
        _log.warning("%s has no folder test, so there are no test samples", folder)
