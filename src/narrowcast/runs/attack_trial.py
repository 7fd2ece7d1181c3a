"""A run as its honest-but-curious server sees it, and all attacks on that, each beside a guess that sees no message."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from narrowcast.algorithms.attacks.inference import (
    alignment,
    attribute_single_rows,
    factors_from_directions,
    factors_from_single_rows,
    pooled_recall,
    positives_from_row_lists,
    positives_from_signs,
    positives_from_sums,
    positives_of,
    read_thin_groups,
    share_rightly_attributed,
)
from narrowcast.algorithms.attacks.network_transcript import NetworkRecorder, NetworkRound
from narrowcast.algorithms.attacks.taps import Recorder
from narrowcast.algorithms.attacks.transcript import Transcript, TranscriptRecorder
from narrowcast.algorithms.secure.schemes import Plain
from narrowcast.experiment import Experiment
from narrowcast.platform.contracts import Task
from narrowcast.platform.data.interactions import Interactions
from narrowcast.platform.data.samples import Samples
from narrowcast.platform.errors import UserError
from narrowcast.platform.models.factorisation import MatrixFactorisation
from narrowcast.platform.models.model import USER_FACTORS
from narrowcast.platform.models.neural_network import NeuralNetwork
from narrowcast.platform.rounds.loop import LocalExecutor, rounds
from narrowcast.platform.rounds.state import Run, RunState, start
from narrowcast.platform.types import FloatArray, IntArray

SMALLEST_GROUP = 3
"""A group of fewer senders is thin."""


def record_transcript(
    experiment: Experiment, data: Interactions | None = None, popularity: FloatArray | None = None
) -> tuple[Transcript, RunState]:
    """Run an experiment of matrix factorisation in this process; return its server's transcript and its last state.

    `data` replaces the experiment's. `popularity` [N] is what attacks are told of the items; none: all alike. The state
    is for the comparison of an inference with the truth. Raise `UserError` for another model.
    """
    if not isinstance(experiment.model, MatrixFactorisation):
        raise UserError(
            f"model.kind = {experiment.model.kind}: transcripts are those of rows of items; use matrix_factorisation"
        )
    task = experiment.task(data or experiment.data_source.load())
    return record_run(Run(experiment, experiment.secured_algorithm, task), popularity)


def record_run(run: Run, popularity: FloatArray | None = None) -> tuple[Transcript, RunState]:
    """Run every round, with clients in chunks of one; return its server's transcript and its last state."""
    told = np.ones(run.task.data.sizes["items"]) if popularity is None else popularity
    recorder = TranscriptRecorder(run.algorithm, run.task, told)
    state = _run_tapped(run, recorder)
    return recorder.transcript(), state


def record_network(experiment: Experiment, data: Samples | None = None) -> tuple[list[NetworkRound], Task]:
    """Run an experiment of a network in this process; return its rounds as its server sees them, and its task.

    `data` replaces the experiment's. Raise `UserError` for another model, and for an algorithm whose server needs more
    than a sum of its clients' changes.
    """
    if not isinstance(experiment.model, NeuralNetwork):
        raise UserError(f"model.kind = {experiment.model.kind}: changes are those of networks; use record_transcript")
    task = experiment.task(data or experiment.data_source.load())
    if experiment.algorithm.sum_layout(task, experiment.clients_per_round) is None:
        raise UserError(
            f"algorithm.kind = {experiment.algorithm.kind}: its server does not add changes up; use fedavg, fedprox, "
            "colr or scolr, without an aggregator"
        )
    recorder = NetworkRecorder(experiment.secured_algorithm, task)
    _run_tapped(Run(experiment, experiment.secured_algorithm, task), recorder)
    return recorder.rounds, task


def _run_tapped(run: Run, recorder: Recorder) -> RunState:
    """Run every round, with clients in chunks of one, while the recorder listens; return the last state."""
    run = replace(run, plan=run.plan.model_copy(update={"chunk_size": 1}))
    if (secure := run.algorithm.secure_sums) is None:
        outcomes = rounds(run, recorder.executor(LocalExecutor(run)))
    else:
        key_store = recorder.key_store(secure.key_store())
        executor = recorder.executor(LocalExecutor(run, key_store))
        outcomes = rounds(run, executor, start(run), recorder.secure_rounds(secure.rounds(key_store, run.task)))
    *_, last = outcomes
    assert last.state is not None, "the last round is always kept"
    return last.state


