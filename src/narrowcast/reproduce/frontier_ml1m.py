"""The frontier on MovieLens-1M: 1000 rounds of 60 clients, HR@10 against a fraction of FedMF-64's float32 uplink.

The server's learning rate is 1, and lower for the shared basis; `frontier-ml1m-rates` tries the rates of `TRIED` on
validation users, and `frontier-ml1m-tuned` runs the methods whose best rate is not 1 at their best rate.
"""

from __future__ import annotations

from dataclasses import replace

from narrowcast.platform.tracking.run_plots import BLACK, BLUE, GREEN, ORANGE, PURPLE, VERMILLION
from narrowcast.reproduce.frontier import Frontier, Series, band
from narrowcast.reproduce.run_spec import RunSpec

BUDGETS = (64, 128, 256, 512, 1024, 2048)
_BEYOND = (3072, 4096, 8192)
_SECONDS = 48.7
_RARELY = ("checkpoint_every=1000", "checkpoint_seconds=100000")  # the errors of all clients are gigabytes
_MORE = ("#56B4E9", "#8C6D31", "0.5")


def _codec(*stages: str) -> tuple[str, ...]:
    return (f"algorithm.codec=[{', '.join(stages)}, entropy]",)


def _levels(levels: int) -> str:
    return f"{{kind: quantise, levels: {levels}, norms: column, rounding: dithered, norm_type: bfloat16}}"


def _fedmf(name: str, colour: str, rate: float, settings: dict[str, tuple[str, ...]]) -> Series:
    common = ("algorithm.rows=touched", *_RARELY)
    return Series(name, "fedmf-ml1m", common, settings, dict.fromkeys(settings, rate), colour)


def _factors(kind: str, sizes: tuple[tuple[int, int], ...], *before: str) -> dict[str, tuple[str, ...]]:
    return {
        f"rank {rank}, k = {levels}": _codec(*before, f"{{kind: {kind}, rank: {rank}}}", _levels(levels))
        for rank, levels in sizes
    }


_SCOLR = "scolr-channel-ml1m"
ADAPTIVE_SVD = Series(
    "Adaptive SVD, channel",
    _SCOLR,
    ("algorithm={kind: adaptive_svd, rank: 4}", *_codec(_levels(10))),
    band("min_error", _SECONDS, (*BUDGETS, *_BEYOND)),
    dict.fromkeys(map(str, (*BUDGETS, *_BEYOND)), 1.0),
    BLUE,
)
SHARED = Series(
    "SCoLR, channel, shared basis",
    _SCOLR,
    (),
    band("min_error", _SECONDS, (128, 512, 2048)),
    {"128": 0.7, "512": 0.5, "2048": 0.4},
    _MORE[0],
)
RANKS = Series(
    "SCoLR, ranks only",
    _SCOLR,
    ("algorithm.codec={kind: cast, dtype: bfloat16}",),
    band("max_min", _SECONDS, BUDGETS[:4]),  # uses 1/140 to 1/3125
    dict.fromkeys(map(str, BUDGETS[:4]), 1.0),
    PURPLE,
)
COLR = Series(
    "CoLR",
    "colr-ml1m",
    ("algorithm.rows=touched", *_codec(_levels(16))),
    {f"r = {rank}": (f"algorithm.rank={rank}",) for rank in (1, 2, 4, 8, 16)},
    {f"r = {rank}": 1.0 for rank in (1, 2, 4, 8, 16)},
    ORANGE,
)
QUANTISED = _fedmf("FedMF, quantised", BLACK, 1.0, {f"k = {k}": _codec(_levels(k)) for k in (4, 12, 40)})
EDEN = _fedmf("FedMF, EDEN", _MORE[1], 1.0, {f"{k} levels": _codec(f"{{kind: eden, levels: {k}}}") for k in (2, 4)})
_FINE = ((1, 16), (1, 64), (4, 64))  # error feedback diverges with coarser levels
SVD = _fedmf("SVD", VERMILLION, 1.0, _factors("svd", ((1, 3), (1, 5), *_FINE)))
POWER_SGD = _fedmf("PowerSGD", _MORE[2], 1.0, _factors("power_sgd", _FINE, "error_feedback"))
TOP_K = _fedmf(
    "Top-K",
    GREEN,
    1.0,
    {
        f"{100 * share:g} %": _codec("error_feedback", f"{{kind: top_k, fraction: {share:g}}}", _levels(16))
        for share in (0.005, 0.02, 0.08)
    },
)

ML1M = Frontier(
    "Accuracy against uplink, MovieLens-1M",
    "test.hr@10",
    60 * 3706 * 64 * 32,
    BUDGETS,
    {256: 63.6, 512: 62.3, 1024: 60.8, 2048: 60.0},
    RunSpec("frontier-fedmf-ml1m-d-64", "fedmf-ml1m", ("model.embedding_dim=64",)),
    ADAPTIVE_SVD,
    (SHARED, RANKS, COLR, QUANTISED, EDEN, SVD, POWER_SGD, TOP_K),
    lowest=45.0,
)


def _tuned(series: Series, rate: float, *settings: str) -> Series:
    """Return some settings of a series at another learning rate of the server."""
    return replace(
        series,
        name=f"{series.name}, rate {rate:g}",
        settings={each: series.settings[each] for each in settings},
        rates=dict.fromkeys(settings, rate),
    )


FLOAT32 = Series("FedMF, float32", "fedmf-ml1m", (), {"d = 64": ("model.embedding_dim=64",)}, {"d = 64": 1.0}, BLACK)
_RATES = (0.5, 1.0, 1.5, 2.0)
TRIED = (
    (FLOAT32, "d = 64", (*_RATES, 2.5)),
    (ADAPTIVE_SVD, "2048", _RATES),
    (SVD, "rank 1, k = 16", _RATES),
    (POWER_SGD, "rank 1, k = 16", _RATES),
    (EDEN, "2 levels", _RATES),
    (QUANTISED, "k = 12", _RATES),
    (COLR, "r = 4", _RATES),
    (RANKS, "256", _RATES),
    (TOP_K, "2 %", _RATES),
    (SHARED, "512", (0.35, 0.5, 0.65)),
)
TUNED = replace(
    ML1M,
    title="Accuracy against uplink, MovieLens-1M, at the best learning rates",
    budgets=(64, 1024, 2048),
    reference=_tuned(FLOAT32, 2.0, "d = 64").run("d = 64"),
    best=_tuned(ADAPTIVE_SVD, 1.5, "64", "1024", "2048", "3072", "4096"),
    others=(
        _tuned(QUANTISED, 1.5, "k = 12"),
        _tuned(EDEN, 1.5, "2 levels"),
        _tuned(SVD, 1.5, "rank 1, k = 5", "rank 1, k = 16", "rank 1, k = 64"),
        _tuned(POWER_SGD, 1.5, "rank 1, k = 64"),
    ),
    lowest=59.0,
)
