"""Gradients of a network with parameters of its own for every client, and the placement of tensors on a device.

Letters: a clients, b samples of each, K outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import lru_cache, partial
from typing import Any, Literal, TypeGuard

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.func import vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from narrowcast.platform.models.adapted_layers import AdaptedLinear
from narrowcast.platform.models.measures import CrossEntropy, Loss
from narrowcast.platform.models.module_call import Inputs, call_module, has_half_types
from narrowcast.platform.models.modules import copy_of, trained_of

Forward = Callable[[Mapping[str, Tensor], Inputs], Tensor]
"""Map parameters [a, ...] and features [a, b, ...] each of a clients to scores [a, b, K]."""

_ELEMENTWISE = (nn.ReLU, nn.Tanh, nn.Sigmoid, nn.GELU, nn.ELU, nn.LeakyReLU, nn.SiLU, nn.Identity)
_OF_LINEAR = ("weight", "bias")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def layers_of(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the layers of a chain with their names, a layer that occurs several times as often as it does."""
    return [(name, layer) for name, layer in module.named_modules(remove_duplicate=False) if name]


def _is_sequence(module: nn.Module) -> TypeGuard[nn.Sequential]:
    """Return whether the module calls its layers one after the other, and does nothing else."""
    return isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward


def trains_faster_at_once(module: nn.Module) -> bool:
    """Return whether the clients of a chunk are known to train faster as one batched program than one by one."""
    return gains_from_batching(module) or is_adapted_chain(module) or is_embedded_chain(module)


@lru_cache(maxsize=4)
def gains_from_batching(module: nn.Module) -> bool:
    """Return whether the module is a chain of linear and elementwise layers; it batches into a few matrix products.

    Not so a chain that has a layer or a weight twice, frozen or further parameters, half types, parametrisations,
    hooks, a forward pass of its own, or a flattening anywhere but before the first linear layer. The module must not
    change afterwards.
    """
    if not _is_sequence(module):
        return False
    kinds = [type(layer) for layer in module]
    if has_half_types(module) or any(kind not in (nn.Linear, nn.Flatten, *_ELEMENTWISE) for kind in kinds):
        return False
    if nn.Linear in kinds and nn.Flatten in kinds[kinds.index(nn.Linear) :]:
        return False
    if any("forward" in vars(layer) or any(getattr(layer, hook) for hook in _HOOKS) for layer in (module, *module)):
        return False
    linear_names = {
        f"{name}.{parameter}"
        for name, layer in layers_of(module)
        if isinstance(layer, nn.Linear)
        for parameter in _OF_LINEAR
    }
    names = dict(module.named_parameters(remove_duplicate=False)).keys()
    return names == trained_of(module).keys() and names <= linear_names


@lru_cache(maxsize=4)
def is_embedded_chain(module: nn.Module) -> bool:
    """Return whether the module is an embedding and then a chain that gains from batching."""
    if not _is_sequence(module) or len(module) < 2:
        return False
    rows = module[0]
    if type(rows) is not nn.Embedding or any(getattr(rows, hook) for hook in _HOOKS) or not rows.weight.requires_grad:
        return False
    plain = (rows.padding_idx, rows.max_norm, rows.scale_grad_by_freq, rows.sparse) == (None, None, False, False)
    return plain and gains_from_batching(module[1:])


@lru_cache(maxsize=4)
def is_adapted_chain(module: nn.Module) -> bool:
    """Return whether the module is a chain of elementwise and linear layers, some of these with adapters.

    Clients that train at once share the products of its frozen weights. The module must not change afterwards.
    """
    if not _is_sequence(module):
        return False
    kinds = {type(layer) for layer in module}
    known = {nn.Linear, AdaptedLinear, nn.Flatten, *_ELEMENTWISE}
    return AdaptedLinear in kinds and kinds <= known and not has_half_types(module)


def callable_of(module: nn.Module, device: str) -> nn.Module:
    """Return a module that may be called, for one that all calls of a process share; a chain is only read."""
    return module if gains_from_batching(module) else copy_of(module, device)


def batched_forward(module: nn.Module) -> Forward:
    """Return the module's forward pass over a leading client axis.

    A chain of linear and elementwise layers becomes batched matrix products; any other module goes through
    `torch.func.vmap`.
    """
    if gains_from_batching(module):
        layers = layers_of(module)
        return lambda parameters, features: _run_chain(layers, parameters, features)
    return vmap(lambda parameters, features: call_module(module, features, parameters))


def linear(layer: nn.Linear, name: str, parameters: Mapping[str, Tensor], inputs: Tensor) -> Tensor:
    """Return the layer's outputs [a, b, m] for inputs [a, b, n], each client with its own weights and bias."""
    weight = parameters[f"{name}.weight"].transpose(1, 2)
    if layer.bias is None:
        return torch.bmm(inputs, weight)
    return torch.baddbmm(parameters[f"{name}.bias"].unsqueeze(1), inputs, weight)


