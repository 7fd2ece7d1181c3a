"""Adapters of MiniLM on mails, spam or not, beside counts of words and a head on the base as it is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from narrowcast_papers.adapters.comparison import Comparison, Method
from narrowcast_papers.adapters.settings import MAILS
from narrowcast_papers.adapters.table import FOUR, HELD, quantised

RATES = tuple(10.0 ** (step / 2) for step in range(-10, 5))
_SOFTMAX: Mapping[str, Any] = {"model": {"kind": "mlp", "hidden": []}}
"""Softmax regression on counts of the words of whole mails."""
_ALMOST_NONE: Mapping[str, Any] = {"factor": "core", "targets": ["*.1.*.value.weight"]}
"""A single number beside the head."""
FEDIT = "FedIT, rank 8"
METHODS: Mapping[str, Method] = {
    "counts of words": Method({"kind": "fedavg"}, fields=_SOFTMAX, data={"tokenizer": None}, first_rate=RATES[10]),
    "head alone": Method({"kind": "lora"}, 1, adapters=_ALMOST_NONE, first_rate=RATES[7]),
    FEDIT: Method({"kind": "lora"}, 8),
    "FlexLoRA, rank 8": Method({"kind": "lora", "combine": "product"}, 8),
    "SCoLR, 4 bits both ways": Method(
        {"kind": "scolr", "rank": 4, **dict.fromkeys(("codec", "downlink_codec"), quantised(FOUR))},
        fields=HELD,
        first_rate=RATES[5],
    ),
}
BY_MAILS = Comparison(
    MAILS,
    "Adapters of MiniLM on mails, spam or not",
    "lora-spam.csv",
    METHODS,
    FEDIT,
    {"kind": "adamw"},
    RATES,
    RATES[5],
)
MAILS_TABLE = BY_MAILS.table
