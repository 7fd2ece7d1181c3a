"""The minimum count of an item: rows of the sum that too few clients touched are left out before it is released."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from narrowcast.algorithms.federated.sum_layout import Group
from narrowcast.algorithms.secure.fixed_point import Integers
from narrowcast.platform.types import PayloadError


@dataclass
class SmallCounts:
    """Blanks the rows of a round's sums that fewer than `least` clients touched, of `rows` items.

    A group with counts of its own is judged by them; other groups by the counts of the group that was opened before,
    which have to come first. With `per_item_mean` and unequal ranks these count the clients that touched the item,
    whichever of its components they sent.
    """

    rows: int
    least: int
    _counts: Integers | None = field(default=None, repr=False)

    def blanked(self, group: Group, integers: Integers) -> Integers:
        """Return the integers of a group's sum [n_values + n_counts] with zeros for values and counts of such rows.

        Raise `PayloadError` for a group whose counts are not by item, or not known yet.
        """
        if self.least <= 1:
            return integers
        values, counts = np.split(integers, [group.n_values])
        if not self.rows or group.n_values % self.rows or group.n_counts % self.rows:
            raise PayloadError("the sum has no counts by item, and is not opened with secure.smallest_count above 1")
        if group.n_counts:
            self._counts = counts.reshape(self.rows, -1)
        if self._counts is None:
            raise PayloadError("the counts of the items have to be opened before their values")
        few = self._counts < self.least
        kept = np.where(few, 0, values.reshape(self.rows, -1)).ravel() if group.n_values else values
        return np.concatenate([kept, np.where(few, 0, self._counts).ravel() if group.n_counts else counts])
