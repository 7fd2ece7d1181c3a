"""FedMA: layer by layer, clients' hidden units are matched and averaged, frozen, and the layers above trained again.

Reference: Wang, Yurochkin, Sun, Papailiopoulos and Khazaeni, Federated Learning with Matched Averaging, ICLR 2020
(arXiv:2002.06440), Algorithm 1 and section 2.3, and its code.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from narrowcast.algorithms.client.client_pass import Arrived, ClientPass, Contribution
from narrowcast.algorithms.client.sums import EACH
from narrowcast.algorithms.client.uploads import Message, where_client, zeros_of_clients
from narrowcast.algorithms.codecs.messages import DensePayload, dense_wire_bits
from narrowcast.algorithms.codecs.wire import dtype_of
from narrowcast.algorithms.federated.submodel import class_counts_of
from narrowcast.algorithms.federated.unit_matching import HeadWeights, Matching, joined_head
from narrowcast.platform.contracts import Broadcast, LocalCall, Recipients, Task
from narrowcast.platform.errors import UserError
from narrowcast.platform.models.hidden_units import HiddenUnits, check_all_trained
from narrowcast.platform.seeds import generator
from narrowcast.platform.traits import Traits
from narrowcast.platform.types import Arrays, BoolArray, Chunk, IntArray, LocalTerms, LocalUpdates, PrefixedArrays

MATCHING = PrefixedArrays("matching/")
"""The server state besides the last whole model."""
MATCHED = PrefixedArrays("matching/layers/")
"""The layers of the present pass that are matched."""
OWN = PrefixedArrays("own/")
"""A client's own layers, of its own width and those of the layer before, [U, ...]."""
CLIENTS, EXAMPLES, CLASSES = "clients", "examples", "classes"
SENT = PrefixedArrays("sent/")
"""The uploads of a layer: client numbers [k], examples in all [k] and by class [k, classes], tensors [k, ...]."""
_LAYER, _PASS, _UNITS = (MATCHING.name(name) for name in ("layer", "pass", "units"))


@dataclass(frozen=True)
class MatchingState:
    """The progress of matching, as the server keeps and sends it.

    `layer` is the next to match, of `len(hidden.counts)` hidden ones and the last; `passes` are those completed.
    `hidden` has the clients' own numbers of units, `units` [U, L] for each layer the global unit of each unit of a
    client, -1 for clients of which none are known. `layers` are those that are matched in this pass.
    """

    hidden: HiddenUnits
    layer: int
    passes: int
    layers: Arrays
    units: tuple[IntArray, ...]

    @classmethod
    def fresh(cls, hidden: HiddenUnits, n_clients: int) -> MatchingState:
        """Return the progress before round 1."""
        units = tuple(np.full((n_clients, count), -1) for count in hidden.counts)
        return cls(hidden, 0, 0, {}, units)

    @classmethod
    def of(cls, arrays: Arrays, hidden: HiddenUnits) -> MatchingState:
        """Return the progress in a server state or a broadcast."""
        units = tuple(np.asarray(arrays[f"{_UNITS}/{layer}"]) for layer in range(len(hidden.counts)))
        return cls(hidden, int(arrays[_LAYER]), int(arrays[_PASS]), MATCHED.of(arrays), units)

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Return the arrays of a server state or a broadcast, besides the last whole model."""
        return {
            _LAYER: np.array(self.layer),
            _PASS: np.array(self.passes),
            **MATCHED.add(self.layers),
            **{f"{_UNITS}/{layer}": units for layer, units in enumerate(self.units)},
        }

    @property
    def at_head(self) -> bool:
        """Return whether all hidden layers are matched."""
        return self.layer == len(self.hidden.counts)

    @property
    def counts(self) -> tuple[int, ...]:
        """The number of units of each layer in this round: global ones before `layer`, a client's own from there on."""
        return self.hidden.counts_in(self.layers)

    @property
    def names(self) -> list[str]:
        """The parameters of the layer that is matched next."""
        return [name for name in self.hidden.axes if self.hidden.owner(name) == self.layer]

    @property
    def trained(self) -> list[str]:
        """The parameters of all layers that are not matched yet."""
        return [name for name in self.hidden.axes if self.hidden.owner(name) >= self.layer]

    def takes_part(self, clients: IntArray) -> BoolArray:
        """Return whether each client's units of the layer before are matched, [C]; all take part in a first layer."""
        if not self.layer:
            return np.ones(len(clients), dtype=bool)
        known: BoolArray = self.units[self.layer - 1][clients, 0] >= 0
        return known

    def at_global_units(self, name: str, values: NDArray[Any], client: int) -> NDArray[Any]:
        """Return a client's parameter of the next layer with its inputs at their global units."""
        before = self.layer - 1
        if not any(axis and axis.layer == before for axis in self.hidden.axes[name]):
            return values
        positions = [np.arange(count) for count in self.hidden.counts]
        positions[before] = self.units[before][client]
        return self.hidden.resized(self.counts).put(name, values, tuple(positions))

    def slice_of(self, model: Arrays, client: int) -> dict[str, NDArray[Any]]:
        """Return a client's units of the last whole model; the first ones if its own are not known."""
        known = all(units[client, 0] >= 0 for units in self.units)
        units = tuple(
            units_of_layer[client] if known else np.arange(units_of_layer.shape[1]) for units_of_layer in self.units
        )
        return self.hidden.resized(self.hidden.counts_in(model)).take(model, units)


