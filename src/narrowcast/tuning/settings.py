"""The `study` section of a study file: objectives, sampler, pruner, budget and workers."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Literal

from pydantic import ConfigDict, Field, model_validator

from narrowcast.platform.config.files import Section, suggest
from narrowcast.platform.errors import UserError
from narrowcast.platform.tracking.metrics import LowerIsBetter, lower_is_better
from narrowcast.tuning.pruning import AnyPruner, Direction, NoPruning
from narrowcast.tuning.samplers import TPE, AnySampler
from narrowcast.tuning.space import Space

EXPERIMENT_COSTS = {
    "uplink_bits": "total_uplink_bits",
    "downlink_bits": "total_downlink_bits",
    "total_bits": "total_bits",
    "simulated_seconds": "simulated_seconds",
}
"""The costs of a trial of an experiment, and the column of its rounds with the cost so far."""
SOLVE_COSTS = {"iterations": "iteration", "solver_seconds": "solver_seconds"}
"""The same of a solve."""
COSTS = {**EXPERIMENT_COSTS, **SOLVE_COSTS}
_OF_STEPS = ("round", "iteration", "residual", "solver_seconds", "wall_seconds", "logged_at_ms")
"""Columns of a solve's rows that are not metrics of the problem."""


class Bound(Section):
    """A constraint on one metric or cost of a trial."""

    model_config = ConfigDict(allow_inf_nan=False)

    at_least: float | None = Field(None, description="lower bound")
    at_most: float | None = Field(None, description="upper bound")

    @model_validator(mode="after")
    def _is_one(self) -> Bound:
        if (self.at_least is None) == (self.at_most is None):
            raise ValueError("give one of at_least and at_most")
        return self

    def excess(self, value: float) -> float:
        """Return by how much a value violates the bound; at most 0 if it does not."""
        return value - self.at_most if self.at_most is not None else float(self.at_least or 0) - value


class Holdout(Section):
    """Hold-out evaluation: the best trials run again with new seeds and measured on the test split."""

    trials: int = Field(3, ge=0, description="number of best trials; of several objectives, spread along the front")
    seeds: int = Field(3, ge=1, description="runs of each, with seeds that no trial had")


