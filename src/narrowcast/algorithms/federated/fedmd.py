"""FedMD: clients with models of their own learn each other's outputs for public samples, which are all that is sent.

Reference: Li and Wang, FedMD: Heterogenous Federated Learning via Model Distillation, NeurIPS 2019 workshop on
federated learning (arXiv:1910.03581), Algorithm 1, and its code.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from typing import Annotated, Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field

from narrowcast.algorithms.client.client_pass import Arrived, ClientPass, Contribution
from narrowcast.algorithms.client.sums import TensorSum, Weights, tensor_weights
from narrowcast.algorithms.client.uploads import zeros_of_clients
from narrowcast.algorithms.codecs.chain import refuse_stateful
from narrowcast.algorithms.codecs.messages import DensePayload, dense_wire_bits
from narrowcast.algorithms.federated.unit_slices import affordable_widths, multiplications
from narrowcast.platform.config.catalog import LOSSES, MODELS
from narrowcast.platform.config.kinds import kind_of
from narrowcast.platform.contracts import Broadcast, OwnModel, Task
from narrowcast.platform.data.samples import Features, Labelled, Samples, by_name, held_by, rows_of_inputs
from narrowcast.platform.errors import UserError
from narrowcast.platform.models.measures import AbsoluteLoss, Loss
from narrowcast.platform.models.model import Model
from narrowcast.platform.models.module_call import call_module
from narrowcast.platform.models.modules import shapes_of
from narrowcast.platform.models.neural_network import NeuralNetwork, as_inputs, skeleton
from narrowcast.platform.seeds import generator
from narrowcast.platform.traits import Traits
from narrowcast.platform.types import Arrays, Chunk, FloatArray, IntArray, LocalTerms, LocalUpdates

_SHARED = ("loss", "metrics", "dtype")
_SAMPLES_AT_ONCE = 1000


@dataclass(frozen=True)
class ClientNetworks:
    """The networks that clients may have, in the order of the field that lists them; all have the same outputs.

    The parameters of clients with different networks are kept as rows of one array.
    """

    networks: tuple[NeuralNetwork, ...]
    data: Samples

    @classmethod
    def of(cls, models: Sequence[Model], task: Task) -> ClientNetworks:
        """Return the networks of a list, with the loss, the metrics and the type of the run's model; it if none are."""
        model: Any = task.model
        shared = {name: getattr(model, name) for name in _SHARED}
        listed: Sequence[Any] = models
        return cls(
            tuple(network.model_copy(update=shared).of_seed(task.seed) for network in listed) or (model,), task.data
        )

    def parts(self, assigned: IntArray) -> Iterator[tuple[Any, IntArray]]:
        """Yield each network and the indices of its clients; `assigned` [C] has the index of each client's network."""
        for index, network in enumerate(self.networks):
            if len(positions := np.flatnonzero(assigned == index)):
                yield network, positions

    def affordable(self, speeds: FloatArray, model: NeuralNetwork) -> IntArray:
        """Return the index of the dearest network whose work is at most each client's speed, [C]."""
        return affordable_widths(self.work(model), speeds)

    def work(self, model: NeuralNetwork) -> FloatArray:
        """Return the operations of each network on a sample, relative to those of `model`, [networks]."""
        return _relative_work(self.networks, model, self.data)

    @property
    def row_length(self) -> int:
        """The number of parameters of the largest network."""
        return max(sum(map(prod, self._shapes(network).values())) for network in self.networks)

    def packed(self, parameters: Arrays) -> NDArray[Any]:
        """Return parameters [C, ...] as rows [C, row_length], filled up with zeros."""
        flat = [values.reshape(len(values), -1) for values in parameters.values()]
        rows = np.concatenate(flat, axis=1)
        return np.pad(rows, ((0, 0), (0, self.row_length - rows.shape[1])))

    def unpacked(self, network: NeuralNetwork, rows: NDArray[Any]) -> dict[str, NDArray[Any]]:
        """Return the parameters [C, ...] of a network that rows [C, row_length] hold."""
        shapes = self._shapes(network)
        ends = np.cumsum([prod(shape) for shape in shapes.values()])
        parts = np.split(rows, ends, axis=1)[: len(shapes)]
        return {
            name: part.reshape(len(rows), *shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)
        }

    def drawn(self, network: NeuralNetwork, task: Task, clients: IntArray) -> NDArray[Any]:
        """Return the rows of networks that these clients draw themselves, [C, row_length]."""
        seeds = task.private_seed.stream_keys("initial model", 0, clients)
        models = [network.init_server(self.data, int(seed >> np.uint64(1))) for seed in seeds]
        shapes = self._shapes(network)
        return self.packed({name: np.stack([model[name] for model in models]) for name in shapes})

    def outputs(self, network: NeuralNetwork, parameters: Arrays, features: Features) -> NDArray[Any]:
        """Return the outputs of each client's network for n samples, [C, n, k]; parameters are [C, ...]."""
        n_samples = len(next(iter(by_name(features).values())))
        inputs = [
            as_inputs(rows_of_inputs(features, slice(start, start + _SAMPLES_AT_ONCE)), network.torch_dtype)
            for start in range(0, n_samples, _SAMPLES_AT_ONCE)
        ]
        n_clients, outputs = len(next(iter(parameters.values()))), []
        for index in range(n_clients):
            module = network.loaded({name: values[index] for name, values in parameters.items()}, self.data)
            with torch.no_grad(), network.evaluation_draws(self.data):
                outputs.append(torch.cat([call_module(module, part) for part in inputs]).numpy())
        return np.stack(outputs)

    def _shapes(self, network: NeuralNetwork) -> dict[str, tuple[int, ...]]:
        return shapes_of(skeleton(network, self.data))


