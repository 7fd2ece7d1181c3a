"""The causal transformer against the encoder of torch with a mask, and what it sees."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from narrowcast.experiment import load_experiment
from narrowcast.laws.small_tasks import sequences
from narrowcast.platform.errors import UserError
from narrowcast.platform.models.transformer import Transformer

COUNTS = np.array([3, 5, 9])
SMALL = Transformer(width=12, heads=3, layers=2, dtype="float64")


def of_torch(ours: nn.Module) -> nn.TransformerEncoder:
    """Return torch's encoder with the weights of the blocks and of the last norm."""
    layer = nn.TransformerEncoderLayer(12, 3, 48, 0.0, "gelu", batch_first=True, norm_first=True, dtype=torch.float64)
    theirs = nn.TransformerEncoder(layer, 2, nn.LayerNorm(12, dtype=torch.float64), enable_nested_tensor=False)
    values = {}
    for name, value in ours.state_dict().items():
        block = name.replace("blocks.", "layers.").replace("attention.output", "self_attn.out_proj")
        if ".attention." not in name or "output" in name:
            values[block] = value
    for number in range(2):
        for end in ("weight", "bias"):
            parts = [ours.state_dict()[f"blocks.{number}.attention.{part}.{end}"] for part in ("query", "key", "value")]
            values[f"layers.{number}.self_attn.in_proj_{end}"] = torch.cat(parts)
    theirs.load_state_dict({name: value for name, value in values.items() if name in theirs.state_dict()})
    return theirs.eval()


def test_it_is_the_encoder_of_torch_under_a_causal_mask() -> None:
    data = sequences(COUNTS)
    ours: Any = SMALL.module(data).double()
    for value in ours.parameters():
        nn.init.normal_(value, std=0.3, generator=torch.Generator().manual_seed(0))
    tokens = torch.from_numpy(np.asarray(data.test.features))
    length = tokens.shape[1]
    embedded = ours.embedding(tokens) + ours.position(torch.arange(length))
    mask = nn.Transformer.generate_square_subsequent_mask(length, dtype=torch.float64)
    wanted = ours.scores(of_torch(ours)(embedded, mask=mask))
    torch.testing.assert_close(ours(tokens), wanted, rtol=1e-10, atol=1e-12)
    changed = tokens.clone()
    changed[:, -1] = (changed[:, -1] + 1) % data.n_classes
    torch.testing.assert_close(ours(changed)[:, :-1], ours(tokens)[:, :-1], rtol=0, atol=0)
    assert (ours(changed)[:, -1] != ours(tokens)[:, -1]).any(1).all()


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        (["model={kind: transformer, width: 10, heads: 4}"], "width = 10 is no multiple of heads = 4; change one"),
        (
            ["model=transformer"],
            "model.kind = transformer takes windows of tokens, and samples of digits are none",
        ),
    ],
)
def test_what_does_not_fit_is_one_line(settings: list[str], line: str) -> None:
    with pytest.raises(UserError, match=line):
        experiment = load_experiment("fedavg-digits", settings)
        experiment.task(experiment.data_source.load())