def _run_chain(layers: list[tuple[str, nn.Module]], parameters: Mapping[str, Tensor], features: Inputs) -> Tensor:
    assert isinstance(features, Tensor), "a chain takes no inputs by name"
    for name, layer in layers:
        if isinstance(layer, nn.Linear):
            features = linear(layer, name, parameters, features)
        else:
            features = features.flatten(2) if isinstance(layer, nn.Flatten) else layer(features)
    return features


Tensors = dict[str, Tensor]
Layers = Sequence[tuple[str, nn.Module]]
StepGradient = Callable[[Mapping[str, Tensor], Inputs, Tensor, Tensor], tuple[Tensors, Tensor]]
"""Map parameters [a, ...], features [a, b, ...], labels [a, b, ...] and weights [a, b] of a clients to the gradients of
each client's weighted sum of losses, by parameter, and the losses [a, b]."""
OutputGradient = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""Map outputs [a, b, ...], labels and weights to the gradient of the weighted sum at the outputs, and the losses."""

_CROSS_ENTROPY = CrossEntropy()
_FEW_CLASSES = 16
"""The classes from which on torch's log_softmax is faster than its parts; 10 take it five times as long as 26."""
_aten = torch.ops.aten
_ELEMENTWISE_GRADIENTS: Mapping[
    type[nn.Module], tuple[Callable[[Tensor], Tensor], Callable[[Tensor, Tensor], Tensor]]
] = {
    nn.ReLU: (torch.relu, lambda back, output: _aten.threshold_backward.default(back, output, 0)),
    nn.Tanh: (torch.tanh, _aten.tanh_backward.default),
    nn.Sigmoid: (torch.sigmoid, _aten.sigmoid_backward.default),
}
"""The function of a layer, and the gradient of its input from that of its output and the output itself."""


@lru_cache(maxsize=4)
def chain_gradient(module: nn.Module, loss: Loss = _CROSS_ENTROPY) -> StepGradient | None:
    """Return the gradient of a chain of linear layers, ReLU, tanh and the logistic function; None for other modules.

    It is in closed form, and no graph is recorded. Products are laid out as the parameters are, which torch's autograd
    does not do for a weight: its gradient is a transposed view there, whose product and whose step take two to four
    times as long. The layers of the module must not change afterwards.
    """
    if not gains_from_batching(module):
        return None
    layers = [(name, layer) for name, layer in layers_of(module) if not isinstance(layer, nn.Flatten)]
    known = (nn.Linear, *_ELEMENTWISE_GRADIENTS)
    if any(type(layer) not in known or (isinstance(layer, nn.ReLU) and layer.inplace) for _, layer in layers):
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
            outputs.append(_ELEMENTWISE_GRADIENTS[type(layer)][0](outputs[-1]))
    back, losses = at_outputs(outputs[-1], labels, weights)
    gradients: Tensors = {}
    for index in range(len(layers) - 1, -1, -1):
        name, layer = layers[index]
        if not isinstance(layer, nn.Linear):
            back = _ELEMENTWISE_GRADIENTS[type(layer)][1](back, outputs[index + 1])
            continue
        gradients[f"{name}.weight"] = torch.bmm(back.mT, outputs[index])
        if layer.bias is not None:
            gradients[f"{name}.bias"] = back.sum(1)
        if index:
            back = torch.bmm(back, parameters[f"{name}.weight"])
    return {name: gradients[name] for name in parameters}, losses


Device = Literal["cpu", "cuda"]
ARRAY_TYPES: Mapping[torch.dtype, type[np.floating[Any]]] = {torch.float32: np.float32, torch.float64: np.float64}
"""numpy's type for each type of parameters."""


def to_tensor(values: NDArray[Any], device: Device) -> Tensor:
    """Return the array as a tensor on the device.

    On a CPU it shares the array's memory unless the array is read-only.
    """
    tensor = torch.from_numpy(values.copy() if not values.flags.writeable else values)
    return tensor if device == "cpu" else tensor.to(device)


def to_array(tensor: Tensor) -> NDArray[Any]:
    """Return the tensor as an array in main memory."""
    return np.asarray(tensor.cpu().numpy())


def batched_attention(device: Device) -> AbstractContextManager[None]:
    """Return a context in which attention is computed from its products.

    The fused kernels of a GPU refuse the strides that clients trained together give them in the backward pass.
    """
    return sdpa_kernel(SDPBackend.MATH) if device == "cuda" else nullcontext()


@contextmanager
def float32_products(device: Device) -> Iterator[None]:
    """Disable TF32 in cuDNN convolutions, which would round the factors of products to ten bits."""
    if device == "cpu":
        yield
        return
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32 = before
