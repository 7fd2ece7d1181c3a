"""A client's private factors and its labels from the directions of the rows that it sends.

The change of row i is the sum over steps of -lr g_i p_u (B p_u on the components of a low-rank update), where
g = sigmoid - label is negative for a training item and positive for a sampled negative. All rows of a client therefore
lie along its private factors p_u, and the side on which a row lies is its label. Chai et al., Secure Federated Matrix
Factorization, IEEE Intelligent Systems 2020, read ratings from gradients; the sign of a gradient gives the label in
Zhao, Mopuri and Bilen, iDLG, arXiv:2001.02610.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from narrowcast.algorithms.attacks.transcript import RoundTranscript, Transcript
from narrowcast.platform.types import FloatArray, IntArray


def factors_from_directions(transcript: Transcript, clients: IntArray) -> FloatArray:
    """Return the direction of each client's private factors, of either sign, [C, d]; zeros for clients not read.

    It is the leading direction of all rows that the client sent, in the coordinates of the item factors.
    """
    found = np.zeros((len(clients), transcript.rounds[0].item_factors.shape[1]))
    for place, client in enumerate(clients.tolist()):
        if sent := transcript.uploads(client):
            found[place] = leading_direction([rows_in_space(each, upload.values) for each, upload in sent])
    return found


def positives_from_signs(transcript: Transcript, clients: IntArray) -> FloatArray:
    """Return how far each row of a client lies on the side of its training items, [C, N], summed over rounds.

    Rows that were absent once, as only negatives are, score below all others. With several negatives for each training
    item, the side of the training items is the one with fewer rows.
    """
    scores = np.zeros((len(clients), transcript.n_items))
    for place, client in enumerate(clients.tolist()):
        for _, upload in transcript.uploads(client):
            of_rows = _signed(upload.values.astype(np.float64), int(transcript.examples[client]))
            dense = np.full(transcript.n_items, -1e9)
            dense[upload.rows] = of_rows / max(np.abs(of_rows).max(), 1e-30)
            scores[place] += dense
    return scores


def rows_in_space(each: RoundTranscript, values: NDArray[np.float32]) -> FloatArray:
    """Return row changes [m, k] as changes of the item factors, [m, d]."""
    rows = values.astype(np.float64)
    return rows if each.basis is None else rows @ each.basis.astype(np.float64)


def leading_direction(changes: list[FloatArray]) -> FloatArray:
    """Return the leading direction of rows [m, d] of several rounds, each round counting alike."""
    moment = sum((rows.T @ rows / max(float((rows**2).sum()), 1e-30) for rows in changes), np.zeros(()))
    return np.asarray(np.linalg.eigh(moment)[1][:, -1])


def _signed(values: FloatArray, positives: int) -> FloatArray:
    """Return the rows' places along their leading direction [m], training items above."""
    along = values @ leading_direction([values])
    above = int((along > 0).sum())
    return along if abs(above - positives) <= abs(len(along) - above - positives) else -along
