"""User images in folders named after their classes: `train/CLASS/*.png` and `test/CLASS/*.png`, or `CLASS/*.png`."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np
from PIL import Image
from pydantic import Field

from narrowcast.platform.data.classification import DEFAULT_CLIENTS, MOST_CLIENTS, Classification, hold_out
from narrowcast.platform.data.own_files import located
from narrowcast.platform.data.samples import Labelled, Samples
from narrowcast.platform.errors import UserError

SUFFIXES = (".png", ".jpg", ".jpeg")
MODES = {1: "L", 3: "RGB"}


class ImageFolder(Classification):
    """PNG and JPEG images; features [n, channels, height, width] are uint8.

    The folders under `train`, in alphabetical order, are the classes; `test` may lack some of them or be missing. If
    there is neither `train` nor `test`, the folders are the classes themselves, and `test_share` of the images is held
    out, the same for every seed.
    """

    kind: Literal["image_folder"] = "image_folder"
    path: Path = Field(description="folder of train/CLASS and, optionally, test/CLASS, or of CLASS; also a data folder")
    channels: Literal[1, 3] = Field(3, description="1 converts images to grey, 3 to RGB")
    size: int | None = Field(
        None,
        ge=1,
        le=4096,
        description="side in pixels of the square that images are scaled to; null: all have one size",
    )
    test_share: float = Field(
        0.2, ge=0, lt=1, description="share of the images held out for testing if there is neither train nor test"
    )
    clients: int = Field(default=DEFAULT_CLIENTS, ge=1, le=MOST_CLIENTS, description="number of clients")

    def load(self) -> Samples:
        """Return the images partitioned across clients; raise `UserError` that names the first unsuitable file."""
        folder = located(self.path, "path")
        whole = not (folder / "train").is_dir() and not (folder / "test").is_dir()
        train_folder = folder if whole else folder / "train"
        classes = _folders(train_folder)
        train_files = _files(train_folder, classes)
        if not train_files:
            raise UserError(
                f"{folder} has neither train/CLASS/*{' or *'.join(SUFFIXES)} nor CLASS/*{SUFFIXES[0]}; give the folder "
                "that holds train and test, or the folders of the classes"
            )
        test_files = [] if whole else _files(folder / "test", classes)
        with _open(train_files[0][0]) as first:
            width, height = (self.size, self.size) if self.size else first.size
        train, test = (self._read(files, width, height) for files in (train_files, test_files))
        if whole:
            # Of no seed of the experiment's, so that runs with different seeds are tested on the same images.
            kept, held_out = hold_out(len(train), self.test_share, 0, "test")
            train, test = train.take(kept), train.take(held_out)
        return self._dealt(folder.name, str(folder), len(classes), train, test, clients=self.clients)

    def _read(self, files: Sequence[tuple[Path, int]], width: int, height: int) -> Labelled:
        features = np.empty((len(files), self.channels, height, width), dtype=np.uint8)
        for pixels, (path, _) in zip(features, files, strict=True):
            with _open(path) as image:
                if not self.size and image.size != (width, height):
                    got, side = "{}x{}".format(*image.size), min(width, height)
                    raise UserError(
                        f"{path}: is {got}, the first image is {width}x{height}; resize all images to one size, such "
                        f"as {side}x{side} with data.size={side}"
                    )
                if image.mode[0] in "IF":
                    raise UserError(f"{path}: has more than 8 bits a channel; convert it to 8 bits")
                try:
                    converted = image.convert(MODES[self.channels])
                    if self.size:
                        converted = converted.resize((width, height), Image.Resampling.BILINEAR)
                    values = np.asarray(converted)
                except (OSError, ValueError, SyntaxError, zlib.error) as error:
                    raise UserError(f"{path}: {error}; replace the file") from error
            pixels[:] = values.reshape(height, width, self.channels).transpose(2, 0, 1)
        return Labelled(features, np.array([label for _, label in files], dtype=np.int64))


def _open(path: Path) -> Image.Image:
    try:
        return Image.open(path, formats=("PNG", "JPEG"))
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise UserError(f"{path}: is not a readable PNG or JPEG image; replace the file") from error


def _folders(folder: Path) -> list[str]:
    """Return the names of the folders in a folder, without hidden ones."""
    if not folder.is_dir():
        return []
    return sorted(path.name for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))


def _files(folder: Path, classes: Sequence[str]) -> list[tuple[Path, int]]:
    """Return the image files below the folder with their class indices."""
    unknown = sorted(set(_folders(folder)) - set(classes))
    if unknown:
        raise UserError(f"{folder / unknown[0]}: train has no class of this name; rename or remove the folder")
    return [
        (path, label)
        for label, name in enumerate(classes)
        for path in (sorted((folder / name).iterdir()) if (folder / name).is_dir() else ())
        if path.suffix.lower() in SUFFIXES
    ]
