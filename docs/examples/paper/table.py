"""How many rounds lose all of their clients: drawn, and by the formula."""

from pathlib import Path

import numpy as np

from narrowcast.studies import PaperVerdict, RecordedTable


def empty_rounds(_results: object, _path: Path) -> tuple[list[PaperVerdict], list[Path]]:
    """Return a verdict for each number of clients; each drops out with probability 0.5."""
    random, verdicts = np.random.default_rng(0), []
    for clients in (1, 2, 4):
        expected, shares = 0.5**clients, (random.random((5, 10_000, clients)) < 0.5).all(axis=2).mean(axis=1)
        agrees = "agrees" if abs(shares.mean() - expected) < 0.01 else "differs"
        verdicts.append(PaperVerdict(f"{clients} clients", f"{expected:.4f}", f"{shares.mean():.4f}", agrees))
    return verdicts, []


DROPPED = RecordedTable(empty_rounds)
