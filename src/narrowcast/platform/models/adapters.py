"""Low-rank adapters: a network with frozen weights, in which factors of a change of its linear layers are trained.

Reference: Hu et al., LoRA: Low-Rank Adaptation of Large Language Models, ICLR 2022 (arXiv:2106.09685), section 4.1.
Letters: W0 [o, i] a frozen weight, A [r, i] and B [o, r] its factors, s = alpha / r.
"""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any, Literal, Self, cast

import torch
from pydantic import Field, model_validator
from safetensors import SafetensorError
from torch import Tensor, nn

from narrowcast.platform.config.catalog import MODELS
from narrowcast.platform.config.files import MODEL
from narrowcast.platform.config.kinds import kind_of
from narrowcast.platform.config.run_fields import LastingPath
from narrowcast.platform.data.dataset import Dataset
from narrowcast.platform.data.samples import Samples
from narrowcast.platform.errors import UserError
from narrowcast.platform.models.adapted_layers import (
    CORE,
    WEIGHT,
    A,
    Adapted,
    B,
    adapt,
    adapted_kind,
    adapted_layers,
    is_factor,
    put_core_between,
)
from narrowcast.platform.models.model import Model
from narrowcast.platform.models.module_call import call_module
from narrowcast.platform.models.modules import (
    arrays_of,
    build_module,
    copy_of,
    named_tensors,
    read_module,
    same_values,
    state_of,
    trained_of,
    with_values,
)
from narrowcast.platform.models.networks import MLP
from narrowcast.platform.models.neural_network import NeuralNetwork, skeleton
from narrowcast.platform.models.peft_files import read_peft, write_peft
from narrowcast.platform.types import Arrays

_OF_THE_WRAPPER = ("loss", "metrics", "dtype", "statistics")


