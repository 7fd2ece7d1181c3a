"""Gradients of a chain of layers with parameters of its own for every client, in closed form.

No graph is recorded. Products are laid out as the parameters are, which torch's autograd does not do for a weight: its
gradient is a transposed view there, whose product and whose step take two to four times as long.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial

import torch
from torch import Tensor, nn

from narrowcast.algorithms.local_training.batched_module import gains_from_batching, layers_of, linear
from narrowcast.platform.models.losses import CrossEntropy, Loss
from narrowcast.platform.models.module_call import Inputs

Tensors = dict[str, Tensor]
Layers = Sequence[tuple[str, nn.Module]]
ChainGradient = Callable[[Mapping[str, Tensor], Inputs, Tensor, Tensor], tuple[Tensors, Tensor]]
"""Map parameters [a, ...], features [a, b, ...], labels [a, b, ...] and weights [a, b] of a clients to the gradients of
each client's weighted sum of losses, by parameter, and the losses [a, b]."""
OutputGradient = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""Map outputs [a, b, ...], labels and weights to the gradient of the weighted sum at the outputs, and the losses."""

_CROSS_ENTROPY = CrossEntropy()
_FEW_CLASSES = 16
"""The classes from which on torch's log_softmax is faster than its parts; 10 take it five times as long as 26."""
_aten = torch.ops.aten
_ELEMENTWISE: Mapping[type[nn.Module], tuple[Callable[[Tensor], Tensor], Callable[[Tensor, Tensor], Tensor]]] = {
    nn.ReLU: (torch.relu, lambda back, output: _aten.threshold_backward.default(back, output, 0)),
    nn.Tanh: (torch.tanh, _aten.tanh_backward.default),
    nn.Sigmoid: (torch.sigmoid, _aten.sigmoid_backward.default),
}
"""The function of a layer, and the gradient of its input from that of its output and the output itself."""


@lru_cache(maxsize=4)
def chain_gradient(module: nn.Module, loss: Loss = _CROSS_ENTROPY) -> ChainGradient | None:
    """Return the gradient of a chain of linear layers, ReLU, tanh and the logistic function; None for other modules.

    The layers of the module must not change afterwards.
    """
    if not gains_from_batching(module):
        return None
    layers = [(name, layer) for name, layer in layers_of(module) if not isinstance(layer, nn.Flatten)]
    known = (nn.Linear, *_ELEMENTWISE)
    if any(type(each) not in known or (isinstance(each, nn.ReLU) and each.inplace) for _, each in layers):
        return None
    at_outputs = _cross_entropy_gradient if type(loss) is CrossEntropy else partial(_loss_gradient, loss)

    def gradient(
        parameters: Mapping[str, Tensor], features: Inputs, labels: Tensor, weights: Tensor
    ) -> tuple[Tensors, Tensor]:
        assert isinstance(features, Tensor), "a chain takes no inputs by name"
        return _gradient(layers, at_outputs, parameters, features.flatten(2), labels, weights)

    return gradient


def records_graph(module: nn.Module, loss: Loss) -> bool:
    """Return whether a batched gradient needs autograd: if not, torch's inference mode makes each call quicker."""
    return type(loss) is not CrossEntropy or chain_gradient(module, loss) is None


def sample_losses(loss: Loss, outputs: Tensor, labels: Tensor) -> Tensor:
    """Return the loss of each sample [a, b], for outputs [a, b, ...] and labels [a, b, ...]."""
    return loss.per_sample(outputs.flatten(0, 1), labels.flatten(0, 1)).view(labels.shape[:2])


def _cross_entropy_gradient(outputs: Tensor, labels: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    columns, shares = labels.unsqueeze(2), weights.unsqueeze(2)
    if outputs.shape[2] < _FEW_CLASSES:
        logits = outputs - outputs.amax(2, keepdim=True)
        back = logits.exp()
        total = back.sum(2, keepdim=True)
        losses = total.log().sub_(logits.gather(2, columns))
        back.mul_(shares / total).scatter_add_(2, columns, shares.neg())
    else:
        logs = torch.log_softmax(outputs, 2)
        losses = logs.gather(2, columns).neg_()
        back = torch.zeros_like(logs).scatter_(2, columns, shares.neg())
        back = _aten._log_softmax_backward_data.default(back, logs, 2, logs.dtype)
    return back, losses.squeeze(2)


def _loss_gradient(loss: Loss, outputs: Tensor, labels: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    outputs = outputs.detach().requires_grad_()
    losses = sample_losses(loss, outputs, labels)
    (back,) = torch.autograd.grad((losses * weights).sum(), outputs)
    return back, losses.detach()


def _gradient(
    layers: Layers,
    at_outputs: OutputGradient,
    parameters: Mapping[str, Tensor],
    features: Tensor,
    labels: Tensor,
    weights: Tensor,
) -> tuple[Tensors, Tensor]:
    outputs = [features]
    for name, layer in layers:
        if isinstance(layer, nn.Linear):
            outputs.append(linear(layer, name, parameters, outputs[-1]))
        else:
            outputs.append(_ELEMENTWISE[type(layer)][0](outputs[-1]))
    back, losses = at_outputs(outputs[-1], labels, weights)
    gradients: Tensors = {}
    for place in range(len(layers) - 1, -1, -1):
        name, layer = layers[place]
        if not isinstance(layer, nn.Linear):
            back = _ELEMENTWISE[type(layer)][1](back, outputs[place + 1])
            continue
        gradients[f"{name}.weight"] = torch.bmm(back.mT, outputs[place])
        if layer.bias is not None:
            gradients[f"{name}.bias"] = back.sum(1)
        if place:
            back = torch.bmm(back, parameters[f"{name}.weight"])
    return {name: gradients[name] for name in parameters}, losses
