"""FedMatch whose messages are differences above a threshold, in the setting of `FASHION`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from narrowcast.runs.significance import compare_paired
from narrowcast.studies.results import Line, Lines, as_text
from narrowcast.studies.tables import MeasuredTable, Measurements
from narrowcast.studies.verdicts import PaperVerdict, bounds_of, corrected, mean_and_spread
from narrowcast_papers.fedmatch.table import CLIENT, FASHION, FEDMATCH, PLACES, SERVER

RATES = {CLIENT: 0.00625, SERVER: 0.003125}
"""Those chosen for FedMatch with whole messages."""
THRESHOLDS = {CLIENT: (0.0, 5e-5, 1e-3, 5e-3, 2e-2), SERVER: (0.0, 1e-5, 1e-3, 5e-3, 2e-2)}
"""The same up and down. With 0 the model is that of whole messages bit for bit; the second is the released code's."""
SEEDS = (0, 1, 2)
COLUMNS = ("up", "down", "loss", "accuracy")


def measure(seed: int, labels: str, threshold: float) -> Iterator[Line]:
    """Yield the end of a run."""
    sparse: dict[str, Any] = {
        "codec": {"kind": "threshold", "magnitude": threshold},
        "download_threshold": threshold,
    }
    *_, end = FASHION.measure(seed, labels, FEDMATCH, RATES[labels], **sparse)
    yield {column: end[column] for column in COLUMNS}


def planned(lines: Lines) -> Iterator[tuple[Any, ...]]:
    """Yield the runs, seed by seed."""
    del lines
    for seed in SEEDS:
        yield from ((seed, labels, threshold) for labels in PLACES for threshold in THRESHOLDS[labels])


def last(lines: Lines, labels: str, threshold: float, column: str) -> tuple[float, ...]:
    """Return a column of the runs at a threshold, by seed; of those that there are."""
    at = (labels, as_text(threshold))
    found = {line["seed"]: line[column] for line in lines if (line["labels"], line["threshold"]) == at}
    return tuple(float(found[str(seed)]) for seed in SEEDS if str(seed) in found)


def judge(lines: Lines) -> list[PaperVerdict]:
    """Compare each threshold with none, seed by seed; p values are corrected over those with labels at one place."""
    verdicts = []
    for labels in PLACES:
        found = {each: last(lines, labels, each, "accuracy") for each in THRESHOLDS[labels]}
        if any(len(values) < len(SEEDS) for values in found.values()):
            continue
        none, *others = found
        tests = corrected([compare_paired(found[each], found[none]) for each in others])
        differences = [(f"{test.interval.mean:+.2f} {bounds_of(test)}", f"; p = {p:.2g}") for test, _, p in tests]
        for (threshold, values), (difference, p_zero) in zip(found.items(), [("", ""), *differences], strict=True):
            up, down = (float(np.mean(last(lines, labels, threshold, column))) for column in ("up", "down"))
            words = f"{up:.3g} MB up, {down:.3g} MB down{p_zero}"
            what = f"labels {labels}: above {threshold:g}"
            verdicts.append(PaperVerdict(what, "", mean_and_spread(values), words, difference, values))
    return verdicts


TABLE = MeasuredTable(
    (Measurements("fedmatch-thresholds.csv", ("seed", "labels", "threshold"), COLUMNS, planned, measure),), judge
)
