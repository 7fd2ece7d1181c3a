"""The upper layers of MiniLM with a linear head, and what its lower layers, which nobody trains, make of texts.

Source: all-MiniLM-L6-v2 of sentence-transformers, a BERT whose embedding of a sentence is the mean of its tokens.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from narrowcast.platform.data.dataset import Dataset
from narrowcast.platform.data.download import located
from narrowcast.platform.data.samples import Labelled, Samples
from narrowcast.platform.models.transformers_model import read_pretrained

FOLDER, TRAINED = "all-minilm-l6-v2", 2
_AT_ONCE = 64


def _body() -> Any:
    from transformers import BertModel

    folder = located(Path(FOLDER), "folder", "model")
    body, _ = read_pretrained(BertModel, folder, {"add_pooling_layer": False})
    return body.eval()


def _through(layers: Any, hidden: Tensor, attention_mask: Tensor) -> Tensor:
    """Return the vectors [n, length, width] above some layers; tokens see those that count."""
    seen = attention_mask.bool()[:, None, None, :]
    for layer in layers:
        hidden = layer(hidden, attention_mask=seen)
    return hidden


class UpperLayers(nn.Module):
    """Scores [n, classes] from the vectors [n, length, width] below the upper layers, and the mask of tokens.

    The head takes the mean of the tokens that count, scaled to a variance of 1.
    """

    def __init__(self, classes: int) -> None:
        """Read the layers; the head is drawn."""
        super().__init__()
        body = _body()
        self.layers = body.encoder.layer[-TRAINED:]
        self.classifier = nn.Linear(body.config.hidden_size, classes)

    def forward(self, hidden: Tensor, attention_mask: Tensor) -> Tensor:
        """Return the scores of each text."""
        counted = attention_mask[..., None].to(hidden.dtype)
        mean = (_through(self.layers, hidden, attention_mask) * counted).sum(dim=1) / counted.sum(dim=1)
        scores: Tensor = self.classifier(torch.nn.functional.layer_norm(mean, mean.shape[-1:]))
        return scores


def below(data: Dataset) -> Dataset:
    """Return the data with the vectors below the upper layers in place of tokens; data without tokens as it is."""
    if not isinstance(data, Samples) or not isinstance(data.train.features, dict):
        return data
    train, validation, test = (_lifted(part) for part in (data.train, data.validation, data.test))
    return replace(data, train=train, validation=validation, test=test)


def _lifted(part: Labelled) -> Labelled:
    assert isinstance(part.features, dict), "the caller has seen to it"
    ids, mask = (torch.from_numpy(part.features[name]) for name in ("input_ids", "attention_mask"))
    body = _frozen()
    with torch.no_grad():
        hidden = [
            _through(body.encoder.layer[:-TRAINED], body.embeddings(input_ids=some), of)
            for some, of in zip(ids.split(_AT_ONCE), mask.split(_AT_ONCE), strict=True)
        ]
    values = np.concatenate([vectors.numpy() for vectors in hidden])
    return Labelled({"hidden": values, "attention_mask": mask.numpy()}, part.labels)


@lru_cache(maxsize=1)
def _frozen() -> Any:
    return _body()
