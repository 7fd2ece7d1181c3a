"""The studies of FedMatch: what their methods share, their runs in the repository and their tables."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from command_line import narrowcast
from narrowcast.studies.tables import MeasuredTable
from narrowcast_papers.fedmatch import thresholds
from narrowcast_papers.fedmatch.table import ALONE, CIFAR, FASHION, FEDMATCH, LONGER, PAIRS, PLACES, PULL, RATIO
from papers import PAPERS, targets

COMPARISONS = {of.name: of for of in (FASHION, CIFAR)}


@pytest.mark.parametrize("name", COMPARISONS)
def test_methods_share_views_and_ratio_and_labels_alone_have_no_loss_without_labels(name: str) -> None:
    methods, losses = COMPARISONS[name].methods, []
    for method, learner in methods.items():
        losses.append(learner.fields.get("consistency", learner.fields))
        assert (losses[-1]["views"], losses[-1]["ratio"]) == (losses[0]["views"], RATIO)
        assert (losses[-1].get("weight") == 0) == (method in (ALONE, LONGER))
    assert methods[FEDMATCH].rates[-1] * PULL == 1, "a step farther takes psi past sigma"


@pytest.mark.parametrize("name", COMPARISONS)
def test_the_published_table_has_every_run_and_its_pairs(name: str, tmp_path: Path) -> None:
    table = targets()[name].table()
    assert isinstance(table, MeasuredTable)
    (lines,) = (part.read([targets()[name].results]) for part in table.parts)
    assert next(table.parts[0].missing(lines), None) is None
    verdicts = {each.what: each for each in table.judge(lines)}
    of = COMPARISONS[name]
    for labels, ours in of.cases:
        for theirs in (reference for method, reference in PAIRS if method == ours and (labels, reference) in of.cases):
            of_both = (of.last(lines, labels, method, "accuracy") for method in (ours, theirs))
            said = verdicts[f"labels {labels}: {ours} less {theirs}"].difference
            assert float(said.split()[0]) == pytest.approx(np.subtract(*of_both).mean(), abs=0.006)
    words = ("reproduce", name, "--papers", PAPERS, "--time-limit", 0, "--output", tmp_path)
    assert narrowcast(*words).status == 0
    assert (tmp_path / f"{name}.png").stat().st_size > 10_000


def test_at_a_threshold_of_zero_the_model_is_that_of_whole_messages() -> None:
    (fashion,), (sparse,) = (
        [part.read([targets()[name].results]) for part in targets()[name].table().parts]
        for name in ("fedmatch-fashion", "fedmatch-thresholds")
    )
    assert next(thresholds.TABLE.parts[0].missing(sparse), None) is None
    for labels in PLACES:
        for column in ("accuracy", "loss"):
            whole = FASHION.last(fashion, labels, FEDMATCH, column)[: len(thresholds.SEEDS)]
            assert thresholds.last(sparse, labels, 0.0, column) == whole


@pytest.mark.slow
@pytest.mark.data("fashion-mnist")
def test_a_kept_line_is_what_its_run_gives() -> None:
    lines = FASHION.table.parts[0].read([targets()["fedmatch-fashion"].results])
    kept = next(line for line in lines if line["method"] == FEDMATCH)
    *_, end = FASHION.measure(int(kept["seed"]), kept["labels"], FEDMATCH, float(kept["rate"]))
    assert end["accuracy"] == pytest.approx(float(kept["accuracy"]), abs=1)
    assert f"{end['down']:.6g}" == kept["down"]
