"""Means over seeds in a plot: dots with bars of one standard deviation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from narrowcast.platform.tracking.figures import BLUE, ORANGE


def draw_seed_means(axes: Axes, places: Sequence[float], by_seed: Sequence[Sequence[float]], **style: Any) -> None:
    """Draw the mean and the standard deviation (n - 1) of the values by seed at each place; `style` as of a line."""
    means, spreads = [np.mean(each) for each in by_seed], [np.std(each, ddof=1) for each in by_seed]
    axes.errorbar(places, means, spreads, **style)


def draw_groups(axes: Axes, names: Sequence[str], groups: Mapping[str, Mapping[str, Sequence[float]]]) -> None:
    """Draw a line of the plot for each name, the first on top, with the values by seed of up to two groups in it."""
    axes.set_yticks(range(len(names)), names[::-1])
    for shift, colour, (group, by_name) in zip((0.12, -0.12), (BLUE, ORANGE), groups.items(), strict=False):
        for place, (name, values) in enumerate(by_name.items()):
            axes.errorbar(
                np.mean(values),
                len(names) - 1 - names.index(name) + shift,
                xerr=np.std(values, ddof=1),
                fmt="o",
                color=colour,
                capsize=3,
                label=group if place == 0 else None,
            )