class Adapters(NeuralNetwork):
    """Low-rank adapters (LoRA) of the linear layers of a frozen network: a layer computes (W0 + alpha/r B A) x + b.

    Clients train and send the factors of the weights that `targets` names, and the tensors that `also_trained` names;
    all other tensors of `base` are frozen, the same for all clients, and never sent or billed. Before training B A is
    zero, so that the outputs are those of `base`, unless training begins with an `adapter`. `base` has the weights that
    the seed gives it, or those of `weights`. In training, clients share one copy of them.

    With `factor: core` a layer computes (W0 + alpha/r B R A) x + b, and R [r, r] alone is trained: it is zero between
    factors that are drawn. Of an `adapter` A and B are the singular vectors of its product, and R the singular values.

    References: Hu et al., LoRA, ICLR 2022 (arXiv:2106.09685), section 4.1; for the core Singhal et al., Fed-SB, 2025
    (arXiv:2502.15436).

    Differs from the papers: 1. A is drawn uniformly, as in the released code; the paper says from a normal
    distribution. 2. the rank of a layer is at most its inputs or outputs, and s is alpha by that rank. 3. no dropout
    before A. 4. Fed-SB's A and B are singular vectors of a first gradient, which clients would have to send whole.
    """

    kind: Literal["adapters"] = "adapters"
    base: Annotated[Model, MODELS] = Field(
        default_factory=MLP, description="network whose weights are frozen: any that is a torch module"
    )
    weights: LastingPath = Field(
        None,
        description="folder of a finished run of `base`, or safetensors file, with the tensors of `base`, which every "
        "host can read; null: drawn from the seed",
    )
    adapter: LastingPath = Field(
        None, description="folder of an adapter of peft, with which training begins; null: factors drawn from the seed"
    )
    rank: int = Field(8, ge=1, description="rank of the change of a weight")
    alpha: float = Field(8.0, gt=0, allow_inf_nan=False, description="s = alpha / rank multiplies the change")
    targets: tuple[str, ...] | None = Field(
        None, min_length=1, description="patterns of names of weights, such as *.query.weight; null: all linear layers"
    )
    factor: Literal["both", "a", "b", "core"] = Field(
        "both",
        description="factors that are trained; a single one starts from zero, and the other stays as drawn; core: a "
        "matrix [rank, rank] between the two, which stay as drawn, or are the singular vectors of `adapter`",
    )
    also_trained: tuple[str, ...] = Field(
        (), description="patterns of names of tensors of `base` that are trained whole, such as those of the last layer"
    )

    @model_validator(mode="after")
    def _one_network(self) -> Self:
        if isinstance(self.base, Adapters) or not isinstance(self.base, NeuralNetwork):
            got = kind_of(self.base)
            raise ValueError(f"base = {got} is no network with weights to freeze; use mlp, cnn or torch")  # noqa: TRY004 - pydantic's
        defaults = type(self.base).model_fields
        for name in _OF_THE_WRAPPER:
            if getattr(self.base, name) != defaults[name].default:
                raise ValueError(f"base.{name} is that of the whole model; set model.{name}")
        return self

    @property
    def network(self) -> NeuralNetwork:
        """The field `base`, with the loss of this model, which decides its outputs."""
        base: NeuralNetwork = cast(NeuralNetwork, self.base).model_copy(update={"loss": self.loss})
        return base

    @property
    def output_part(self) -> str | int | None:
        """Return that of `base`."""
        return self.network.output_part

    def module(self, data: Samples) -> nn.Module:
        """Return the module of `base`, frozen, with factors at its linear layers."""
        base = self.network
        module = build_module(lambda: base.module(data), self.dtype, lambda: self._few(data.train), base.named)
        if self.weights is not None:
            with_values(module, self._read(module, Path(self.weights)))
        also = _matching(self.also_trained, list(dict(module.named_parameters())), "also_trained")
        layers = self._targeted(module, also)
        for name, tensor in module.named_parameters():
            tensor.requires_grad_(name in also)
        for layer in layers.values():
            adapt(layer, self.rank, self.alpha, {"both": (A, B), "a": (A,), "b": (B,), "core": (CORE,)}[self.factor])
        if self.adapter is not None:
            with_values(module, read_peft(Path(self.adapter), module))
            if self.factor == "core":
                for _, adapted in adapted_layers(module):
                    put_core_between(adapted)
        return module

    def _read(self, module: nn.Module, source: Path) -> dict[str, Tensor]:
        """Return the tensors of a finished run's folder or of a file, which have to be those of the module."""
        try:
            tensors = read_module(source / MODEL if source.is_dir() else source)
        except (OSError, SafetensorError) as error:
            raise UserError(
                f"model.weights = {source}: no model there ({error}); give the folder of a finished run, or a "
                "safetensors file"
            ) from None
        state = module.state_dict()  # without buffers that are made anew, which nobody saves
        has = {name: tuple(values.shape) for name, values in tensors.items()}
        needed = {name: tuple(tensor.shape) for name, tensor in named_tensors(module).items() if name in state}
        other = [name for name in sorted(has.keys() | needed.keys()) if has.get(name) != needed.get(name)]
        if other := [name for name in other if name in needed or name not in state]:
            raise UserError(
                f"model.weights = {source}: {other[0]} is {_shape(has.get(other[0]))} there and "
                f"{_shape(needed.get(other[0]))} in {kind_of(self.base)}; give the tensors of the same network"
            )
        return {name: tensors[name] for name in needed}

    def _targeted(self, module: nn.Module, also: Sequence[str]) -> dict[str, nn.Module]:
        """Return the layers whose weights are adapted, by the names of these."""
        first = {id(tensor): name for name, tensor in module.named_parameters()}
        layers = dict[str, nn.Module]()
        for layer in module.modules():  # a tied weight has its adapter where it comes first
            if adapted_kind(layer) and (weight := layer._parameters.get("weight")) is not None and id(weight) in first:
                layers.setdefault(first[id(weight)], layer)
        if self.targets is None:
            embedded = {id(layer.weight) for layer in module.modules() if isinstance(layer, nn.Embedding)}
            layers = {
                name: layer
                for name, layer in layers.items()
                if name not in also and id(layer.weight) not in embedded  # an adapter would change one use of the two
            }
            if not layers:
                raise UserError(
                    f"model.targets: {kind_of(self.base)} has no linear layer to adapt; use another base, or fedpara "
                    "or colr, which factorise other weights too"
                )
            return layers
        for name in (names := _matching(self.targets, list(first.values()), "targets")):
            if name in also:
                raise UserError(f"model.targets names {name}, which also_trained trains whole; name it in one of them")
            if name not in layers:
                tensor = dict(module.named_parameters())[name]
                owner = type(module.get_submodule(name.rpartition(".")[0])).__name__
                raise UserError(
                    f"model.targets names {name} {list(tensor.shape)} of {owner}, and only weights of linear layers "
                    f"have adapters; name those of {', '.join(layers) or 'another network'}, or add it to also_trained"
                )
        return {name: layers[name] for name in names}

    def check(self, data: Dataset) -> None:
        """Raise `UserError` unless `base` fits the data, and its outputs follow from all that is trained."""
        super().check(data)
        assert isinstance(data, Samples), "the check above has seen to it"
        module = copy_of(skeleton(self, data)).eval()
        trained, inputs = trained_of(module), self._few(data.train)
        with torch.no_grad():
            for name, tensor in trained.items():
                if is_factor(name):
                    tensor.fill_(0.1)
        with self.evaluation_draws(data):
            outputs = call_module(module, inputs)
        slopes: Any = torch.autograd.grad(outputs.sum(), list(trained.values()), allow_unused=True)
        unused = [name for name, slope in zip(trained, slopes, strict=True) if slope is None]
        with torch.no_grad(), self.evaluation_draws(data):
            evaluated = call_module(module, inputs)
        if unused or not torch.allclose(evaluated, outputs, rtol=1e-2, atol=1e-4, equal_nan=True):
            on = unused[0] if unused else "adapters where no gradient is asked for"
            raise UserError(
                f"model.targets: outputs of {kind_of(self.base)} do not depend on {on}; leave its weight out of "
                "model.targets, or, if fused kernels of attention read it, call "
                "torch.backends.mha.set_fastpath_enabled(False) where the module is made"
            )

    def merged(self, parameters: Arrays, data: Samples) -> Arrays:
        """Return the `state_dict` of `base` with W0 + s B A in place of W0; raise `UserError` for a tied weight."""
        module = self.loaded(parameters, data)
        for layer in _mergeable(module).values():
            layer.weight = nn.Parameter(layer.merged_weight(), requires_grad=False)
        return {name: values for name, values in state_of(module).items() if not is_factor(name)}

    def adapted_weights(self, data: Samples) -> Arrays:
        """Return W0 [o, i] of each layer with adapters, in `held_dtype`.

        Raise `UserError` for a tied weight, and for one that its layer holds transposed.
        """
        module = skeleton(self, data)
        layers = _mergeable(module)
        if transposed := [name for name, layer in layers.items() if layer.transposed]:
            raise UserError(
                f"{transposed[0]} of Conv1D is held transposed, and no product is added to it in training; use a "
                "method that averages the factors, or other model.targets"
            )
        return arrays_of(module, layers)

    def write_peft(self, parameters: Arrays, data: Samples, folder: Path) -> Path:
        """Write adapters with these factors as peft does, and return the folder; see the function of this name.

        Raise `UserError` if products have been added to the frozen weights, which an adapter does not have.
        """
        module = self.loaded(parameters, data)
        before = dict(adapted_layers(skeleton(self, data)))
        for name, layer in adapted_layers(module):
            if not same_values(layer.weight.detach(), before[name].weight.detach()):
                raise UserError(
                    f"products have been added to {name}{WEIGHT}, and an adapter of peft has the last one alone; "
                    "export it with --merged"
                )
        return write_peft(module, self.rank, self.alpha, folder)


def _mergeable(module: nn.Module) -> dict[str, Adapted]:
    """Return the layers with adapters by the names of their weights; raise `UserError` for a tied weight."""
    owners = [id(tensor) for _, tensor in module.named_parameters(remove_duplicate=False)]
    layers = {layer_name + WEIGHT: layer for layer_name, layer in adapted_layers(module)}
    for name, layer in layers.items():
        if owners.count(id(layer.weight)) > 1:
            raise UserError(
                f"{name} is a tensor of another layer too, which has no adapter, so that the two cannot be merged; "
                "keep the factors apart"
            )
    return layers


def _matching(patterns: Sequence[str], names: Sequence[str], field: str) -> tuple[str, ...]:
    """Return the names that match a pattern, in their order; raise `UserError` for a pattern that matches none."""
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise UserError(f"model.{field} = {pattern} names no tensor of the base, which has {', '.join(names)}")
    return tuple(name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns))


def _shape(shape: tuple[int, ...] | None) -> str:
    return "missing" if shape is None else str(list(shape))
