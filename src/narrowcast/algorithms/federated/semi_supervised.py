"""FixMatch and UDA in FedAvg: clients of whose samples some, or none, have labels.

References: Sohn et al., FixMatch, NeurIPS 2020 (arXiv:2001.07685); Xie et al., Unsupervised Data Augmentation for
Consistency Training, NeurIPS 2020 (arXiv:1904.12848); as baselines of federated learning in Jeong et al., Federated
Semi-Supervised Learning with Inter-Client Consistency and Disjoint Learning, ICLR 2021 (arXiv:2006.12097), section 4.
Letters: x the server's model, n_u the samples that client u trains on.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import numpy as np
from pydantic import Field

from narrowcast.algorithms.federated.fedavg import FedAvg, model_of
from narrowcast.algorithms.local_training.calls import padded_batch
from narrowcast.algorithms.local_training.consistency import ConsistencyLoss, FixMatch
from narrowcast.platform.config.kinds import kind_of
from narrowcast.platform.contracts import Task
from narrowcast.platform.data.samples import Samples
from narrowcast.platform.errors import UserError
from narrowcast.platform.models.neural_network import NeuralNetwork
from narrowcast.platform.traits import Traits
from narrowcast.platform.types import Arrays, Chunk, FloatArray, IntArray, LocalTerms

_UNLABELLED_WORK = 4 / 3
"""The work on a sample without a label by that on one with: a forward pass more than forward and back."""


def check_images_without_labels(task: Task, kind: str) -> None:
    """Raise `UserError` unless clients have images without labels, for which the model predicts a class."""
    data, asked = task.data, f"algorithm.kind = {kind}"
    if not isinstance(task.model, NeuralNetwork) or not isinstance(data, Samples) or data.targets != "classes":
        raise UserError(f"{asked} trains networks that classify images; {data.name} with {task.model.kind} is other")
    if not isinstance(data.train.features, np.ndarray) or data.train.features.ndim != 4:
        shapes = ", ".join(f"{name} {list(values.shape[1:])}" for name, values in data.inputs.items())
        raise UserError(
            f"{asked} takes views of images [channels, height, width], and {data.name} has {shapes}; use a data "
            "set of images"
        )
    if data.unlabelled is None or not len(data.unlabelled.order):
        raise UserError(
            f"{asked} needs samples without labels, and all of {data.name} have one; set data.labelled, such as "
            "data.labelled.share=0.1"
        )
    if (outputs := task.model.n_outputs(data)) != data.n_classes:
        raise UserError(
            f"{asked} predicts one of {data.n_classes} classes, and the model with loss = "
            f"{kind_of(task.model.loss_on(data))} has {outputs} outputs; use cross_entropy"
        )


class SemiSupervised(FedAvg):
    """FedAvg whose clients add to the loss of a step's batch the consistency of samples without labels.

    `data.labelled` says which samples of clients keep their labels. A client takes the steps of FedAvg on these, on the
    same batches; each step also has `ratio` times as many samples without labels, in shuffled passes of their own. With
    `weight: 0`, and where no prediction reaches `threshold`, it is FedAvg on the samples with labels, bit for bit: the
    control of equal supervised steps. n_u counts samples with labels.

    With `data.labelled.samples: 0` clients take steps on samples without labels alone, in batches of
    `training.batch_size`, and n_u counts these; after the mean of every round the server trains x on `data.server` for
    the epochs of `training`, from the public seed. `weight: 0` is then a model of the server's samples alone. The
    server's training costs no bits and no simulated time.

    Bits are those of FedAvg. Work is that of a forward pass on each weak view, and forward and back on each strong one.

    Differs from the papers: 1. samples without labels of a step are at most all that a client has. 2. the others are
    those of the losses: `fixmatch` and `uda` of `consistency`.
    """

    kind: Literal["semi_supervised"] = "semi_supervised"  # type: ignore[assignment]
    consistency: ConsistencyLoss = Field(FixMatch(), description="loss of the samples without labels")

    @property
    def traits(self) -> Traits:
        """Clients without labels have steps too."""
        return replace(super().traits, needs_no_labels=True)

    def check(self, task: Task) -> None:
        """Raise `UserError` unless clients have images without labels, for which the model predicts a class."""
        super().check(task)
        check_images_without_labels(task, self.kind)

    def terms(self, chunk: Chunk, task: Task) -> LocalTerms:
        """Return the loss of samples without labels; nothing for a server, whose samples have labels."""
        used = self.consistency.weight and task.data.unlabelled is not None
        return replace(super().terms(chunk, task), consistency=self.consistency if used else None)

    def step(self, server: Arrays, broadcast: Arrays, total: Arrays, task: Task, round_index: int) -> Arrays:
        """Return x after the server's step; where clients have no labels, trained on the server's own samples."""
        stepped = super().step(server, broadcast, total, task, round_index)
        if task.data.labels_at_clients:
            return stepped
        own, model = task.of_server(), model_of(stepped)
        chunk = Chunk(round_index, 0, np.zeros(1, dtype=np.int64), own.model.init_clients(own.data, own.seed))
        learnt = own.training.train(model, chunk, own, LocalTerms())
        return {**stepped, **{name: values + learnt.changes[name][0] for name, values in model.items()}}

    def relative_work(self, broadcast: Arrays, task: Task, clients: IntArray) -> FloatArray | None:
        """Return the work on all samples of a round, by sample that is counted, [C]."""
        del broadcast
        if not self.consistency.weight:
            return None
        data, batch = task.data, padded_batch(task)
        counted = np.maximum(data.examples[clients], 1)
        if not data.labels_at_clients:
            return np.full(len(clients), _UNLABELLED_WORK)
        steps = -(-counted // batch)
        others = steps * np.minimum(self.consistency.ratio * batch, data.unlabelled.examples[clients])
        return np.asarray(1 + _UNLABELLED_WORK * others / counted)
