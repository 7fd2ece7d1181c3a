"""Progress of a study: a live table of its trials on a terminal, a line for each trial elsewhere."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table

from narrowcast.platform.tracking.units import format_seconds
from narrowcast.tuning.study_result import format_metric, format_params
from narrowcast.tuning.study_settings import trial_metrics
from narrowcast.tuning.trial_record import TrialRecord

_ROWS = 12  # of ended trials in the live table


class StudyDisplay:
    """A `StudyObserver` that prints."""

    def __init__(self, name: str, objectives: Mapping[str, str], n_trials: int, console: Console) -> None:
        self._name, self._objectives, self._n_trials, self._console = name, objectives, n_trials, console
        self._running: dict[int, tuple[Mapping[str, Any], int]] = {}
        self._latest: dict[int, Mapping[str, Any]] = {}
        self._ended: list[TrialRecord] = []
        self._began = time.monotonic()
        self._live = Live(console=console, refresh_per_second=4) if sys.stdout.isatty() else None

    def __enter__(self) -> StudyDisplay:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._live.stop()

    def trial_started(self, number: int, params: Mapping[str, Any], rounds: int) -> None:
        """Show a running trial."""
        self._running[number] = (params, rounds)
        self._show()

    def trial_evaluated(self, number: int, row: Mapping[str, Any]) -> None:
        """Show the latest evaluation of a trial."""
        self._latest[number] = row
        self._show()

    def trial_ended(self, trial: TrialRecord) -> None:
        """Show the result of a trial."""
        self._running.pop(trial.number, None)
        self._latest.pop(trial.number, None)
        self._ended.append(trial)
        if self._live is None:
            done = sum(each.state != "lost" for each in self._ended)
            line = f"[{done}/{self._n_trials}] trial {trial.number}  {trial.state} after {trial.rounds} rounds  "
            self._console.print(line + self._in_short(trial), highlight=False, markup=False, soft_wrap=True)
        self._show()

    def message(self, line: str) -> None:
        """Print a line."""
        self._console.print(line, highlight=False, markup=False, soft_wrap=True)

    def _in_short(self, trial: TrialRecord) -> str:
        reached = [f"{name} {format_metric(name, trial.metrics[name])}" for name in self._objectives if trial.metrics]
        return "  ".join(filter(None, (*reached, trial.reason, format_params(trial.params))))

    def _show(self) -> None:
        if self._live is None:
            return
        states = Counter(row.state for row in self._ended)
        spent = format_seconds(time.monotonic() - self._began)
        counted = ", ".join(f"{count} {state}" for state, count in states.items()) or "started"
        title = f"{self._name}: {counted}, {spent}"
        table = Table(title=title, title_justify="left", box=None, pad_edge=False)
        for head in ("trial", "state", "rounds", *self._objectives, "parameters"):
            table.add_column(head, no_wrap=head != "parameters")
        for trial in self._ended[-_ROWS:]:
            reached = [format_metric(name, trial.metrics[name]) if trial.metrics else "-" for name in self._objectives]
            table.add_row(str(trial.number), trial.state, str(trial.rounds), *reached, format_params(trial.params))
        for number, (params, rounds) in self._running.items():
            latest = self._latest.get(number)
            reached = [format_metric(name, trial_metrics(latest)[name]) if latest else "-" for name in self._objectives]
            done = f"{latest['round'] if latest else 0}/{rounds}"
            table.add_row(str(number), "running", done, *reached, format_params(params), style="bold")
        self._live.update(table)
