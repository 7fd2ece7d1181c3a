"""Inferences of an honest-but-curious server from a transcript: one attack a function, and measures of attacks.

A measure is the share of the sought entries that an attack finds, to be read beside the share that a guess finds.

Letters: N items, d factors, k columns of an update, C clients that an attack is about, U clients of the task.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from narrowcast.algorithms.attacks.transcript import OpenedSum, RoundTranscript, Transcript
from narrowcast.algorithms.local_training.negatives import SharedNegatives
from narrowcast.algorithms.secure.messages import Messages
from narrowcast.algorithms.secure.participation import RoundKeys
from narrowcast.algorithms.secure.schemes import RingElements
from narrowcast.algorithms.secure.unmasking import recovered
from narrowcast.platform.seeds import stream_keys
from narrowcast.platform.types import BoolArray, FloatArray, IntArray


def expected_hits(scores: FloatArray, wanted: BoolArray) -> float:
    """Return how many of the n wanted entries are among the n of the highest scores; ties count in expectation."""
    n = int(wanted.sum())
    if not n:
        return 0.0
    least = np.partition(scores, -n)[-n]
    above, tied = scores > least, scores == least
    return float((above & wanted).sum() + (n - above.sum()) * (tied & wanted).sum() / tied.sum())


def pooled_recall(scores: FloatArray, wanted: BoolArray) -> float:
    """Return the share of all wanted entries that are found, as `expected_hits` counts; both arguments are [C, N]."""
    hits = sum(expected_hits(*ranking) for ranking in zip(scores, wanted, strict=True))
    return hits / max(int(wanted.sum()), 1)


def chance_recall(wanted: BoolArray) -> float:
    """Return the pooled recall of scores that say nothing; wanted [C, N]."""
    counts = wanted.sum(axis=1).astype(np.float64)
    return float((counts**2).sum() / max(wanted.size // len(wanted) * counts.sum(), 1))


def alignment(estimate: NDArray[np.floating], truth: NDArray[np.floating]) -> float:
    """Return the mean absolute cosine between the rows of two matrices [C, d]."""
    scale = np.linalg.norm(estimate, axis=1) * np.linalg.norm(truth, axis=1)
    return float(np.mean(np.abs((estimate * truth).sum(axis=1)) / np.maximum(scale, 1e-30)))


def positives_of(indptr: IntArray, items: IntArray, clients: IntArray, n_items: int) -> BoolArray:
    """Return the training items of clients, [C, N]."""
    wanted = np.zeros((len(clients), n_items), dtype=bool)
    for index, client in enumerate(clients.tolist()):
        wanted[index, items[indptr[client] : indptr[client + 1]]] = True
    return wanted


_NEVER = -1e9
"""Score of an item that is certainly not a training item: below the scores of all others."""


def factors_from_directions(transcript: Transcript, clients: IntArray) -> FloatArray:
    """Return the direction of each client's private factors, of either sign, [C, d]; zeros for clients not read.

    The change of row i is the sum over steps of -lr g_i p_u (B p_u on the components of a low-rank update), where
    g = sigmoid - label. All rows of a client therefore lie along its private factors p_u, and the estimate is the
    leading direction of all rows that the client sent, in the coordinates of the item factors.

    Reference: Chai et al., Secure Federated Matrix Factorization, IEEE Intelligent Systems 2020, who read ratings from
    gradients.
    """
    factors = np.zeros((len(clients), transcript.rounds[0].item_factors.shape[1]))
    for index, client in enumerate(clients.tolist()):
        if sent := transcript.uploads(client):
            factors[index] = leading_direction([rows_in_space(record, upload.values) for record, upload in sent])
    return factors


def positives_from_signs(transcript: Transcript, clients: IntArray) -> FloatArray:
    """Return how far each row of a client lies on the side of its training items, [C, N], summed over rounds.

    The factor g = sigmoid - label of a row's change is negative for a training item and positive for a sampled
    negative, so that the side of the private factors on which a row lies is its label. Rows that were absent once, as
    only negatives are, score below all others. With several negatives for each training item, the side of the training
    items is the one with fewer rows.

    Reference: Zhao, Mopuri and Bilen, iDLG, arXiv:2001.02610, where the sign of a gradient gives the label.
    """
    scores = np.zeros((len(clients), transcript.n_items))
    for index, client in enumerate(clients.tolist()):
        for _, upload in transcript.uploads(client):
            of_rows = _signed(upload.values.astype(np.float64), int(transcript.examples[client]))
            dense = np.full(transcript.n_items, _NEVER)
            dense[upload.rows] = of_rows / max(np.abs(of_rows).max(), 1e-30)
            scores[index] += dense
    return scores


def rows_in_space(record: RoundTranscript, values: NDArray[np.float32]) -> FloatArray:
    """Return row changes [m, k] as changes of the item factors, [m, d]."""
    rows = values.astype(np.float64)
    return rows if record.basis is None else rows @ record.basis.astype(np.float64)


def leading_direction(changes: list[FloatArray]) -> FloatArray:
    """Return the leading direction of rows [m, d] of several rounds, each round counting alike."""
    moment = sum((rows.T @ rows / max(float((rows**2).sum()), 1e-30) for rows in changes), np.zeros(()))
    return np.asarray(np.linalg.eigh(moment)[1][:, -1])


def _signed(values: FloatArray, positives: int) -> FloatArray:
    """Return the rows' coordinates along their leading direction [m], training items above."""
    along = values @ leading_direction([values])
    above = int((along > 0).sum())
    return along if abs(above - positives) <= abs(len(along) - above - positives) else -along


