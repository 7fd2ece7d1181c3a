"""The columns of a run's table of rounds as curves: a metric against a cost; importing this imports no Matplotlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from narrowcast.platform.errors import UserError
from narrowcast.platform.tracking.units import BYTE_UNITS, TIME_UNITS, Unit
from narrowcast.platform.types import BoolArray, FloatArray


@dataclass(frozen=True)
class Cost:
    """The horizontal axis of an accuracy plot: a column that grows from round to round."""

    column: str
    label: str
    units: tuple[Unit, ...]

    def axis_label(self, unit: Unit) -> str:
        """Return the label of an axis in this unit."""
        return f"{self.label} ({unit.symbol})" if unit.symbol else self.label


ROUND = Cost("round", "round", (Unit("", 1),))
UPLINK = Cost("total_uplink_bits", "cumulative uplink", BYTE_UNITS)
TOTAL = Cost("total_bits", "cumulative uplink and downlink", BYTE_UNITS)
TIME = Cost("simulated_seconds", "simulated time", TIME_UNITS)
ITERATIONS = Cost("iteration", "iteration", (Unit("", 1),))
SOLVER_TIME = Cost("solver_seconds", "time of the solver", (Unit("ms", 1e-3), *TIME_UNITS))


def chosen_costs(known: Mapping[str, Cost], names: Sequence[str] | None, of: str = "") -> list[Cost]:
    """Return the costs of these names, each once, or all of them; raise `UserError` for a name that is not known."""
    wrong = [name for name in names or () if name not in known]
    if wrong or (names is not None and not names):
        raise UserError(f"no axis {', '.join(map(repr, wrong)) or 'given'}; known{of}: {', '.join(known)}")
    return [known[name] for name in dict.fromkeys(names or known)]


def column(table: pa.Table, name: str) -> FloatArray:
    """Return a column as floats, with NaN for null."""
    values: FloatArray = table.column(name).cast(pa.float64()).to_numpy()
    return values


def curve(rounds: pa.Table, cost: Cost, name: str) -> tuple[FloatArray, FloatArray]:
    """Return cost and value of the rounds with a finite value; empty without such a column."""
    if name not in rounds.column_names or cost.column not in rounds.column_names:
        return np.empty(0), np.empty(0)
    values = column(rounds, name)
    measured: BoolArray = np.isfinite(values)
    return column(rounds, cost.column)[measured], values[measured]


def running_mean(values: FloatArray, window: int) -> FloatArray:
    """Return the mean over an odd window centred on each value, truncated at the ends."""
    ones = np.ones(window)
    return np.convolve(values, ones, "same") / np.convolve(np.ones_like(values), ones, "same")
