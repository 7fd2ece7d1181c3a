"""The record of one run: the plan of its rounds, the algorithm and the task."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from narrowcast.platform.client_splits import check_client_evaluation
from narrowcast.platform.contract_checks import check_traits
from narrowcast.platform.contracts import Algorithm, Dataset, Task, Training
from narrowcast.platform.errors import UserError
from narrowcast.platform.kinds import optional
from narrowcast.platform.plan import Plan
from narrowcast.platform.threads import one_thread


@dataclass(frozen=True)
class Run:
    """One run, before or between its rounds: everything that its results depend on, except its `RunState`.

    `answered` is the file in which its clients write what they answer under secure aggregation; None: in memory alone.
    """

    plan: Plan
    algorithm: Algorithm
    task: Task[Dataset, Training]
    answered: Path | None = None

    @one_thread()
    def check(self) -> None:
        """Raise `UserError` if model, training, algorithm, data and plan do not fit together."""
        check_traits(self.algorithm)
        self.task.model.check(self.task.data)
        self.task.training.check(self.task)
        self.algorithm.check(self.task)
        self._check_factors()
        self._check_statistics()
        self.check_plan()
        check_client_evaluation(self.plan.evaluate_clients, self.task)

    def detached(self) -> Run:
        """Return the run with nothing but the plan of its experiment, for processes that need no more than that."""
        fields = {name: getattr(self.plan, name) for name in Plan.model_fields}
        return replace(self, plan=Plan.model_construct(**fields))

    def _check_factors(self) -> None:
        """Raise `UserError` if the training is one of factors and the algorithm is not."""
        training = self.task.training
        if optional(training, "train_factors") and not self.algorithm.traits.trains_factors:
            raise UserError(
                f"algorithm.kind = {self.algorithm.kind} does not train {self.task.model.kind} by {training.kind}; use "
                "fedmavg or sfmf"
            )

    def _check_statistics(self) -> None:
        """Raise `UserError` if the statistics that clients of a network move cannot be shared, or kept, as it says."""
        statistics = optional(self.task.model, "statistics", "refuse")
        if statistics == "refuse":
            return
        setting = f"model.statistics = {statistics}"
        if (settings := self.algorithm.traits.mean_unless) is None:
            raise UserError(
                f"{setting}: algorithm.kind = {self.algorithm.kind} has no place for what training moves besides the "
                "parameters; use fedavg or fedprox"
            )
        if statistics == "local":
            return
        others = {
            **settings,
            "secure": self.algorithm.secure_sums is not None,
            "schedule = buffered": self.plan.schedule.kind == "buffered",
        }
        if some := [name for name, there in others.items() if there]:
            raise UserError(
                f"{setting}: with {' and '.join(some)} the average of variances may be negative; leave that out, or "
                "set model.statistics = local"
            )

    def check_plan(self) -> None:
        """Raise `UserError` if the plan does not fit the clients, or needs what the algorithm does not offer."""
        plan, algorithm, task = self.plan, self.algorithm, self.task
        plan.availability.check(task.data.n_clients)
        algorithm.check_cohort(min(plan.clients_per_round, task.data.n_clients))
        buffered = plan.schedule.kind == "buffered"
        if buffered and algorithm.weighted_by_staleness({}, 1.0) is None:
            raise UserError(
                f"schedule = buffered: {algorithm.kind} as set here cannot count stale updates less; use fedavg or "
                "fedprox without an aggregator"
            )
        if plan.replacement and not algorithm.traits.counts_draws:
            raise UserError(
                f"replacement = true: {algorithm.kind} as set here counts every client once; use fedavg, fedprox, "
                "fednova or qffl, without an aggregator and secure sums"
            )
        if not (buffered or plan.stragglers == "partial"):
            return
        nobody = np.empty(0, dtype=np.int64)
        broadcast = algorithm.broadcast(algorithm.init(task), task, 1).arrays
        if algorithm.upload_bits(broadcast, task, nobody) is None:
            setting, advice = ("schedule = buffered", "synchronous") if buffered else ("stragglers = partial", "drop")
            raise UserError(
                f"{setting}: how long the clients of {algorithm.kind} take here is known only after their training; "
                f"use {advice}, or fedavg without a codec"
            )