def negatives_of_seed(transcript: Transcript, round_index: int, client: int) -> BoolArray:
    """Return the items that the public seed makes a client draw first, [N]; false guesses if the stream is private."""
    key = stream_keys(transcript.public_seed, "negatives", round_index, np.array([client]))
    shared = SharedNegatives(transcript.n_items, transcript.negatives, key)
    return shared.likely_rows(int(transcript.examples[client]))


def positives_from_row_lists(transcript: Transcript, clients: IntArray, *, with_seed: bool) -> FloatArray:
    """Return the log-odds that each item is a training item of each client, [C, N], up to a constant.

    A client sends the rows of its training items in every round, and those of the negatives that it drew in this round.
    A row that is absent once is therefore no training item; a row that a uniform draw of negatives would rarely touch,
    and a row outside the negatives that the seed gives where the server can compute them, probably is one. The set of
    uploaded items is the leak that the sampled items of Lin et al., FedRec, IEEE Intelligent Systems 2020, are to hide.

    The prior of an item is its popularity. `with_seed` takes the negatives from the public seed, which is right only
    for runs in which server and clients share that stream.
    """
    n_items = transcript.n_items
    scores = np.repeat(np.log(transcript.popularity + 0.5)[None, :], len(clients), axis=0)
    for index, client in enumerate(clients.tolist()):
        positives = int(transcript.examples[client])
        drawn, free = positives * transcript.negatives, max(n_items - positives, 1)
        by_draw = -np.expm1(drawn * np.log1p(-1 / max(free, 2)))
        again = -np.expm1(drawn * positives / n_items * np.log1p(-1 / max(free, 2)))
        for record, upload in transcript.uploads(client):
            present = np.zeros(n_items, dtype=bool)
            present[upload.rows] = True
            evidence = np.full(n_items, -np.log(by_draw))
            if with_seed:
                likely = negatives_of_seed(transcript, record.round_index, client)
                evidence = np.where(likely, 0.0, -np.log(again))
            scores[index] += np.where(present, evidence, _NEVER)
    return scores


