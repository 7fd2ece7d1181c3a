"""A server's view of a network's training, round by round: changes as it decodes them, or the opened sum.

Letters: W [m, d] a weight viewed as a matrix of d columns, the shorter side; B [r, d] the basis of CoLR and SCoLR.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from narrowcast.algorithms.attacks.taps import Recorder
from narrowcast.algorithms.client.sums import COMPONENT_WEIGHTS, TensorSum, add_up
from narrowcast.algorithms.codecs.sparsify import RandomK, Threshold, TopK
from narrowcast.algorithms.federated.low_rank import BASIS, Factor
from narrowcast.algorithms.secure.aggregation import SecureAggregation
from narrowcast.algorithms.secure.unmasking import protected_groups
from narrowcast.platform.contracts import Algorithm, Task
from narrowcast.platform.rounds.ledger import ChunkResult
from narrowcast.platform.types import Arrays, Chunk


@dataclass(frozen=True)
class ObservedChange:
    """A change of a network's parameters as a server reads it, in the parameters' own shapes.

    `projections` has, for each weight of which only a part in a public basis was sent, the matrix [d, d] by which the
    gradient was multiplied on the shorter side before it became this change. With `sparse` an entry of zero was not
    sent, and says nothing.
    """

    change: Arrays = field(repr=False)
    projections: Arrays = field(default_factory=dict, repr=False)
    sparse: bool = False


@dataclass(frozen=True)
class NetworkRound:
    """One round of a network as the server sees it.

    `model` is what was broadcast. `uploads` has each client's change, by client; under masks, with `readable` False,
    the numbers that its ring elements are when they are read as if there was no mask; none under encryption. `mean` is
    the weighted mean of the changes, which is all that secure sums open; None if nothing arrived or was opened.
    """

    round_index: int
    model: Arrays = field(repr=False)
    uploads: Mapping[int, ObservedChange]
    uplink_bits: Mapping[int, int]
    readable: bool
    mean: ObservedChange | None


@dataclass
class NetworkRecorder(Recorder):
    """The rounds of a real run of a network by `algorithm`, which adds its clients' changes up."""

    algorithm: Algorithm
    task: Task
    rounds: list[NetworkRound] = field(default_factory=list)

    def record_uploads(self, broadcast: Arrays, chunks: Sequence[Chunk], results: Sequence[ChunkResult]) -> None:
        """Record a round's broadcast and uploads."""
        view = _View.of(self.algorithm, broadcast)
        secure = isinstance(self.algorithm, SecureAggregation)
        readable = not isinstance(self.algorithm, SecureAggregation) or self.algorithm.scheme.kind == "plain"
        arrived = {
            int(chunk.clients[0]): (chunk, result)
            for chunk, result in zip(chunks, results, strict=True)
            if result.ledger.delivered[0]
        }
        partials = {
            client: partial
            for client, (chunk, result) in arrived.items()
            if (partial := self._unprotected(chunk, result) if secure else result.partial) is not None
        }
        mean = None if secure or not partials else view.mean(add_up(list(partials.values())))
        self.rounds.append(
            NetworkRound(
                round_index=chunks[0].round_index,
                model=view.model,
                uploads={client: view.mean(partial) for client, partial in partials.items()},
                uplink_bits={client: int(result.ledger.uplink_bits[0]) for client, (_, result) in arrived.items()},
                readable=readable,
                mean=mean,
            )
        )
        self._view = view

    def record_opened(self, total: Arrays) -> None:
        """Record the mean of the sum that the server opened."""
        self.rounds[-1] = replace(self.rounds[-1], mean=self._view.mean(total))

    def _unprotected(self, chunk: Chunk, result: ChunkResult) -> Arrays | None:
        """Return the partial sum that a client's ring elements say without regard to masks; None for ciphertexts."""
        assert isinstance(self.algorithm, SecureAggregation)
        if self.algorithm.scheme.kind not in ("plain", "masked"):
            return None
        messages = chunk.relayed.messages(self.algorithm.messages(self.task))
        groups, numbers = protected_groups(result.partial), messages.fixed_point
        sums = [
            messages.scheme.open_sum(group, groups[index], numbers) if index in groups else None
            for index, group in enumerate(messages.layout.groups)
        ]
        return numbers.total(sums, messages.layout)


@dataclass(frozen=True)
class _View:
    """The public part of a round: the model, the bases of its weights, and whether uploads leave entries out."""

    model: Arrays
    bases: Arrays
    sparse: bool

    @classmethod
    def of(cls, algorithm: Algorithm, broadcast: Arrays) -> _View:
        sparse = any(isinstance(stage, (TopK, Threshold, RandomK)) for stage in algorithm.traits.codec)
        return cls(algorithm.final(broadcast), BASIS.of(broadcast), sparse)

    def mean(self, arrays: Arrays) -> ObservedChange:
        """Return the mean of a sum of changes, of one client or of several."""
        sums = TensorSum.of(arrays)
        change, projections = sums.means(), {}
        for name, basis in self.bases.items():
            factor = Factor.of(self.model[name].shape, len(basis))
            assert factor is not None, "vectors have no basis"
            counts = arrays.get(COMPONENT_WEIGHTS.name(name))
            sent = basis if counts is None else basis[np.asarray(counts) > 0]
            # Clients train A with gradients times sqrt(r / d), see `LowRank.local_calls`.
            projections[name] = (len(basis) / factor.short) ** 0.5 * (sent.T @ sent)
            change[name] = factor.change_of(np.asarray(change[name]), basis)
        return ObservedChange(change, projections, self.sparse)
