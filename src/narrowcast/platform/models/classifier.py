"""Base of the neural classifiers: seeded initialisation of named parameters, and evaluation on held-out samples."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor, nn

from narrowcast.platform.contracts import Dataset, Split
from narrowcast.platform.data.samples import Samples
from narrowcast.platform.errors import UserError
from narrowcast.platform.seeds import generator
from narrowcast.platform.types import Arrays

_SAMPLES_AT_ONCE = 1000


class Classifier(BaseModel):
    """A torch module that maps features [n, ...] to scores [n, classes], trained on the mean cross-entropy.

    All parameters are global. A subclass builds the module in `module`. Inputs are as `as_input` gives them: images [n,
    channels, height, width] as float32 from 0 to 1, other features [n, features] as float32, text [n, length] as int64
    tokens.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    def __hash__(self) -> int:
        return hash(self.model_dump_json())

    def module(self, data: Samples) -> nn.Module:
        """Return the untrained module for this data set."""
        raise NotImplementedError

    def check(self, data: Dataset) -> None:
        """Raise `UserError` unless the module maps the features to [n, classes] and keeps no other state."""
        kind = getattr(self, "kind", "this model")
        if not isinstance(data, Samples):
            raise UserError(f"model.kind = {kind} needs labelled samples, but {data.name} has none; use another model")
        module = self.module(data)
        if buffers := [name for name, _ in module.named_buffers()]:
            raise UserError(
                f"model.kind = {kind} has state besides its parameters ({', '.join(buffers[:3])}), which clients "
                "would have to share; replace batch norm by group norm or layer norm"
            )
        try:
            with torch.no_grad():
                some = (data.test if len(data.test) else data.train).features[:2]
                scores = module(as_input(torch.from_numpy(np.array(some))))
        except (RuntimeError, IndexError, TypeError) as error:
            shape = ", ".join(["n", *map(str, data.train.features.shape[1:])])
            reason = str(error).splitlines()[0]
            raise UserError(
                f"model.kind = {kind} does not take the features of {data.name}, a tensor [{shape}] ({reason}); "
                f"the module must map it to scores [n, {data.n_classes}]"
            ) from error
        if scores.shape[1:] != (data.n_classes,):
            raise UserError(f"model.kind = {kind} returns {list(scores.shape)}, expected scores [n, {data.n_classes}]")

    def init_server(self, data: Samples, seed: int) -> Arrays:
        """Return the module's own initialisation, drawn from the seed."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(int(generator(seed, "model").integers(2**63)))
            module = self.module(data)
        return {name: values.detach().numpy().copy() for name, values in module.named_parameters()}

    def init_clients(self, data: Samples, seed: int) -> Arrays:
        """Return no arrays: no parameter is private."""
        del data, seed
        return {}

    def evaluate(self, server: Arrays, clients: Arrays, data: Samples, split: Split) -> Mapping[str, float]:
        """Return the accuracy and mean cross-entropy on the server's samples; empty if there are none."""
        del clients
        samples = data.test if split == "test" else data.validation
        if not len(samples):
            return {}
        module = self.module(data)
        module.load_state_dict({name: torch.from_numpy(np.array(values)) for name, values in server.items()})
        module.eval()
        labels = torch.from_numpy(samples.labels)
        loss, right = 0.0, 0
        with torch.no_grad():
            for start in range(0, len(labels), _SAMPLES_AT_ONCE):
                part = slice(start, start + _SAMPLES_AT_ONCE)
                scores = module(as_input(torch.from_numpy(np.array(samples.features[part]))))
                loss += float(nn.functional.cross_entropy(scores, labels[part], reduction="sum"))
                right += int((scores.argmax(dim=1) == labels[part]).sum())
        return {"accuracy": right / len(labels), "loss": loss / len(labels)}


@lru_cache(maxsize=2)
def skeleton(model: Classifier, data: Samples) -> nn.Module:
    """Return the module in training mode and without values, for calls that supply their own."""
    with torch.device("meta"):
        return model.module(data).train()


def as_input(features: Tensor) -> Tensor:
    """Return features as a module takes them: uint8 scaled to float32 from 0 to 1, floats and tokens unchanged."""
    return features.to(torch.float32) / 255 if features.dtype == torch.uint8 else features