def positives_from_sums(transcript: Transcript, clients: IntArray, *, with_seed: bool) -> FloatArray:
    """Return the probability that each item is a training item of each client, [C, N], from the counts of sums alone.

    The count of an item in a sum is the number of its clients that touched it. Over rounds, counts are a linear system
    in what each client touches, with the known participation of clients as its matrix and the fresh negatives as noise;
    the difference of two sums whose cohorts differ by one client is its smallest case.

    The probability is the posterior mean of a linear model with a normal error: client u of a round touches item i if
    it is a training item (x_ui), and otherwise if it is a negative (probability q_ui of this round), so that a count is
    the sum of q_ui + (1 - q_ui) x_ui. `with_seed` takes the negatives, and so q_ui, from the public seed.

    Reference: Lam et al., Gradient Disaggregation, ICML 2021 (arXiv:2106.06089), who take updates apart in the same
    way, without even knowing the participation.
    """
    n_items = transcript.n_items
    counted = [record for record in transcript.rounds if len(record.total.counts) == n_items]
    if not counted:
        return np.zeros((len(clients), n_items))
    members = np.unique(np.concatenate([record.cohort for record in counted]))
    # Components of a row are counted apart if they are divided apart; the largest count is the nearest to the row's.
    counts = np.array([record.total.counts.max(axis=1) for record in counted])
    took_part = np.array([np.isin(members, record.cohort[record.arrived]) for record in counted], dtype=np.float64)
    touched = np.array([_touched(transcript, record, members, with_seed) for record in counted]) * took_part[:, :, None]
    popular = (transcript.popularity + 0.5) / (transcript.popularity + 0.5).sum()
    prior = np.clip(transcript.examples[members, None] * popular, 1e-3, 0.95)
    matrix = np.moveaxis(took_part[:, :, None] - touched, 2, 0)  # [N, rounds, members]
    left = counts.T - touched.sum(axis=1).T - (matrix @ prior.T[:, :, None])[:, :, 0]
    noise = (touched * (1 - touched)).sum(axis=1).T + 0.05
    spread = matrix * (prior * (1 - prior)).T[:, None, :]
    covariance = spread @ np.swapaxes(matrix, 1, 2) + noise[:, :, None] * np.eye(len(counted))
    posterior = prior + (np.swapaxes(spread, 1, 2) @ np.linalg.solve(covariance, left[:, :, None]))[:, :, 0].T
    scores, columns = np.zeros((len(clients), n_items)), np.searchsorted(members, clients)
    seen = np.isin(clients, members)
    scores[seen] = posterior[columns[seen]]
    return scores


def _touched(transcript: Transcript, record: RoundTranscript, members: IntArray, with_seed: bool) -> FloatArray:
    """Return the probability that a client draws each item, not one of its positives, as a negative, [members, N]."""
    n_items, drawn = transcript.n_items, transcript.examples[members] * transcript.negatives
    if not with_seed:
        by_draw = -np.expm1(drawn * np.log1p(-1 / n_items))
        return np.repeat(by_draw[:, None], n_items, axis=1)
    again = -np.expm1(drawn * transcript.examples[members] / n_items * np.log1p(-1 / n_items))
    rows = np.repeat(again[:, None], n_items, axis=1)
    for index, client in enumerate(members.tolist()):
        if client in record.cohort:
            rows[index, negatives_of_seed(transcript, record.round_index, client)] = 1.0
    return rows


@dataclass(frozen=True)
class SingleRow:
    """A row of a sum with a count of one: its round, its item, and the clients that may have sent it."""

    round_index: int
    item: int
    candidates: IntArray

    @property
    def client(self) -> int | None:
        """The client to which the row is attributed: the only candidate, or None."""
        return int(self.candidates[0]) if len(self.candidates) == 1 else None


Evidence = Literal["seed", "components", "examples"]
"""The evidence by which a row is attributed: the negatives that the public seed gives, if only one client's contain the
item; the components in which the row is not zero, if only one client sent these; or, to compare with, most examples."""


def single_rows(total: OpenedSum) -> IntArray:
    """Return the rows of a sum that one client sent; none if rows are not counted."""
    if len(total.counts) != len(total.values):
        return np.empty(0, dtype=np.int64)
    return np.flatnonzero(total.counts.max(axis=1) == 1)


def attribute_single_rows(transcript: Transcript, by: Evidence) -> list[SingleRow]:
    """Return every single row of the run's sums with the clients that fit; all that arrived if none fits.

    A count of one says that a row of the sum is the row of one client; see `Evidence` for whose it may be.
    """
    attributed = []
    for record in transcript.rounds:
        total = record.total
        if len(items := single_rows(total)):
            fits = {"seed": _by_seed, "components": _by_components, "examples": _by_examples}[by](transcript, record)
            for item in items.tolist():
                candidates = record.cohort[record.arrived & fits(item)]
                attributed.append(
                    SingleRow(
                        record.round_index, item, candidates if len(candidates) else record.cohort[record.arrived]
                    )
                )
    return attributed


def share_rightly_attributed(rows: list[SingleRow], owners: Mapping[tuple[int, int], Sequence[int]]) -> float:
    """Return the share of rows whose sender is guessed, one candidate at random; `owners` by round and item."""
    hits = [np.isin(row.candidates, owners.get((row.round_index, row.item), ())).mean() for row in rows]
    return float(np.mean(hits)) if hits else 0.0


