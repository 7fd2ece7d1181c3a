"""What a server learns: the kept lines are complete, the page's table is theirs, and a cell is measured again."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from narrowcast.algorithms.attacks.inversion import rows_over_bias
from narrowcast.studies.tables import MeasuredTable
from narrowcast_papers.leakage.observed import ENCODINGS, FIRST_LAYER, FLOAT32, SUM, compared, observations
from narrowcast_papers.leakage.table import BATCHES, LAYER, MEMBERSHIP, SEARCH, SEEDS, judge_leakage, values_of
from papers import targets

PAGE = Path(__file__).parents[2] / "docs" / "what-a-server-learns.md"
TARGET = targets()["what-a-server-learns"]


def table() -> MeasuredTable:
    measured = TARGET.table()
    assert isinstance(measured, MeasuredTable)
    return measured


INVERSIONS, MEMBERSHIPS = (part.read([TARGET.results]) for part in table().parts)


def means(attack: str, network: str, encoding: str, column: str) -> list[float]:
    """Return the means over the seeds by the number of images."""
    key = {"attack": attack, "network": network, "encoding": encoding}
    return [float(np.mean(values_of(INVERSIONS, column, images=str(images), **key))) for images in BATCHES]


def page_row(encoding: str) -> str:
    """Return the row of the page's table for an encoding, from the kept lines."""
    cells = [encoding, f"{means(LAYER, 'MLP', encoding, 'uplink_bits')[0] / 8000:.1f}"]
    for attack, network in ((LAYER, "MLP"), (SEARCH, "MLP"), (LAYER, "softmax")):
        cosines = means(attack, network, encoding, "cosine")
        shares = means(attack, network, encoding, "identified")
        cells.append(" / ".join(f"{cosine:.2f}" for cosine in cosines))
        if network == "MLP":
            cells.append(" / ".join(f"{100 * share:.0f}" for share in shares))
    if encoding in MEMBERSHIP:
        cells += [
            f"{np.mean(values_of(MEMBERSHIPS, column, encoding=encoding)):.2f}"
            for column in ("change_advantage", "owner_auc")
        ]
    else:
        cells += ["–", "–"]
    return f"| {' | '.join(cells)} |"


def test_every_seed_is_kept() -> None:
    for part, lines in zip(table().parts, (INVERSIONS, MEMBERSHIPS), strict=True):
        assert list(part.missing(lines)) == []
    assert len(INVERSIONS) == SEEDS * 3 * len(BATCHES) * len(ENCODINGS)
    assert len(MEMBERSHIPS) == SEEDS * len(MEMBERSHIP)


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_the_page_has_the_kept_figures(encoding: str) -> None:
    assert page_row(encoding) in PAGE.read_text()


def test_the_verdicts_have_every_attack() -> None:
    assert len(judge_leakage(INVERSIONS, MEMBERSHIPS)) == 3 * len(ENCODINGS) + len(MEMBERSHIP)


def test_a_cell_is_measured_again() -> None:
    seen = observations("MLP", FLOAT32, 2, 0)
    line = compared([rows_over_bias(observed.change, FIRST_LAYER) for observed in seen.changes], seen)
    key = {"attack": LAYER, "network": "MLP", "encoding": FLOAT32, "images": "2", "seed": "0"}
    for column, value in line.items():
        (kept,) = values_of(INVERSIONS, column, **key)
        assert value == pytest.approx(kept, rel=1e-4), column


def test_what_the_page_concludes() -> None:
    """Rank one and 8 bits cost single images nothing, a masked upload says nothing, and sums do not say whose."""
    for attack in (LAYER, SEARCH):
        whole = means(attack, "MLP", FLOAT32, "cosine")[0]
        for encoding in ("8 bits", "SVD, rank 1"):
            assert means(attack, "MLP", encoding, "cosine")[0] == pytest.approx(whole, abs=1e-3)
        masked = means(attack, "MLP", "masked, one upload", "cosine")
        assert max(masked) < min(means(attack, "MLP", "masked, one upload", "mean_image"))
    assert means(LAYER, "softmax", "CoLR, rank 1", "cosine")[0] > 0.9999
    assert set(values_of(MEMBERSHIPS, "owner_auc", encoding=SUM)) == {0.5}
