"""Adapters as folders of peft: `adapter_config.json`, and `adapter_model.safetensors` with the factors of each layer.

Source: peft 0.21, `LoraConfig` and `PeftModel.save_pretrained`. A layer `encoder.query` has its factors under
`base_model.model.encoder.query.lora_A.weight` [r, i] and `lora_B.weight` [o, r], a tensor that is trained whole its own
name after `base_model.model.`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from math import isclose, sqrt
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save
from torch import Tensor, nn

from narrowcast.platform.config.trust import read_json
from narrowcast.platform.errors import UserError
from narrowcast.platform.models.adapted_layers import A, B, adapted_layers, is_factor
from narrowcast.platform.models.modules import named_tensors, read_module, trained_of
from narrowcast.platform.storage.disk import readable, write_atomically

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX, _SUFFIX = "base_model.model.", ".weight"
_ADAPTED = ".base_layer."  # between an adapted layer and its weight, which peft saves if it is an embedding's too
_ALPHA_OF_PEFT = 8
_PLAIN: tuple[object, ...] = (None, False, "none", [], {})
_OTHER_SUMS = (
    *("bias", "use_dora", "use_qalora", "use_bdlora", "lora_bias", "layer_replication", "target_parameters"),
    *("alora_invocation_tokens", "trainable_token_indices", "arrow_config", "kasa_config", "monteclora_config"),
    "velora_config",
)
"""Settings with which a layer of peft computes something else than (W0 + s B A) x + b."""


def write_peft(module: nn.Module, rank: int, alpha: float, folder: Path) -> Path:
    """Write the adapters of a module, and what it trains besides, as peft does, and return the folder.

    `PeftModel.from_pretrained(base, folder)` then has the outputs of the module. A layer of a lower rank than `rank`
    has it in `rank_pattern`. Besides adapters peft saves whole modules: those that have a trained tensor. Raise
    `UserError` if such a module has an adapter too, or if the folder cannot be written.
    """
    layers = dict(adapted_layers(module))
    names = [name.removesuffix(".") for name in layers]
    whole = sorted({name.rpartition(".")[0] for name in trained_of(module) if not is_factor(name)})
    for name in whole:
        if (inside := f"{name}." if name else "") in layers or any(layer.startswith(inside) for layer in layers):
            raise UserError(
                f"peft saves a module with its adapters or whole, and {name or 'the model'} has adapters and tensors "
                "of also_trained; export it with --merged"
            )
    if "" in names:
        raise UserError("peft adapts layers within a module, and the base is one layer; export it with --merged")
    tensors = {
        f"{_PREFIX}{name}{factor}{_SUFFIX}": values.detach()
        for name, layer in layers.items()
        for factor, values in ((A, getattr(layer, A)), (B, layer.left_factor()))
    }
    for name in whole:
        for tensor, values in named_tensors(module.get_submodule(name)).items():
            tensors[f"{_PREFIX}{name}.{tensor}"] = values
    ranks = {name: len(getattr(layer, A)) for name, layer in zip(names, layers.values(), strict=True)}
    config = {
        "peft_type": "LORA",
        "task_type": None,
        "base_model_name_or_path": getattr(module, "name_or_path", None),
        "inference_mode": True,
        "r": rank,
        "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": any(layer.transposed for layer in layers.values()),
        "target_modules": _selecting(names, module),
        "rank_pattern": {f"^{re.escape(name)}": its for name, its in ranks.items() if its != rank},
        "modules_to_save": whole or None,
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        content = save(
            {name: values.detach().contiguous().clone() for name, values in tensors.items()}, {"format": "pt"}
        )
        write_atomically(folder / TENSORS, content)
        write_atomically(folder / CONFIG, json.dumps(config, indent=2).encode() + b"\n")
    except OSError as error:
        raise UserError(f"cannot write {folder} ({error.strerror}); give another folder") from error
    return folder


def _selecting(names: list[str], module: nn.Module) -> list[str] | str:
    """Return the names, each of which peft takes for the end of a name too; a pattern where that selects others."""
    ends = tuple(f".{name}" for name in names)
    if any(other.endswith(ends) and other not in names for other, _ in module.named_modules()):
        return "|".join(map(re.escape, names))
    return names


def read_peft(folder: Path, module: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of an adapter of peft by the names that the module, which is adapted, has for them.

    Pickles are not read. Raise `UserError`, of one line, for anything but LoRA of the module's layers, ranks and scale.
    """
    config, tensors = _opened(folder)
    where = f"model.adapter = {folder}"
    if (kind := config.get("peft_type")) != "LORA":
        raise UserError(f"{where}: peft_type is {kind} there; only LORA has the factors that are trained here")
    for name in _OTHER_SUMS:
        if config.get(name) not in _PLAIN:
            raise UserError(
                f"{where}: {name} is {config[name]!s:.60} there, with which layers do not compute (W0 + s B A) x + b; "
                "give an adapter without it"
            )
    layers = {layer.removesuffix("."): each for layer, each in adapted_layers(module)}
    values = {_named(name, where): tensor for name, tensor in tensors.items()}
    theirs = {name.removesuffix(f".{A}") for name in values if name.endswith(f".{A}")}
    if theirs != layers.keys():
        first = min(theirs ^ layers.keys())
        has = "adapters there and none here" if first in theirs else "adapters here and none there"
        patterns = sorted({"*." + name.rpartition(".")[2] + _SUFFIX for name in theirs})
        raise UserError(f"{where}: {first} has {has}; set model.targets = [{', '.join(patterns)}]")
    own = module.state_dict(keep_vars=True)
    for name, tensor in values.items():
        if name not in own:
            raise UserError(f"{where}: {name} is no tensor of the base; give an adapter of this base")
        if (got := list(tensor.shape)) != (wanted := list(own[name].shape)):
            advice = f"set model.rank = {config.get('r')}, or " if is_factor(name) else ""
            raise UserError(f"{where}: {name} is {got} there and {wanted} here; {advice}give an adapter of this base")
    for name, layer in layers.items():
        alpha, rank = _alpha(config, name), len(getattr(layer, A))
        scale = alpha / (sqrt(rank) if config.get("use_rslora") else rank)
        if not isclose(scale, layer.scale, rel_tol=1e-6):
            raise UserError(
                f"{where}: {name} is scaled by {scale:g} there, and by alpha / rank = {layer.scale:g} here; set "
                f"model.alpha = {scale * rank:g}"
            )
    here = {id(tensor): name for name, tensor in named_tensors(module).items()}
    return {here[id(own[name])]: tensor for name, tensor in values.items()}


def _opened(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    remedy = f"model.adapter is a folder with {CONFIG} and {TENSORS}, as save_pretrained of peft writes them"
    config = read_json(folder / CONFIG, remedy)
    with readable(folder / TENSORS, (OSError, SafetensorError), remedy):
        return config, read_module(folder / TENSORS)


def _named(name: str, where: str) -> str:
    """Return the name here of a tensor of an adapter's file."""
    if not name.startswith(_PREFIX):
        raise UserError(f"{where}: {name} is no tensor of an adapter, whose names begin with {_PREFIX}")
    name = name.removeprefix(_PREFIX).replace(_ADAPTED, ".")
    return name.removesuffix(_SUFFIX) if is_factor(name.removesuffix(_SUFFIX)) else name


def _alpha(config: Mapping[str, Any], layer: str) -> float:
    """Return alpha of a layer: that of the first pattern that names it, as peft looks for it, or that of all."""
    patterns: Mapping[str, Any] = config.get("alpha_pattern") or {}
    own = (alpha for pattern, alpha in patterns.items() if re.match(rf"(.*\.)?({pattern})$", layer))
    return float(next(own, config.get("lora_alpha", _ALPHA_OF_PEFT)))
