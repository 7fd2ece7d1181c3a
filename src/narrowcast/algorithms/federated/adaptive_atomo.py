"""Adaptive ATOMO of networks: each client draws directions of its change such that their mean is the change.

Sixty steps of SGD change a network in few directions: of a LeNet-like one on MNIST, 28 hold nine tenths of the change.
Sending the strongest alone leaves out the same ones in every round, which costs accuracy that noise does not. So a
client draws them, and sends the more of each the less likely it was (`codecs.atomo`); within its bits it chooses the
probabilities and the quantiser's levels that lose least.

Reference: Wang et al., ATOMO: Communication-efficient Learning via Atomic Sparsification, NeurIPS 2018
(arXiv:1806.04090), for the draw; the choice of levels is this package's.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from narrowcast.algorithms.channel.curves import DistortionCurves
from narrowcast.algorithms.channel.joint import STEPS, bits_per_value
from narrowcast.algorithms.client.client_pass import Arrived, ClientPass, Contribution
from narrowcast.algorithms.client.sums import TensorSum, tensor_weights
from narrowcast.algorithms.client.uploads import UPDATE, Message, Sent, Tensors
from narrowcast.algorithms.codecs.atomo import Atomo, Directions, with_vectors
from narrowcast.algorithms.codecs.budget import ClientEncoder
from narrowcast.algorithms.codecs.chain import Codec, Stages, check_values
from narrowcast.algorithms.codecs.low_rank import as_matrix
from narrowcast.algorithms.codecs.messages import CodedTensors, DensePayload, TensorUpdate
from narrowcast.algorithms.federated.adaptive_svd import DEFAULT_CODEC, check_adaptive_codec
from narrowcast.algorithms.federated.fedavg import ServerLearningRate
from narrowcast.platform.contracts import Broadcast, LocalCall, RateDistortion, Task
from narrowcast.platform.data.samples import Samples
from narrowcast.platform.errors import UserError
from narrowcast.platform.models.modules import shapes_of
from narrowcast.platform.models.neural_network import NeuralNetwork, skeleton
from narrowcast.platform.types import Arrays, Chunk, FloatArray, IntArray, LocalTerms, LocalUpdates

_NORM_BITS = 16.0  # bfloat16
_HEADER_BITS = 400.0  # models of the entropy coder, about
_SIZE_MARGIN = 1.35  # of an upload of a fixed fraction over its estimate; on MNIST at most 34 %
_POINTS = 48


class AdaptiveAtomo(ClientPass):
    """Clients train the whole network, and send directions of their change, drawn at random; the server adds the mean.

    `rank` bounds the directions of a weight that a client draws from. Without a budget a client sends that many, at the
    codec's own levels; with one it chooses the probabilities and the levels. If `fraction` is given, it chooses
    nothing: it draws that fraction, as the codec `atomo` does, at the codec's own levels, and sends nothing if that is
    too much. Clients count by their examples. With `informs_allocation` the radio's allocation knows how many bits an
    upload needs at least; its error is taken to fall as 1 / bits, and counts by the square of the client's examples.

    Differs from the paper: 1. to 3. as the codec `atomo`. 4. the number of directions and the levels follow from the
    bits of the client's link.
    """

    kind: Literal["adaptive_atomo"] = "adaptive_atomo"
    rank: int = Field(8, ge=1, description="most directions of a weight matrix; fewer where the matrix is smaller")
    codec: Stages = DEFAULT_CODEC
    fraction: float | None = Field(
        None,
        gt=0,
        le=2,
        description="expected number of values of the factors, over those of the matrix; null: chosen by budget",
    )
    server_learning_rate: ServerLearningRate = 1.0
    informs_allocation: bool = Field(False, description="tell the radio's allocation what bits are worth to clients")

    def check(self, task: Task) -> None:
        """Raise `UserError` for models other than networks, and for codecs that do not fit."""
        if not isinstance(task.model, NeuralNetwork):
            raise UserError(f'algorithm.kind = "{self.kind}" trains networks, not {task.model.kind}; use adaptive_svd')
        check_adaptive_codec(self.kind, self.codec)

    def init(self, task: Task) -> Arrays:
        """Return the parameters, and the change that the last round made to them: none."""
        model = task.initial_parameters()
        zeros = {name: np.zeros_like(values) for name, values in model.items()}
        return {**model, **UPDATE.add(zeros)}

    def init_clients(self, task: Task) -> Arrays:
        """Return the clients' private parameters."""
        return task.model.init_clients(task.data, task.private_seed.value)

    # Server half

    def broadcast(self, server: Arrays, task: Task, round_index: int) -> Broadcast:
        """Send the parameters to a newcomer, and the last change to a client that holds the rest."""
        del task
        model = self.final(server)
        update = DensePayload.of(UPDATE.of(server)) if round_index > 1 else None
        return Broadcast(model, full=DensePayload.of(model), update=update)

    def step(self, server: Arrays, broadcast: Arrays, total: Arrays, task: Task, round_index: int) -> Arrays:
        """Return the parameters plus the weighted mean of the decoded changes, at the server's learning rate."""
        del broadcast, task, round_index
        sums, rate = TensorSum.of(total), self.server_learning_rate
        after: dict[str, NDArray[Any]] = {}
        for name, values in self.final(server).items():
            mean = rate * sums.mean(name)
            after[UPDATE.name(name)], after[name] = mean, values + mean
        return after

    def final(self, server: Arrays) -> Arrays:
        """Return the parameters."""
        return UPDATE.without(server)

    # Client half

    def local_calls(self, broadcast: Arrays, chunk: Chunk, task: Task) -> list[LocalCall]:
        """Train the whole network."""
        return [LocalCall(broadcast, chunk, task, LocalTerms())]

    def message(self, broadcast: Arrays, chunk: Chunk, task: Task, updates: LocalUpdates) -> Message:
        """Send directions of each change."""
        del broadcast, task
        wire = partial(send_drawn, self.rank, fraction=self.fraction)
        return Message(updates.changes, max_ranks=np.full(len(chunk.clients), self.rank), wire=wire)

    def contribution(self, broadcast: Arrays, chunk: Chunk, task: Task, arrived: Arrived) -> Contribution:
        """Return what is decoded of each change, by the clients' examples."""
        del broadcast
        return Contribution(arrived.tensors, tensor_weights("examples", task, chunk))

    # What the channel is told before a round

    def rate_distortion(self, task: Task, cohort: IntArray) -> RateDistortion | None:
        """Return the error of each client's update at so many bits; a single size with a `fraction`."""
        if not self.informs_allocation:
            return None
        assert isinstance(task.model, NeuralNetwork) and isinstance(task.data, Samples), "check() refuses other models"
        shapes = shapes_of(skeleton(task.model, task.data)).values()
        vectors = np.array([np.prod(shape) for shape in shapes if len(shape) < 2], dtype=np.float64)
        matrices = np.array([as_matrix(shape) for shape in shapes if len(shape) > 1], dtype=np.float64)
        largest, values = matrices[matrices.prod(axis=1).argmax()], float(matrices.prod(axis=1).sum())
        weight = np.maximum(task.data.examples[cohort], 1).astype(np.float64) ** 2
        if self.fraction is not None:
            levels = Codec(self.codec).levels or 1
            drawn = self.fraction * values / largest.sum() * _bits(largest, levels).sum()
            bits = _HEADER_BITS + _bits(vectors, levels).sum() + drawn
            curves = DistortionCurves.single_point(np.full(len(cohort), _SIZE_MARGIN * bits), weight)
        else:
            least = _HEADER_BITS + _bits(vectors, 1).sum() + _bits(largest, 1).sum()
            points = np.geomspace(least, max(32 * values, 2 * least), _POINTS)
            bits, errors = (np.tile(values, (len(cohort), 1)) for values in (points, points[-1] / points))
            curves = DistortionCurves.of(bits, errors, weight)
        return RateDistortion(np.ceil(curves.min_bits()).astype(np.int64), curves)