@dataclass(frozen=True)
class AttackResult:
    """The success of an attack after some rounds, in 0..1, and that of a guess; `cases` is what it was measured on.

    `attack` names the attack and its measure: `positives` are the share of the clients' training items that are found,
    as many being named for each client as it has; `single rows` the share of a sum's rows of one client that are
    rightly attributed; `factors` the mean cosine between a client's private factors and their estimate; `thin
    groups` the share of components of one or two senders that are read.
    """

    attack: str
    rounds: int
    found: float
    chance: float
    cases: int


def attack_run(
    experiment: Experiment, data: Interactions, rounds: Sequence[int], popularity: FloatArray
) -> list[AttackResult]:
    """Run an experiment for each of these numbers of rounds, and apply the attacks that its transcript allows.

    `popularity` [N] is how often other people took each item, which the attacks and the guess know. What clients sent
    under protection, for comparison, is read from the same run without it.
    """
    results: list[AttackResult] = []
    for count in rounds:
        shortened = experiment.model_copy(update={"rounds": count, "evaluate_every": count})
        transcript, state = record_transcript(shortened, data, popularity)
        readable = transcript
        if (secure := experiment.secure).kind not in ("none", "plain"):
            fields = {name: getattr(secure, name) for name in Plain.model_fields if name not in ("kind", "keys")}
            readable, _ = record_transcript(shortened.model_copy(update={"secure": Plain(**fields)}), data)
        owners: dict[tuple[int, int], list[int]] = {}
        for round_ in readable.rounds:
            for upload in round_.readable:
                for item in upload.rows.tolist():
                    owners.setdefault((round_.round_index, item), []).append(upload.client)
        truth = Truth(data, owners, state.participants, np.asarray(state.clients[USER_FACTORS]))
        results += _attacks(transcript, truth)
    return results


@dataclass(frozen=True)
class Truth:
    """The facts that attacks infer: training items, senders by round and item, and private factors of participants."""

    data: Interactions
    owners: Mapping[tuple[int, int], Sequence[int]]
    participants: IntArray
    factors: FloatArray


def _attacks(transcript: Transcript, truth: Truth) -> list[AttackResult]:
    count = len(transcript.rounds)
    seen = np.unique(np.concatenate([round_.cohort for round_ in transcript.rounds]))
    wanted = positives_of(truth.data.indptr, truth.data.items, seen, truth.data.n_items)
    private = truth.factors[np.searchsorted(truth.participants, seen)]
    chance = pooled_recall(np.broadcast_to(transcript.popularity, wanted.shape), wanted)
    results: list[AttackResult] = []

    def positives(name: str, scores: FloatArray) -> None:
        recall = pooled_recall(scores, wanted)
        results.append(AttackResult(f"positives by {name}", count, recall, chance, len(seen)))

    def factors(name: str, estimate: FloatArray) -> None:
        read = np.abs(estimate).sum(axis=1) > 0
        if read.any():
            cosine = alignment(estimate[read], private[read])
            # The control: the same estimates beside other clients' factors, which have a direction in common.
            control = alignment(estimate[read], np.roll(private, 1, axis=0)[read])
            results.append(AttackResult(f"factors by {name}", count, cosine, control, int(read.sum())))

    if any(round_.readable for round_ in transcript.rounds):
        positives("row lists", positives_from_row_lists(transcript, seen, with_seed=False))
        positives("row lists and seed", positives_from_row_lists(transcript, seen, with_seed=True))
        positives("signs", positives_from_signs(transcript, seen))
        factors("directions", factors_from_directions(transcript, seen))
        return results
    positives("sums", positives_from_sums(transcript, seen, with_seed=False))
    positives("sums and seed", positives_from_sums(transcript, seen, with_seed=True))
    guessed = share_rightly_attributed(attribute_single_rows(transcript, "examples"), truth.owners)
    unequal = any(len(np.unique(round_.components, axis=0)) > 1 for round_ in transcript.rounds)
    for by in ("seed", "components") if unequal else ("seed",):
        rows = attribute_single_rows(transcript, by)
        right = share_rightly_attributed(rows, truth.owners)
        results.append(AttackResult(f"single rows by {by}", count, right, guessed, len(rows)))
        factors(f"single rows and {by}", factors_from_single_rows(transcript, rows, seen))
    if unequal:
        thin = read_thin_groups(transcript, SMALLEST_GROUP)
        read = float(np.mean([group.integers is not None for group in thin])) if thin else 0.0
        results.append(AttackResult("thin groups", count, read, 0.0, len(thin)))
    return results
