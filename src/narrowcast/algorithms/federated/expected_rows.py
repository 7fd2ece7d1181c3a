"""The rows of the item matrix that clients are expected to touch, known before they draw their negatives."""

from __future__ import annotations

import numpy as np

from narrowcast.platform.contracts import Task
from narrowcast.platform.types import FloatArray, IntArray


def expected_rows(task: Task, cohort: IntArray) -> FloatArray:
    """Return the expected number of rows that each client of a cohort touches, [C]: positives and drawn negatives."""
    positives = task.data.examples[cohort].astype(np.float64)
    drawn = task.data.n_items * -np.expm1(-positives * task.training.negatives / task.data.n_items)
    return positives + drawn * (1 - positives / task.data.n_items)
