"""Adapters of MiniLM on mails, spam or not, beside counts of words and a head on the base as it is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from narrowcast_papers.adapters.comparison import Comparison, Method
from narrowcast_papers.adapters.settings import MAILS, MAILS_OF_DOMAINS
from narrowcast_papers.adapters.table import DOWN, FOUR, HELD, TWO, quantised

RATES = tuple(10.0 ** (step / 2) for step in range(-10, 5))
_SOFTMAX: Mapping[str, Any] = {"model": {"kind": "mlp", "hidden": [], **MAILS.measured}}
"""Softmax regression on counts of the words of whole mails."""
_ALMOST_NONE: Mapping[str, Any] = {"factor": "core", "targets": ["*.1.*.value.weight"]}
"""A single number beside the head."""
FEDIT = "FedIT, rank 8"
_BOTH_WAYS = dict.fromkeys(("codec", "downlink_codec"), quantised(FOUR))
_OF_DOMAINS: Mapping[str, Method] = {
    "counts of words": Method({"kind": "fedavg"}, fields=_SOFTMAX, data={"tokenizer": None}, first_rate=RATES[10]),
    "head alone": Method({"kind": "lora"}, 1, adapters=_ALMOST_NONE, first_rate=RATES[7]),
    FEDIT: Method({"kind": "lora"}, 8),
    "FlexLoRA, rank 8": Method({"kind": "lora", "combine": "product"}, 8),
    "HetLoRA, ranks 1 to 8": Method({"kind": "lora", "combine": "padded", "rank_policy": "uniform"}, 8),
    "FFA-LoRA, rank 16": Method({"kind": "lora", "share": "b"}, 16),
    "FedIT, 4 bits, coded download": Method({"kind": "lora", "codec": quantised(FOUR), **DOWN}, 8),
    "SCoLR, 4 bits both ways": Method({"kind": "scolr", "rank": 4, **_BOTH_WAYS}, fields=HELD, first_rate=RATES[4]),
}
METHODS: Mapping[str, Method] = {
    **_OF_DOMAINS,
    "FedIT, rank 2": Method({"kind": "lora"}, 2),
    "FedIT, rank 32": Method({"kind": "lora"}, 32),
    "FlexLoRA, ranks 1 to 8": Method({"kind": "lora", "combine": "product", "rank_policy": "uniform"}, 8),
    "RoLoRA, rank 16": Method({"kind": "lora", "share": "alternate"}, 16),
    "FLoRA, rank 8": Method({"kind": "lora", "combine": "stack"}, 8),
    "FedEx-LoRA, rank 8": Method({"kind": "lora", "combine": "residual"}, 8),
    "FedAvg, 2 bits, coded download": Method(
        {"kind": "fedavg", "codec": quantised(TWO), **DOWN}, fields=HELD, first_rate=RATES[4]
    ),
    "SCoLR, float32": Method({"kind": "scolr", "rank": 4}, fields=HELD, first_rate=RATES[3]),
    "CoLR, rank 4, float32": Method({"kind": "colr", "rank": 4}, fields=HELD, first_rate=RATES[3]),
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
BY_DOMAINS = replace(
    BY_MAILS,
    setting=MAILS_OF_DOMAINS,
    title="Adapters of MiniLM on mails, a client for each domain",
    file="lora-spam-domains.csv",
    methods=_OF_DOMAINS,
)
MAILS_TABLE, DOMAINS_TABLE = BY_MAILS.table, BY_DOMAINS.table
