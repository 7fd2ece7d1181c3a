"""Comparisons of adapters: by SGD and by AdamW, of several ranks, in few bits, over unequal links and a fading band."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from narrowcast_papers.adapters.comparison import Comparison, Method
from narrowcast_papers.adapters.settings import PRESIDENTS, PRESIDENTS_ALONE

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
    PRESIDENTS, "Adapters of a transformer on addresses of presidents", "lora-sotu.csv", METHODS, FEDIT, SGD, STEPS, 0.1
)
MORE_BY_SGD = Comparison(
    PRESIDENTS,
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


def quantised(levels: int) -> list[Any]:
    """Return the codec that rounds at random to as many levels of either sign, and codes them by their frequency."""
    return [{"kind": "quantise", "levels": levels, "scale": "max"}, "entropy"]


EIGHT, FOUR, TWO = 127, 7, 1
"""Levels of as many bits, before entropy coding."""
DOWN, _COARSELY_DOWN = ({"download": {"step": step}} for step in (0.003, 0.01))
HELD = {"downlink": "from_start"}
"""Clients hold the base, as those of adapters do, and are sent what has been added to it."""
CLIPPED: Mapping[str, Any] = {"kind": "adamw", "clip_norm": 1.0}
SMALL_STEPS = tuple(0.03 * 10 ** (-step / 2) for step in range(8))
BY_ADAMW = Comparison(
    PRESIDENTS,
    "Adapters of a transformer, AdamW and clipped gradients",
    "lora-sotu-adamw.csv",
    {
        **{name: METHODS[name] for name in (FEDIT, "FlexLoRA", "FFA-LoRA", "CoLR", SCOLR, FEDAVG)},
        "SCoLR, base held": Method({"kind": "scolr", "rank": 8}, fields=HELD, first_rate=SMALL_STEPS[3]),
        "SCoLR, 4 bits both ways, base held": Method(
            {"kind": "scolr", "rank": 8, "codec": quantised(FOUR), "downlink_codec": quantised(FOUR)},
            fields=HELD,
            first_rate=SMALL_STEPS[3],
        ),
        "FedAvg, 2 bits": Method({"kind": "fedavg", "codec": quantised(TWO)}, first_rate=SMALL_STEPS[3]),
        "FedIT, 2 bits, coded download": Method({"kind": "lora", "codec": quantised(TWO), **DOWN}, 4),
        "FedIT, 2 bits, coarse download": Method({"kind": "lora", "codec": quantised(TWO), **_COARSELY_DOWN}, 4),
        "FedAvg, 2 bits, coded download": Method(
            {"kind": "fedavg", "codec": quantised(TWO), **DOWN}, first_rate=SMALL_STEPS[3]
        ),
        "FedIT, 2 bits, coarse download, 44 rounds": Method(
            {"kind": "lora", "codec": quantised(TWO), **_COARSELY_DOWN}, 4, first_rate=SMALL_STEPS[1], rounds=44
        ),
        "SCoLR, 4 bits both ways, base held, 28 rounds": Method(
            {"kind": "scolr", "rank": 8, "codec": quantised(FOUR), "downlink_codec": quantised(FOUR)},
            fields=HELD,
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
    PRESIDENTS,
    "Bits of factors",
    "lora-bits.csv",
    {
        "FedAvg, float32": Method({"kind": "fedavg"}, first_rate=_LOW),
        "FedAvg, 8 bits": Method({"kind": "fedavg", "codec": quantised(EIGHT)}, first_rate=_LOW),
        "FedAvg, 2 bits": Method({"kind": "fedavg", "codec": quantised(TWO)}, first_rate=_LOW),
        "rank 4, float32": Method({"kind": "lora"}, 4),
        "rank 4, 8 bits": Method({"kind": "lora", "codec": quantised(EIGHT)}, 4),
        "rank 4, 4 bits": Method({"kind": "lora", "codec": quantised(FOUR)}, 4),
        "rank 4, 2 bits": Method({"kind": "lora", "codec": quantised(TWO)}, 4),
        "rank 4, 2 bits, feedback": Method({"kind": "lora", "codec": ["error_feedback", *quantised(TWO)]}, 4),
        "rank 1, 4 bits": Method({"kind": "lora", "codec": quantised(FOUR)}, 1),
        "B of rank 1, 4 bits": Method({"kind": "lora", "share": "b", "codec": quantised(FOUR)}, 1),
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
    PRESIDENTS,
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
            {"kind": "scolr", "rank": 8, "rank_policy": IN_TIME, "downlink_codec": quantised(FOUR)},
            fields=HELD,
            first_rate=SMALL_STEPS[3],
        ),
        "FedAvg, 2 bits, coded download": Method(
            {"kind": "fedavg", "codec": quantised(TWO), **DOWN}, first_rate=SMALL_STEPS[3]
        ),
        "SCoLR, ranks, float32 means": Method(
            {"kind": "scolr", "rank": 8, "rank_policy": IN_TIME}, fields=HELD, first_rate=SMALL_STEPS[3]
        ),
        "HetLoRA, ranks, pruned": Method(
            {"kind": "lora", "combine": "padded", "rank_policy": IN_TIME, "pruning": {}}, 8
        ),
        "FedIT, 4 bits, coded download": Method({"kind": "lora", "codec": quantised(FOUR), **DOWN}, 4),
        "CoLR, 4 bits both ways": Method(
            {"kind": "colr", "rank": 8, **dict.fromkeys(("codec", "downlink_codec"), quantised(FOUR))},
            fields=HELD,
            first_rate=SMALL_STEPS[3],
        ),
    },
    "FedIT, all waited for",
    CLIPPED,
    SMALL_STEPS,
    SMALL_STEPS[1],
    UNEQUAL,
    target=6.0,
)

OF_RANKS = Comparison(
    PRESIDENTS,
    "Ranks of adapters",
    "lora-ranks.csv",
    {
        **{f"FedIT, rank {rank}": Method({"kind": "lora"}, rank) for rank in (2, 8, 32)},
        **{
            f"CoLR, rank {rank}": Method({"kind": "colr", "rank": rank}, fields=HELD, first_rate=SMALL_STEPS[3])
            for rank in (2, 8, 32)
        },
    },
    "FedIT, rank 8",
    CLIPPED,
    SMALL_STEPS,
    SMALL_STEPS[1],
)

FADING: Mapping[str, Any] = {
    "radio": {
        "channel": {"kind": "rayleigh", "access": "shared"},
        **{"allocation": "max_min", "upload_seconds": 0.2},
    }
}
"""A band of 1 MHz that fades anew in each round, with 0.2 seconds for the uploads of its six clients."""
_BY_CHANNEL: Mapping[str, Any] = {"rank_policy": "channel"}
_ANY_LEVELS = [
    {"kind": "quantise", "levels": 10, "norms": "column", "rounding": "dithered", "norm_type": "bfloat16"},
    "entropy",
]
_MEANS: Mapping[str, Any] = {"kind": "scolr", "rank": 8, "downlink_codec": quantised(FOUR), **_BY_CHANNEL}
OVER_A_CHANNEL = Comparison(
    PRESIDENTS,
    "Adapters over a fading band",
    "lora-channel.csv",
    {
        "FedIT, rank 4": Method({"kind": "lora"}, 4),
        "FedIT, rank 4, 4 bits": Method({"kind": "lora", "codec": quantised(FOUR)}, 4),
        "FedIT, rank 8, 4 bits": Method({"kind": "lora", "codec": quantised(FOUR)}, 8),
        "FlexLoRA, rank 8, 4 bits": Method({"kind": "lora", "combine": "product", "codec": quantised(FOUR)}, 8),
        "means of columns, ranks": Method({"kind": "lora", **_BY_CHANNEL}, 8),
        "HetLoRA, ranks": Method({"kind": "lora", "combine": "padded", **_BY_CHANNEL}, 8),
        "FlexLoRA, ranks": Method({"kind": "lora", "combine": "product", **_BY_CHANNEL}, 8),
        "CoLR, rank 8, 4 bits": Method(
            {"kind": "colr", "rank": 8, **dict.fromkeys(("codec", "downlink_codec"), quantised(FOUR))},
            fields=HELD,
            first_rate=SMALL_STEPS[3],
        ),
        "SCoLR, ranks": Method(_MEANS, fields=HELD, first_rate=SMALL_STEPS[3]),
        "SCoLR, ranks and levels": Method({**_MEANS, "codec": _ANY_LEVELS}, fields=HELD, first_rate=SMALL_STEPS[3]),
        "FedAvg, 2 bits, coded download": Method(
            {"kind": "fedavg", "codec": quantised(TWO), **DOWN}, first_rate=SMALL_STEPS[3]
        ),
        "FedIT, rank 8, 4 bits, coded download": Method({"kind": "lora", "codec": quantised(FOUR), **DOWN}, 8),
    },
    "FedIT, rank 4, 4 bits",
    CLIPPED,
    (0.03 * 10**0.5, *SMALL_STEPS),
    SMALL_STEPS[1],
    FADING,
    target=6.0,
)

WITH_OWN = Comparison(
    PRESIDENTS_ALONE,
    "Adapters of which clients keep a part",
    "lora-personal.csv",
    {
        "FedIT, rank 4": Method({"kind": "lora"}, 4),
        "FedIT, rank 8": Method({"kind": "lora"}, 8),
        "FedIT, rank 4, fine-tuned": Method({"kind": "fine_tune"}, 4),
        "FedSA-LoRA, rank 8": Method({"kind": "partial", "kept": ["*.lora_B"]}, 8),
        "A kept, B shared, rank 8": Method({"kind": "partial", "kept": ["*.lora_A"]}, 8),
        "FFA-LoRA, rank 8": Method({"kind": "lora", "share": "b"}, 8),
        "nothing sent, rank 8": Method({"kind": "local"}, 8),
    },
    "FedIT, rank 4",
    CLIPPED,
    SMALL_STEPS,
    SMALL_STEPS[1],
    {"evaluate_clients": ["validation", "test"]},
)

SGD_TABLE, MORE_TABLE, ADAMW_TABLE, BITS_TABLE, LINKS_TABLE, RANKS_TABLE, CHANNEL_TABLE, PERSONAL_TABLE = (
    comparison.table
    for comparison in (BY_SGD, MORE_BY_SGD, BY_ADAMW, IN_FEW_BITS, OVER_LINKS, OF_RANKS, OVER_A_CHANNEL, WITH_OWN)
)
