"""The `study` section of a study file: what is sought, who looks for it, and how much may be spent on it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from narrowcast.platform.config import suggest
from narrowcast.platform.errors import UserError
from narrowcast.tuning.pruning import AnyPruner, Direction, NoPruner
from narrowcast.tuning.samplers import TPE, AnySampler
from narrowcast.tuning.space import Space

COSTS = {
    "uplink_bits": "total_uplink_bits",
    "downlink_bits": "total_downlink_bits",
    "simulated_seconds": "simulated_seconds",
}
"""What a trial spends, and the column of its rounds that says how much so far."""


class Bound(BaseModel):
    """What a trial has to keep to."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    at_least: float | None = None
    at_most: float | None = None

    @model_validator(mode="after")
    def _is_one(self) -> Bound:
        if (self.at_least is None) == (self.at_most is None):
            raise ValueError("give one of at_least and at_most")
        return self

    def excess(self, value: float) -> float:
        """By how much a value breaks it; at most 0 where it does not."""
        return value - self.at_most if self.at_most is not None else float(self.at_least or 0) - value


class Retest(BaseModel):
    """The best trials, played again with new seeds and measured on the test split."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    trials: int = Field(3, ge=0, description="how many of the best; of several objectives, spread along the front")
    seeds: int = Field(3, ge=1, description="none of which a trial had")


class StudySettings(BaseModel):
    """How a study looks for good values of an experiment."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    objectives: dict[str, Direction] = Field(min_length=1)
    constraints: dict[str, Bound] = {}
    budget: dict[str, float] = Field({}, description="a trial that has spent so much is over, at its next evaluation")
    sampler: AnySampler = TPE()
    pruner: AnyPruner = NoPruner()
    seed: int = Field(0, ge=0, lt=2**32, description="of the sampler")
    seeds: int = Field(1, ge=1, description="runs of a trial, whose mean counts")
    trials: int | None = Field(None, ge=1, description="50 by default, of a grid every combination")
    timeout_seconds: float | None = Field(None, gt=0, description="no trial starts later")
    parallel: int = Field(1, ge=1, le=4096, description="workers that play trials at the same time")
    trials_together: int = Field(1, ge=1, description="trials that a worker plays as one program")
    cpus_per_worker: float = Field(1.0, gt=0)
    gpus_per_worker: float = Field(0.0, ge=0)
    backend: Literal["ray", "local"] = Field(
        "ray", description="workers on Ray, or one after the other in this process"
    )
    address: str | None = Field(None, description="of a running Ray cluster, host:port or auto")
    storage: str | None = Field(
        None, description="a database URL or journal file; by default one in the study's folder"
    )
    patience_seconds: float = Field(120.0, gt=0, description="a storage that is down is waited for")
    stale_seconds: float = Field(60.0, ge=5, description="a process not heard of for so long is taken for dead")
    retest: Retest = Retest()

    @model_validator(mode="after")
    def _fit_together(self) -> StudySettings:
        if self.sampler.kind == "cma_es" and len(self.objectives) > 1:
            raise ValueError("study.sampler = cma_es is for one objective; use tpe, gp or nsga2")
        if self.backend == "local" and self.parallel > 1:
            raise ValueError("study.backend = local plays one trial after the other; leave out study.parallel")
        if self.pruner.kind == "none":
            return self
        on = self.pruned_on
        if on is None:
            raise ValueError(
                f"pruning by several objectives: study.pruner.on has to be one of {', '.join(self._metrics)}"
            )
        if on not in self._metrics:
            raise ValueError(f"study.pruner.on = {on!r} cannot be pruned on; it has to be an objective of validation")
        return self

    @property
    def _metrics(self) -> list[str]:
        return [name for name in self.objectives if name not in COSTS]

    @property
    def costs(self) -> list[bool]:
        """Which of the objectives are what a trial spends."""
        return [name in COSTS for name in self.objectives]

    @property
    def pruned_on(self) -> str | None:
        """The objective that pruning looks at."""
        if isinstance(self.pruner, NoPruner):
            return None
        return self.pruner.on or (next(iter(self.objectives)) if len(self.objectives) == 1 else None)

    def check_measured(self, measured: Collection[str]) -> None:
        """Raise `UserError` for anything sought that a run does not report, or that selection must not see."""
        known = [*sorted(name for name in measured if name.startswith("validation.")), *COSTS]
        for section in ("objectives", "constraints", "budget"):
            for name in getattr(self, section):
                allowed = list(COSTS) if section == "budget" else known
                if name in allowed:
                    continue
                if name.startswith("test."):
                    raise UserError(
                        f"study.{section}.{name}: trials are chosen on validation; the best ones are measured on test "
                        "afterwards (study.retest)"
                    )
                raise UserError(
                    f"study.{section}.{name}: no run of this experiment reports it; it reports "
                    f"{', '.join(allowed)}{suggest(name, allowed)}"
                )

    def n_trials(self, space: Space) -> int:
        """How many trials there are to be."""
        if self.sampler.kind == "grid":
            size = len(space.grid())
            return min(self.trials or size, size)
        return self.trials or 50

    def identity(self) -> dict[str, Any]:
        """What all who work on a study, and whoever goes on with it, must agree on."""
        kept = ("objectives", "constraints", "budget", "seeds")
        return {name: value for name, value in self.model_dump(mode="json").items() if name in kept}


def amounts(row: Mapping[str, Any]) -> dict[str, float]:
    """What a round's row says of everything that can be sought or bounded."""
    metrics = {name: float(value) for name, value in row.items() if name.startswith("validation.")}
    return metrics | {name: float(row[column]) for name, column in COSTS.items()}
