"""Display of a study: its estimated cost before it begins, and its trials while it runs."""

from __future__ import annotations

import math
import sys
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table

from narrowcast.platform.errors import RunFailed, UserError
from narrowcast.platform.tracking.metrics import metric_label
from narrowcast.platform.tracking.units import format_seconds
from narrowcast.runs.terminal_output import output_may_end
from narrowcast.tuning.client import draw_without_study
from narrowcast.tuning.result import format_params, format_value, labelled
from narrowcast.tuning.study_file import StudyFile
from narrowcast.tuning.trials import TrialRecord

_CONFIGURATIONS = 6  # several, since ranks, epochs and batches change the cost of a round


@dataclass(frozen=True)
class Estimate:
    """Estimated seconds of all trials without pruning, and of the hold-out evaluation.

    `steps` are the rounds or iterations of a trial that ends by their number. `step_seconds` and `evaluation_seconds`
    are means over the drawn configurations; `params` is the first of them.
    """

    params: dict[str, Any]
    trials: int
    steps: int
    step_seconds: float
    slowest_step_seconds: float
    evaluation_seconds: float
    seconds: float
    holdout_seconds: float


def estimate(file: StudyFile, shared: Any) -> Estimate:
    """Time a few steps and an evaluation of some configurations, and multiply; raise the last error if all fail."""
    settings = file.settings
    drawn = draw_without_study(settings, file.space, _CONFIGURATIONS)
    runs = [file.build(params) for params in drawn]
    timed: list[tuple[float, float]] = []
    for index, run in enumerate(runs):
        try:
            timed.append(file.subject.timed(run, shared))
        except (RunFailed, UserError):  # values that do not fit together or diverge at once, as in some trials
            if index == len(runs) - 1 and not timed:
                raise
    step_seconds, evaluation_seconds = (sum(column) / len(timed) for column in zip(*timed, strict=True))
    first, steps = runs[0], int(getattr(runs[0], file.subject.steps))
    run_seconds = steps * step_seconds + math.ceil(steps / first.evaluate_every) * evaluation_seconds
    trials, holdout_runs = settings.n_trials(file.space), settings.holdout.trials * settings.holdout.seeds
    return Estimate(
        params=drawn[0],
        trials=trials,
        steps=steps,
        step_seconds=step_seconds,
        slowest_step_seconds=max(seconds for seconds, _ in timed),
        evaluation_seconds=evaluation_seconds,
        seconds=run_seconds * trials * settings.seeds / settings.workers,
        holdout_seconds=run_seconds * holdout_runs / settings.workers,
    )


_ROWS = 12  # of ended trials in the live table


class StudyDisplay:
    """An `Observer` that prints: a live table of the trials on a terminal, a line for each trial elsewhere."""

    def __init__(self, file: StudyFile, n_trials: int, console: Console) -> None:
        self._name, self._objectives, self._shares = file.name, list(file.settings.objectives), file.shares
        self._n_trials, self._console, self._steps = n_trials, console, file.subject.steps
        self._running: dict[int, TrialRecord] = {}
        self._ended: list[TrialRecord] = []
        self._began = time.monotonic()
        self._live = Live(console=console, refresh_per_second=4) if sys.stdout.isatty() else None

    def __enter__(self) -> StudyDisplay:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            with output_may_end():
                self._live.stop()

    def __call__(self, event: TrialRecord | str) -> None:
        """Print a line, or show the state of a trial."""
        if isinstance(event, str):
            self._print(event)
        elif event.state == "running":
            self._running[event.number] = event
        else:
            self._running.pop(event.number, None)
            self._ended.append(event)
            if self._live is None:
                self._print(self._line(event))
        if self._live is not None:
            with output_may_end():
                self._live.update(self._table())

    def _print(self, line: str) -> None:
        with output_may_end():
            self._console.print(line, highlight=False, soft_wrap=True)

    def _line(self, trial: TrialRecord) -> str:
        done = sum(record.state != "lost" for record in self._ended)
        head = f"[{done}/{self._n_trials}] trial {trial.number}  {trial.state} after {trial.rounds} {self._steps}"
        reached = [labelled(name, trial.metrics[name], self._shares) for name in self._objectives if trial.metrics]
        return "  ".join(filter(None, (head, *reached, trial.reason, format_params(trial.params))))

    def _table(self) -> Table:
        states = Counter(trial.state for trial in self._ended)
        counted = ", ".join(f"{count} {state}" for state, count in states.items()) or "started"
        title = f"{self._name}: {counted}, {format_seconds(time.monotonic() - self._began)}"
        table = Table(title=title, title_justify="left", box=None, pad_edge=False)
        for head in ("trial", "state", self._steps, *map(metric_label, self._objectives), "parameters"):
            table.add_column(head, no_wrap=head != "parameters")
        for trial in (*self._ended[-_ROWS:], *self._running.values()):
            reached = [self._value(trial, name) for name in self._objectives]
            cells = (str(trial.number), trial.state, str(trial.rounds), *reached, format_params(trial.params))
            table.add_row(*cells, style="bold" if trial.state == "running" else None)
        return table

    def _value(self, trial: TrialRecord, name: str) -> str:
        return format_value(name, trial.metrics[name], self._shares) if trial.metrics else "-"
