"""How far a study is: a live table of its trials on a terminal, a line for each trial elsewhere."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table

from narrowcast.platform.tracking.units import format_bits, format_percent, format_seconds
from narrowcast.tuning.study_settings import COSTS, amounts
from narrowcast.tuning.summary import TrialRow

_SHOWN = 12  # trials in the live table


class StudyProgress:
    """Looks on while a study goes, and shows it."""

    def __init__(self, name: str, objectives: Mapping[str, str], n_trials: int, console: Console) -> None:
        self._name, self._objectives, self._n_trials, self._console = name, objectives, n_trials, console
        self._running: dict[int, tuple[Mapping[str, Any], int]] = {}
        self._latest: dict[int, Mapping[str, Any]] = {}
        self._ended: list[TrialRow] = []
        self._began = time.monotonic()
        self._live = Live(console=console, refresh_per_second=4) if sys.stdout.isatty() else None

    def __enter__(self) -> StudyProgress:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._live.stop()

    def begun(self, number: int, values: Mapping[str, Any], rounds: int) -> None:
        """A trial starts."""
        self._running[number] = (values, rounds)
        self._show()

    def evaluated(self, number: int, row: Mapping[str, Any]) -> None:
        """A trial was evaluated."""
        self._latest[number] = row
        self._show()

    def ended(self, row: TrialRow) -> None:
        """A trial is over."""
        self._running.pop(row.number, None)
        self._latest.pop(row.number, None)
        self._ended.append(row)
        if self._live is None:
            done = sum(each.state != "lost" for each in self._ended)
            line = f"[{done}/{self._n_trials}] trial {row.number}  {row.state} after {row.rounds} rounds  "
            self._console.print(line + self._in_short(row), highlight=False, markup=False, soft_wrap=True)
        self._show()

    def say(self, line: str) -> None:
        """Something else happened."""
        self._console.print(line, highlight=False, markup=False, soft_wrap=True)

    def _in_short(self, row: TrialRow) -> str:
        reached = "  ".join(f"{name} {shown(name, row.amounts[name])}" for name in self._objectives if row.amounts)
        return "  ".join(filter(None, (reached, row.reason, settings_line(row.drawn))))

    def _show(self) -> None:
        if self._live is None:
            return
        states = Counter(row.state for row in self._ended)
        spent = format_seconds(time.monotonic() - self._began)
        title = f"{self._name}: {', '.join(f'{count} {state}' for state, count in states.items()) or 'begun'}, {spent}"
        table = Table(title=title, title_justify="left", box=None, pad_edge=False)
        for head in ("trial", "state", "rounds", *self._objectives, "values"):
            table.add_column(head, no_wrap=head != "values")
        for row in self._ended[-_SHOWN:]:
            reached = [shown(name, row.amounts[name]) if row.amounts else "-" for name in self._objectives]
            table.add_row(str(row.number), row.state, str(row.rounds), *reached, settings_line(row.drawn))
        for number, (values, rounds) in self._running.items():
            latest = self._latest.get(number)
            reached = [shown(name, amounts(latest)[name]) if latest else "-" for name in self._objectives]
            done = f"{latest['round'] if latest else 0}/{rounds}"
            table.add_row(str(number), "running", done, *reached, settings_line(values), style="bold")
        self._live.update(table)


def shown(name: str, value: float) -> str:
    """A value as people read it."""
    if name in COSTS:
        return format_bits(value) if name.endswith("bits") else format_seconds(value)
    return format_percent(value) if 0 <= value <= 1 else f"{value:.4g}"


def settings_line(values: Mapping[str, Any]) -> str:
    """Values in one line, each under the last part of its path."""
    return " ".join(
        f"{path.rpartition('.')[2]}={value:.4g}" if isinstance(value, float) else f"{path.rpartition('.')[2]}={value}"
        for path, value in values.items()
    )
