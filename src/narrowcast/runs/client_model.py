"""The model that one client of a finished run uses, from the state in the run's last checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from narrowcast.experiment import Experiment
from narrowcast.platform.compiled import one_thread
from narrowcast.platform.data.samples import Samples
from narrowcast.platform.data.soundness import load_checked
from narrowcast.platform.errors import UserError
from narrowcast.platform.models.forward_pass import OWN_LAYERS
from narrowcast.platform.models.neural_network import NeuralNetwork
from narrowcast.platform.rounds.evaluation import model_of_client
from narrowcast.platform.rounds.loop import LocalBackend
from narrowcast.platform.rounds.state import LiveState, Run, RunState
from narrowcast.platform.storage.checkpoint import NoCheckpointError, load_checkpoint
from narrowcast.runs.folder import checkpoint_place
from narrowcast.runs.recordable import check_digest, check_same_data


@one_thread()
def client_module(folder: Path, experiment: Experiment, rounds: int, client: int) -> Any:
    """Return the torch module that a client uses after `rounds` rounds, in evaluation mode, as it was measured.

    Some methods make it by training on the client's samples. Raise `UserError` if clients have no network of their own,
    if there is no such client, and if the last checkpoint, which alone has what clients keep, is not there any more.
    """
    name, model, algorithm = folder.name, experiment.model, experiment.algorithm
    if not isinstance(model, NeuralNetwork):
        raise UserError(f"{name}: clients of {model.kind} keep factors of their own, and no model; leave out client")
    if not (algorithm.personalises or model.client_parameters):
        raise UserError(f"{name}: clients of {algorithm.kind} use the global model; leave out client")
    data = load_checked(experiment.data_source)
    if not 0 <= client < (n_clients := data.n_clients):
        raise UserError(f"{name} has no client {client}; it has {n_clients}: give one of 0 to {n_clients - 1}")
    run = Run(experiment, experiment.secured_algorithm, experiment.task(data, folder))
    LocalBackend().check(run)
    state = _last_state(folder, experiment, run, rounds)
    network, parameters, private = model_of_client(LiveState.of(run, state), client)
    assert isinstance(network, NeuralNetwork) and isinstance(data, Samples)
    if OWN_LAYERS in private:
        layers = model.own_layers_of(private[OWN_LAYERS][np.newaxis], data)
        parameters = {**parameters, **{layer: values[0] for layer, values in layers.items()}}
    return network.loaded(parameters, data)


def _last_state(folder: Path, experiment: Experiment, run: Run, rounds: int) -> RunState:
    """Return the state after the last round, which is that of this experiment and its data."""
    checkpoints = checkpoint_place(experiment, folder)
    advice = "what clients keep is nowhere else: run the experiment again"
    try:
        kept = load_checkpoint(checkpoints, RunState)
    except NoCheckpointError as error:
        raise UserError(f"{folder.name} has no checkpoint in {checkpoints} any more; {advice}") from error
    check_digest(folder, kept, experiment)
    check_same_data(folder, kept, run.task.data)
    if kept.state.round_index != rounds:
        last = kept.state.round_index
        raise UserError(f"{folder.name} has {rounds} rounds, and its last checkpoint is of round {last}; {advice}")
    return kept.state
