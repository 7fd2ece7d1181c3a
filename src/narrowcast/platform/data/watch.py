"""Exercises by the sensors of a smartwatch: windows of movement, whose subjects are the clients.

Reference: Burns et al., Shoulder physiotherapy exercise recognition: machine learning the inertial signals from a
smartwatch, Physiological Measurement 2018 (arXiv:1802.01489); the part of its data that comes with seglearn.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray
from pydantic import Field

from narrowcast.platform.data.classification import MOST_CLIENTS, Classification, Splits, cuts_in_time
from narrowcast.platform.data.download import find
from narrowcast.platform.data.partition import Natural, Partition
from narrowcast.platform.data.pickles import ADVICE, UNREADABLE, array_of, object_of, read_pickle
from narrowcast.platform.data.samples import Labelled, Samples
from narrowcast.platform.errors import UserError
from narrowcast.platform.seeds import generator
from narrowcast.platform.storage.disk import readable
from narrowcast.platform.types import IntArray

FILE = "watch_dataset.npy"
SENSORS = 6
"""Acceleration and rotation along three axes, at 50 Hz."""
_HEADER = b"\x93NUMPY\x01\x00v\x00{'descr': '|O', 'fortran_order': False, 'shape': (), }"
_HEADER_BYTES = 128
_LEAST_SCALE = 1e-6


@dataclass(frozen=True)
class Recordings:
    """Recordings of one exercise by one arm of one subject each: sensors [length, 6], classes and subjects [n]."""

    sensors: list[NDArray[np.float64]]
    classes: IntArray
    subjects: IntArray
    n_classes: int


class _Part(NamedTuple):
    """Windows [n, 6, window], and the exercise and the subject of each, [n]."""

    windows: NDArray[np.float64]
    classes: IntArray
    subjects: IntArray


class WatchExercises(Classification):
    """Seven exercises of the shoulder by ten subjects, in windows of a watch's six sensors.

    Features [n, 6, window] are float32 with mean 0 and variance 1 over the training windows of all subjects; labels are
    the exercises. Each recording is cut in time: the last `test_share` is for testing, the last `validation_share` of
    the rest for validation, and no window crosses a cut. A subject is a client unless `partition` says otherwise; its
    two arms, and its exercises, are in each part.
    """

    kind: Literal["watch-exercises"] = "watch-exercises"
    clients: int | None = Field(
        None, ge=1, le=MOST_CLIENTS, description="number of clients; null: all ten subjects with partition natural"
    )
    partition: Partition = Field(default=Natural(), description="distribution of the training windows across clients")
    window: int = Field(100, ge=1, description="readings of a window, 50 a second")
    stride: int = Field(50, ge=1, description="readings between the starts of windows")
    test_share: float = Field(0.2, gt=0, lt=1, description="share of each recording held out for testing")

    def load(self) -> Samples:
        """Return the windows partitioned across clients; raise `UserError` if the file is missing or malformed."""
        path = find(self.kind, (FILE,)) / FILE
        recordings = read_recordings(path)
        known = np.unique(recordings.subjects)
        clients = len(known) if self.clients is None else self.clients
        if self.partition.by_user:
            if clients > len(known):
                raise UserError(
                    f"{self.kind} has {len(known)} subjects, but {clients} clients are requested; lower clients"
                )
            known = np.sort(generator(self.seed or 0, "subjects").choice(known, clients, replace=False))
        kept = np.flatnonzero(np.isin(recordings.subjects, known))
        parts = [self._part(recordings, kept, part) for part in range(3)]
        train = parts[0].windows
        if not len(train) or not len(parts[2].windows):
            raise UserError(
                f"{self.kind}: no recording has a window of {self.window} readings to train on, or to test on; "
                "lower window"
            )
        mean = train.mean(axis=(0, 2), keepdims=True)
        scale = np.maximum(train.std(axis=(0, 2), keepdims=True), _LEAST_SCALE)
        splits = [Labelled(((part.windows - mean) / scale).astype(np.float32), part.classes) for part in parts]
        users, validation_users, test_users = (np.searchsorted(known, part.subjects) for part in parts)
        return self._indexed(
            self.kind,
            str(path),
            recordings.n_classes,
            Splits(*splits),
            clients=clients,
            users=users,
            held_out_users={"validation": validation_users, "test": test_users},
        )

    def _part(self, recordings: Recordings, kept: IntArray, part: int) -> _Part:
        """Return a part, 0 to 2, of the kept recordings."""
        windows, counts = [np.empty((0, SENSORS, self.window))], []
        for recording in kept:
            sensors = recordings.sensors[recording]
            cuts = cuts_in_time(len(sensors), self.validation_share, self.test_share)
            inside = sensors[cuts[part] : cuts[part + 1]]
            if fits := len(inside) >= self.window:
                windows.append(sliding_window_view(inside, self.window, axis=0)[:: self.stride])
            counts.append(len(windows[-1]) if fits else 0)
        classes, subjects = (np.repeat(values[kept], counts) for values in (recordings.classes, recordings.subjects))
        return _Part(np.concatenate(windows), classes, subjects)


def read_recordings(path: Path) -> Recordings:
    """Return the recordings in a file of `numpy.save`, whose pickle is not run.

    Raise `UserError` if it is malformed.
    """
    content = read_pickle(path, _HEADER.ljust(_HEADER_BYTES - 1) + b"\n")
    with readable(path, UNREADABLE, ADVICE):
        named: dict[str, Any] = object_of(content)
        sensors = [array_of(values) for values in named["X"]]
        classes, subjects = array_of(named["y"]), array_of(named["subject"])
        n_classes = len(named["y_labels"])
        if sum(values.nbytes for values in sensors) > path.stat().st_size:  # one array may be named many times
            raise UserError(f"{path}: has more readings than bytes; {ADVICE}")
        if not sensors or not (classes.shape == subjects.shape == (len(sensors),)):
            raise UserError(f"{path}: has {len(sensors)} recordings, but not a class and a subject of each; {ADVICE}")
        if any(values.ndim != 2 or values.shape[1] != SENSORS for values in sensors):
            raise UserError(f"{path}: a recording has not {SENSORS} sensors; {ADVICE}")
        if not all(np.isfinite(values).all() for values in sensors):
            raise UserError(f"{path}: has a reading that is not finite; {ADVICE}")
        if not ((classes >= 0) & (classes < n_classes)).all():
            raise UserError(f"{path}: has a class that is not one of 0 to {n_classes - 1}; {ADVICE}")
        return Recordings(
            [np.ascontiguousarray(values, dtype=np.float64) for values in sensors],
            classes.astype(np.int64),
            subjects.astype(np.int64),
            n_classes,
        )
