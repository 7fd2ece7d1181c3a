"""The result of a study, and its words, table cells and metrics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from narrowcast.platform.tracking.metric_direction import Declared
from narrowcast.platform.tracking.metric_labels import format_metric, metric_label
from narrowcast.platform.tracking.units import format_bits, format_seconds, format_short_seconds
from narrowcast.runs.significance import COMPARABLE_SEEDS
from narrowcast.tuning.space import Space, edges
from narrowcast.tuning.study_settings import COSTS
from narrowcast.tuning.trial_record import TrialRecord

if TYPE_CHECKING:
    from pandas import DataFrame

    from narrowcast.tuning.holdout import HoldoutEvaluation


@dataclass(frozen=True, repr=False)
class StudyResult:
    """The result of a study: `best_trials`, the chosen one first, and the Pareto `front` of several objectives.

    `elsewhere` counts trials that other processes are still running; there are no hold-out evaluations before they end.
    """

    folder: Path
    records: Sequence[TrialRecord]
    best_trials: Sequence[TrialRecord] = ()
    front: Sequence[TrialRecord] = ()
    holdout: Sequence[HoldoutEvaluation] = ()
    elsewhere: int = 0
    files: Sequence[Path] = field(default_factory=tuple)
    shares: Declared = None
    """The metrics that are declared as shares."""
    cautions: Sequence[str] = ()
    """Advice to follow before the chosen trial stands for its method in a comparison."""

    def __repr__(self) -> str:
        states = Counter(each.state for each in self.records)
        counted = ", ".join(f"{count} {state}" for state, count in states.items()) or "none"
        lines = [f"{self.folder.name}: trials {counted}, in {self.folder}"]
        for each in self.best_trials:
            chosen = "chosen" if each is self.best else "next"
            lines.append(f"  {chosen}: trial {each.number}  {format_params(each.params)}")
        for held in self.holdout:
            means = ", ".join(
                f"{name} {format_metric(name, value, self.shares)}" for name, value in held.means().items()
            )
            lines.append(f"  hold-out evaluation of trial {held.trial.number}, {len(held.seeds)} new seeds: {means}")
        lines += [f"  {caution}" for caution in self.cautions]
        return "\n".join(lines)

    @property
    def best(self) -> TrialRecord | None:
        """Return the chosen trial; `best.yaml` in the folder is its experiment or solve."""
        return self.best_trials[0] if self.best_trials else None

    @property
    def trials(self) -> DataFrame:
        """Return all trials, a row each: number, state, rounds, ..., then parameters and metrics by name."""
        from pandas import DataFrame

        rows = []
        for each in self.records:
            plain = {name: value for name, value in vars(each).items() if name not in ("params", "metrics")}
            rows.append({**plain, **each.params, **each.metrics})
        return DataFrame(rows)

    @property
    def ended(self) -> int:
        """The number of trials that have ended."""
        return sum(each.state not in ("running", "waiting") for each in self.records)

    def metrics(self, objectives: Sequence[str], wall_seconds: float) -> dict[str, float]:
        """Return the metrics of the study's own MLflow run."""
        states = Counter(each.state for each in self.records)
        metrics = {f"trials_{state}": float(count) for state, count in states.items()}
        metrics |= {"rounds_run": float(sum(each.rounds for each in self.records)), "wall_seconds": wall_seconds}
        if self.best is not None:
            metrics |= {f"best.{name}": self.best.metrics[name] for name in objectives}
            metrics["best.trial"] = float(self.best.number)
        if self.holdout:
            metrics |= {f"best.{name}": value for name, value in self.holdout[0].means().items()}
        return metrics

    def plain(self, storage: str, wall_seconds: float) -> dict[str, Any]:
        """Return the contents of `result.json`."""
        return {
            "name": self.folder.name,
            "storage": storage,
            "trials": dict(Counter(each.state for each in self.records)),
            "rounds_run": sum(each.rounds for each in self.records),
            "wall_seconds": wall_seconds,
            "chosen": self.best.number if self.best else None,
            "best": [_plain(each) for each in self.best_trials],
            "pareto_front": [_plain(each) for each in self.front],
            "holdout": [each.plain() for each in self.holdout],
            "cautions": list(self.cautions),
        }

    def note(self, objectives: Mapping[str, str]) -> str:
        """Return the description of the study for its page in MLflow, in Markdown."""
        states = Counter(each.state for each in self.records)
        sought = " and ".join(f"{metric_label(name)} ({direction})" for name, direction in objectives.items())
        lines = [
            f"A study of {sought}: {', '.join(f'{count} {state}' for state, count in states.items())} trials. "
            "Its figures are under Artifacts, in `plots`; `best.yaml` there is the file of the chosen trial."
        ]
        if self.best is not None:
            reached = ", ".join(labelled(name, self.best.metrics[name], self.shares) for name in objectives)
            lines.append(f"Chosen: **trial {self.best.number}** with {reached}; `{format_params(self.best.params)}`")
        if self.holdout:
            first = self.holdout[0]
            on_test = ", ".join(labelled(name, value, self.shares) for name, value in first.means().items())
            lines.append(f"Hold-out evaluation with {len(first.seeds)} new seeds: {on_test} on average.")
        lines += self.cautions
        return "\n\n".join(lines)


