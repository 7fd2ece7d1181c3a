"""Sums over the chunks of a round."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from narrowcast.platform.types import Arrays


def add_up(partials: Sequence[Arrays]) -> Arrays:
    """Add the chunks' partial sums in their order, so that rounding does not depend on who was fast."""
    total = {name: values.copy() for name, values in partials[0].items()}
    with np.errstate(over="ignore"):  # a sum that leaves the finite numbers ends the run with advice
        for partial in partials[1:]:
            for name, values in partial.items():
                total[name] += values
    return total