def check_networks(models: Sequence[Model], task: Task, kind: str) -> None:
    """Raise `UserError` unless all models are networks that `training` trains, with the outputs of the run's model."""
    for index, model in enumerate(models):
        field = f"algorithm.models[{index}]"
        if not isinstance(model, NeuralNetwork):
            raise UserError(
                f"{field}.kind = {model.kind}: clients of {kind} average the outputs of networks; use a network with "
                f"the {task.data.n_outputs} outputs of the others, such as mlp or cnn"
            )
        for name in sorted(model.model_fields_set.intersection(_SHARED)):
            if getattr(model, name) != getattr(task.model, name):
                raise UserError(f"{field}.{name}: clients of {kind} share it; set model.{name} in its place")
    networks: Sequence[Any] = ClientNetworks.of(models, task).networks
    for index, network in enumerate(networks):
        try:
            network.check(task.data)
            task.training.check(replace(task, model=network))
        except UserError as error:
            raise UserError(f"algorithm.models[{index}]: {error}") from error


@lru_cache(maxsize=2)
def _relative_work(networks: tuple[NeuralNetwork, ...], model: NeuralNetwork, data: Samples) -> FloatArray:
    whole = max(multiplications(model, data), 1)
    return np.array([multiplications(network, data) for network in networks], dtype=np.float64) / whole


CONSENSUS, CONSENSUS_ROUND = "consensus", "consensus round"
"""The mean outputs [n, k] for the public samples of a round, and that round, 0 before there are any."""
PARAMETERS, STARTED = "own/parameters", "own/started"
"""A client's parameters [U, row_length], and whether it has trained, [U]."""


