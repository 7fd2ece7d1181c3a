"""Sub-model training: clients train slices of a network's hidden units, as wide as each of them affords.

References: Diao, Ding and Tarokh, HeteroFL, ICLR 2021 (arXiv:2010.01264): `prefix`; Alam et al., FedRolex, NeurIPS 2022
(arXiv:2212.01548): `rolling`; Caldas et al., Expanding the Reach of Federated Learning by Reducing Client Resource
Requirements, 2018 (arXiv:1812.07210), Federated Dropout: `random`; Yuan et al., Distributed Learning of Neural Networks
using Independent Subnet Training, VLDB 2022 (arXiv:1910.02120), IST: `disjoint`. Letters: x the server's model, y_u
client u's slice after its local steps, w_u its weight.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from narrowcast.algorithms.client.client_pass import Arrived, ClientPass, Contribution
from narrowcast.algorithms.client.sums import TensorSum, Weights, stale_sum, tensor_weights
from narrowcast.algorithms.client.uploads import chunk_result
from narrowcast.algorithms.codecs.chain import refuse_stateful
from narrowcast.algorithms.codecs.messages import dense_wire_bits
from narrowcast.algorithms.codecs.wire import dtype_of
from narrowcast.algorithms.federated.downloads import DOWNLOAD, broadcast_all
from narrowcast.algorithms.federated.fedavg import ServerLearningRate, model_of
from narrowcast.algorithms.federated.unit_slices import (
    NESTED,
    Assignment,
    Slices,
    UnitSlices,
    Width,
    affordable_widths,
    drawn_widths,
    joined_updates,
    joined_uploads,
    relative_work,
)
from narrowcast.platform.contracts import Broadcast, LocalCall, Recipients, Task
from narrowcast.platform.data.samples import Samples
from narrowcast.platform.errors import UserError
from narrowcast.platform.models.hidden_units import HiddenUnits, Units, check_all_trained
from narrowcast.platform.rounds.ledger import ChunkResult, joined_metrics
from narrowcast.platform.traits import Downloads, Traits
from narrowcast.platform.types import Arrays, BoolArray, Chunk, FloatArray, IntArray, LocalTerms, LocalUpdates


@dataclass(frozen=True)
class SlicePart:
    """The clients at `positions` of a chunk, which train the same units, and the terms of their local steps.

    `labels` [outputs] are those that they have samples of, None if all outputs are trained.
    """

    hidden: HiddenUnits
    positions: IntArray
    units: Units
    labels: BoolArray | None = None

    @property
    def counts(self) -> list[int]:
        """The number of units of each hidden layer."""
        return [len(units) for units in self.units]

    def call(self, model: Arrays, chunk: Chunk, task: Task, *, scaler: bool) -> LocalCall:
        """Return the training of the slice, by a network that has its units alone."""
        narrow = replace(task, model=task.model.narrowed(self.counts))
        server = self.hidden.take(model, self.units)
        factors = self._factors(server, scaler=scaler)
        columns = self.units[0] if self.hidden.reads_units else None
        terms = LocalTerms(rebuild=_rebuild if factors else None, frozen=factors, columns=columns)
        return LocalCall(server, chunk.take(self.positions), narrow, terms)

    def _factors(self, server: Arrays, *, scaler: bool) -> dict[str, NDArray[Any]]:
        """Return the factors of parameters in local training, of shapes that broadcast with theirs.

        A layer's weights and biases divided by its share of units divide its outputs before their activation; weights
        and biases of 0 give the score 0.
        """
        factors: dict[str, NDArray[Any]] = {}
        for name, axes in self.hidden.axes.items():
            if scaler and axes[0] is not None:
                layer = axes[0].layer
                factors[name] = np.array([self.hidden.counts[layer] / self.counts[layer]], dtype=server[name].dtype)
        if self.labels is not None:
            factors |= {name: self.of_labels(server[name]).astype(server[name].dtype) for name in self.hidden.outputs}
        return factors

    def of_labels(self, output: NDArray[Any]) -> NDArray[Any]:
        """Return `labels` in a shape that broadcasts with a parameter of the last layer."""
        assert self.labels is not None, "asked for where labels are masked"
        return self.labels.reshape(-1, *[1] * (output.ndim - 1))

    def add(self, total: Arrays, weights: Arrays, added: Arrays, weight: float) -> None:
        """Add the weighted sum of the clients' changes of the slice to `total`, and its weight to each entry's."""
        for name, values in added.items():
            index = self.hidden.index(name, self.units)
            masked = self.labels is not None and name in self.hidden.outputs
            counts = self.of_labels(values) if masked else 1.0
            total[name][index] += values * counts
            weights[name][index] += weight * counts


def labels_of(data: Samples, clients: IntArray) -> BoolArray:
    """Return the classes of which each client has training samples, [C, classes]."""
    return class_counts_of(data, clients) > 0


def class_counts_of(data: Samples, clients: IntArray) -> IntArray:
    """Return the number of each client's training samples of each class, [C, classes]."""
    rows, sizes = data.of_clients("train").rows(clients)
    counts = np.zeros((len(clients), data.n_classes), dtype=np.int64)
    np.add.at(counts, (np.repeat(np.arange(len(clients)), sizes), data.train.labels[rows]), 1)
    return counts


