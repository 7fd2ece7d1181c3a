"""Sharing a part of a network: FedPer, FedRep, LG-FedAvg and FedBABU as settings of one method.

References: Arivazhagan et al., Federated Learning with Personalization Layers, 2019 (arXiv:1912.00818); Collins et al.,
Exploiting Shared Representations for Personalized Federated Learning, ICML 2021 (arXiv:2102.07078), Algorithm 1; Liang
et al., Think Locally, Act Globally, 2020 (arXiv:2001.01523); Oh, Kim and Yun, FedBABU, ICLR 2022 (arXiv:2106.06042).
Letters: x the shared tensors, v_u what client u keeps.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from narrowcast.algorithms.federated.personal import PartlyShared, adapted, check_adapted
from narrowcast.platform.contracts import Task
from narrowcast.platform.errors import UserError
from narrowcast.platform.types import Arrays, Chunk, LocalTerms, Phase

Names = Annotated[tuple[str, ...], Field(min_length=1)]
PartOfNetwork = Literal["head", "body"] | Names


class PartialPhase(BaseModel):
    """The first local epochs of a round, or the next ones, in which only some tensors train."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    trained: PartOfNetwork = Field(description="tensors that train: head, body, or patterns of names")
    epochs: int = Field(1, ge=1, description="local epochs of this phase")


class Partial(PartlyShared):
    """Clients average the rest of the network, and each keeps the tensors of `kept`; bits are those of the rest.

    FedPer is `kept: head`. FedRep is that with `phases: [{trained: head, epochs: 10}, {trained: body}]` and 11 local
    epochs. LG-FedAvg is `kept: body`. FedBABU is `kept: head` with `kept_trains: false` and `fine_tune_epochs`.

    Differs from the papers: 1. v_u begins as in the model before round 1, for all clients alike; LG-FedAvg begins from
    a model of FedAvg, which `start_from` gives. 2. means are weighted by examples unless `weights: equal`, which is
    that of LG-FedAvg and FedRep's paper. 3. a client that takes no part keeps its v_u; FedRep's code then gives it the
    mean of all heads. 4. FedRep's paper counts steps of the head, its code and this class count epochs.
    """

    kind: Literal["partial"] = "partial"
    kept: PartOfNetwork = Field(
        "head",
        description="tensors that each client keeps: head, those of the last layer; body, all others; or patterns of "
        "their names, such as 3.*",
    )
    kept_trains: bool = Field(True, description="whether clients train what they keep; false: it stays as drawn")
    phases: tuple[PartialPhase, ...] = Field(
        (), description="first local epochs, in which only some tensors train; in the epochs left all of them do"
    )
    fine_tune_epochs: int = Field(0, ge=0, description="local epochs of the whole network before a client is measured")

    def kept_names(self, task: Task) -> frozenset[str]:
        """Return the names of the tensors that clients keep."""
        return frozenset(_names(self.kept, "kept", task))

    def check(self, task: Task) -> None:
        """Raise `UserError` for names that match nothing, and for phases longer than the training."""
        super().check(task)
        if self.fine_tune_epochs:
            check_adapted(task, "algorithm.fine_tune_epochs")
        if not self.kept_names(task):
            raise UserError("algorithm.kept is empty: clients share all; use fedavg")
        trained = self.trained(task)
        for phase in self.phases:
            names = _names(phase.trained, "phases.trained", task)
            if fixed := [name for name in names if name not in trained]:
                raise UserError(
                    f"algorithm.phases trains {fixed[0]}, which kept_trains = false holds fixed; leave it out"
                )
        if (epochs := sum(phase.epochs for phase in self.phases)) > task.training.epochs:
            raise UserError(
                f"algorithm.phases have {epochs} epochs and training.epochs = {task.training.epochs}; raise it to "
                f"{epochs}"
            )

    def trained(self, task: Task) -> tuple[str, ...]:
        """Return the names of the tensors that train in a round."""
        kept = self.kept_names(task)
        return tuple(name for name in task.initial_parameters() if self.kept_trains or name not in kept)

    def terms(self, chunk: Chunk, task: Task) -> LocalTerms:
        """Return what trains, and in which epochs."""
        del chunk
        phases = tuple(Phase(_names(phase.trained, "phases.trained", task), phase.epochs) for phase in self.phases)
        return LocalTerms(trained=None if self.kept_trains else self.trained(task), phases=phases)

    def personal(self, broadcast: Arrays, chunk: Chunk, task: Task) -> Arrays:
        """Return x with the kept tensors of each client, after `fine_tune_epochs` of them all, [C, ...]."""
        own = super().personal(broadcast, chunk, task)
        return adapted(own, chunk, task, self.fine_tune_epochs, of_each=True)


def _names(part: PartOfNetwork, field: str, task: Task) -> tuple[str, ...]:
    """Return the names of tensors of a part, in the order of the network."""
    names = tuple(task.initial_parameters())
    if isinstance(part, str):
        last = names[-1].rpartition(".")[0]
        return tuple(name for name in names if (name.rpartition(".")[0] == last) == (part == "head"))
    for pattern in part:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise UserError(
                f"algorithm.{field} = {pattern} names no tensor of {task.model.kind}; it has {', '.join(names)}"
            )
    return tuple(name for name in names if any(fnmatchcase(name, pattern) for pattern in part))