class FedMD(ClientPass):
    """Clients send their networks' outputs for public samples, and are taught the mean of these by distillation.

    In a round from the second on, clients receive the mean outputs of the round before (the consensus), train on them
    for `digest_epochs` and on their own samples for the epochs of `training`, and send their outputs for the public
    samples of this round. In its first round a client trains on the labelled public samples and then on its own before
    all else. The clients' networks never leave them, and there is no global model: `evaluate_clients` measures each
    client's network.

    `models` share loss, metrics and type of values with `model`, which also is the unit of work.

    Differs from the paper: 1. a round begins with the download of the consensus and ends with the upload, so that
    clients have digested the uploads of all rounds but the last. 2. optimisers are those of `training`; the code has
    Adam. 3. epochs of the first round are fixed numbers; the paper trains to convergence.
    """

    kind: Literal["fedmd"] = "fedmd"
    models: tuple[Annotated[Model, MODELS], ...] = Field((), description="networks of clients; []: model for all")
    assignment: Literal["turns", "compute"] = Field(
        "turns",
        description="network of a client: in turn by its number, or the dearest whose work, relative to that of model, "
        "is at most its compute speed",
    )
    public_epochs: int = Field(5, ge=0, description="epochs on the labelled public samples in a client's first round")
    private_epochs: int | None = Field(
        None, ge=0, description="epochs on its own samples after them; null: those of training"
    )
    samples_per_round: int | None = Field(
        None, ge=1, description="public samples drawn in each round for which outputs are sent; null: all"
    )
    digest_epochs: int = Field(1, ge=0, description="epochs on the consensus in each round; 0: clients train alone")
    digest_loss: Annotated[Loss, LOSSES] = Field(
        AbsoluteLoss(), description="distance from the consensus that a client minimises"
    )
    digest_rate: float = Field(1.0, gt=0, description="factor of the learning rate on the consensus")
    weights: Weights = "equal"

    @property
    def traits(self) -> Traits:
        """The server holds mean outputs alone."""
        return replace(super().traits, global_model=False)

    def check(self, task: Task) -> None:
        """Raise `UserError` without public samples, and for models whose outputs cannot be averaged."""
        data, kind = task.data, self.kind
        if not isinstance(task.model, NeuralNetwork) or not isinstance(data, Samples):
            raise UserError(
                f"algorithm.kind = {kind} trains networks on samples, not {task.model.kind}; use mlp or cnn"
            )
        if data.targets == "tokens":
            raise UserError(
                f"algorithm.kind = {kind} averages one output for each class or number, but the targets of "
                f"{data.name} are tokens at each position; use another data set"
            )
        if data.public is None:
            raise UserError(
                f"algorithm.kind = {kind} needs samples that all clients hold; give data.public, such as "
                "data.public.samples=200"
            )
        if (self.samples_per_round or 0) > len(data.public):
            raise UserError(
                f"algorithm.samples_per_round = {self.samples_per_round}: there are {len(data.public)} public samples; "
                "use at most these, or raise data.public.samples"
            )
        if task.start is not None:
            raise UserError(
                f"algorithm.kind = {kind}: clients draw networks of their own, which start_from does not have; leave "
                "start_from out"
            )
        if "numbers" not in self.digest_loss.takes:
            named = kind_of(self.digest_loss)
            raise UserError(f"algorithm.digest_loss = {named} takes no outputs as targets; use absolute_error")
        refuse_stateful(self.codec, f"clients of {kind} send outputs again in every round; leave it out")
        check_networks(self.models, task, kind)

    def init(self, task: Task) -> Arrays:
        """Return a consensus of zeros, of no round."""
        model: Any = task.model
        shape = len(self._rows(task, 0)), model.n_outputs(task.data)
        return {CONSENSUS: np.zeros(shape, model.held_dtype), CONSENSUS_ROUND: np.array(0)}

    def init_clients(self, task: Task) -> Arrays:
        """Return rows of zeros: a client draws its network in its first round."""
        like = {
            PARAMETERS: np.zeros(self._networks(task).row_length, task.model.held_dtype),
            STARTED: np.zeros((), bool),
        }
        return zeros_of_clients(like, task.data.n_clients)

    # Server half

    def broadcast(self, server: Arrays, task: Task, round_index: int) -> Broadcast:
        """Return the consensus; an empty message as long as there is none."""
        del task, round_index
        sent = self.final(server) if server[CONSENSUS_ROUND] else {}
        return Broadcast(server, DensePayload.of(sent), update=None)

    def upload_bits(self, broadcast: Arrays, task: Task, clients: IntArray) -> IntArray | None:
        """Return the size of the outputs that each client sends, [C]; None with a codec."""
        if self.codec:
            return None
        bits = dense_wire_bits(broadcast[CONSENSUS].size, broadcast[CONSENSUS].dtype)
        return np.where(task.data.examples[clients] > 0, bits, 0)

    def relative_work(self, broadcast: Arrays, task: Task, clients: IntArray) -> FloatArray:
        """Return each client's work on all samples of a round, by sample of its own, [C].

        The first epochs are counted in round 1, not for clients that are first drawn later.
        """
        networks, model, epochs = self._networks(task), task.model, task.training.epochs
        public = self.digest_epochs * len(broadcast[CONSENSUS])
        if not broadcast[CONSENSUS_ROUND]:
            epochs = epochs if self.private_epochs is None else self.private_epochs
            public = self.public_epochs * len(task.data.public)
        private = np.maximum(epochs * task.data.examples[clients], 1)
        work: FloatArray = networks.work(model)[self._assigned(task, clients)] * (1 + public / private)  # type: ignore[arg-type]
        return work

    def step(self, server: Arrays, broadcast: Arrays, total: Arrays, task: Task, round_index: int) -> Arrays:
        """Return the mean outputs of this round; the previous ones if no client delivered."""
        del broadcast, task
        sums = TensorSum.of(total)
        if not sums.weight:
            return server
        return {**sums.means(), CONSENSUS_ROUND: np.array(round_index)}

    def final(self, server: Arrays) -> Arrays:
        """Return the consensus, which is all that the server knows."""
        return {CONSENSUS: server[CONSENSUS]}

    # Client half

    def local_updates(self, broadcast: Arrays, chunk: Chunk, task: Task) -> list[LocalUpdates]:
        """Train the networks of a chunk's clients; return their outputs for the public samples of the round."""
        networks, n_clients = self._networks(task), len(chunk.clients)
        features = rows_of_inputs(task.data.public.features, self._rows(task, chunk.round_index))
        outputs = np.empty((n_clients, *broadcast[CONSENSUS].shape), broadcast[CONSENSUS].dtype)
        parameters, loss = np.empty_like(chunk.state[PARAMETERS]), np.empty(n_clients)
        examples, steps = np.empty(n_clients, np.int64), np.empty(n_clients, np.int64)
        for network, positions in networks.parts(self._assigned(task, chunk.clients)):
            values, trained = self._trained(network, broadcast, chunk.take(positions), task)
            parameters[positions] = networks.packed(values)
            outputs[positions] = networks.outputs(network, values, features)
            loss[positions], examples[positions], steps[positions] = trained.loss, trained.examples, trained.steps
        state = {PARAMETERS: parameters, STARTED: np.ones(n_clients, bool)}
        return [LocalUpdates({CONSENSUS: outputs}, state, loss, examples, steps)]

    def contribution(self, broadcast: Arrays, chunk: Chunk, task: Task, arrived: Arrived) -> Contribution:
        """Return the outputs, with the clients' weights in their mean."""
        del broadcast
        return Contribution(arrived.tensors, tensor_weights(self.weights, task, chunk))

    def own_models(self, broadcast: Arrays, chunk: Chunk, task: Task) -> list[OwnModel]:
        """Return each client's network as it is after its last round; untrained if it had none."""
        del broadcast
        parts = self._networks(task).parts(self._assigned(task, chunk.clients))
        return [
            OwnModel(positions, network, self._start(network, chunk.take(positions), task))
            for network, positions in parts
        ]

    def _trained(self, network: Any, broadcast: Arrays, chunk: Chunk, task: Task) -> tuple[Arrays, LocalUpdates]:
        """Return the parameters [C, ...] of clients with one network after training, and their steps on own samples."""
        values, none = self._start(network, chunk, task), np.zeros(len(chunk.clients), np.int64)
        trained = LocalUpdates({}, {}, none.astype(np.float64), none, none)
        for phase, epochs in self._phases(network, broadcast, chunk, task):
            if not epochs.any():
                continue
            first = {name: initial[0] for name, initial in values.items()}
            # Of the time that a client may have for training, public samples take none.
            limited = chunk if phase.data is task.data else replace(chunk, epochs=None)
            updates = phase.training.train(first, limited, phase, LocalTerms(epochs=epochs, start=values))
            values = {name: start + updates.changes[name] for name, start in values.items()}
            if phase.data is task.data:
                loss = np.where(updates.steps > 0, updates.loss, trained.loss)
                trained = LocalUpdates({}, {}, loss, trained.examples + updates.examples, trained.steps + updates.steps)
        return values, trained

    def _phases(self, network: Any, broadcast: Arrays, chunk: Chunk, task: Task) -> Iterator[tuple[Task, IntArray]]:
        """Yield the tasks that clients train on one after the other, with the epochs of each client, [C]."""
        new, agreed = ~chunk.state[STARTED], int(broadcast[CONSENSUS_ROUND])
        private, training = task.training.epochs, task.training
        alone = replace(task, model=network)
        # Public samples are shuffled by a stream of their own, so that the client's own are as without them.
        shared = replace(alone, private_seed=task.private_seed.successor())
        labelled = held_by(chunk.clients, task.data, task.data.public)
        yield replace(shared, data=labelled), np.where(new, self.public_epochs, 0)
        yield alone, np.where(new, private if self.private_epochs is None else self.private_epochs, 0)
        if agreed:
            shown = rows_of_inputs(task.data.public.features, self._rows(task, agreed))
            taught = Labelled(shown, np.array(broadcast[CONSENSUS]))
            digest = replace(
                shared,
                data=held_by(chunk.clients, task.data, taught),
                model=network.model_copy(update={"loss": self.digest_loss}),
                training=training.model_copy(update={"learning_rate": self.digest_rate * training.learning_rate}),
            )
            yield digest, np.full(len(new), self.digest_epochs)
        yield alone, np.where(new & (not agreed), 0, private)

    def _start(self, network: Any, chunk: Chunk, task: Task) -> dict[str, NDArray[Any]]:
        """Return the parameters of each client with this network before a round, [C, ...]."""
        networks, new = self._networks(task), ~chunk.state[STARTED]
        rows = np.array(chunk.state[PARAMETERS])
        if new.any():
            rows[new] = networks.drawn(network, task, chunk.clients[new])
        return networks.unpacked(network, rows)

    def _rows(self, task: Task, round_index: int) -> IntArray:
        """Return the public samples of a round, ascending, drawn from the public seed."""
        n_samples = len(task.data.public)
        if self.samples_per_round is None:
            return np.arange(n_samples)
        rows = generator(task.seed, "public subset", round_index).permutation(n_samples)
        return np.sort(rows[: self.samples_per_round])

    def _networks(self, task: Task) -> ClientNetworks:
        return ClientNetworks.of(self.models, task)

    def _assigned(self, task: Task, clients: IntArray) -> IntArray:
        """Return the index of each client's network in `models`, [C]."""
        networks = self._networks(task)
        if self.assignment == "turns":
            return clients % len(networks.networks)
        return networks.affordable(task.profiles.compute_speed[clients], task.model)  # type: ignore[arg-type]
