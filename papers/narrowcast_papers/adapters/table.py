"""Comparisons of adapters: by SGD and by AdamW, with values of few bits, and over unequal links."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from narrowcast_papers.adapters.comparison import Comparison, Method

STEPS = (0.003, 0.03 / 10**0.5, 0.03, 0.1, 0.3, 0.3 * 10**0.5, 3.0, 3 * 10**0.5, 30.0, 30 * 10**0.5)
"""Learning rates of SGD, about a factor of the square root of ten apart."""
SGD: Mapping[str, Any] = {"kind": "sgd"}

FEDIT, SCOLR, FEDAVG = "FedIT", "SCoLR", "FedAvg"
METHODS: Mapping[str, Method] = {
    FEDIT: Method({"kind": "lora"}, 4),
    "FlexLoRA": Method({"kind": "lora", "combine": "product"}, 4),
    "FLoRA": Method({"kind": "lora", "combine": "stack"}, 4),
    "FedEx-LoRA": Method({"kind": "lora", "combine": "residual"}, 4),
    "FFA-LoRA": Method({"kind": "lora", "share": "b"}, 8),
    "RoLoRA": Method({"kind": "lora", "share": "alternate"}, 8),
    "CoLR": Method({"kind": "colr", "rank": 8}),
    SCOLR: Method({"kind": "scolr", "rank": 8}),
    FEDAVG: Method({"kind": "fedavg"}),
}
"""Ranks give methods about the same uplink: a single factor has twice the rank of two, as have ranks that are drawn.