def _rebuild(trained: Mapping[str, Any], frozen: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the parameters of a slice, some of them times their factor."""
    return {name: values * frozen[name] if name in frozen else values for name, values in trained.items()}


_ROUND = DOWNLOAD.name("round")


class Submodel(ClientPass):
    """Clients train slices of the hidden units, and each entry moves by the mean of those that sent it.

    x += server_learning_rate * sum w_u (y_u - x) / sum w_u, entry by entry, over the clients whose slice has the entry
    and that delivered. Entries that no client sent keep their value. A client downloads, trains and uploads its slice
    alone, whose units follow from the public seed and the model, and the clock counts its share of the multiplications.

    `slices`: `prefix` has the first units of every layer (HeteroFL), `rolling` a window that moves on by one unit in
    each round (FedRolex), `random` units that a client draws in each round (Federated Dropout), `disjoint` the arcs of
    a circle of shuffled units that follow one another over all clients (IST), `stratified` the same of units ranked by
    importance, one of every rank for each client, `important` those with the largest sums of squares of all entries
    that belong to them.

    Differs from the papers: 1. a slice has the width's share of a layer's units rounded down; the released code of
    HeteroFL and FedRolex rounds up. 2. `weights: equal` is theirs. 3. networks have no batch norm; HeteroFL keeps it
    without running statistics. 4. IST has as many clients as slices, all of which take part; here clients that are not
    sampled leave their arcs untrained in that round, and widths that add up to more than 1 overlap.
    """

    kind: Literal["submodel"] = "submodel"
    widths: tuple[Width, ...] = Field(
        (1.0, 0.5, 0.25), min_length=1, description="shares of each hidden layer's units that clients train"
    )
    assignment: Assignment = Field(
        "turns",
        description="width of a client: widths in turn by its number; a draw in each round; or the widest whose work "
        "is at most its compute speed, or whose upload in float32 takes its uplink at most upload_seconds",
    )
    upload_seconds: float | None = Field(
        None, gt=0, allow_inf_nan=False, description="time that an upload may take, with assignment = link"
    )
    slices: Slices = Field("prefix", description="which of the units a client trains")
    sliced_layers: tuple[Annotated[int, Field(ge=0)], ...] | None = Field(
        None,
        min_length=1,
        description="numbers of the layers whose units are sliced, from 0; null: all. Layer 0 of gcn are the features",
    )
    output_bias: Literal["averaged", "kept"] = Field(
        "averaged", description="bias of the last layer: averaged, or never merged as in the code released with GIST"
    )
    weights: Weights = "examples"
    scaler: bool = Field(
        False,
        description="divide the outputs of hidden layers by the slice's share of their units in local training, before "
        "the activation (HeteroFL, section 3)",
    )
    masked_labels: bool = Field(
        False,
        description="scores of classes that a client has no samples of are 0 in its local training, and their outputs "
        "are averaged over the other clients alone (HeteroFL, section 3)",
    )
    server_learning_rate: ServerLearningRate = 1.0

    @model_validator(mode="after")
    def _links_have_a_time(self) -> Self:
        if (self.assignment == "link") != (self.upload_seconds is not None):
            raise ValueError("assignment = link goes with upload_seconds; give both or neither")
        return self

    @property
    def traits(self) -> Traits:
        """A client drawn k times has k times its weight; the largest of nested slices contains all others."""
        downloads: Downloads = "alike" if self.slices in NESTED else "slices"
        return replace(super().traits, counts_draws=True, downloads=downloads)

    def check(self, task: Task) -> None:
        """Raise `UserError` for models without hidden units, widths without a unit, and codecs with state."""
        model = task.model
        if model.hidden_units(task.data) is None:
            raise UserError(
                f"algorithm.kind = {self.kind}: model.kind = {model.kind} declares no hidden units to slice; use mlp, "
                "cnn, vgg9, char_lstm or gcn"
            )
        if task.adversary is not None and task.adversary.attack.sees != "own":
            raise UserError(
                f"attack: attackers follow the changes of others, and clients of algorithm.kind = {self.kind} train "
                "slices of their own; use an attack on own changes, such as sign_flip"
            )
        check_all_trained(model, task.data, self.kind)
        slices = self._slices(task)
        hidden = slices.hidden
        if not hidden.counts:
            raise UserError(f"algorithm.kind = {self.kind}: model.kind = {model.kind} has no hidden layer; give it one")
        narrowest = min(self.widths)
        if self.sliced_layers and (beyond := max(self.sliced_layers)) >= len(hidden.counts):
            raise UserError(
                f"algorithm.sliced_layers has {beyond}, but layers of model.kind = {model.kind} are 0 to "
                f"{len(hidden.counts) - 1}; leave it out"
            )
        fewest = min(slices.sliced_counts)
        if not slices.counts.all():
            raise UserError(
                f"algorithm.widths = {narrowest:g} leaves no unit of a hidden layer of {fewest}; use at least "
                f"1/{fewest}, or wider layers"
            )
        refuse_stateful(self.codec, f"the slice of a client of {self.kind} may be another in every round; leave it out")
        if self.scaler and any(axis.blocks > 1 for axes in hidden.axes.values() for axis in axes if axis):
            raise UserError(
                f"algorithm.scaler = true: the units of model.kind = {model.kind} have gates, which it is not defined "
                "for; leave it out"
            )
        if hidden.reads_units and (self.scaler or self.masked_labels):
            raise UserError(
                f"algorithm.{'scaler' if self.scaler else 'masked_labels'} = true is not defined for model.kind = "
                f"{model.kind}; leave it out"
            )
        if self.masked_labels and task.data.targets != "classes":
            raise UserError(
                f"algorithm.masked_labels = true: the targets of {task.data.name} are {task.data.targets}, not "
                "classes; leave it out"
            )

    def init(self, task: Task) -> Arrays:
        """Return the model's parameters."""
        return task.initial_parameters()

    def init_clients(self, task: Task) -> Arrays:
        """Return the clients' private parameters."""
        return task.model.init_clients(task.data, task.private_seed.value)

    # Server half

    def broadcast(self, server: Arrays, task: Task, round_index: int) -> Broadcast:
        """Return the whole model, of which each client is sent its slice, and the round."""
        del task
        sent = broadcast_all(server)
        return Broadcast({**server, _ROUND: np.array(round_index)}, sent.full, update=None)

    def download_bits(self, server: Arrays, broadcast: Broadcast, task: Task, recipients: Recipients) -> IntArray:
        """Return the size of each recipient's slice, [C]."""
        del server
        return self._bits(broadcast.arrays, task, recipients.clients)

    def upload_bits(self, broadcast: Arrays, task: Task, clients: IntArray) -> IntArray | None:
        """Return the size of each client's upload, [C], which is that of its slice; None with a codec."""
        if self.codec:
            return None
        return np.where(task.data.examples[clients] > 0, self._bits(broadcast, task, clients), 0)

    def relative_work(self, broadcast: Arrays, task: Task, clients: IntArray) -> FloatArray:
        """Return the multiplications of each client's slice, relative to those of the model, [C]."""
        return self._work(task)[self._widths(broadcast, task, clients)]

    def step(self, server: Arrays, broadcast: Arrays, total: Arrays, task: Task, round_index: int) -> Arrays:
        """Return x with each entry moved by its mean change."""
        del broadcast, round_index
        sums, after, whole = TensorSum.of(total), {}, self._kept(task)
        for name, values in server.items():
            weight = sums.component_weights[name]
            mean = sums.tensors[name] / np.where(weight > 0, weight, 1.0).astype(values.dtype)
            moves = (weight > 0) & (name not in whole)
            after[name] = np.where(moves, values + self.server_learning_rate * mean, values)
        return after

    def _kept(self, task: Task) -> frozenset[str]:
        """Return the parameters that are never merged."""
        if self.output_bias == "averaged":
            return frozenset()
        hidden = self._slices(task).hidden
        return frozenset(name for name in hidden.outputs if len(hidden.axes[name]) == 1)

    def final(self, server: Arrays) -> Arrays:
        """Return x."""
        return model_of(server)

    def weighted_by_staleness(self, partial: Arrays, factor: float) -> Arrays:
        """Return a partial sum with its changes times `factor`, and the weights of entries unchanged."""
        return stale_sum(partial, factor)

    # Client half

    def local_calls(self, broadcast: Arrays, chunk: Chunk, task: Task) -> list[LocalCall]:
        """Return the training of each slice, from the model's entries, for the clients that share it."""
        model = self.final(broadcast)
        return [part.call(model, chunk, task, scaler=self.scaler) for part in self._parts(broadcast, chunk, task)]

    def contribution(self, broadcast: Arrays, chunk: Chunk, task: Task, arrived: Arrived) -> Contribution:
        """Return w_u (y_u - x) of the clients of one slice."""
        del broadcast
        return Contribution(arrived.tensors, tensor_weights(self.weights, task, chunk))

    def send(self, broadcast: Arrays, chunk: Chunk, task: Task, updates: Sequence[LocalUpdates]) -> ChunkResult:
        """Send y_u - x of each slice, and add up w_u (y_u - x) and w_u entry by entry."""
        parts, uploads, metrics = self._parts(broadcast, chunk, task), [], []
        model, in_all = self.final(broadcast), np.zeros(())
        total: dict[str, NDArray[Any]] = {name: np.zeros_like(values) for name, values in model.items()}
        weights = {name: np.zeros(values.shape) for name, values in model.items()}
        for part, trained in zip(parts, updates, strict=True):
            contribution, sent = self.contributed(broadcast, chunk.take(part.positions), task, trained)
            of_slice = TensorSum.of(contribution.partial(sent.delivered))
            part.add(total, weights, of_slice.tensors, float(of_slice.weight))
            uploads.append(sent)
            metrics.append(contribution.metrics)
            in_all += of_slice.weight
        positions, sums = [part.positions for part in parts], TensorSum(total, in_all, weights).arrays()
        result = chunk_result(chunk, joined_updates(positions, updates), joined_uploads(positions, uploads), sums)
        order = np.argsort(np.concatenate(positions))
        return replace(result, metrics={name: values.take(order) for name, values in joined_metrics(metrics).items()})

    def _parts(self, broadcast: Arrays, chunk: Chunk, task: Task) -> list[SlicePart]:
        """Return the clients of a chunk by slice, and by their labels where others are masked."""
        slices, width_of = self._slices(task), partial(self._widths, broadcast, task)
        units = slices.of_clients(chunk.clients, width_of, self.final(broadcast), task.seed, chunk.round_index)
        labels = labels_of(task.data, chunk.clients) if self.masked_labels else None
        groups: dict[tuple[bytes, ...], list[int]] = {}
        for index, client_units in enumerate(units):
            key = (*(layer.tobytes() for layer in client_units), b"" if labels is None else labels[index].tobytes())
            groups.setdefault(key, []).append(index)
        return [
            SlicePart(
                slices.hidden, np.array(members), units[members[0]], None if labels is None else labels[members[0]]
            )
            for members in groups.values()
        ]

    def _slices(self, task: Task) -> UnitSlices:
        return UnitSlices(self.slices, self.widths, task.model.hidden_units(task.data), self.sliced_layers)

    def _work(self, task: Task) -> FloatArray:
        """Return the work of a slice of each width, relative to that of the model, [widths]."""
        return relative_work(task.model, self.widths, task.data, self.sliced_layers)

    def _widths(self, broadcast: Arrays, task: Task, clients: IntArray) -> IntArray:
        """Return the index of each client's width in `widths`, [C]."""
        if self.assignment == "turns":
            return clients % len(self.widths)
        if self.assignment == "draw":
            return drawn_widths(len(self.widths), clients, task.seed, int(broadcast[_ROUND]))
        if self.assignment == "compute":
            return affordable_widths(self._work(task), task.profiles.compute_speed[clients])
        budgets = task.profiles.uplink_bits_per_second[clients] * (self.upload_seconds or 0.0)
        return affordable_widths(self._bits_at_widths(broadcast, task).astype(np.float64), budgets)

    def _bits(self, broadcast: Arrays, task: Task, clients: IntArray) -> IntArray:
        """Return the size of each client's slice, uncoded, [C]."""
        return self._bits_at_widths(broadcast, task)[self._widths(broadcast, task, clients)]

    def _bits_at_widths(self, broadcast: Arrays, task: Task) -> IntArray:
        """Return the size of a slice of each width, uncoded, [widths]."""
        model, slices = self.final(broadcast), self._slices(task)
        values = np.array([slices.hidden.n_values(model, counts) for counts in slices.counts.tolist()])
        return dense_wire_bits(values, dtype_of(model))
