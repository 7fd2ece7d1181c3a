"""CIFAR-10, read from the binary version of its archive; the Python version is pickled, and unpickling can run code."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import Field

from narrowcast.platform.data.classification import DEFAULT_CLIENTS, MOST_CLIENTS, Classification, check_labels
from narrowcast.platform.data.fetch import find, roots
from narrowcast.platform.data.samples import Labelled, Samples
from narrowcast.platform.errors import UserError

NAME = "cifar-10"
FOLDER = "cifar-10-batches-bin"
TRAIN, TEST = tuple(f"data_batch_{batch}.bin" for batch in range(1, 6)), ("test_batch.bin",)
N_CLASSES, IMAGE = 10, (3, 32, 32)
RECORD = 1 + 3 * 32 * 32


class CIFAR10(Classification):
    """50,000 training and 10,000 test photographs in 10 classes (Krizhevsky 2009); features [n, 3, 32, 32] are uint8.

    The files `data_batch_1.bin` etc. may be in the archive's folder `cifar-10-batches-bin` or outside it.
    """

    kind: Literal["cifar-10"] = "cifar-10"
    clients: int = Field(default=DEFAULT_CLIENTS, ge=1, le=MOST_CLIENTS, description="number of clients")

    def load(self) -> Samples:
        """Return the data set partitioned across clients; raise `UserError` if it is missing, malformed or pickled."""
        candidates = (TRAIN[0], f"{FOLDER}/{TRAIN[0]}")
        try:
            folder = find(NAME, candidates)
        except UserError:
            _refuse_pickles()
            raise
        if not (folder / TRAIN[0]).is_file():
            folder /= FOLDER
        train, test = (_labelled([folder / name for name in names]) for names in (TRAIN, TEST))
        return self._dealt(NAME, str(folder), N_CLASSES, train, test, clients=self.clients)


def _labelled(paths: list[Path]) -> Labelled:
    """Read records of one label byte and 3072 pixel bytes: red, green, blue, each row by row."""
    batches = []
    for path in paths:
        if not path.is_file():
            raise UserError(f"{path} does not exist; move {path.parent} away and run: narrowcast data fetch {NAME}")
        values = np.fromfile(path, np.uint8)
        if len(values) == 0 or len(values) % RECORD:
            raise UserError(f"{path}: has {len(values)} bytes, no multiple of {RECORD}; download the file again")
        batch = values.reshape(-1, RECORD)
        check_labels(batch[:, 0].astype(np.int64), N_CLASSES, str(path))
        batches.append(batch)
    records = np.concatenate(batches)
    features = np.ascontiguousarray(records[:, 1:]).reshape(-1, *IMAGE)
    return Labelled(features, records[:, 0].astype(np.int64))


def _refuse_pickles() -> None:
    for root in roots():
        folder = root / NAME
        pickles = [path for path in (folder / "cifar-10-batches-py", folder / "data_batch_1") if path.exists()]
        if pickles:
            raise UserError(
                f"{pickles[0]} is the Python version of CIFAR-10, which is not read because unpickling can run code; "
                f"put the binary version there ({FOLDER}), or move {folder} away and run: narrowcast data fetch {NAME}"
            )
