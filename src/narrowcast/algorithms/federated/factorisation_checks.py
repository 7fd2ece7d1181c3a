"""Checks of algorithms that train rows of the item matrix, and the rows that a client is expected to touch."""

from __future__ import annotations

import numpy as np

from narrowcast.platform.contracts import Task
from narrowcast.platform.errors import UserError
from narrowcast.platform.models.matrix_factorisation import MatrixFactorisation
from narrowcast.platform.types import FloatArray, IntArray


def only_factorisation(kind: str, task: Task, instead: str = "fedavg, colr or scolr") -> None:
    """Raise `UserError` if the model is not matrix factorisation."""
    if not isinstance(task.model, MatrixFactorisation):
        raise UserError(f'algorithm.kind = "{kind}" trains matrix_factorisation, not {task.model.kind}; use {instead}')


def check_rank(rank: int, model: object) -> None:
    """Raise `UserError` if the rank exceeds the embedding dimension; other models take the rank that they can."""
    if isinstance(model, MatrixFactorisation) and rank > model.embedding_dim:
        raise UserError(
            f"algorithm.rank = {rank} is above model.embedding_dim = {model.embedding_dim}; "
            f"use a rank of 1 to {model.embedding_dim}, or a larger embedding_dim"
        )


def expected_rows(task: Task, cohort: IntArray) -> FloatArray:
    """Return the expected number of rows that each client of a cohort touches, [C]: positives and drawn negatives."""
    positives = task.data.examples[cohort].astype(np.float64)
    drawn = task.data.n_items * -np.expm1(-positives * task.training.negatives / task.data.n_items)
    return positives + drawn * (1 - positives / task.data.n_items)


def named_rows(task: Task, cohort: IntArray) -> FloatArray:
    """Return the expected number of rows that each client of a cohort names, [C]: all of them, or its positives alone.

    With shared negatives the receiver expects the others.
    """
    if task.training.shared_negatives:
        return np.asarray(task.data.examples[cohort], dtype=np.float64)
    return expected_rows(task, cohort)
