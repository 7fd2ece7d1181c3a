"""Training items of clients from sums over cohorts that overlap.

The count of an item in a sum is the number of its clients that touched it. Over rounds, counts are a linear system in
what each client touches, with the known participation of clients as its matrix and the fresh negatives as noise; the
difference of two sums whose cohorts differ by one client is its smallest case. Lam et al., Gradient Disaggregation,
ICML 2021 (arXiv:2106.06089), take updates apart in the same way, without even knowing the participation.
"""

from __future__ import annotations

import numpy as np

from narrowcast.algorithms.attacks.row_list_attack import negatives_of_seed
from narrowcast.algorithms.attacks.transcript import RoundTranscript, Transcript
from narrowcast.platform.types import FloatArray, IntArray


def positives_from_sums(transcript: Transcript, clients: IntArray, *, with_seed: bool) -> FloatArray:
    """Return the probability that each item is a training item of each client, [C, N], from counts alone.

    It is the posterior mean of a linear model with a normal error: client u of a round touches item i if it is a
    training item (x_ui), and otherwise if it is a negative (probability q_ui of this round), so that a count is the sum
    of q_ui + (1 - q_ui) x_ui. `with_seed` takes the negatives, and so q_ui, from the public seed.
    """
    n_items = transcript.n_items
    counted = [each for each in transcript.rounds if len(each.total.counts) == n_items]
    if not counted:
        return np.zeros((len(clients), n_items))
    members = np.unique(np.concatenate([each.cohort for each in counted]))
    # Components of a row are counted apart if they are divided apart; the largest count is the nearest to the row's.
    counts = np.array([each.total.counts.max(axis=1) for each in counted])
    took_part = np.array([np.isin(members, each.cohort[each.arrived]) for each in counted], dtype=np.float64)
    touched = np.array([_touched(transcript, each, members, with_seed) for each in counted]) * took_part[:, :, None]
    popular = (transcript.popularity + 0.5) / (transcript.popularity + 0.5).sum()
    prior = np.clip(transcript.examples[members, None] * popular, 1e-3, 0.95)
    matrix = np.moveaxis(took_part[:, :, None] - touched, 2, 0)  # [N, rounds, members]
    left = counts.T - touched.sum(axis=1).T - (matrix @ prior.T[:, :, None])[:, :, 0]
    noise = (touched * (1 - touched)).sum(axis=1).T + 0.05
    spread = matrix * (prior * (1 - prior)).T[:, None, :]
    covariance = spread @ np.swapaxes(matrix, 1, 2) + noise[:, :, None] * np.eye(len(counted))
    posterior = prior + (np.swapaxes(spread, 1, 2) @ np.linalg.solve(covariance, left[:, :, None]))[:, :, 0].T
    scores, places = np.zeros((len(clients), n_items)), np.searchsorted(members, clients)
    there = np.isin(clients, members)
    scores[there] = posterior[places[there]]
    return scores


def _touched(transcript: Transcript, each: RoundTranscript, members: IntArray, with_seed: bool) -> FloatArray:
    """Return the probability that a client draws each item as a negative, if it is none of its own, [members, N]."""
    n_items, drawn = transcript.n_items, transcript.examples[members] * transcript.negatives
    if not with_seed:
        by_draw = -np.expm1(drawn * np.log1p(-1 / n_items))
        return np.repeat(by_draw[:, None], n_items, axis=1)
    again = -np.expm1(drawn * transcript.examples[members] / n_items * np.log1p(-1 / n_items))
    rows = np.repeat(again[:, None], n_items, axis=1)
    for place, client in enumerate(members.tolist()):
        if client in each.cohort:
            rows[place, negatives_of_seed(transcript, each.round_index, client)] = 1.0
    return rows
