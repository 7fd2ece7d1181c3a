"""Progress of the runs of one command: a bar for each run on a terminal, lines elsewhere."""

from __future__ import annotations

import math
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tqdm import tqdm

from narrowcast.platform.errors import printable
from narrowcast.platform.storage.journal import evaluation, step_name, step_of
from narrowcast.platform.tracking.metrics import (
    FractionMetrics,
    format_metric,
    fraction_metrics,
    headline_metric,
    metric_label,
)
from narrowcast.platform.tracking.units import counted, format_bits, format_seconds, format_short_seconds
from narrowcast.platform.types import ITERATION, RunInput
from narrowcast.runs.prepared import PreparedExperiment, PreparedSolve
from narrowcast.runs.terminal_output import output_may_end

_TASKS = {
    "train_ratings": "rating prediction",
    "classes": "classification",
    "numbers": "regression",
    "tokens": "prediction of the next token",
    "items": "recommendation",
}
"""The task of a model, by one of the sizes of its data set."""
_PLAIN_LINES, _FEWEST_LINES = 20, 3  # of all runs together that do not write to a terminal, and of one run at least


def data_line(data: RunInput) -> str:
    """Return the name, task and sizes of a data set or problem in one line."""
    sizes = ", ".join(f"{value:,} {name.replace('_', ' ')}" for name, value in data.sizes.items())
    task = next((task for name, task in _TASKS.items() if name in data.sizes), "")
    return f"{data.name}: {f'{task}, ' if task else ''}{sizes}"


@dataclass
class _RunProgress:
    rounds: int
    bar: tqdm[Any] | None
    shares: FractionMetrics
    personal: bool = False  # clients have models of their own
    metric: tuple[str, float, int] | None = None  # the last evaluation: name, value, step
    lines: int = 0  # printed where there is no terminal, with those of steps before a resume

    def facts(self, row: Mapping[str, Any]) -> str:
        """Return the state of a run after a step, with the age of its metric if it is not of this step."""
        measured = {name: value for name, value in row.items() if value is not None}
        unit, step = step_name(row), step_of(row)
        name = headline_metric(measured, personal=self.personal)
        name = name or (next(iter(evaluation(row)), None) if unit == ITERATION else None)
        if name is not None:
            self.metric = (name, measured[name], step)
        facts = _facts_of_iteration(row) if unit == ITERATION else _facts_of_round(row)
        if self.metric is not None:
            name, value, measured_at = self.metric
            age = "" if measured_at == step else f" ({unit} {measured_at})"
            facts.insert(0, f"{metric_label(name)} {format_metric(name, value, self.shares)}{age}")
        return printable("  ".join(facts))


def _facts_of_round(row: Mapping[str, Any]) -> list[str]:
    return [
        f"loss {row['loss']:.3f}",
        f"up {format_bits(row['total_uplink_bits'])}",
        f"down {format_bits(row['total_downlink_bits'])}",
        f"simulated {format_seconds(row['simulated_seconds'])}",
    ]


def _facts_of_iteration(row: Mapping[str, Any]) -> list[str]:
    return [f"residual {row['residual']:.3g}", f"solver {format_short_seconds(row['solver_seconds'])}"]


class ProgressDisplay:
    """A bar for each run on a terminal, about 20 lines in all otherwise."""

    def __init__(
        self,
        runs: Mapping[str, tuple[int, int]],
        shares: FractionMetrics = None,
        unit: str = "round",
        data: str = "",
        personal: Collection[str] = (),
    ) -> None:
        """Show runs, given the steps done and the steps in all of each by its name; `shares` as models declare.

        `data` is a line about the data, shown first; `personal` are the runs whose clients have models of their own.
        """
        if data:
            self._print(data)
        self._unit = unit
        width = max(map(len, runs))
        self._prefix = {name: f"{name:<{width}}  " if len(runs) > 1 else "" for name in runs}
        self._lines = max(_FEWEST_LINES, _PLAIN_LINES // len(runs))
        on_terminal = sys.stderr.isatty()
        self._runs = {
            name: _RunProgress(
                rounds,
                tqdm(total=rounds, initial=done, desc=f"{name:<{width}}", unit=unit, position=index, leave=True)
                if on_terminal
                else None,
                shares,
                name in personal,
                lines=done // self._interval(rounds),
            )
            for index, (name, (done, rounds)) in enumerate(runs.items())
        }
        for name, (done, rounds) in runs.items():
            if not on_terminal:
                self._print(f"{name}: {counted(rounds, unit)}" + (f", resuming after {unit} {done}" if done else ""))

    @classmethod
    def of(cls, runs: Sequence[PreparedExperiment] | Sequence[PreparedSolve]) -> ProgressDisplay:
        """Return the display for runs that are about to start."""
        solves = {run.folder.name: run for run in runs if isinstance(run, PreparedSolve)}
        if solves:
            shares = fraction_metrics(next(iter(solves.values())).solve.problem)
            steps = {name: (run.state.iteration, run.solve.iterations) for name, run in solves.items()}
            return cls(steps, shares, ITERATION, data_line(runs[0].input))
        experiments = [run for run in runs if isinstance(run, PreparedExperiment)]
        rounds = {run.folder.name: (run.state.round_index, run.experiment.rounds) for run in experiments}
        personal = [run.folder.name for run in experiments if run.experiment.algorithm.personalises]
        shares, data = fraction_metrics(experiments[0].experiment.model), data_line(runs[0].input)
        return cls(rounds, shares, data=data, personal=personal)

    def __enter__(self) -> ProgressDisplay:
        return self

    def __exit__(self, *_: object) -> None:
        for run in self._runs.values():
            if run.bar is not None:
                with output_may_end():
                    run.bar.close()

    def show(self, row: Mapping[str, Any]) -> None:
        """Show a round or iteration, given its row of the journal and the name of its `run`."""
        name, index = row["run"], step_of(row)
        run = self._runs[name]
        facts = run.facts({column: value for column, value in row.items() if column != "run"})
        if run.bar is not None:
            with output_may_end():
                run.bar.set_postfix_str(facts, refresh=False)
                run.bar.update(index - run.bar.n)
        elif (lines := index // self._interval(run.rounds)) > run.lines or index == run.rounds:
            run.lines = lines
            self._print(f"{self._prefix[name]}{self._unit} {index}/{run.rounds}  {facts}")

    def _interval(self, rounds: int) -> int:
        """Return the number of steps from a line to the next where there is no terminal."""
        return math.ceil(rounds / self._lines)

    def _print(self, line: str) -> None:
        with output_may_end():
            print(line, flush=True)
