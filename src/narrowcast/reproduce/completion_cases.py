"""The 63 synthetic cases of the completion benchmark, and what was published for each.

Source: Engels and Morse, Benchmarking Low-Rank Matrix Completion Algorithms: table 1, and the 63 plots of its site.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from narrowcast.algorithms.completion.synthetic_completion import SyntheticCompletion

SIZES, RANKS, FRACTIONS, CONDITIONS = (1000, 10_000), (2, 20, 200), (0.05, 0.1, 0.2, 0.4), (2.0, 200.0, 20_000.0)
Class = Literal["S", "M", "F"]

# One letter for each condition number, by size and rank, then by fraction: S below 1e-9, M below 1, F above.
_PUBLISHED = {
    (1000, 2): "SSS SSS SSS SSS",
    (1000, 20): "SSM SSS SSS SSS",
    (1000, 200): "--- --- --- MFF",
    (10_000, 2): "SSS SSS SSM SMF",
    (10_000, 20): "SFF SFF SFF SFF",
    (10_000, 200): "FFF MFF MFF MFF",
}


@dataclass(frozen=True)
class CompletionCase:
    """One synthetic case; `published` is the class of the least distance that any published solver reached in 60 s.

    The distance is the report's, the norm of the errors of column sums, at the best iteration.
    """

    n: int
    rank: int
    fraction: float
    condition: float
    published: Class

    @property
    def name(self) -> str:
        """Return the case as a word, such as n1000-r2-p5-k200."""
        return f"n{self.n}-r{self.rank}-p{round(100 * self.fraction)}-k{self.condition:.0f}"

    @property
    def oversampling(self) -> float:
        """Return the number of observed entries for each degree of freedom of a matrix of this rank."""
        return round(self.fraction * self.n**2) / (self.rank * (2 * self.n - self.rank))

    def source(self, seed: int) -> SyntheticCompletion:
        """Return the problem of this case."""
        return SyntheticCompletion(
            rows=self.n, rank=self.rank, fraction=self.fraction, condition=self.condition, seed=seed
        )


def cases() -> Iterator[CompletionCase]:
    """Yield the 63 cases: all combinations with more entries than degrees of freedom, small ones first."""
    for (n, rank), published in sorted(_PUBLISHED.items()):
        for fraction, classes in zip(FRACTIONS, published.split(), strict=True):
            for condition, each in zip(CONDITIONS, classes, strict=True):
                if fraction * n**2 > (2 * n - rank) * rank:
                    yield CompletionCase(n, rank, fraction, condition, each)  # type: ignore[arg-type]