def factors_from_single_rows(transcript: Transcript, rows: list[SingleRow], clients: IntArray) -> FloatArray:
    """Return the direction of the rows attributed to each client, of either sign, [C, d]; zeros for clients without.

    It is that of the client's private factors, as in `factors_from_directions`.
    """
    rounds = {record.round_index: record for record in transcript.rounds}
    factors = np.zeros((len(clients), transcript.rounds[0].item_factors.shape[1]))
    for index, client in enumerate(clients.tolist()):
        changes = [
            rows_in_space(rounds[row.round_index], rounds[row.round_index].total.values[[row.item]])
            for row in rows
            if row.client == client
        ]
        if changes:
            factors[index] = leading_direction(changes)
    return factors


Fits = Callable[[int], BoolArray]
"""Returns the clients of a cohort [C] that may have sent the row of an item."""


def _by_seed(transcript: Transcript, record: RoundTranscript) -> Fits:
    likely = np.array([negatives_of_seed(transcript, record.round_index, client) for client in record.cohort.tolist()])
    return lambda item: likely[:, item]


def _by_components(transcript: Transcript, record: RoundTranscript) -> Fits:
    del transcript
    values = record.total.values
    opened = (values != 0).any(axis=0)
    return lambda item: np.asarray((record.components == (values[item] != 0))[:, opened].all(axis=1))


def _by_examples(transcript: Transcript, record: RoundTranscript) -> Fits:
    most = np.arange(len(record.cohort)) == transcript.examples[record.cohort].argmax()
    return lambda _: most


@dataclass(frozen=True)
class ThinGroup:
    """A group of entries that few of the arrived clients sent, and their sum's integers if the server could read it."""

    round_index: int
    group: int
    clients: tuple[int, ...]
    integers: IntArray | None


def read_thin_groups(transcript: Transcript, least_senders: int) -> list[ThinGroup]:
    """Return the groups that fewer arrived clients sent, with their integers where an attempt to unmask them succeeds.

    A pair masks the components that both of its clients send. A component of one sender therefore carries the own mask
    of this client alone, and what survivors reveal of its mask of other components must not open it. The attempt uses
    all that the survivors reveal, and succeeds if all values are within what that many clients can send, as hardly any
    are under a mask.
    """
    read: list[ThinGroup] = []
    for record in transcript.rounds:
        if record.keys is None or transcript.messages is None or "reveal" not in record.told:
            continue
        messages = record.keys.messages(transcript.messages)
        senders: dict[int, list[int]] = {}
        for upload in record.protected:
            for group in upload.groups:
                senders.setdefault(group, []).append(upload.client)
        thin = {group: clients for group, clients in senders.items() if len(clients) < least_senders}
        masks = _known_masks(record, messages, record.keys) if thin else []
        read += [
            ThinGroup(record.round_index, group, tuple(clients), _read(record, group, clients, messages, masks))
            for group, clients in sorted(thin.items())
        ]
    return read


def _known_masks(record: RoundTranscript, messages: Messages, keys: RoundKeys) -> list[list[RingElements]]:
    """Return the masks of all groups that the revealed secrets give, in each way in which they might be made.

    They are those of the protocol, and those of a client that would draw its own mask of all groups from one seed.
    """
    survivors = frozenset(upload.client for upload in record.protected)
    recovery = recovered(messages, record.round_index, keys, survivors, record.told["reveal"])
    layout, at_once = messages.mask_layout(), messages.mask_layout().zeros()
    for client, seeds in recovery.own_seeds.items():
        layout.add(at_once, seeds.shared, recovery.rule.sent[client])
    return [recovery.masks(layout, keys.advertised), [elements.astype(np.uint64) for elements in at_once]]


def _read(
    record: RoundTranscript, position: int, clients: list[int], messages: Messages, masks: list[list[RingElements]]
) -> IntArray | None:
    group, most = messages.layout.groups[position], len(clients) * 2 ** (messages.scheme.bits - 1)
    sent = [upload.groups[position] for upload in record.protected if upload.client in clients]
    total = np.add.reduce(sent)
    for known in masks:
        integers = messages.scheme.open_sum(group, total - known[position], messages.fixed_point)
        if (np.abs(integers[: group.n_values]) <= most).all() and integers[: group.n_values].any():
            return integers
    return None