class FedMA(ClientPass):
    """A pass has a round for each layer, and at its end the global model is a new one, mostly wider than the clients'.

    In the first round of a pass clients train all layers and send the first. The server matches its units and sends
    each client the global layer and the indices of its own units in it. In each further round clients put the inputs of
    the next layer at these indices, train it and those above while all below are frozen, and send it. The last layer
    is averaged by class. The next pass starts from slices of the global model, each client's own units of it (FedMA
    with communication).

    A client that misses a round of a pass, or whose upload is lost, is skipped until the next pass. The global model
    is that of the last complete pass, before the first one that of the seed. Layers and the indices of units are sent
    as values of the model's type; the last layer goes with the number of the client's examples of each class.

    Differs from the paper and its code: 1. networks have no batch norm, as theirs. 2. local steps are those of
    `training` in all rounds, shuffled anew; the code trains the last layer three times as long at a tenth of the rate
    with weight decay, which `head_epochs` and `head_rate` set but for the decay. 3. `matching.bias_prior: first_weight`
    is the code's, which from the second layer on has the prior of biases at the wrong column. 4. units of an LSTM are
    matched by input weights and both biases; the code leaves one of the two out. 5. its code for an LSTM averages the
    last layer with equal weights, which `head: equal` does.
    """

    kind: Literal["fedma"] = "fedma"
    initial: Literal["different", "same"] = Field(
        "different",
        description="models that clients start from: drawn by each, as in the paper, or one for all",
    )
    matching: Matching = Field(Matching(), description="how units are matched and averaged")
    head: HeadWeights = Field(
        "classes",
        description="weights of clients in the last layer: examples of each class, all examples, or equal",
    )
    retrain_epochs: int | None = Field(
        None, ge=0, description="local epochs after the first layer; null: those of training; 0: matching alone"
    )
    head_epochs: int | None = Field(None, ge=0, description="local epochs of the last layer; null: retrain_epochs")
    head_rate: float = Field(1.0, gt=0, description="factor of the learning rate when the last layer is trained alone")

    @property
    def traits(self) -> Traits:
        """Each client is sent the indices of its own units; the global model has units that not all clients have."""
        return replace(super().traits, downloads="slices", grows=True)

    def check(self, task: Task) -> None:
        """Raise `UserError` for codecs, and for models or starts whose layers cannot be matched."""
        model = task.model
        if self.codec:
            raise UserError(
                f"algorithm.codec has {self.codec[0].kind}, but clients of {self.kind} send whole layers to be "
                "matched, not changes that a codec could shorten; leave it out"
            )
        if model.hidden_units(task.data) is None:
            raise UserError(
                f"algorithm.kind = {self.kind}: model.kind = {model.kind} declares no hidden units to match; use mlp, "
                "cnn, vgg9 or char_lstm"
            )
        check_all_trained(model, task.data, self.kind)
        hidden = model.matched_units(task.data)
        if not hidden.counts:
            raise UserError(f"algorithm.kind = {self.kind}: model.kind = {model.kind} has no hidden layer; give it one")
        if hidden.reads_units:
            raise UserError(
                f"algorithm.kind = {self.kind}: the first units of model.kind = {model.kind} are features, which all "
                "clients have alike; use mlp, cnn, vgg9 or char_lstm"
            )
        if unmatched := [name for name in hidden.axes if not _can_be_matched(hidden, name)]:
            raise UserError(
                f"algorithm.kind = {self.kind}: {unmatched[0]} of model.kind = {model.kind} joins layers that do not "
                "follow one another, or belongs to none; use mlp, cnn, vgg9 or char_lstm"
            )
        if self.head == "classes" and task.data.targets != "classes":
            raise UserError(
                f"algorithm.head = classes: the targets of {task.data.name} are {task.data.targets}, not classes; use "
                "examples or equal"
            )
        if self.initial == "different" and task.start is not None:
            raise UserError(
                "algorithm.initial = different: start_from gives all clients one model; set algorithm.initial = same"
            )

    def init(self, task: Task) -> Arrays:
        """Return the model of the seed, and that no layer is matched."""
        progress = MatchingState.fresh(self._hidden(task), task.data.n_clients)
        return {**task.initial_parameters(), **progress.arrays()}

    def init_clients(self, task: Task) -> Arrays:
        """Return each client's own layers: zeros until it trains them."""
        return OWN.add(zeros_of_clients(task.initial_parameters(), task.data.n_clients))

    # Server half

    def broadcast(self, server: Arrays, task: Task, round_index: int) -> Broadcast:
        """Return what this round's clients need: matched layers, or in the first round of a pass the whole model."""
        del round_index
        progress = MatchingState.of(server, self._hidden(task))
        sent = {} if progress.layer or self._draws(progress) else self.final(server)
        return Broadcast({**sent, **progress.arrays()}, DensePayload.of({**sent, **progress.layers}), update=None)

    def download_bits(self, server: Arrays, broadcast: Broadcast, task: Task, recipients: Recipients) -> IntArray:
        """Return the size of each recipient's message, [C].

        In the first round of a pass it is the client's slice of the model, or its last layer for those that have all
        others; then the layer matched last, or all of them for a client that was not in the round before, and the
        indices of the client's units; a header alone for clients that are skipped.
        """
        del broadcast
        progress, clients = MatchingState.of(server, self._hidden(task)), recipients.clients
        follows = recipients.last_round == recipients.round_index - 1
        model, dtype = self.final(server), dtype_of(self.final(server))
        if progress.layer:
            last = progress.layer - 1
            new = sum(v.size for name, v in progress.layers.items() if progress.hidden.owner(name) == last)
            every = sum(values.size for values in progress.layers.values())
            values = np.where(follows, new, every) + progress.hidden.counts[last]
            return dense_wire_bits(np.where(progress.takes_part(clients), values, 0), dtype)
        if self._draws(progress):
            return dense_wire_bits(np.zeros(len(clients), dtype=np.int64), dtype)
        known = np.logical_and.reduce([units[clients, 0] >= 0 for units in progress.units])
        local = progress.hidden.take(model, tuple(np.arange(count) for count in progress.hidden.counts))
        head = sum(local[name].size for name in progress.hidden.outputs)
        values = np.where(known & follows & (progress.passes > 0), head, sum(values.size for values in local.values()))
        return dense_wire_bits(values, dtype)

    def upload_bits(self, broadcast: Arrays, task: Task, clients: IntArray) -> IntArray:
        """Return the size of each client's upload, [C]: its layer, and with the last one its examples by class."""
        progress = MatchingState.of(broadcast, self._hidden(task))
        like, counts = task.initial_parameters(), progress.counts
        whole = progress.hidden.resized(counts)
        n_values = sum(_size(progress.hidden, whole, name, like[name].size) for name in progress.names)
        n_values += task.data.n_classes if progress.at_head and self.head == "classes" else 0
        sends = progress.takes_part(clients) & (task.data.examples[clients] > 0)
        return np.where(sends, dense_wire_bits(np.full(len(clients), n_values), dtype_of(like)), 0)

    def step(self, server: Arrays, broadcast: Arrays, total: Arrays, task: Task, round_index: int) -> Arrays:
        """Match the layer, or average the last one; the layer is asked for again if no client delivered it."""
        del broadcast
        order = np.argsort(total[EACH.name(CLIENTS)])
        uploads = {name: values[order] for name, values in EACH.of(total).items()}
        clients, examples, progress = uploads[CLIENTS], uploads[EXAMPLES], MatchingState.of(server, self._hidden(task))
        if not len(clients):
            return server
        sent = [{name: values[index] for name, values in SENT.of(uploads).items()} for index in range(len(clients))]
        if progress.at_head:
            head = joined_head(progress.names, sent, examples, uploads.get(CLASSES))
            model = {**progress.layers, **head}
            after = replace(progress, layer=0, passes=progress.passes + 1, layers={})
            return {**{name: model[name] for name in self.final(server)}, **after.arrays()}
        hidden, untrained = progress.hidden.resized(progress.counts), task.initial_parameters()
        random = generator(task.seed, "matching order", round_index)
        joined, assigned = self.matching.join(hidden, progress.layer, sent, examples, untrained, random)
        units = np.full_like(progress.units[progress.layer], -1)
        units[clients] = np.stack(assigned)
        every = (*progress.units[: progress.layer], units, *progress.units[progress.layer + 1 :])
        after = replace(progress, layer=progress.layer + 1, layers={**progress.layers, **joined}, units=every)
        return {**self.final(server), **after.arrays()}

    def final(self, server: Arrays) -> Arrays:
        """Return the model of the last complete pass."""
        return MATCHING.without(server)

    # Client half

    def local_calls(self, broadcast: Arrays, chunk: Chunk, task: Task) -> list[LocalCall]:
        """Return the training of the layers that are not matched yet; clients that sit out take no steps."""
        progress = MatchingState.of(broadcast, self._hidden(task))
        start, epochs = self._start(progress, broadcast, chunk, task), None
        training = task.training
        if progress.layer:
            asked = self.head_epochs if progress.at_head and self.head_epochs is not None else self.retrain_epochs
            most = training.epochs if asked is None else asked
            epochs = np.where(progress.takes_part(chunk.clients), most, 0)
        if progress.at_head:
            training = training.model_copy(update={"learning_rate": training.learning_rate * self.head_rate})
        model = task.model.resized(progress.counts)
        terms = LocalTerms(epochs=epochs, start=start, trained=tuple(progress.trained))
        parameters = {**progress.layers, **{name: values[0] for name, values in start.items()}}
        return [LocalCall(parameters, chunk, replace(task, model=model, training=training), terms)]

    def message(self, broadcast: Arrays, chunk: Chunk, task: Task, updates: LocalUpdates) -> Message:
        """Send the layer as it is after the training, and with the last one a client's examples of each class."""
        progress = MatchingState.of(broadcast, self._hidden(task))
        trained = self._trained(progress, broadcast, chunk, task, updates)
        tensors = {name: trained[name] for name in progress.names}
        if progress.at_head and self.head == "classes":
            tensors[CLASSES] = class_counts_of(task.data, chunk.clients).astype(dtype_of(tensors))
        sends = progress.takes_part(chunk.clients) & (task.data.examples[chunk.clients] > 0)
        return Message(tensors, sends=sends)

    def contribution(self, broadcast: Arrays, chunk: Chunk, task: Task, arrived: Arrived) -> Contribution:
        """Return the layer of each client, which keeps those above it."""
        progress = MatchingState.of(broadcast, self._hidden(task))
        uploads = {CLIENTS: chunk.clients, EXAMPLES: task.data.examples[chunk.clients].astype(np.float64)}
        uploads |= SENT.add({name: arrived.tensors[name] for name in progress.names})
        if CLASSES in arrived.tensors:
            uploads[CLASSES] = arrived.tensors[CLASSES].astype(np.float64)
        models = {name: chunk.state[OWN.name(name)] for name in progress.hidden.axes}
        keeps = arrived.finite & progress.takes_part(chunk.clients)
        for name, values in self._trained(progress, broadcast, chunk, task, arrived.updates).items():
            if name not in progress.names:
                models[name] = where_client(keeps, values, models[name])
        return Contribution(each=uploads, state=OWN.add(models))

    def _trained(
        self, progress: MatchingState, broadcast: Arrays, chunk: Chunk, task: Task, updates: LocalUpdates
    ) -> dict[str, NDArray[Any]]:
        """Return the parameters of each client after the training, [C, ...], of the layers that are not matched yet."""
        start = self._start(progress, broadcast, chunk, task)
        return {name: start[name] + values for name, values in updates.changes.items()}

    def _start(self, progress: MatchingState, broadcast: Arrays, chunk: Chunk, task: Task) -> dict[str, NDArray[Any]]:
        """Return the parameters from which each client trains, [C, ...], of the layers that are not matched yet."""
        local, clients = OWN.of(chunk.state), chunk.clients.tolist()
        if progress.layer:
            started = {name: local[name] for name in progress.trained}
            for name in progress.names:
                started[name] = np.stack(
                    [
                        progress.at_global_units(name, model, client)
                        for model, client in zip(local[name], clients, strict=True)
                    ]
                )
            return started
        if self._draws(progress):
            seeds = task.private_seed.stream_keys("initial model", 0, chunk.clients)
            models = [task.model.init_server(task.data, int(seed >> np.uint64(1))) for seed in seeds]
        elif progress.passes:
            models = [progress.slice_of(self.final(broadcast), client) for client in clients]
        else:
            models = [dict(self.final(broadcast))] * len(clients)
        return {name: np.stack([model[name] for model in models]) for name in progress.trained}

    def _draws(self, progress: MatchingState) -> bool:
        """Return whether clients start from models that they draw themselves."""
        return self.initial == "different" and not progress.passes

    def _hidden(self, task: Task) -> HiddenUnits:
        model: Any = task.model
        return model.matched_units(task.data)


def _can_be_matched(hidden: HiddenUnits, name: str) -> bool:
    """Return whether a parameter belongs to a layer, and has no units but those of this layer and the one before."""
    owner = hidden.owner(name)
    return owner >= 0 and all(owner - axis.layer in (0, 1) for axis in hidden.axes[name] if axis)


def _size(narrow: HiddenUnits, whole: HiddenUnits, name: str, size: int) -> int:
    """Return the number of values of a parameter with other numbers of units."""
    for axis in filter(None, narrow.axes[name]):
        size = size // narrow.counts[axis.layer] * whole.counts[axis.layer]
    return size
