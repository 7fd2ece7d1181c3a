"""Models of the library transformers: drawn from a configuration, or read from a folder of pretrained weights.

Source: transformers 5, `PreTrainedModel.from_pretrained`.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from typing import Any, Literal

from pydantic import Field
from torch import nn

from narrowcast.platform.config.plugins import check_installed
from narrowcast.platform.data.download import located
from narrowcast.platform.data.samples import Samples
from narrowcast.platform.errors import UserError
from narrowcast.platform.models.neural_network import NeuralNetwork


@contextmanager
def _quiet(log: Any) -> Iterator[None]:
    """Leave out the library's progress bar, and its table of the tensors of a new last layer."""
    verbosity, bar = log.get_verbosity(), log.is_progress_bar_enabled()
    log.set_verbosity_error()
    log.disable_progress_bar()
    try:
        with redirect_stderr(io.StringIO()):  # the bar of GGUF files is not the library's own
            yield
    finally:
        log.set_verbosity(verbosity)
        if bar:
            log.enable_progress_bar()


def read_pretrained(kind: Any, folder: Path, settings: Mapping[str, Any]) -> tuple[Any, Mapping[str, Any]]:
    """Return a model of a class of the library with the weights of a folder, and what the library says of its tensors.

    A folder with a GGUF file and no config.json has its weights and configuration in that file, in few bits, which are
    read as float32. Nothing is downloaded, and pickles are not read.
    """
    import transformers

    attention = "sdpa" if kind._supports_sdpa else "eager"  # a folder's may name a kernel to download
    local: dict[str, Any] = {"local_files_only": True, "use_safetensors": True, "output_loading_info": True}
    if not (folder / "config.json").exists() and (files := sorted(folder.glob("*.gguf"))):
        check_installed("gguf", f"model.path = {folder}")
        if len(files) > 1:
            raise UserError(f"model.path = {folder}: has {len(files)} files *.gguf; keep one of them there")
        local |= {"gguf_file": files[0].name, "use_safetensors": None}
    with _quiet(transformers.utils.logging):
        module, found = kind.from_pretrained(folder, **{"attn_implementation": attention, **settings, **local})
    return module, found


class TransformersModel(NeuralNetwork):
    """A model of the library transformers, such as BertForSequenceClassification or GPT2LMHeadModel.

    Its weights are those of `path`, a folder that `save_pretrained` wrote or that was downloaded, also one with a GGUF
    file, or are drawn from the seed. Nothing is downloaded, pickles are not read and no code of the folder is run. The
    number of labels, and the number of tokens of a model without `path`, are those of the data, unless `config` says
    otherwise. A window of tokens is its first argument, inputs by name such as input_ids and attention_mask are keyword
    arguments. What the folder does not have, as a new last layer, is drawn from the seed.

    Differs from the library: caches of keys and values are off, which serve to generate text.
    """

    kind: Literal["transformers"] = "transformers"
    architecture: str = Field(pattern=r"^\w+$", description="class of the library that returns scores")
    path: Path | None = Field(
        None, description="folder with config.json and model.safetensors, or a .gguf; null: drawn from the seed"
    )
    config: dict[str, Any] = Field({}, description="settings of the model's configuration, such as hidden_size")
    output: str = Field("logits", description="the part of what the model returns that is its scores")

    def module(self, data: Samples) -> nn.Module:
        """Build the model from its configuration, or read it; raise `UserError` if there is no such class or folder."""
        named = f"model.kind = {self.kind}"
        check_installed("transformers", named)
        import transformers

        kind = _class_of(transformers, self.architecture)
        sizes = {"num_labels": self.n_outputs(data)} if data.targets != "tokens" else {}
        module: Any
        if self.path is not None:
            folder = located(self.path, "path", "model")
            module, found = read_pretrained(kind, folder, {**sizes, **self.config})
            if len(found["missing_keys"]) >= len(module.state_dict()):
                raise UserError(f"model.path = {folder}: has no tensor of {self.architecture}; use its own class")
        else:
            sizes |= {"vocab_size": data.n_classes} if data.targets == "tokens" else {}
            module = kind(kind.config_class(**{**sizes, **self.config}))
        if hasattr(module.config, "use_cache"):
            module.config.use_cache = False
        built: nn.Module = module
        return built


def _class_of(library: Any, name: str) -> Any:
    """Return a class of models; raise `UserError` if the library has none of this name."""
    try:
        kind = getattr(library, name, None)
    except ImportError as error:
        raise UserError(
            f"model.architecture = {name}: transformers cannot import it ({error.__cause__ or error}); if that is of "
            "torchvision, install its build for this torch, or uninstall it"
        ) from error
    if not isinstance(kind, type) or not issubclass(kind, library.PreTrainedModel):
        raise UserError(
            f"model.architecture = {name} is no model of transformers {library.__version__}; use one that returns "
            "scores, such as BertForSequenceClassification or GPT2LMHeadModel"
        )
    return kind