class StudySettings(Section):
    """Settings of a study: objectives, sampler, pruner, trials and budget."""

    model_config = ConfigDict(allow_inf_nan=False)

    objectives: dict[str, Direction] = Field(
        min_length=1,
        description="metrics and costs, each with maximize or minimize; of experiments those of validation",
    )
    constraints: dict[str, Bound] = Field({}, description="bounds on metrics and costs of a trial")
    budget: dict[str, float] = Field(
        {},
        description="costs at which a trial ends, by their names",
    )
    sampler: AnySampler = Field(TPE(), description="search strategy")
    pruner: AnyPruner = Field(NoPruning(), description="rule that stops trials early")
    seed: int = Field(0, ge=0, lt=2**32, description="seed of the sampler")
    seeds: int = Field(1, ge=1, description="runs of a trial, over which metrics are averaged")
    trials: int | None = Field(None, ge=1, description="number of trials; null: 50, or every combination of a grid")
    timeout_seconds: float | None = Field(None, gt=0, description="wall time after which no trial starts")
    parallel: int = Field(1, ge=1, le=4096, description="number of workers on Ray")
    trials_together: int = Field(1, ge=1, description="trials that a worker runs as one tensor program")
    cpus_per_worker: float = Field(1.0, gt=0, description="CPUs of a worker on Ray")
    gpus_per_worker: float = Field(0.0, ge=0, description="GPUs of a worker on Ray")
    backend: Literal["ray", "local"] = Field("ray", description="workers on Ray, or one worker in this process")
    address: str | None = Field(None, description="running Ray cluster to join, host:port or auto")
    storage: str | None = Field(
        None, description="Optuna storage: database URL or journal file; null: a journal in the study's folder"
    )
    storage_timeout_seconds: float = Field(120.0, gt=0, description="longest wait for a storage that is down")
    stale_seconds: float = Field(60.0, ge=5, description="age of a heartbeat after which a process counts as dead")
    holdout: Holdout = Field(Holdout(), description="hold-out evaluation of the best trials on the test split")

    @model_validator(mode="after")
    def _fit_together(self) -> StudySettings:
        if self.sampler.kind == "cma_es" and len(self.objectives) > 1:
            raise ValueError("study.sampler = cma_es is for one objective; use tpe, gp or nsga2")
        if self.pruner.kind == "none":
            return self
        on = self.pruned_on
        if on is None:
            raise ValueError(f"study.pruner.on is missing: one of {', '.join(self._metrics)}")
        if on not in self._metrics:
            raise ValueError(
                f"study.pruner.on = {on!r}: should be an objective that is a metric: {', '.join(self._metrics)}"
            )
        return self

    @property
    def _metrics(self) -> list[str]:
        return [name for name in self.objectives if name not in COSTS]

    @property
    def costs(self) -> list[bool]:
        """Return for each objective whether it is a cost."""
        return [name in COSTS for name in self.objectives]

    @property
    def workers(self) -> int:
        """Return the number of workers: one in this process, or `parallel` on Ray."""
        return 1 if self.backend == "local" else self.parallel

    @property
    def budget_columns(self) -> dict[str, float]:
        """Return the budget by column of a trial's rounds."""
        return {COSTS[name]: limit for name, limit in self.budget.items()}

    @property
    def pruned_on(self) -> str | None:
        """Return the objective to prune by."""
        if self.pruner.kind == "none":
            return None
        only = next(iter(self.objectives)) if len(self.objectives) == 1 else None
        return self.pruner.steps.on or only

    def check_names(self, what: str, costs: Collection[str]) -> None:
        """Raise `UserError` for an objective or constraint of an experiment that no data set can measure."""
        for section in ("objectives", "constraints") if what == "experiment" else ():
            for name in getattr(self, section):
                if name.startswith("test."):
                    raise _on_test(section, name)
                if name not in costs and not name.startswith("validation."):
                    raise UserError(
                        f"study.{section}.{name}: should be a metric of validation, such as validation.accuracy, or "
                        f"one of {', '.join(costs)}{suggest(name, costs)}"
                    )

    def check_measured(
        self,
        what: str,
        selectable: Collection[str],
        measured: Collection[str],
        costs: Collection[str],
        declared: LowerIsBetter = None,
        *,
        of_attack: bool = False,
    ) -> None:
        """Raise `UserError` for a name that no run reports or that selection must not see, and for a wrong direction.

        Args:
            what: experiment or solve.
            selectable: the metrics that trials may be chosen by.
            measured: all metrics.
            costs: the costs of a trial.
            declared: the metrics that are declared as better when lower.
            of_attack: whether an attack alone is tuned, for which the best may be what is worst for honest clients.

        """
        known = [*selectable, *costs]
        for section in ("objectives", "constraints", "budget"):
            for name in getattr(self, section):
                allowed = list(costs) if section == "budget" else known
                if name in allowed:
                    continue
                if name.startswith("test.") and name in measured:
                    raise _on_test(section, name)
                raise UserError(
                    f"study.{section}.{name}: no run of this {what} reports it; it reports "
                    f"{', '.join(allowed)}{suggest(name, allowed)}"
                )
        axis = self.pruner.steps.axis
        if axis not in ("rounds", *costs):
            raise UserError(f"study.pruner.axis = {axis}: no run of this {what} has it; use rounds, {', '.join(costs)}")

        for name, direction in self.objectives.items():
            lower = name in COSTS or lower_is_better(name, declared)
            if (direction == "minimize") != lower and not of_attack:
                better, right = ("lower", "minimize") if lower else ("higher", "maximize")
                raise UserError(f"study.objectives.{name} = {direction}: it is better when {better}; write {right}")

    def n_trials(self, space: Space) -> int:
        """Return the number of trials; raise `UserError` for a grid over an infinite range."""
        if self.sampler.kind == "grid":
            size = len(space.grid())
            return min(self.trials or size, size)
        return self.trials or 50


def _on_test(section: str, name: str) -> UserError:
    return UserError(
        f"study.{section}.{name}: trials are chosen on validation; the best ones are measured on test afterwards "
        "(study.holdout)"
    )


def metric_names(row: Mapping[str, Any]) -> list[str]:
    """Return the metrics in an evaluation's row, without its steps, times and costs."""
    if "iteration" in row:
        return [name for name in row if name not in _OF_STEPS]
    return [name for name in row if name.startswith(("validation.", "test."))]


def final_costs(row: Mapping[str, Any]) -> dict[str, str]:
    """Return the costs to be shown of a whole trial, by heading."""
    if "iteration" in row:
        return {"iterations": "iterations", "time of the solver": "solver_seconds"}
    return {cost.removesuffix("_bits"): cost for cost in EXPERIMENT_COSTS if cost.endswith("_bits")}


def trial_metrics(row: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics that trials are chosen by, and the costs, of an evaluation's row."""
    if "iteration" in row:
        metrics = {name: float(row[name]) for name in metric_names(row)}
        return metrics | {name: float(row[column]) for name, column in SOLVE_COSTS.items()}
    metrics = {name: float(value) for name, value in row.items() if name.startswith("validation.")}
    return metrics | {name: float(row[column]) for name, column in EXPERIMENT_COSTS.items()}
