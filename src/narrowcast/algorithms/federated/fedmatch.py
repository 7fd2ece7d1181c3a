"""FedMatch: parameters for labels and parameters for samples without, and clients that ask similar clients.

Reference: Jeong, Yoon, Yang and Hwang, Federated Semi-Supervised Learning with Inter-Client Consistency and Disjoint
Learning, ICLR 2021 (arXiv:2006.12097), sections 3 and 4, Algorithms 1 and 2; released code wyjeong/FedMatch. Letters:
theta = sigma + psi the parameters of the network, p its softmax, u a sample without a label, pi(u) its strong view, H
helpers, U clients.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field

from narrowcast.algorithms.client.client_pass import Arrived, Contribution
from narrowcast.algorithms.client.sums import CLIENT, SumLayout, Weights, each_in_order
from narrowcast.algorithms.client.uploads import Message, zeros_of_clients
from narrowcast.algorithms.codecs.chain import flatten
from narrowcast.algorithms.codecs.messages import CodedTensors, dense_wire_bits
from narrowcast.algorithms.codecs.wire import dtype_of, varint, write_indices
from narrowcast.algorithms.federated.downloads import DOWNLOAD
from narrowcast.algorithms.federated.fedavg import Averaging, dense_bits, model_of
from narrowcast.algorithms.federated.semi_supervised import check_images_without_labels
from narrowcast.algorithms.federated.server_optimizer import SERVER_ONLY
from narrowcast.algorithms.local_training.calls import network_of, padded_batch
from narrowcast.algorithms.local_training.consistency import FixMatch
from narrowcast.algorithms.local_training.rules import along, only_gradient_descent
from narrowcast.algorithms.local_training.views import Views
from narrowcast.platform.config.fields import ROUNDS
from narrowcast.platform.contracts import Broadcast, Recipients, Task
from narrowcast.platform.errors import UserError
from narrowcast.platform.models.module_call import call_module
from narrowcast.platform.models.neural_network import as_inputs
from narrowcast.platform.seeds import generator
from narrowcast.platform.traits import Traits
from narrowcast.platform.types import (
    Arrays,
    Chunk,
    FloatArray,
    Gradient,
    IntArray,
    LocalTerms,
    LocalUpdates,
    PrefixedArrays,
    UnlabelledStep,
)

PSI = PrefixedArrays("psi/")
"""psi of each tensor; sigma has the tensor's own name."""
_CLIENTS = PrefixedArrays(SERVER_ONLY.name("psi of clients/"))
"""psi of each client after the last round in which it delivered, [U, ...]."""
_SIGMAS = PrefixedArrays(SERVER_ONLY.name("sigma of clients/"))
"""sigma of each client after that round, [U, ...], if clients are sent differences."""
_KNOWN = SERVER_ONLY.name("known clients")
"""True for clients whose psi the server has, [U]."""
_OF_CLIENTS, _HELPERS = PrefixedArrays(DOWNLOAD.name("psi of clients/")), DOWNLOAD.name("helpers")
"""In a broadcast: psi of all clients [U, ...], of which each downloads those of its helpers [U, H]."""
_HELD_SIGMAS, _HOLDS = PrefixedArrays(DOWNLOAD.name("sigma of clients/")), DOWNLOAD.name("known clients")
"""In a broadcast, for differences: sigma of all clients [U, ...], and which hold theirs and their psi [U]."""


def added_up(trained: Mapping[str, Any]) -> dict[str, Any]:
    """Return theta = sigma + psi, for torch tensors and for arrays."""
    return {name: values + trained[PSI.name(name)] for name, values in trained.items() if PSI.name(name) in trained}


def _rebuild(trained: Mapping[str, Any], frozen: Mapping[str, Any]) -> Mapping[str, Any]:
    del frozen
    return added_up(trained)


