"""Baselines of the data sets of ratings that tables of results are about: what takes no training, by seed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from narrowcast.studies.execution import baselines_of
from narrowcast.studies.results import append_lines, read_lines
from narrowcast.studies.spec import RunSpec, slug
from narrowcast.studies.tables import MeasuredTable
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
COLUMNS = ("case", "seed", "baseline", "metric", "value")
Row = Mapping[str, Any]


def measured(case: str, seed: int) -> Mapping[str, Mapping[str, float]]:
    """Return the metrics of each baseline of a case by name."""
    return baselines_of(RunSpec(slug(case), *CASES[case], data_seed=True), seed)


def measure_missing(output: Path, done: list[Row]) -> Iterator[str]:
    """Measure what the rows lack, append it to the file, and yield a line of each case and seed."""
    have = {(row["case"], int(row["seed"])) for row in done}
    for case in CASES:
        for seed in range(SEEDS):
            if (case, seed) in have:
                continue
            found = measured(case, seed)
            rows = [
                dict(zip(COLUMNS, (case, seed, name, metric, value), strict=True))
                for name, metrics in found.items()
                for metric, value in metrics.items()
                if metric.startswith("test.")
            ]
            append_lines(output, COLUMNS, rows)
            done += rows
            yield f"{case}, seed {seed}: {', '.join(found)}"


def judge(rows: Sequence[Row]) -> list[PaperVerdict]:
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


BASELINES = MeasuredTable("rating-baselines.csv", lambda paths: read_lines(*paths), measure_missing, judge)
