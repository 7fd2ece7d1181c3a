"""Membership inference by loss: a sample on which a model's loss is low is called a training sample.

Reference: Yeom et al., Privacy Risk in Machine Learning: Analyzing the Connection to Overfitting, IEEE CSF 2018, with
its advantage, true positive less false positive rate; Carlini et al., Membership Inference Attacks From First
Principles, IEEE S&P 2022, for the true positive rate at a low false positive rate.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from scipy import stats

from narrowcast.platform.contracts import Task
from narrowcast.platform.data.samples import Labelled, Samples
from narrowcast.platform.errors import UserError
from narrowcast.platform.models.module_call import call_module
from narrowcast.platform.models.neural_network import NeuralNetwork, as_inputs, as_target
from narrowcast.platform.types import Arrays, FloatArray


@dataclass(frozen=True)
class Separation:
    """Scores tell members from others so well, over all thresholds and at a false positive rate of 1 %.

    `advantage` is the largest true less false positive rate over all thresholds, which is above 0 for scores that say
    nothing too: compare it with `chance_advantage`. `auc` is the probability that a member scores higher, ties half.
    """

    advantage: float
    auc: float
    tpr_at_1_percent: float

    @classmethod
    def of(cls, members: FloatArray, others: FloatArray) -> Separation:
        """Return the separation of the members' scores [m] from the others' [n], a higher one being called a member."""
        thresholds = np.unique(np.concatenate([members, others]))
        positive = 1 - np.searchsorted(np.sort(members), thresholds) / len(members)
        false = 1 - np.searchsorted(np.sort(others), thresholds) / len(others)
        ranks = stats.rankdata(np.concatenate([members, others]))[: len(members)].sum()
        auc = (ranks - len(members) * (len(members) + 1) / 2) / (len(members) * len(others))
        allowed = positive[false <= 0.01]
        return cls(max(float((positive - false).max()), 0.0), float(auc), float(allowed.max(initial=0.0)))


def chance_advantage(members: int, others: int, confidence: float = 0.95) -> float:
    """Return the advantage that scores which say nothing exceed with probability 1 - confidence.

    The advantage is the one-sided Kolmogorov-Smirnov statistic of the two samples, whose tail is exp(-2 m n D^2 /
    (m + n)) in the limit (Smirnov, 1939).
    """
    return float(np.sqrt(-np.log(1 - confidence) / 2 * (members + others) / (members * others)))


def losses(task: Task, model: Arrays, samples: Labelled) -> FloatArray:
    """Return the loss of each sample, [n], in a network with these parameters; raise `UserError` for another model."""
    network, data = task.model, task.data
    if not isinstance(network, NeuralNetwork) or not isinstance(data, Samples):
        raise UserError(f"model.kind = {network.kind}: losses of samples are those of networks; use mlp or cnn")
    loss, dtype = network.loss_on(data), network.torch_dtype
    with torch.no_grad(), network.evaluation_draws(data):
        outputs = call_module(network.loaded(model, data), as_inputs(samples.features, dtype))
        targets = as_target(torch.from_numpy(np.array(samples.labels)), dtype)
        return loss.per_sample(outputs, targets).double().numpy()


def scores_of_model(task: Task, model: Arrays, samples: Labelled) -> FloatArray:
    """Return minus the loss of each sample, [n]: how much it looks like a training sample of this model."""
    return -losses(task, model, samples)


def scores_of_change(task: Task, model: Arrays, change: Mapping[str, FloatArray], samples: Labelled) -> FloatArray:
    """Return by how much a change lowers the loss of each sample, [n]: how much it looks like one that caused it."""
    moved = {name: values + change[name] for name, values in model.items()}
    return losses(task, model, samples) - losses(task, moved, samples)
