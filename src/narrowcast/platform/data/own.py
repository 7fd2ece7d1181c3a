"""A user's own labelled samples: images as arrays of 8 bits, and the parts, labels, classes and users of a data set.

A format is a subclass of `UserSamples` that reads its files (`formats`). The checks, the held-out samples and the
partition across clients are here, so that they are the same in every format.
"""

from __future__ import annotations

import logging
import struct
import warnings
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps, UnidentifiedImageError
from pydantic import Field

from narrowcast.platform.data.classification import (
    DEFAULT_CLIENTS,
    MOST_CLIENTS,
    Classification,
    Splits,
    hold_out,
)
from narrowcast.platform.data.partition import Natural
from narrowcast.platform.data.samples import Features, Labelled, Samples, Targets, by_name, signature
from narrowcast.platform.errors import UserError
from narrowcast.platform.seeds import generator
from narrowcast.platform.types import IntArray

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
    most = max((image.shape[-3] for image in images), default=1)
    return [image if image.shape[-3] == most else np.repeat(image, most, axis=-3) for image in images]


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


TRAIN, VALIDATION, TEST = "train", "validation", "test"
PART_NAMES = {
    TRAIN: ("train", "training"),
    VALIDATION: ("validation", "valid", "val", "dev"),
    TEST: ("test", "testing"),
}
"""The names that parts of a data set go by in files and folders."""
_MOST_TOKENS = 10**7
_MOST_CLASSES_OF_FRACTIONS = 20
_FEWEST_OF_A_CLASS = 5
_LARGEST_CLASS = 2**53
"""Up to this, floating-point numbers have every whole number."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class UserSplit:
    """Samples as they were read, whose place in messages is `where`.

    Shapes: features [n, ...], or a mapping of such by name; labels [n] or [n, k], numbers or text; users [n], if the
    samples have users.
    """

    where: str
    features: Features
    labels: NDArray[Any]
    users: NDArray[Any] | None = None


class UserSamples(Classification):
    """User-provided samples; the distinct training labels, in ascending order, are the classes.

    Labels that are fractions are numbers to be predicted, in regression; they may be several for each sample. Whole
    numbers stored as fractions are classes if they are at most 20 different ones, each twice or more on average, and
    so are one-hot rows; `targets` decides otherwise. With `tokens`, labels [n, length] are the tokens that follow each
    position.

    Without a test set, `test_share` of the samples is held out, the same for every seed.
    """

    clients: int | None = Field(
        None,
        ge=1,
        le=MOST_CLIENTS,
        description=f"number of clients; null: {DEFAULT_CLIENTS}, or all users with partition natural",
    )
    test_share: float = Field(
        0.2, ge=0, lt=1, description="share of the samples held out for testing if the data have no test set"
    )
    targets: Targets | None = Field(None, description="what is predicted; null: by the type of the labels, see above")
    tokens: bool = Field(
        False, description="whole numbers among the features are tokens, which an embedding takes, not quantities"
    )

    def _samples(
        self, name: str, source: str, parts: Mapping[str, UserSplit], classes: Sequence[str] | None = None
    ) -> Samples:
        """Return the parts `train`, `test` and `validation`, of which the last two may be missing, partitioned.

        `classes` are the names of the labels 0, 1, ... if the format has them. Raise `UserError` if samples cannot be
        used.
        """
        parts = {key: replace(part, labels=_plain(part, tokens=self.tokens)) for key, part in parts.items()}
        train_part = parts[TRAIN]
        targets = self.targets or _targets(train_part, tokens=self.tokens)
        known: NDArray[Any] = np.empty(0)
        if targets == "classes":
            n_columns = train_part.labels.shape[1] if _is_one_hot(train_part.labels) else 0
            known = np.arange(n_columns if classes is None else len(classes))
            if not len(known):
                known = np.unique(_class_labels(train_part))
            if len(known) < 2:
                raise UserError(f"{train_part.where}: all samples are of one class; there have to be two or more")
        ready = {key: Labelled(self._features(part), _labels(part, targets, known)) for key, part in parts.items()}
        _check_alike(ready, parts)
        n_classes = len(known)
        if targets == "tokens":
            texts = (
                array
                for samples in ready.values()
                for array in (samples.labels, *_texts(samples.features, samples.labels))
            )
            n_classes = 1 + max(int(array.max()) for array in texts)
            if n_classes > _MOST_TOKENS:
                raise UserError(
                    f"{train_part.where}: has the token {n_classes - 1}; number tokens from 0, up to {_MOST_TOKENS - 1}"
                )
        train, users = ready[TRAIN], None if train_part.users is None else np.asarray(train_part.users)
        held_out_users = {key: part.users for key, part in parts.items() if key != TRAIN}
        if TEST in ready:
            test = ready[TEST]
        else:
            # Of no seed of the experiment's, so that runs with different seeds are tested on the same samples.
            kept, held_out = hold_out(len(train), self.test_share, 0, "test")
            train, test = train.take(kept), train.take(held_out)
            if users is not None:
                users, held_out_users[TEST] = users[kept], users[held_out]
        clients, train, numbers, ids = self._clients(train, users)
        owners = {key: _owners(part_users, ids) for key, part_users in held_out_users.items()}
        if VALIDATION not in ready:
            return self._dealt(
                name, source, n_classes, train, test, clients=clients, users=numbers, test_users=owners.get(TEST)
            )
        splits = Splits(train, ready[VALIDATION], test)
        return self._indexed(name, source, n_classes, splits, clients=clients, users=numbers, held_out_users=owners)

    def _clients(
        self, train: Labelled, users: NDArray[Any] | None
    ) -> tuple[int, Labelled, IntArray | None, NDArray[Any] | None]:
        """Return the number of clients, the samples that are theirs, and if they are users, each one's client and id.

        Clients are numbered in ascending order of their ids.
        """
        if users is None or not self.partition.by_user:
            return self.clients or DEFAULT_CLIENTS, train, None, None
        ids, numbers = np.unique(users, return_inverse=True)
        if self.clients is None or self.clients == len(ids):
            return len(ids), train, numbers, ids
        if self.clients > len(ids):
            raise UserError(f"data.clients is {self.clients}, but the data have {len(ids)} users; omit it")
        chosen = np.sort(generator(self.seed or 0, "users").choice(len(ids), self.clients, replace=False))
        rows = np.flatnonzero(np.isin(numbers, chosen))
        return self.clients, train.take(rows), np.searchsorted(chosen, numbers[rows]), ids[chosen]

    def _features(self, part: UserSplit) -> Features:
        """Return features as uint8, float32 or, for tokens, int64; those with names as `_named_input` does."""
        if isinstance(part.features, Mapping):
            return {name: _named_input(values, f"{part.where}: {name}") for name, values in part.features.items()}
        features = np.asarray(part.features)
        if features.ndim < 2:
            raise UserError(
                f"{part.where}: features have the shape {list(features.shape)}, expected [samples, features] or more"
            )
        if 0 in features.shape[1:]:
            raise UserError(f"{part.where}: features have the shape {list(features.shape)}, with no values in a sample")
        if self.tokens:
            if features.dtype.kind not in "iu":
                raise UserError(f"{part.where}: features are {features.dtype}, not whole numbers; omit data.tokens")
            return np.ascontiguousarray(features, dtype=np.int64)
        if features.dtype.kind not in "buif":
            raise UserError(f"{part.where}: features are {features.dtype}; convert them to numbers")
        if features.dtype != np.uint8:
            features = _finite(features, part.where)
        return np.array(features, order="C")  # torch needs a writable array


def _named_input(values: NDArray[Any], where: str) -> NDArray[Any]:
    """Return an input with a name: images and bool as they are, other whole numbers as int64, fractions as float32.

    Of uint8, arrays of three or more dimensions are images.
    """
    values = np.asarray(values)
    if values.dtype.kind not in "buif":
        raise UserError(f"{where} is {values.dtype}; convert it to numbers")
    if not values.ndim:
        raise UserError(f"{where} is a single number; give an array [samples, ...]")
    if values.dtype.kind == "f":
        values = _finite(values, where)
    elif values.dtype.kind in "iu" and not (values.dtype == np.uint8 and values.ndim >= 3):
        if values.dtype == np.uint64 and values.max(initial=0) > np.iinfo(np.int64).max:
            raise UserError(f"{where} has whole numbers of 2^63 or more; number what they stand for from 0")
        values = values.astype(np.int64)
    return np.array(values, order="C")  # torch needs a writable array


def _finite(features: NDArray[Any], where: str) -> NDArray[np.float32]:
    with np.errstate(over="ignore"):  # what overflows is found below
        numbers = features.astype(np.float32)
    if len(wrong := np.argwhere(~np.isfinite(numbers.reshape(len(numbers), -1)))):
        raise UserError(
            f"{where}: sample {wrong[0][0]} has a feature that is not a finite float32 number; replace missing values"
        )
    return numbers


def natural_if_users(values: Any) -> Any:
    """Return the values of a section with `partition: natural` if it names users and no partition."""
    named = isinstance(values, Mapping) and values.get("users") is not None and "partition" not in values
    return {**values, "partition": Natural()} if named else values


def with_images_alike(parts: Mapping[str, UserSplit], images: Iterable[str]) -> dict[str, UserSplit]:
    """Return the parts with images of the same channels in all of them; `images` names inputs, "" the one array."""
    converted = dict(parts)
    for name in images:
        arrays = alike([np.asarray(by_name(part.features)[name]) for part in converted.values()])
        for (key, part), array in zip(list(converted.items()), arrays, strict=True):
            converted[key] = replace(part, features={**by_name(part.features), name: array} if name else array)
    return converted


def part_names(candidates: Iterable[str], where: str) -> dict[str, str]:
    """Return which of the candidates are the names of train, validation and test, in any case of letters.

    Raise `UserError` if two names are those of one part.
    """
    by_part: dict[str, str] = {}
    for name in candidates:
        for part in (part for part, names in PART_NAMES.items() if name.casefold() in names):
            if part in by_part:
                raise UserError(f"{where}: {by_part[part]} and {name} are both {part} samples; rename or remove one")
            by_part[part] = name
    return {part: by_part[part] for part in PART_NAMES if part in by_part}


def stacked(values: Sequence[Any], where: str) -> NDArray[Any]:
    """Return arrays of one shape as one array; raise `UserError` that names the first of another shape."""
    arrays = [np.asarray(value) for value in values]
    for sample, array in enumerate(arrays):
        if array.shape != arrays[0].shape:
            raise UserError(
                f"{where}: sample {sample} has the shape {list(array.shape)}, and the first has "
                f"{list(arrays[0].shape)}; bring all to one shape"
            )
    return np.stack(arrays) if arrays else np.empty((0, 0), dtype=np.float32)


def _owners(users: NDArray[Any] | None, ids: NDArray[Any] | None) -> IntArray | None:
    """Return the client of each sample by the ascending ids of clients, -1 for others; None if users are unknown."""
    if users is None or ids is None:
        return None
    positions = np.minimum(np.searchsorted(ids, users), len(ids) - 1)
    return np.where(ids[positions] == users, positions, -1)


def _plain(part: UserSplit, *, tokens: bool) -> NDArray[Any]:
    """Return labels with bytes as text, and [n, 1] as [n]."""
    labels = np.asarray(part.labels)
    if labels.dtype.kind == "S":
        try:
            labels = np.char.decode(labels, "utf-8")
        except UnicodeDecodeError as error:
            raise UserError(f"{part.where}: labels are bytes that are not UTF-8; convert them to text") from error
    return labels[:, 0] if labels.ndim == 2 and labels.shape[1] == 1 and not tokens else labels


def _targets(part: UserSplit, *, tokens: bool) -> Targets:
    """Return what labels without `targets` are; raise `UserError` if whole numbers may be either."""
    labels = part.labels
    if labels.dtype.kind != "f":
        return "tokens" if tokens and labels.ndim == 2 else "classes"
    one_hot = _is_one_hot(labels)
    if not one_hot and (labels.ndim != 1 or not _are_whole(labels)):
        return "numbers"
    distinct = np.unique(labels)
    if not one_hot and len(distinct) > _MOST_CLASSES_OF_FRACTIONS:
        if _FEWEST_OF_A_CLASS * len(distinct) > len(labels) or np.ptp(distinct) + 1 > len(distinct):
            return "numbers"
        raise UserError(
            f"{part.where}: labels are the whole numbers {distinct[0]:g} to {distinct[-1]:g} stored as {labels.dtype}; "
            "set data.targets=classes or data.targets=numbers"
        )
    if not one_hot and 2 * len(distinct) > len(labels):
        return "numbers"
    _log.warning(
        "%s: labels are %s stored as %s, and taken for %d classes; data.targets=numbers predicts them as numbers",
        part.where, "one-hot rows" if one_hot else "whole numbers", labels.dtype,
        labels.shape[1] if one_hot else len(distinct),
    )  # fmt: skip
    return "classes"


def _is_one_hot(labels: NDArray[Any]) -> bool:
    if labels.ndim != 2 or labels.shape[1] < 2 or not len(labels) or labels.dtype.kind not in "buif":
        return False
    return bool(((labels == 0) | (labels == 1)).all() and (labels.sum(axis=1) == 1).all())


def _are_whole(labels: NDArray[Any]) -> bool:
    numbers = labels.astype(np.float64)
    return bool((np.floor(numbers) == numbers).all() and (np.abs(numbers) < _LARGEST_CLASS).all())


def _labels(part: UserSplit, targets: Targets, known: NDArray[Any]) -> NDArray[Any]:
    if targets == "classes":
        return _numbered(part, known)
    return _numbers(part) if targets == "numbers" else _next_tokens(part)


def _checked_labels(part: UserSplit, kinds: str, expected: str, dimensions: tuple[int, ...]) -> NDArray[Any]:
    """Return the labels; raise `UserError` if there are none, or they have another type or shape."""
    labels = part.labels
    for name, values in by_name(part.features).items():
        if not np.ndim(values):
            raise UserError(f"{part.where}: features are a single number; give an array [samples, features] or more")
        if labels.ndim not in dimensions or len(labels) != len(values):
            raise UserError(
                f"{part.where}: {len(values)} samples {f'of {name} ' * bool(name)}have labels of the shape "
                f"{list(labels.shape)}; give {expected} for each sample"
            )
    if len(labels) == 0:
        raise UserError(f"{part.where}: has no samples; leave it out, or fill it")
    if part.users is not None and np.shape(part.users) != labels.shape[:1]:
        raise UserError(
            f"{part.where}: {len(labels)} samples have users of the shape {list(np.shape(part.users))}; "
            "give one user for each sample"
        )
    users = np.asarray(() if part.users is None else part.users)
    unknown = np.isnan(users) if users.dtype.kind == "f" else _is_empty(users)
    for what, wrong in (("label", _is_empty(labels)), ("user", unknown)):
        if len(missing := np.flatnonzero(wrong)):
            raise UserError(f"{part.where}: sample {missing[0]} has no {what}; remove such samples")
    if labels.dtype.kind not in kinds:
        raise UserError(
            f"{part.where}: labels are {labels.dtype}; give {expected} for each sample, or set data.targets"
        )
    return labels


def _is_empty(values: NDArray[Any]) -> NDArray[np.bool_]:
    """Return which of the values are empty text, [n], none for other values."""
    return values == "" if values.dtype.kind in "UT" else np.zeros(len(values), dtype=np.bool_)


def _class_labels(part: UserSplit) -> NDArray[Any]:
    """Return the label of each sample's class, [n]: of one-hot rows the place of the 1."""
    if _is_one_hot(part.labels):
        part = replace(part, labels=part.labels.argmax(axis=1))
    labels = _checked_labels(part, "buifUT", "one class, a whole number or text,", (1,))
    if labels.dtype.kind != "f":
        return labels
    if not _are_whole(labels):
        wrong = next(sample for sample, label in enumerate(labels) if not _are_whole(labels[sample : sample + 1]))
        raise UserError(
            f"{part.where}: label {labels[wrong]} of sample {wrong} is not a whole number, as classes are; correct or "
            "remove such samples, or set data.targets=numbers"
        )
    return labels.astype(np.int64)


