"""The study of FedMatch: what its methods share, its runs in the repository and its table."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from command_line import narrowcast
from narrowcast.studies.tables import MeasuredTable
from narrowcast_papers.fedmatch.table import ALONE, CASES, FEDMATCH, METHODS, PAIRS, PULL, RATIO, VIEWS, last, measure
from papers import PAPERS, targets

NAME = "fedmatch-fashion"


def test_methods_share_views_and_ratio_and_labels_alone_have_no_loss_without_labels() -> None:
    for name, method in METHODS.items():
        loss = method.fields.get("consistency", method.fields)
        assert (loss["views"], loss["ratio"]) == (VIEWS, RATIO)
        assert (loss.get("weight") == 0) == (name == ALONE)
    assert METHODS[FEDMATCH].rates[-1] * PULL == 1, "a step farther takes psi past sigma"


def test_the_published_table_has_every_run_and_its_pairs(tmp_path: Path) -> None:
    table = targets()[NAME].table()
    assert isinstance(table, MeasuredTable)
    (lines,) = (part.read([targets()[NAME].results]) for part in table.parts)
    assert next(table.parts[0].missing(lines), None) is None
    verdicts = {each.what: each for each in table.judge(lines)}
    for labels, ours in CASES:
        for theirs in (reference for method, reference in PAIRS if method == ours and (labels, reference) in CASES):
            apart = np.array(last(lines, labels, ours, "accuracy")) - last(lines, labels, theirs, "accuracy")
            said = verdicts[f"labels {labels}: {ours} less {theirs}"].difference
            assert float(said.split()[0]) == pytest.approx(apart.mean(), abs=0.006)
    words = ("reproduce", NAME, "--papers", PAPERS, "--time-limit", 0, "--output", tmp_path)
    assert narrowcast(*words).status == 0
    assert (tmp_path / f"{NAME}.png").stat().st_size > 10_000


@pytest.mark.slow
@pytest.mark.data("fashion-mnist")
def test_a_kept_line_is_what_its_run_gives() -> None:
    table = targets()[NAME].table()
    assert isinstance(table, MeasuredTable)
    kept = next(line for line in table.parts[0].read([targets()[NAME].results]) if line["method"] == FEDMATCH)
    *_, end = measure(int(kept["seed"]), kept["labels"], FEDMATCH, float(kept["rate"]))
    assert end["accuracy"] == pytest.approx(float(kept["accuracy"]), abs=1)
    assert f"{end['down']:.6g}" == kept["down"]