def cautions_on(space: Space, chosen: TrialRecord, seeds: int) -> list[str]:
    """Return a line for each value of the chosen trial at the edge of its range, and one for fewer than three seeds."""
    lines = [
        f"{path} = {chosen.params[path]!r} is at the edge of its range, which ends at {end!r}; a better value may lie "
        f"beyond it: widen space.{path}"
        for path, end in edges(space, chosen.params).items()
    ]
    if seeds < COMPARABLE_SEEDS:
        tried = "one seed" if seeds == 1 else f"{seeds} seeds"
        lines.append(
            f"each trial had {tried}; for a comparison of tuned methods choose on {COMPARABLE_SEEDS} or more "
            f"(study.seeds={COMPARABLE_SEEDS})"
        )
    return lines


def _plain(trial: TrialRecord) -> dict[str, Any]:
    return {"trial": trial.number, "values": trial.params, **trial.metrics}


def why_no_trial_is_complete(name: str, trials: Sequence[TrialRecord]) -> str:
    """Return the error message of a study without a complete trial."""
    states = Counter(trial.state for trial in trials if trial.state != "lost")
    reasons = Counter(trial.reason for trial in trials if trial.state == "failed")
    if set(states) == {"failed"}:
        reason, times = reasons.most_common(1)[0]
        return (
            f"all {states['failed']} trials of {name} failed, {times} of them with: {reason}; "
            "narrow the space, and give the study another name"
        )
    counted = ", ".join(f"{count} {state}" for state, count in states.items()) or "none"
    return f"{name}: no trial is complete ({counted}); allow more trials or time, or use a milder pruner"


def format_value(name: str, value: float, shares: Declared = None) -> str:
    """Return a metric or cost with its unit; `shares` are the metrics that the model declares as such."""
    if name == "iterations":
        return f"{value:,.0f}"
    if name == "solver_seconds":
        return format_short_seconds(value)
    if name in COSTS:
        return format_bits(value) if name.endswith("bits") else format_seconds(value)
    return format_metric(name, value, shares)


def labelled(name: str, value: float, shares: Declared = None) -> str:
    """Return a metric or cost with its label: `validation accuracy 81.20 %`."""
    return f"{metric_label(name)} {format_value(name, value, shares)}"


def format_params(params: Mapping[str, Any]) -> str:
    """Return parameters in one line, each under the last part of its path."""
    return " ".join(
        f"{path.rpartition('.')[2]}={value:.4g}" if isinstance(value, float) else f"{path.rpartition('.')[2]}={value}"
        for path, value in params.items()
    )
