"""The frontier of a network on MNIST: 30 rounds of 10 clients, accuracy against a fraction of FedAvg's float32 uplink.

100 clients with Dirichlet(0.5) labels and the LeNet-like network of `scolr-mnist`. On constant links adaptive ATOMO has
the same conditions as the rivals: equal bits for every client in every round. The learning rate of the server is 1
throughout, since every client of a cohort sends, and each tensor's mean is over all of them.
"""

from __future__ import annotations

from narrowcast.platform.tracking.run_plots import BLACK, BLUE, GREEN, ORANGE, PURPLE, VERMILLION
from narrowcast.reproduce.frontier import Frontier, Series, band
from narrowcast.reproduce.run_spec import RunSpec

BUDGETS = (32, 64, 128, 256, 512, 1024)
_SECONDS = 12.0
_PARAMETERS = 215_370
_SECONDS_ALONE = 32 * _PARAMETERS / 2**21  # a whole update on a link of 2 Mibit/s
_SHORT = ("rounds=30",)
_FEDAVG = (*_SHORT, "algorithm=fedavg")


def _codec(*stages: str) -> tuple[str, ...]:
    return (f"algorithm.codec=[{', '.join(stages)}, entropy]",)


def _levels(levels: int) -> str:
    return f"{{kind: quantise, levels: {levels}, norms: column, rounding: dithered, norm_type: bfloat16}}"


def _series(name: str, colour: str, common: tuple[str, ...], settings: dict[str, tuple[str, ...]]) -> Series:
    return Series(name, "scolr-mnist", common, settings, dict.fromkeys(settings, 1.0), colour)


_CHANNEL = (*_SHORT, "algorithm.rank_policy=channel", *_codec(_levels(8)))
_DRAWN = (*_SHORT, "algorithm={kind: adaptive_atomo, rank: 64}", *_codec(_levels(8)))
ADAPTIVE_ATOMO = _series(
    "Adaptive ATOMO, channel",
    BLUE,
    _DRAWN,
    band("max_min", _SECONDS, BUDGETS),
)
STEADY = _series(
    "Adaptive ATOMO, steady links",
    "0.5",
    _DRAWN,
    {
        f"{each}": (f"radio={{channel: {{kind: fixed}}, upload_seconds: {_SECONDS_ALONE / each:g}}}",)
        for each in (64, 256, 1024)
    },
)
SHARED = _series("SCoLR, channel, shared basis", "#56B4E9", _CHANNEL, band("max_min", _SECONDS, BUDGETS[:4]))
FIXED = _series(
    "CoLR",
    ORANGE,
    (*_SHORT, "algorithm=colr", *_codec(_levels(16))),
    {f"r = {rank}": (f"algorithm.rank={rank}",) for rank in (2, 4, 8, 16)},
)
QUANTISED = _series("FedAvg, quantised", BLACK, _FEDAVG, {f"k = {k}": _codec(_levels(k)) for k in (1, 2, 8)})
EDEN = _series(
    "FedAvg, EDEN", "#8C6D31", _FEDAVG, {f"{k} levels": _codec(f"{{kind: eden, levels: {k}}}") for k in (2, 4)}
)
ATOMO = _series(
    "FedAvg, ATOMO",
    PURPLE,
    _FEDAVG,
    {
        f"{100 * share:g} %": _codec(f"{{kind: atomo, fraction: {share:g}}}", _levels(24))
        for share in (0.2, 0.05, 0.0125)
    },
)
POWER_SGD = _series(
    "PowerSGD",
    VERMILLION,
    _FEDAVG,
    {
        f"rank {rank}": _codec("error_feedback", f"{{kind: power_sgd, rank: {rank}}}", _levels(16))
        for rank in (1, 2, 4, 8)
    },
)
TOP_K = _series(
    "Top-K",
    GREEN,
    _FEDAVG,
    {
        f"{100 * share:g} %": _codec("error_feedback", f"{{kind: top_k, fraction: {share:g}}}", _levels(16))
        for share in (0.001, 0.004, 0.016)
    },
)

MNIST = Frontier(
    "Accuracy against uplink, a network on MNIST",
    "test.accuracy",
    10 * _PARAMETERS * 32,
    BUDGETS,
    {},
    RunSpec("mnist-fedavg", "scolr-mnist", _FEDAVG),
    ADAPTIVE_ATOMO,
    (STEADY, SHARED, FIXED, QUANTISED, EDEN, ATOMO, POWER_SGD, TOP_K),
    lowest=92.0,
)