@dataclass(frozen=True)
class DisjointStep:
    """sigma -= rate supervised g_s, and then psi -= rate g_u, with sigma as it has become.

    g_s is the gradient of the loss of the step's batch; g_u that of equations 3 and 4 on the step's samples without
    labels, of which those count whose likeliest class has a probability of `sure.threshold` or more. Without such a
    sample psi still moves by its two norms; a client that has no samples without labels leaves psi as it is.
    """

    supervised: float
    agreement: float
    inter_client: float
    l1: float
    l2: float
    sure: FixMatch
    helpers: int
    labels: bool = True
    parts: int = 1

    @property
    def uses_images(self) -> bool:
        """Return whether a term of samples without labels has a factor above 0, so that they are looked at."""
        return self.agreement > 0 or (self.helpers > 0 and self.inter_client > 0)

    def init(self, start: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
        """Return nothing: sigma and psi are what trains."""
        del start, own
        return {}

    def step(
        self,
        values: Mapping[str, Any],
        slots: Mapping[str, Any],
        gradient: Gradient,
        own: Mapping[str, Any],
        rate: float,
        step: int,
    ) -> None:
        """Move sigma, and then psi."""
        del slots, step
        sigma = [name for name in values if PSI.name(name) in values]
        if self.labels or not self.uses_images:  # without labels 0
            of_labels = gradient(values, 0)
            for name in sigma:
                values[name].sub_(of_labels[name], alpha=rate * self.supervised)
        if (unlabelled := gradient.unlabelled) is None:
            return
        learns = unlabelled.valid.any(1)
        for name, direction in self._of_unlabelled(values, unlabelled, own).items():
            psi = values[PSI.name(name)]
            moves = direction + self.l1 * psi.sign() + 2 * self.l2 * (psi - values[name])
            psi.sub_(torch.where(along(learns, psi), moves, 0), alpha=rate)

    def _of_unlabelled(
        self, values: Mapping[str, Any], unlabelled: UnlabelledStep, own: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Return the gradient of both consistency terms at psi, by the tensors' own names."""
        sigma = [name for name in values if PSI.name(name) in values]
        if not self.uses_images:
            return {name: torch.zeros_like(values[name]) for name in sigma}
        votes, counts = self.sure.targets(unlabelled.outputs(values))
        counts = (counts & unlabelled.valid).to(votes.dtype)
        weights = counts / counts.sum(1, keepdim=True).clamp(min=1)
        predictions = []
        for index in range(self.helpers):
            helper = {PSI.name(name): own[_own_name(index, name)] for name in sigma}
            outputs = unlabelled.outputs({**values, **helper})
            predictions.append(torch.softmax(outputs, -1))
            votes = votes + self.sure.targets(outputs)[0]
        agreed = torch.nn.functional.one_hot(votes.argmax(-1), votes.shape[-1]).to(votes.dtype)
        descents = [(self.agreement, unlabelled.gradient(values, agreed, weights, strong=True))]
        if predictions:  # at theta the divergence from their mean and that from each have one gradient
            mean = torch.stack(predictions).mean(0)
            descents.append((self.inter_client, unlabelled.gradient(values, mean, weights, strong=False)))
        return {name: sum(factor * descent[PSI.name(name)] for factor, descent in descents) for name in sigma}


def patched(sent: Arrays, held: Arrays, threshold: float) -> tuple[Arrays, int]:
    """Return what the holder of `held` has once it is sent the values that differ by more than `threshold`; and bits.

    Values, how many they are and their indices are in the message, as the codec `threshold` writes them. If that is not
    smaller than all of `sent`, all is sent.
    """
    sent = {name: np.asarray(sent[name]) for name in sorted(sent)}
    differs = {name: np.abs(values - held[name]) > threshold for name, values in sent.items()}
    flat, indices, dtype = flatten(sent), np.flatnonzero(flatten(differs)), dtype_of(sent)
    data = varint(len(indices)) + write_indices(indices, len(flat), "smallest") + flat[indices].tobytes()
    bits, whole = CodedTensors(0, 0, data, dtype=dtype).wire_bits(), int(dense_wire_bits(len(flat), dtype))
    if bits >= whole:
        return sent, whole
    return {name: np.where(differs[name], values, held[name]) for name, values in sent.items()}, bits


def _own_name(helper: int, name: str) -> str:
    return f"helper {helper}/{name}"


class FedMatch(Averaging):
    """theta = sigma + psi: sigma learns from labels and psi from samples without; the server averages both.

    A step moves sigma along `supervised` times the gradient of the batch's loss, and then psi along that of the step's
    `ratio` times as many samples without labels: `agreement` times the cross-entropy of the strong view with the class
    for which most of the client and its H helpers vote, plus `inter_client` / H times the divergences of p from the p
    of helpers, plus `l1` |psi|_1 + `l2` ||sigma - psi||^2. Helpers of a client are the H others whose outputs on the
    probes are nearest to its own: drawn images, the same for all. Their parameters are the client's sigma plus their
    psi. A client that the server has not heard yet is placed where theta is.

    With `data.labelled.samples: 0` clients train, and send, psi alone, and after each mean the server trains sigma on
    `data.server` for the epochs of `training`.

    Bits: sigma and psi down and up, or psi alone up; and in a round with helpers, H times psi down besides, as the
    server has it of them; of sparse messages the values and where they are. The server sees psi of each client.

    With a `download_threshold` a client is sent the values of sigma, psi and its helpers' psi that differ by more from
    those that it holds, and starts from what it then has: elsewhere its own of the last round in which it delivered. A
    codec `threshold` does so with uploads, which are changes since that start.

    With `helpers: 0`, `psi: 0` and `agreement`, `l1` and `l2` 0 it is FedAvg on the samples with labels, at
    `supervised` times the rate. With `l2` above 0 and no sure predictions psi goes to sigma, and theta to twice sigma.

    Differs from the paper: 1. messages are whole unless `codec` and `download_threshold` make them sparse. 2. a client
    trains from what it was sent; in the released code from the server's whole parameters, whose small differences are
    not counted, nor is where the others are. 3. it sends changes since its start, there those from the server's
    parameters. 4. psi near 0 is not rounded to 0 for messages. 5. helpers are downloaded every `helpers_every` rounds
    and absent between them, as in the released code; 1 is the paper's. 6. they are all found by distances to all
    clients, in place of a k-d tree. 7. the views are those of `views`. 8. the weights of the terms by default are those
    of the released code.
    """

    kind: Literal["fedmatch"] = "fedmatch"
    weights: Weights = "equal"
    psi: float = Field(
        0.2, ge=0, description="psi before round 1, as a share of the model's parameters, which sigma is"
    )
    supervised: float = Field(10.0, gt=0, description="lambda_s, factor of the loss of samples with labels")
    agreement: float = Field(0.01, ge=0, description="factor of the cross-entropy with the class that is agreed upon")
    inter_client: float = Field(0.01, ge=0, description="lambda_ICCS, factor of the divergence from helpers")
    l1: float = Field(1e-4, ge=0, description="lambda_L1, factor of the L1 norm of psi")
    l2: float = Field(10.0, ge=0, description="lambda_L2, factor of the squared distance of psi from sigma")
    threshold: float = Field(0.75, ge=0, le=1, description="least probability of the class that a client predicts")
    ratio: int = Field(10, ge=1, description="samples without labels in a step, for each of training.batch_size")
    views: Views = Field(Views(shift=0), description="how images are changed for weak and strong views")
    helpers: int = Field(2, ge=0, description="H, most similar clients whose psi a client downloads; 0: none")
    helpers_every: int = Field(
        10, ge=1, description="rounds from one with helpers to the next", json_schema_extra=ROUNDS
    )
    download_threshold: float | None = Field(
        None,
        ge=0,
        allow_inf_nan=False,
        description="difference from what a client holds above which a value is sent down; null: all values are",
    )
    probes: int = Field(1, ge=1, description="drawn images on which the outputs of clients are compared")

    @property
    def traits(self) -> Traits:
        """Clients download what their own helpers have; those without labels have steps too."""
        traits = replace(super().traits, needs_no_labels=True)
        if not self._keeps_clients:
            return traits
        field = f"helpers = {self.helpers}" if self.helpers else f"download_threshold = {self.download_threshold:g}"
        return replace(traits, downloads="by_client", needs_each=traits.needs_each or field)

    @property
    def _keeps_clients(self) -> bool:
        """Return whether the server keeps what each client has learnt."""
        return self.helpers > 0 or self.download_threshold is not None

    def check(self, task: Task) -> None:
        """Raise `UserError` unless clients have images without labels, and take steps along gradients."""
        super().check(task)
        check_images_without_labels(task, self.kind)
        traits, steps = (
            task.training.traits,
            f"algorithm.kind = {self.kind} trains two sets of parameters by its own steps",
        )
        only_gradient_descent(task, steps)
        if traits.momentum or traits.clip_norm:
            raise UserError(f"{steps}, without momentum and clipping; leave training.momentum and clip_norm out")
        rate = traits.learning_rate
        if rate is not None and rate * self.l2 > 1:
            raise UserError(
                f"algorithm.l2 = {self.l2:g} with training.learning_rate = {rate:g}: a step takes psi past sigma, and "
                "farther from it than it was; keep the product at 1 or below"
            )
        if self.download is not None and self.download_threshold is not None:
            raise UserError("algorithm.download and algorithm.download_threshold are two ways down; leave out one")
        if task.start is not None and self.psi:
            raise UserError(f"start_from: {self.kind} begins at 1 + psi times the model; set algorithm.psi = 0")

    def init(self, task: Task) -> Arrays:
        """Return sigma and psi, and room for what the server keeps of each client."""
        state = super().init(task)
        if not self._keeps_clients:
            return state
        n_clients, psi = task.data.n_clients, PSI.of(model_of(state))
        kept = _CLIENTS.add(zeros_of_clients(psi, n_clients))
        if self.download_threshold is not None:
            kept |= _SIGMAS.add(zeros_of_clients({name: state[name] for name in psi}, n_clients))
        return {**state, **kept, _KNOWN: np.zeros(n_clients, dtype=bool)}

    def parameters(self, task: Task) -> Arrays:
        """Return sigma, the model's parameters, and psi, a share of these."""
        sigma = task.initial_parameters()
        return {**sigma, **PSI.add({name: (self.psi * values).astype(values.dtype) for name, values in sigma.items()})}

    # Client half

    def terms(self, chunk: Chunk, task: Task) -> LocalTerms:
        """Return the steps without helpers; those of a server are of its labels alone."""
        del chunk
        return self._terms(task, 0)

    def _terms(self, task: Task, helpers: int) -> LocalTerms:
        sure = FixMatch(threshold=self.threshold, weight=0, ratio=self.ratio, views=self.views)
        factors = (self.supervised, self.agreement, self.inter_client, self.l1, self.l2)
        rule = DisjointStep(*factors, sure, helpers, task.data.labels_at_clients)
        has = task.data.unlabelled is not None
        return LocalTerms(rebuild=_rebuild, rule=rule, consistency=sure if has else None)

    def local_calls(self, broadcast: Arrays, chunk: Chunk, task: Task) -> list[Any]:
        """Train sigma and psi from where each client starts, with psi of its helpers beside them."""
        (call,) = super().local_calls(broadcast, chunk, task)
        if _HELPERS in broadcast:
            count = broadcast[_HELPERS].shape[1]
            of_helpers = [self._of_helpers(broadcast, client)[0] for client in chunk.clients.tolist()]
            own = {
                _own_name(index, name): np.stack([psi[index][name] for psi in of_helpers])
                for index in range(count)
                for name in PSI.of(model_of(broadcast))
            }
            call = replace(call, terms=replace(self._terms(task, count), own=own))
        if _HOLDS not in broadcast:
            return [call]
        return [replace(call, terms=replace(call.terms, start=self._starts(broadcast, chunk.clients)))]

    def _start(self, broadcast: Arrays, client: int) -> tuple[Arrays, int]:
        """Return sigma and psi of a client that received the broadcast, and the bits of those."""
        model = model_of(broadcast)
        if self.download_threshold is None or not broadcast[_HOLDS][client]:
            return model, int(dense_wire_bits(sum(values.size for values in model.values()), dtype_of(model)))
        held = {**_HELD_SIGMAS.of(broadcast), **PSI.add(_OF_CLIENTS.of(broadcast))}
        return patched(model, {name: values[client] for name, values in held.items()}, self.download_threshold)

    def _starts(self, broadcast: Arrays, clients: IntArray) -> Arrays:
        """Return sigma and psi from which each client starts, [C, ...]."""
        starts = [self._start(broadcast, client)[0] for client in clients.tolist()]
        return {
            name: np.array([start[name] for start in starts], dtype=values.dtype).reshape(-1, *values.shape)
            for name, values in model_of(broadcast).items()
        }

    def _of_helpers(self, broadcast: Arrays, client: int) -> tuple[list[Arrays], int]:
        """Return psi of each helper of a client as the client has them, and their bits."""
        of_clients = _OF_CLIENTS.of(broadcast)
        helpers = broadcast[_HELPERS][client].tolist()
        sent: list[Arrays] = [{name: values[helper] for name, values in of_clients.items()} for helper in helpers]
        if self.download_threshold is None:
            bits = dense_wire_bits(sum(values[0].size for values in of_clients.values()), dtype_of(of_clients))
            return sent, len(sent) * int(bits)
        own = PSI.of(self._start(broadcast, client)[0])
        received = [patched(psi, own, self.download_threshold) for psi in sent]
        return [psi for psi, _ in received], sum(bits for _, bits in received)

    def message(self, broadcast: Arrays, chunk: Chunk, task: Task, updates: LocalUpdates) -> Message:
        """Return the changes of sigma and psi, of psi alone where clients have no labels."""
        message = super().message(broadcast, chunk, task, updates)
        if task.data.labels_at_clients:
            return message
        return replace(message, tensors=PSI.add(PSI.of(message.tensors)))

    def contribution(self, broadcast: Arrays, chunk: Chunk, task: Task, arrived: Arrived) -> Contribution:
        """Return the changes, and apart those of each client that the server keeps."""
        whole = super().contribution(broadcast, chunk, task, arrived)
        if not self._keeps_clients:
            return whole
        changes = dict(arrived.tensors)
        if self.download_threshold is None:
            changes = {name: values for name, values in changes.items() if name.startswith(PSI.prefix)}
        return replace(whole, each={**whole.each, CLIENT: chunk.clients, **changes})

    def upload_bits(self, broadcast: Arrays, task: Task, clients: IntArray) -> IntArray | None:
        """Return the size of each client's upload, [C]; None with a codec."""
        if self.codec or task.data.labels_at_clients:
            return super().upload_bits(broadcast, task, clients)
        return dense_bits(PSI.of(model_of(broadcast)), task, clients)

    def relative_work(self, broadcast: Arrays, task: Task, clients: IntArray) -> FloatArray:
        """Return the work on all samples of a round, by sample that is counted, [C].

        A sample without a label takes a forward pass of the client and each helper, a third of the work of one with a
        label, and forward and back of its strong view, and of its weak one if there are helpers.
        """
        helpers = broadcast[_HELPERS].shape[1] if _HELPERS in broadcast else 0
        work, data = 4 / 3 + helpers / 3 + (helpers > 0), task.data
        if not data.labels_at_clients:
            return np.full(len(clients), work)
        batch, counted = padded_batch(task), np.maximum(data.examples[clients], 1)
        others = -(-counted // batch) * np.minimum(self.ratio * batch, data.unlabelled.examples[clients])
        return np.asarray(1 + work * others / counted)

    # Server half

    def broadcast(self, server: Arrays, task: Task, round_index: int) -> Broadcast:
        """Send sigma and psi, and every `helpers_every` rounds psi of the helpers of each client."""
        sent = super().broadcast(server, task, round_index)
        of_clients, arrays = _CLIENTS.of(server), dict(sent.arrays)
        if self.download_threshold is not None:
            arrays |= {**_HELD_SIGMAS.add(_SIGMAS.of(server)), **_OF_CLIENTS.add(of_clients), _HOLDS: server[_KNOWN]}
        if self.helpers and not (round_index - 1) % self.helpers_every:
            count = min(self.helpers, int(server[_KNOWN].sum()) - 1)
            if count >= 1:
                nearest = self._nearest(model_of(sent.arrays), of_clients, server[_KNOWN], task)[:, :count]
                arrays |= {**_OF_CLIENTS.add(of_clients), _HELPERS: nearest}
        return replace(sent, arrays=arrays)

    def _nearest(self, model: Arrays, of_clients: Arrays, known: NDArray[np.bool_], task: Task) -> IntArray:
        """Return the known clients by their distance from each client, itself last, [U, k]."""
        shape = (self.probes, *task.data.train.features.shape[1:])
        probes = generator(task.seed, "probes").standard_normal(shape, dtype=np.float32)
        clients = np.flatnonzero(known)
        of_known = [{name: values[client] for name, values in of_clients.items()} for client in clients]
        places = np.stack([_predicted({**model, **PSI.add(psi)}, probes, task) for psi in of_known])
        of_each = np.repeat(_predicted(model, probes, task)[np.newaxis], len(known), axis=0)
        of_each[clients] = places
        distances = np.square(of_each[:, np.newaxis] - places).sum(axis=2)
        distances[clients, np.arange(len(clients))] = np.inf
        return clients[np.argsort(distances, axis=1, kind="stable")]

    def download_bits(
        self, server: Arrays, broadcast: Broadcast, task: Task, recipients: Recipients
    ) -> IntArray | None:
        """Return the size of what each recipient is sent, [C], with psi of its helpers."""
        arrays, clients = broadcast.arrays, recipients.clients.tolist()
        if self.download_threshold is not None:
            sizes: IntArray | None = np.array([self._start(arrays, each)[1] for each in clients], dtype=np.int64)
        else:
            sizes = super().download_bits(server, broadcast, task, recipients)
        if _HELPERS not in arrays:
            return sizes
        whole = np.full(len(clients), broadcast.full.wire_bits()) if sizes is None else sizes
        return whole + np.array([self._of_helpers(arrays, each)[1] for each in clients], dtype=np.int64)

    def reference(self, broadcast: Arrays, task: Task, round_index: int) -> Arrays:
        """Return what the server would send as a client that joins now, which has no helpers and holds nothing."""
        return super().reference(model_of(broadcast), task, round_index)

    def mean_change(self, server: Arrays, total: Arrays, task: Task, round_index: int) -> Arrays | None:
        """Return the mean change; that of sigma is 0 where clients have no labels."""
        changes = super().mean_change(server, total, task, round_index)
        if changes is None:
            return None
        return {name: np.zeros_like(values) for name, values in model_of(server).items()} | dict(changes)

    def step(self, server: Arrays, broadcast: Arrays, total: Arrays, task: Task, round_index: int) -> Arrays:
        """Return sigma and psi after the step, sigma trained by the server where clients have no labels."""
        stepped = {**super().step(server, broadcast, total, task, round_index)}
        if not task.data.labels_at_clients:
            own, model = task.of_server(), model_of(stepped)
            chunk = Chunk(round_index, 0, np.zeros(1, dtype=np.int64), own.model.init_clients(own.data, own.seed))
            learnt = own.training.train(model, chunk, own, self._terms(own, 0))
            stepped |= {name: values + learnt.changes[name][0] for name, values in model.items()}
        if self._keeps_clients:
            each, known = each_in_order(total), server[_KNOWN].copy()
            known[each[CLIENT]] = True
            stepped[_KNOWN] = known
            starts = self._starts(broadcast, each[CLIENT])
            for kept, prefix in ((_CLIENTS, PSI.prefix), (_SIGMAS, "")):
                for name, values in kept.of(server).items():
                    start, of_clients = starts[prefix + name], np.array(values)
                    of_clients[each[CLIENT]] = start + each.get(prefix + name, np.zeros_like(start))
                    stepped[kept.name(name)] = of_clients
        return stepped

    def final(self, server: Arrays) -> Arrays:
        """Return theta."""
        return added_up(model_of(server))

    def weighted_by_staleness(self, partial: Arrays, factor: float) -> Arrays | None:
        """Return None if the server keeps what clients have learnt: it is as it was sent."""
        return None if self._keeps_clients else super().weighted_by_staleness(partial, factor)

    def sum_layout(self, task: Task, cohort: int) -> SumLayout | None:
        """Return that of sigma and psi; None if the server keeps those of clients, and where these send psi alone."""
        if self._keeps_clients or not task.data.labels_at_clients:
            return None
        return super().sum_layout(task, cohort)


def _predicted(model: Arrays, probes: NDArray[np.float32], task: Task) -> FloatArray:
    """Return p of the probes as one vector."""
    network, data = network_of(task), task.data
    module = network.loaded(added_up(model), data)
    with torch.no_grad(), network.evaluation_draws(data):
        outputs = call_module(module, as_inputs(probes, network.torch_dtype))
    return np.asarray(torch.softmax(outputs, -1).double().flatten().numpy())
