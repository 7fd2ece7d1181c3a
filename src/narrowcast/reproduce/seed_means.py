"""Means over seeds in a plot: dots with bars of one standard deviation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes


def draw_seed_means(axes: Axes, places: Sequence[float], by_seed: Sequence[Sequence[float]], **style: Any) -> None:
    """Draw the mean and the standard deviation (n - 1) of the values by seed at each place; `style` as of a line."""
    means, spreads = [np.mean(each) for each in by_seed], [np.std(each, ddof=1) for each in by_seed]
    axes.errorbar(places, means, spreads, **style)