def _numbers(part: UserSplit) -> NDArray[np.float32]:
    """Return the numbers to be predicted, [n, k]."""
    labels = _checked_labels(part, "buif", "one number, or several,", (1, 2))
    with np.errstate(over="ignore"):  # what overflows is found below
        numbers = np.array(labels, dtype=np.float32).reshape(len(labels), -1)
    if (wrong := np.argwhere(~np.isfinite(numbers))).size:
        raise UserError(
            f"{part.where}: sample {wrong[0][0]} has a label that is not a finite float32 number; remove such samples"
        )
    return numbers


def _next_tokens(part: UserSplit) -> IntArray:
    """Return the token that follows each position, [n, length]."""
    labels = _checked_labels(part, "ui", "the token that follows each position", (2,)).astype(np.int64)
    texts = _texts(part.features, labels)
    if not texts or min(int(array.min()) for array in (labels, *texts)) < 0:
        got = ", ".join(f"{name} {list(np.shape(values))}".lstrip() for name, values in by_name(part.features).items())
        raise UserError(
            f"{part.where}: labels are tokens {list(labels.shape)} for features {got}; "
            "both have one shape, and tokens are 0 or more"
        )
    return labels


def _texts(features: Features, labels: IntArray) -> list[NDArray[Any]]:
    """Return the features that are tokens of the positions that labels follow: whole numbers of the labels' shape."""
    arrays = map(np.asarray, by_name(features).values())
    return [array for array in arrays if array.shape == labels.shape and array.dtype.kind in "iu"]


