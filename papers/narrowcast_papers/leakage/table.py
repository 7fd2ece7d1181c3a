"""The table of what a server learns: reconstructed images by encoding and batch, and membership by encoding."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import product

import numpy as np

from narrowcast.studies.results import Line, Lines
from narrowcast.studies.tables import MeasuredTable, Measurements
from narrowcast.studies.verdicts import PaperVerdict, mean_and_spread
from narrowcast_papers.leakage.observed import (
    ENCODINGS,
    MEMBERSHIP_VALUES,
    SUM,
    by_layer,
    by_search,
    infer_members,
)

SEEDS, BATCHES = 5, (1, 2, 4, 8)
LAYER, SEARCH = "first layer", "search"
ATTACKS = ((LAYER, "MLP"), (LAYER, "softmax"), (SEARCH, "MLP"))
"""The attacks and the networks whose updates they are made on."""
MEMBERSHIP = tuple(name for name, encoding in ENCODINGS.items() if not encoding.masked or name == SUM)
"""The encodings of which membership is inferred; a masked upload alone is noise."""


def _inversions(_: Lines) -> Iterator[tuple[str, str, int, int]]:
    for seed, (attack, network), images in product(range(SEEDS), ATTACKS, BATCHES):
        yield attack, network, images, seed


def invert(attack: str, network: str, images: int, seed: int) -> Iterator[Line]:
    """Yield what an attack makes of each encoding."""
    return (by_layer if attack == LAYER else by_search)(network, images, seed)


def _memberships(_: Lines) -> Iterable[tuple[str, int]]:
    return ((encoding, seed) for seed, encoding in product(range(SEEDS), MEMBERSHIP))


def values_of(lines: Lines, column: str, **key: str) -> list[float]:
    """Return the values of a column in the lines of a key, by seed."""
    return [float(_number(line, column)) for line in lines if all(line[name] == text for name, text in key.items())]


def _number(line: Line, column: str) -> str:
    value = line[column]
    assert value is not None, "finished lines have every value"
    return str(value)


def judge_leakage(inversions: Lines, memberships: Lines) -> list[PaperVerdict]:
    """Return a row for each attack, network and encoding of inversion, and for each encoding of membership."""
    verdicts = []
    for (attack, network), encoding in product(ATTACKS, ENCODINGS):
        key = {"attack": attack, "network": network, "encoding": encoding}
        cells, last = [], list[float]()
        for images in map(str, BATCHES):
            last = values_of(inversions, "cosine", images=images, **key)
            if not last:
                continue
            shares = values_of(inversions, "identified", images=images, **key)
            cells.append(f"{images}: {np.mean(last):.2f} ({100 * np.mean(shares):.0f} %)")
        if cells:
            guess, others = (np.mean(values_of(inversions, name, **key)) for name in ("mean_image", "other_images"))
            said = f"mean image {guess:.2f}; other images {others:.2f}"
            verdicts.append(PaperVerdict(f"{attack}, {network}, {encoding}", "", ", ".join(cells), said))
    for encoding in MEMBERSHIP:
        key = {"encoding": encoding}
        by_seed = values_of(memberships, "change_advantage", **key)
        if len(by_seed) < 2:
            continue
        of_model = mean_and_spread(values_of(memberships, "model_advantage", **key), 3)
        control = np.mean(values_of(memberships, "model_control_advantage", **key))
        owner = np.mean(values_of(memberships, "owner_auc", **key))
        verdicts.append(
            PaperVerdict(
                f"membership, {encoding}: advantage by the change",
                "",
                mean_and_spread(by_seed, 3),
                f"by the model {of_model}, control {control:.3f}; whose image: AUC {owner:.2f}",
                by_seed=tuple(by_seed),
            )
        )
    return verdicts


LEAKAGE = MeasuredTable(
    (
        Measurements(
            "inversion.csv",
            ("attack", "network", "images", "seed"),
            ("encoding", "uplink_bits", "mean_image", "other_images", "identified", "cosine"),
            _inversions,
            invert,
        ),
        Measurements("membership.csv", ("encoding", "seed"), MEMBERSHIP_VALUES, _memberships, infer_members),
    ),
    judge_leakage,
)
