"""The floor: the whole cohort as one tensor program without any platform, for the MLP; nothing is drawn or recorded.

`--gradient vmap` lets torch.func do the batching and the gradient, as for any module; `autograd` has the batched
products written out; `bmm` the gradient as well.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from replay import Stopwatch, Workload, arguments, report
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

Tensors = dict[str, Tensor]
Gradient = Callable[[Tensors, Tensor, Tensor, Tensor], Tensors]


def by_vmap(module: nn.Module) -> Gradient:
    """Gradients of the clients' mean losses; features [a, b, d], labels [a, b], weights [a, b] = valid / batch size."""

    def loss(parameters: Tensors, features: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
        scores = functional_call(module, parameters, (features,))
        return (nn.functional.cross_entropy(scores, labels, reduction="none") * weights).sum()

    return vmap(grad(loss))


def by_autograd(parameters: Tensors, features: Tensor, labels: Tensor, weights: Tensor) -> Tensors:
    """The same for two linear layers with a ReLU between them."""
    with torch.enable_grad():
        now = {name: values.detach().requires_grad_() for name, values in parameters.items()}
        hidden = torch.baddbmm(now["1.bias"].unsqueeze(1), features, now["1.weight"].mT).relu()
        scores = torch.baddbmm(now["3.bias"].unsqueeze(1), hidden, now["3.weight"].mT)
        each = nn.functional.cross_entropy(scores.flatten(0, 1), labels.flatten(), reduction="none")
        return dict(zip(now, torch.autograd.grad((each * weights.flatten()).sum(), list(now.values())), strict=True))


def by_hand(parameters: Tensors, features: Tensor, labels: Tensor, weights: Tensor) -> Tensors:
    """The same again, without a graph."""
    hidden = torch.baddbmm(parameters["1.bias"].unsqueeze(1), features, parameters["1.weight"].mT).relu_()
    scores = torch.baddbmm(parameters["3.bias"].unsqueeze(1), hidden, parameters["3.weight"].mT)
    error = scores.softmax(dim=2)
    error.scatter_add_(2, labels.unsqueeze(2), error.new_tensor(-1.0).expand(*labels.shape, 1))
    error.mul_(weights.unsqueeze(2))
    back = torch.bmm(error, parameters["3.weight"]).mul_(hidden > 0)
    return {
        "1.weight": torch.bmm(back.mT, features),
        "1.bias": back.sum(dim=1),
        "3.weight": torch.bmm(error.mT, hidden),
        "3.bias": error.sum(dim=1),
    }


def main() -> None:
    options = arguments(gradient={"choices": ("vmap", "autograd", "bmm"), "default": "bmm"})
    workload = Workload(options.workload)
    if workload.settings.network != "mlp":
        raise SystemExit("the bare program is for the MLP")
    gradient = {"vmap": by_vmap(workload.network()), "autograd": by_autograd, "bmm": by_hand}[options.gradient]
    features, rate = workload.features.flatten(1), workload.settings.learning_rate
    parameters = dict(workload.initial)
    watch = Stopwatch()
    watch.start()
    with torch.no_grad():
        for round_index in range(options.rounds):
            counts, steps = padded(workload, round_index)
            clients = {name: values.expand(len(counts), *values.shape).clone() for name, values in parameters.items()}
            for rows, weights in steps:
                now = {name: values[: len(rows)] for name, values in clients.items()}
                for name, values in gradient(now, features[rows], workload.labels[rows], weights).items():
                    now[name].sub_(values, alpha=rate)
            share = counts / counts.sum()
            parameters = {name: torch.tensordot(share, values, dims=1) for name, values in clients.items()}
            watch.lap()
    report(workload, watch, parameters, options.parameters)


def padded(workload: Workload, round_index: int) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
    """The cohort's batches as steps of [clients still training, batch]; those with most samples stand first."""
    batch = workload.settings.batch_size
    own = [workload.rows(round_index, place) for place in range(workload.cohorts.shape[1])]
    own.sort(key=len, reverse=True)
    counts = np.array([len(rows) for rows in own])
    n_steps = -(-counts[0] // batch)
    table = np.zeros((len(own), n_steps * batch), dtype=np.int64)
    for client, rows in enumerate(own):
        table[client, : len(rows)] = rows
    valid = np.arange(n_steps * batch) < counts[:, None]
    rows = torch.from_numpy(table).view(len(own), n_steps, batch)
    weights = torch.from_numpy(valid.astype(np.float32)).view(len(own), n_steps, batch)
    weights /= weights.sum(dim=2, keepdim=True).clamp_(min=1)
    active = np.searchsorted(-counts, -np.arange(n_steps) * batch, side="left")
    steps = [(rows[:stop, step], weights[:stop, step]) for step, stop in enumerate(active.tolist())]
    return torch.from_numpy(counts.astype(np.float32)), steps


if __name__ == "__main__":
    main()
