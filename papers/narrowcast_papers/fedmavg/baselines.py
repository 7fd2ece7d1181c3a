"""Baselines of the data sets of ratings that tables of results are about: what takes no training, by seed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product

import numpy as np

from narrowcast.studies.execution import baselines_of
from narrowcast.studies.results import Line, Lines
from narrowcast.studies.spec import RunSpec, slug
from narrowcast.studies.tables import MeasuredTable, Measurements
from narrowcast.studies.verdicts import PaperVerdict, mean_and_spread
from narrowcast_papers.fedmavg.central import RATINGS
from narrowcast_papers.fedmavg.sfmf import EXCERPT

SEEDS = 5
CASES: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "ml-1m, items": ("scolr-ml1m", ()),
    "ml-100k, items": ("scolr-ml100k", ()),
    "ml-latest-small, items": ("scolr-ml1m", ("data={kind: ml-latest-small, validation: none}",)),
    "ml-100k, stars": ("ratings-ml100k", ()),
    "ml-latest-small, stars": ("ratings-ml100k", (f"problem={{kind: rating_completion, {RATINGS}}}",)),
    "excerpt of SFMF, stars": ("fedmavg-ml-latest-small", (f"data={{kind: explicit_ratings, {EXCERPT}}}",)),
}
"""The experiment or solve whose data are meant, and overrides."""


def measured(case: str, seed: int) -> Iterator[Line]:
    """Yield the test metrics of each baseline of a case."""
    of_baselines = baselines_of(RunSpec(slug(case), *CASES[case], data_seed=True), seed)
    for name, metrics in of_baselines.items():
        for metric, value in metrics.items():
            if metric.startswith("test."):
                yield {"baseline": name, "metric": metric, "value": value}


def judge(rows: Lines) -> list[PaperVerdict]:
    """Return the mean of each metric over seeds, shares in percent."""
    found: dict[tuple[str, str, str], list[float]] = {}
    for row in rows:
        share = 1 if row["metric"] in ("test.rmse", "test.mae") else 100
        found.setdefault((row["case"], row["baseline"], row["metric"]), []).append(share * float(row["value"]))
    return [
        PaperVerdict(
            f"{case}, {baseline}, {metric.removeprefix('test.')}",
            "",
            mean_and_spread(values, 4 if metric in ("test.rmse", "test.mae") else 2),
            "the same for every seed" if np.ptp(values) == 0 else "",
            "",
            tuple(values),
        )
        for (case, baseline, metric), values in found.items()
    ]


BASELINES = MeasuredTable(
    (
        Measurements(
            "rating-baselines.csv",
            ("case", "seed"),
            ("baseline", "metric", "value"),
            lambda _: product(CASES, range(SEEDS)),
            measured,
        ),
    ),
    judge,
)
