"""Images as arrays of 8 bits, whatever file, library or camera they come from."""

from __future__ import annotations

import struct
import warnings
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps, UnidentifiedImageError

from narrowcast.platform.errors import UserError

SUFFIXES = (
    *(".png", ".jpg", ".jpeg", ".jpe", ".jfif", ".webp", ".bmp", ".gif", ".tif", ".tiff"),
    *(".ppm", ".pgm", ".pbm", ".pnm"),
)
FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF", "PPM")
"""The formats of Pillow that are read. Its others are rare, and a parser that is not called cannot be attacked."""
MODES = {1: "L", 3: "RGB"}
SixteenBits = Literal["refuse", "high_byte"]
_GREY = ("1", "L")
_SIXTEEN_BITS = ("I;16", "I;16L", "I;16B", "I;16N")
_ORIENTATION = 0x0112
_BAD_EXIF = (SyntaxError, ValueError, TypeError, LookupError, OSError, ArithmeticError, struct.error)
_UNREADABLE = (OSError, ValueError, SyntaxError, TypeError, LookupError, ArithmeticError, zlib.error, struct.error)
"""Errors of Pillow on damaged files."""


@contextmanager
def opened(file: Path | IO[bytes], name: str = "", advice: str = "replace the file") -> Iterator[Image.Image]:
    """Open an image, a file or its content; raise `UserError` if it cannot be read, there or within the block.

    `name` stands in errors for a content's path, and `advice` says what to do.
    """
    name = name or str(file)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # of tags that are damaged, not pixels
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(file, formats=FORMATS) as image:
                yield image
    except UserError as error:
        raise UserError(f"{name}: {error}") from error
    except UnidentifiedImageError as error:
        raise UserError(f"{name}: is not a readable image ({', '.join(FORMATS)}); {advice}") from error
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise UserError(f"{name}: has more pixels than {Image.MAX_IMAGE_PIXELS:,}; {advice}") from error
    except _UNREADABLE as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise UserError(f"{name}: {reason or 'is damaged'}; {advice}") from error


def eight_bit_image(
    image: Image.Image, channels: int | None = None, sixteen_bits: SixteenBits = "refuse"
) -> Image.Image:
    """Return a PIL image of mode L or RGB, upright as its EXIF data say, for 1 or 3 `channels`.

    Without `channels`, grey images stay grey. Transparency is dropped, palettes are resolved, and of several frames the
    first is taken. Raise `UserError` for more than 8 bits a channel unless `sixteen_bits` says what to do.
    """
    image.load()  # which finds damage; otherwise the search for EXIF data in a PNG file does, below
    try:
        turned = image.getexif().get(_ORIENTATION, 1) != 1
    except _BAD_EXIF:
        turned = False
    if turned:
        image = ImageOps.exif_transpose(image)
    if image.mode[0] in "IF":
        image = _of_sixteen_bits(image, sixteen_bits)
    if image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")  # which keeps the palette's colours; Pillow warns otherwise
    mode = MODES[channels] if channels else "L" if image.mode in _GREY else "RGB"
    return image.convert(mode)


def pixels(image: Image.Image, channels: int | None = None, sixteen_bits: SixteenBits = "refuse") -> NDArray[np.uint8]:
    """Return `eight_bit_image` as an array [channels, height, width]."""
    return channels_first(np.asarray(eight_bit_image(image, channels, sixteen_bits)))


def alike(images: Sequence[NDArray[np.uint8]]) -> list[NDArray[np.uint8]]:
    """Return arrays [..., channels, height, width] with as many channels each: grey ones are RGB if others are."""
    most = max((each.shape[-3] for each in images), default=1)
    return [each if each.shape[-3] == most else np.repeat(each, most, axis=-3) for each in images]


def channels_first(values: NDArray[Any]) -> NDArray[Any]:
    """Return an image [height, width] or [height, width, channels] as [channels, height, width]."""
    return values[np.newaxis] if values.ndim == 2 else np.moveaxis(values, -1, 0)


def _of_sixteen_bits(image: Image.Image, sixteen_bits: SixteenBits) -> Image.Image:
    """Return the high bytes of an image of 16 bits; raise `UserError` if that is not wanted, or not its depth."""
    is_png = image.mode == "I" and image.format in ("PNG", "PPM")  # Pillow's mode for 16 bits there
    if image.mode not in _SIXTEEN_BITS and not is_png:
        raise UserError(f"has more than 8 bits a channel (mode {image.mode}); convert it to 8 bits")
    if sixteen_bits == "refuse":
        raise UserError(
            "has more than 8 bits a channel; convert it to 8 bits, or keep the upper 8 of 16 with "
            "data.sixteen_bits=high_byte"
        )
    return Image.fromarray((np.asarray(image).astype(np.int64) >> 8).astype(np.uint8), "L")