def send_drawn(
    max_rank: int, update: TensorUpdate, encoder: ClientEncoder, *, fraction: float | None = None
) -> Sent[Tensors] | None:
    """Send one client's change as directions, and decode it with an `atomo` before the client's codec."""
    fitting = encode_drawn(update, encoder, max_rank, fraction)
    if fitting is None:
        return None
    payload, rank = fitting
    arrived = CodedTensors.from_bytes(payload.to_bytes())
    receiver = Codec((Atomo(rank=max_rank), *encoder.codec.stages), arrived.dtype)
    shapes = {name: values.shape for name, values in update.tensors.items()}
    return Sent(payload.wire_bits(), receiver.decode(arrived.coded, shapes, encoder.key), encoder.state, rank)


def encode_drawn(
    update: TensorUpdate, encoder: ClientEncoder, max_rank: int, fraction: float | None = None
) -> tuple[CodedTensors, int] | None:
    """Pack a network's change within a budget: directions drawn, and levels, that should lose least.

    With a `fraction` the values drawn are that share of the matrices' values, and the levels those of the codec.
    Return the payload, which an `atomo` of `max_rank` before the codec decodes, and the largest rank of a weight; None
    if one direction, or what is drawn, does not fit. Raise `UnsendableUpdateError` for values that are not finite.
    """
    tensors = {name: update.tensors[name] for name in sorted(update.tensors)}
    check_values(tensors)
    directions = Directions.of(tensors, max_rank)
    head = CodedTensors(update.examples, update.rank, b"", dtype=encoder.codec.dtype).to_bytes()
    left, finest = encoder.budget_bits - 8 * len(head), None
    probabilities, levels = np.ones(len(directions.strength)), encoder.codec.levels or 1
    if fraction is not None:
        drawn = fraction * sum(tensors[name].size for name in directions.factors)
        probabilities = directions.probabilities(directions.lengths.sum(axis=1), drawn)
        encoder = replace(encoder, budget_bits=np.inf)
    elif np.isfinite(left):
        vectors = np.array([values.size for values in tensors.values() if values.ndim < 2], dtype=np.float64)
        chosen = best_draw(directions, vectors, left)
        if chosen is None:
            return None
        probabilities, levels = chosen
        finest = _finest_levels(directions)
    counts, factors = directions.draw(probabilities, encoder.key)
    encoder = replace(encoder, codec=encoder.codec.with_levels(levels))
    fitting = encoder.encode(with_vectors(factors, tensors), head + counts, finest)
    if fitting is None or 8 * (len(fitting[0]) - len(head)) > left:
        return None
    rank = max((values.shape[1] for values in factors.values()), default=0)
    return CodedTensors.from_bytes(fitting[0]), rank


