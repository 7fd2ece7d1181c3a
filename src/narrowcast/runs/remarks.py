"""Settings that a run accepts although they have no effect in it, said before its first round."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from narrowcast.algorithms.codecs.factors import Factored
from narrowcast.experiment import Experiment
from narrowcast.platform.contracts import Task
from narrowcast.platform.data.samples import Samples
from narrowcast.platform.schedule import Buffered
from narrowcast.platform.state import RunState

FEW_SAMPLES = 10
"""Samples of a client below which a share such as the accuracy moves in steps of more than 10 %."""


def remarks(experiment: Experiment, task: Task, state: RunState) -> Iterator[str]:
    """Yield a line for each such setting of a new run, with what happens instead."""
    schedule, clients = experiment.schedule, task.data.n_clients
    if isinstance(schedule, Buffered):
        if schedule.buffer_size > clients:
            yield (
                f"schedule.buffer_size = {schedule.buffer_size}: the data have {clients} clients, so each step uses "
                f"{clients} updates"
            )
        elif schedule.concurrency < schedule.buffer_size:
            yield (
                f"schedule.concurrency = {schedule.concurrency} is below buffer_size = {schedule.buffer_size}: each "
                f"step waits for {-(-schedule.buffer_size // schedule.concurrency)} groups of clients in turn"
            )
    elif "clients_per_round" in experiment.model_fields_set and experiment.clients_per_round > clients:
        yield (
            f"clients_per_round = {experiment.clients_per_round}: the data have {clients} clients, so all of them take "
            "part in each round"
        )
    if idle := int((task.data.examples == 0).sum()):
        yield f"{idle} of {clients} clients have no training samples; use fewer clients, or another partition"
    for split in experiment.evaluate_clients:
        examples = task.data.examples_of(split)
        if left_out := int((examples == 0).sum()):
            yield f"{left_out} of {clients} clients have no {split} samples; metrics over clients leave them out"
        if isinstance(task.data, Samples) and (few := int(np.median(examples[examples > 0]))) < FEW_SAMPLES:
            yield f"evaluate_clients: half of the clients have {few} {split} samples or fewer; their metrics are coarse"
    if experiment.secure.kind not in ("none", "plain") and not experiment.private_seed.own:
        yield (
            f"secure.kind = {experiment.secure.kind}: the clients' secrecy is simulated, since their private draws "
            "follow from seed; set client_seed to a number of their own if somebody who knows seed must not follow them"
        )
    shapes = {name: values.shape for name, values in state.server.items()}
    for place, stage in enumerate(experiment.algorithm.traits.codec):
        if isinstance(stage, Factored) and not stage.factored(shapes):
            yield (
                f"algorithm.codec.{place}: no matrix of the model is smaller as two factors of rank {stage.rank}, so "
                "all are sent whole; lower rank"
            )
