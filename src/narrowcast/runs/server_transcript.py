"""A run that is recorded as its server sees it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from narrowcast.algorithms.attacks.transcript import Transcript
from narrowcast.algorithms.attacks.transcript_recorder import TranscriptRecorder
from narrowcast.experiment import Experiment
from narrowcast.platform.data.interactions import Interactions
from narrowcast.platform.errors import UserError
from narrowcast.platform.local_backend import LocalExecutor
from narrowcast.platform.models.matrix_factorisation import MatrixFactorisation
from narrowcast.platform.rounds import rounds
from narrowcast.platform.run import Run
from narrowcast.platform.state import RunState, start
from narrowcast.platform.types import FloatArray


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
    run = replace(run, plan=run.plan.model_copy(update={"chunk_size": 1}))
    told = np.ones(run.task.data.sizes["items"]) if popularity is None else popularity
    recorder = TranscriptRecorder(run.algorithm, run.task, told)
    if (secure := run.algorithm.secure_sums) is None:
        outcomes = rounds(run, recorder.executor(LocalExecutor(run)))
    else:
        key_store = recorder.key_store(secure.key_store())
        executor = recorder.executor(LocalExecutor(run, key_store))
        outcomes = rounds(run, executor, start(run), recorder.secure_rounds(secure.rounds(key_store, run.task)))
    *_, last = outcomes
    assert last.state is not None, "the last round is always kept"
    return recorder.transcript(), last.state