def best_draw(directions: Directions, vectors: FloatArray, bits: float) -> tuple[FloatArray, int] | None:
    """Return the probabilities [D] and the levels that should take so many bits with the least error.

    `vectors` are the sizes of the tensors that are sent whole. A direction of energy e, drawn with probability p, has
    the error e (1 / p - 1) of the draw and e / p (m + d) / 12 k^2 of the dithered rounding at k levels, which rounds
    either side with the steps that serve both best. None if not one direction is drawn on average.
    """
    energy, best, least = directions.strength**2, None, np.inf
    for levels in np.unique(np.rint(_finest_levels(directions) * STEPS[0] / STEPS).clip(1)):
        sizes = _bits(directions.lengths, levels).sum(axis=1)
        probabilities = directions.probabilities(sizes, bits - _HEADER_BITS - _bits(vectors, levels).sum())
        if probabilities.sum() < 1:
            continue
        with np.errstate(divide="ignore"):
            lost = (1 + directions.lengths.sum(axis=1) / (12 * levels**2)) / probabilities - 1
        if (error := float(energy @ lost)) < least:
            least, best = error, (probabilities, int(levels))
    return best


def _bits(lengths: FloatArray, levels: float) -> FloatArray:
    """Return the size of columns of normal values at so many levels, each with its norm."""
    return lengths * bits_per_value(lengths, levels) + _NORM_BITS


def _finest_levels(directions: Directions) -> int:
    """Return the levels beyond which rounding is negligible: the finest of `STEPS` for the longest column."""
    return round(float(directions.lengths.max(initial=1.0)) ** 0.5 / STEPS[0])