def _numbered(part: UserSplit, known: NDArray[Any]) -> IntArray:
    """Return the number of each label's class."""
    labels = _class_labels(part)
    if (labels.dtype.kind in "UT") != (known.dtype.kind in "UT"):
        text, number = f"text, such as {labels[0]!s:.20}", f"numbers, such as {labels[0]}"
        form, training_form = (text, "numbers") if labels.dtype.kind in "UT" else (number, "text")
        raise UserError(
            f"{part.where}: labels are {form}, and those of the training samples {training_form}; write them alike"
        )
    if (wrong := np.flatnonzero(~np.isin(labels, known))).size:
        shown = ", ".join(map(str, known[:10])) + (", ..." if len(known) > 10 else "")
        raise UserError(
            f"{part.where}: label {labels[wrong[0]]} of sample {wrong[0]} is not a class of the training samples "
            f"({shown}); correct or remove such samples"
        )
    return np.searchsorted(known, labels).astype(np.int64)


def _check_alike(ready: Mapping[str, Labelled], parts: Mapping[str, UserSplit]) -> None:
    for key, labelled in ready.items():
        for what in ("features", "labels"):
            got, expected = (_of_a_sample(getattr(samples, what)) for samples in (labelled, ready[TRAIN]))
            if got != expected:
                raise UserError(
                    f"{parts[key].where}: {what} of a sample are {got}, those of the training samples {expected}"
                )


def _of_a_sample(features: Features) -> str:
    return ", ".join(f"{name} {list(shape)} of {np.dtype(of)}".lstrip() for name, shape, of in signature(features))
