"""Training items of a client from the lists of rows that it sends, over rounds.

A client sends the rows of its training items in every round, and those of the negatives that it drew in this round. A
row that is absent once is therefore no training item; a row that a uniform draw of negatives would rarely touch, and a
row outside the negatives that the seed gives where the server can compute them, probably is one. The set of uploaded
items is the leak that the sampled items of Lin et al., FedRec, IEEE Intelligent Systems 2020, are to hide.
"""

from __future__ import annotations

import numpy as np

from narrowcast.algorithms.attacks.transcript import Transcript
from narrowcast.algorithms.local_training.batches import SharedNegatives
from narrowcast.platform.seeds import stream_keys
from narrowcast.platform.types import BoolArray, FloatArray, IntArray

_NEVER = -1e9


def negatives_of_seed(transcript: Transcript, round_index: int, client: int) -> BoolArray:
    """Return the items that the public seed makes a client draw first, [N]; false guesses if the stream is private."""
    key = stream_keys(transcript.public_seed, "negatives", round_index, np.array([client]))
    shared = SharedNegatives(transcript.n_items, transcript.negatives, key)
    return shared.likely_rows(int(transcript.examples[client]))


def positives_from_row_lists(transcript: Transcript, clients: IntArray, *, with_seed: bool) -> FloatArray:
    """Return the log-odds that each item is a training item of each client, [C, N], up to a constant.

    The prior of an item is its popularity. `with_seed` takes the negatives from the
    public seed, which is right only for runs in which server and clients share that stream.
    """
    n_items = transcript.n_items
    scores = np.repeat(np.log(transcript.popularity + 0.5)[None, :], len(clients), axis=0)
    for place, client in enumerate(clients.tolist()):
        positives = int(transcript.examples[client])
        drawn, free = positives * transcript.negatives, max(n_items - positives, 1)
        by_draw = -np.expm1(drawn * np.log1p(-1 / max(free, 2)))
        again = -np.expm1(drawn * positives / n_items * np.log1p(-1 / max(free, 2)))
        for each, upload in transcript.uploads(client):
            present = np.zeros(n_items, dtype=bool)
            present[upload.rows] = True
            evidence = np.full(n_items, -np.log(by_draw))
            if with_seed:
                likely = negatives_of_seed(transcript, each.round_index, client)
                evidence = np.where(likely, 0.0, -np.log(again))
            scores[place] += np.where(present, evidence, _NEVER)
    return scores