A core of rank 32 between factors that are drawn has a quarter more.
"""
BY_SGD = Comparison(
    "Adapters of a transformer on addresses of presidents", "lora-sotu.csv", METHODS, FEDIT, SGD, STEPS, 0.1
)
MORE_BY_SGD = Comparison(
    "Further means of adapters, and ranks of clients",
    "lora-sotu-more.csv",
    {
        **{name: METHODS[name] for name in (FEDIT, "FlexLoRA")},
        "LoRA-FAIR": Method({"kind": "lora", "combine": "refined"}, 4),
        "HetLoRA": Method({"kind": "lora", "combine": "padded", "rank_policy": "uniform"}, 8),
        "FlexLoRA, ranks": Method({"kind": "lora", "combine": "product", "rank_policy": "uniform"}, 8),
        "core": Method({"kind": "lora"}, 32, adapters={"factor": "core"}),
    },
    FEDIT,
    SGD,
    STEPS,
    0.1,
)


def _quantised(levels: int) -> list[Any]:
    return [{"kind": "quantise", "levels": levels, "scale": "max"}, "entropy"]


_EIGHT, _FOUR, _TWO = 127, 7, 1
"""Levels of as many bits, before entropy coding."""
_DOWN, _COARSELY_DOWN = ({"download": {"step": step}} for step in (0.003, 0.01))
_HELD = {"downlink": "from_start"}
"""Clients hold the base, as those of adapters do, and are sent what has been added to it."""
CLIPPED: Mapping[str, Any] = {"kind": "adamw", "clip_norm": 1.0}
SMALL_STEPS = tuple(0.03 * 10 ** (-step / 2) for step in range(8))
BY_ADAMW = Comparison(
    "Adapters of a transformer, AdamW and clipped gradients",
    "lora-sotu-adamw.csv",
    {
        **{name: METHODS[name] for name in (FEDIT, "FlexLoRA", "FFA-LoRA", "CoLR", SCOLR, FEDAVG)},
        "SCoLR, base held": Method({"kind": "scolr", "rank": 8}, fields=_HELD, first_rate=SMALL_STEPS[3]),
        "SCoLR, 4 bits both ways, base held": Method(
            {"kind": "scolr", "rank": 8, "codec": _quantised(_FOUR), "downlink_codec": _quantised(_FOUR)},
            fields=_HELD,
            first_rate=SMALL_STEPS[3],
        ),
        "FedAvg, 2 bits": Method({"kind": "fedavg", "codec": _quantised(_TWO)}, first_rate=SMALL_STEPS[3]),
        "FedIT, 2 bits, coded download": Method({"kind": "lora", "codec": _quantised(_TWO), **_DOWN}, 4),
        "FedIT, 2 bits, coarse download": Method({"kind": "lora", "codec": _quantised(_TWO), **_COARSELY_DOWN}, 4),
        "FedAvg, 2 bits, coded download": Method(
            {"kind": "fedavg", "codec": _quantised(_TWO), **_DOWN}, first_rate=SMALL_STEPS[3]
        ),
        "FedIT, 2 bits, coarse download, 44 rounds": Method(
            {"kind": "lora", "codec": _quantised(_TWO), **_COARSELY_DOWN}, 4, first_rate=SMALL_STEPS[1], rounds=44
        ),
        "SCoLR, 4 bits both ways, base held, 28 rounds": Method(
            {"kind": "scolr", "rank": 8, "codec": _quantised(_FOUR), "downlink_codec": _quantised(_FOUR)},
            fields=_HELD,
            first_rate=SMALL_STEPS[3],
            rounds=28,
        ),
    },
    FEDIT,
    CLIPPED,
    SMALL_STEPS,
    SMALL_STEPS[2],
)


_LOW = STEPS[1]
"""Where methods that train the whole model, which higher rates make worse than the base, have their best rate."""
IN_FEW_BITS = Comparison(
    "Bits of factors",
    "lora-bits.csv",
    {
        "FedAvg, float32": Method({"kind": "fedavg"}, first_rate=_LOW),
        "FedAvg, 8 bits": Method({"kind": "fedavg", "codec": _quantised(_EIGHT)}, first_rate=_LOW),
        "FedAvg, 2 bits": Method({"kind": "fedavg", "codec": _quantised(_TWO)}, first_rate=_LOW),
        "rank 4, float32": Method({"kind": "lora"}, 4),
        "rank 4, 8 bits": Method({"kind": "lora", "codec": _quantised(_EIGHT)}, 4),
        "rank 4, 4 bits": Method({"kind": "lora", "codec": _quantised(_FOUR)}, 4),
        "rank 4, 2 bits": Method({"kind": "lora", "codec": _quantised(_TWO)}, 4),
        "rank 4, 2 bits, feedback": Method({"kind": "lora", "codec": ["error_feedback", *_quantised(_TWO)]}, 4),
        "rank 1, 4 bits": Method({"kind": "lora", "codec": _quantised(_FOUR)}, 1),
        "B of rank 1, 4 bits": Method({"kind": "lora", "share": "b", "codec": _quantised(_FOUR)}, 1),
    },
    "rank 4, float32",
    SGD,
    STEPS,
    STEPS[5],
)

UNEQUAL: Mapping[str, Any] = {
    "fleet": {
        "kind": "lognormal",
        "uplink_mbit_per_second": {"median": 0.1, "sigma": 1.0},
        "downlink_mbit_per_second": {"median": 0.6, "sigma": 1.0},
    }
}
IN_TIME = {"kind": "bandwidth", "upload_seconds": 3.0}
"""Ranks whose float32 factors the uplink carries within three seconds: 3 or 4 of rank 8, at its median."""
OVER_LINKS = Comparison(
    "Adapters over unequal links",
    "lora-links.csv",
    {
        "FedIT, all waited for": Method({"kind": "lora"}, 4),
        "FedIT, rank 1, all waited for": Method({"kind": "lora"}, 1),
        "FedIT, the first 4 of 6": Method({"kind": "lora"}, 4, {"clients_per_round": 4, "over_selection": 1.5}),
        "means of columns, ranks": Method({"kind": "lora", "rank_policy": IN_TIME}, 8),
        "HetLoRA, ranks": Method({"kind": "lora", "combine": "padded", "rank_policy": IN_TIME}, 8),
        "FlexLoRA, ranks": Method({"kind": "lora", "combine": "product", "rank_policy": IN_TIME}, 8),
        "SCoLR, ranks": Method(
            {"kind": "scolr", "rank": 8, "rank_policy": IN_TIME, "downlink_codec": _quantised(_FOUR)},
            fields=_HELD,
            first_rate=SMALL_STEPS[3],
        ),
        "FedAvg, 2 bits, coded download": Method(
            {"kind": "fedavg", "codec": _quantised(_TWO), **_DOWN}, first_rate=SMALL_STEPS[3]
        ),
    },
    "FedIT, all waited for",
    CLIPPED,
    SMALL_STEPS,
    SMALL_STEPS[1],
    UNEQUAL,
    target=6.0,
)

SGD_TABLE, MORE_TABLE, ADAMW_TABLE, BITS_TABLE, LINKS_TABLE = (
    comparison.table for comparison in (BY_SGD, MORE_BY_SGD, BY_ADAMW, IN_FEW_BITS, OVER_LINKS)
)
