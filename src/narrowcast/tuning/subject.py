"""The subject of a study: the kind of run whose settings it searches, experiments or solves."""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Collection, Generator, Mapping
from contextlib import closing
from typing import Any, ClassVar

from pydantic import BaseModel

from narrowcast.cluster.backend import RayBackend
from narrowcast.experiment import Experiment, build_experiment, defaults_for
from narrowcast.platform.compiled import one_thread
from narrowcast.platform.config.files import Defaults, plugin_folders
from narrowcast.platform.data.dataset import DataSource
from narrowcast.platform.data.soundness import load_checked
from narrowcast.platform.errors import UserError
from narrowcast.platform.models.model import Model
from narrowcast.platform.rounds.evaluation import measure
from narrowcast.platform.rounds.loop import LocalBackend
from narrowcast.platform.rounds.state import start
from narrowcast.platform.solving import ProblemSource, begin, iterations, loaded_problem, measured
from narrowcast.platform.tracking.metrics import FractionMetrics, LowerIsBetter, declared_by, fraction_metrics
from narrowcast.solve_run import Solve, build_solve
from narrowcast.tuning.settings import EXPERIMENT_COSTS, SOLVE_COSTS
from narrowcast.tuning.workers import SharedData, SharedProblem, run_solve_trials, run_trials, selects


class RunKind(ABC):
    """The kind of run of a study: its section, costs and checks, and its trials on a worker."""

    section: ClassVar[str]
    """The section of a study file that has the run."""
    steps: ClassVar[str]
    """The field of the run with its largest number of steps, and their name."""
    costs: ClassVar[Mapping[str, str]]
    """The costs of a trial, and the column of its rows with the cost so far."""
    model: ClassVar[type[BaseModel]]
    """The model of a run."""

    @staticmethod
    @abstractmethod
    def run_trials(batch: Any, shared: Any) -> Generator[Any, Any, None]:
        """Run trials on a worker."""

    @abstractmethod
    def defaults(self, origin: str) -> Defaults:
        """Return the defaults of a run that is read from a file."""

    @abstractmethod
    def build(self, values: dict[str, Any], origin: str) -> Any:
        """Return the validated run."""

    @abstractmethod
    def of_worker(self, run: Any) -> Any:
        """Return the run as a worker runs it, in its own process and without checkpoints to resume from."""

    @abstractmethod
    def identity(self, run: Any) -> dict[str, Any]:
        """Return the dotted values that the results of a trial depend on."""

    @abstractmethod
    def source(self, run: Any) -> Any:
        """Return the data source or the problem of a run, with the run's seed."""

    @abstractmethod
    def load(self, run: Any) -> Any:
        """Read what all workers share; its `data` is the data set or problem."""

    @abstractmethod
    def check(self, run: Any, shared: Any) -> None:
        """Raise `UserError` if the parts of a run do not fit together, as far as that is quick to find out."""

    @abstractmethod
    def check_place(self, run: Any, shared: Any, backend: RayBackend | None, together: int) -> None:
        """Raise `UserError` if workers cannot run trials where they are to, or not so many together."""

    @abstractmethod
    def selectable(self, run: Any, shared: Any) -> tuple[list[str], Collection[str]]:
        """Return the metrics that trials may be chosen by, and all that are measured."""

    @abstractmethod
    def measures(self, run: Any) -> Any:
        """Return the model or problem, which declares its metrics."""

    def untimed(self, run: Any) -> Any:
        """Return the run without a limit of measured time, which it does not have by default."""
        return run

    def declared(self, run: Any) -> LowerIsBetter:
        """Return the metrics that are declared as better when lower."""
        return declared_by(self.measures(run))

    def shares(self, run: Any) -> FractionMetrics:
        """Return the metrics that are declared as shares."""
        return fraction_metrics(self.measures(run))

    @abstractmethod
    def timed(self, run: Any, shared: Any) -> tuple[float, float]:
        """Return the seconds of a step and of an evaluation, from a few of them."""


_TIMED_ITERATIONS = 5  # iterations
_ENDS = ("iterations", "tolerance", "solver_seconds", "evaluate_every", "spacing")


class SolveKind(RunKind):
    """A study of solves: trials are chosen by the problem's metrics, by iterations and by the time of the solver.

    A metric of test is among them only if each seed draws another problem; the hold-out evaluation has new seeds.
    """

    section: ClassVar[str] = "solve"
    steps: ClassVar[str] = "iterations"
    model: ClassVar[type[Solve]] = Solve
    costs: ClassVar[Mapping[str, str]] = SOLVE_COSTS
    run_trials = staticmethod(run_solve_trials)

    def defaults(self, origin: str) -> Defaults:
        """Return the defaults of a solve that is read from a file."""
        return Defaults(Solve, plugin_folders(origin))

    def build(self, values: dict[str, Any], origin: str) -> Solve:
        """Return the validated solve."""
        return build_solve(values, origin)

    def untimed(self, run: Solve) -> Solve:
        """Return the solve without a limit of the solver's time."""
        return run.model_copy(update={"solver_seconds": None})

    def of_worker(self, run: Solve) -> Solve:
        """Return the solve with measured iterations alone, and a state at its end alone."""
        return run.model_copy(
            update={"record_every": run.iterations, "checkpoint_every": None, "checkpoint_seconds": math.inf}
        )

    def identity(self, run: Solve) -> dict[str, Any]:
        """Return the solve's identity, when it ends and when it is measured."""
        return run.identity() | {name: getattr(run, name) for name in _ENDS}

    def source(self, run: Solve) -> ProblemSource:
        """Return the problem's source."""
        return run.problem_source

    def load(self, run: Solve) -> SharedProblem:
        """Load the problem."""
        return SharedProblem(run.problem_source, loaded_problem(run.problem_source))

    def check(self, run: Solve, shared: SharedProblem) -> None:
        """Check the solver on the problem that is shared."""
        if run.problem_source == shared.source:
            run.solver.check(shared.data)

    def check_place(self, run: Solve, shared: SharedProblem, backend: RayBackend | None, together: int) -> None:
        """Check the cluster, and that trials are not to run as one program."""
        del run, shared
        if together > 1:
            raise UserError(
                f"study.trials_together = {together}: solves have no program in common; set study.parallel, for trials "
                "side by side on Ray"
            )
        if backend is not None:
            backend.check_workers("study.parallel")

    def selectable(self, run: Solve, shared: SharedProblem) -> tuple[list[str], Collection[str]]:
        """Return the metrics of the first state's answer that trials may be chosen by, and all of them."""
        problem = shared.problem_of(run)
        metrics = measured(problem, run.solver, begin(problem, run.solver, run.seed))
        return [name for name in metrics if selects(run, name)], metrics

    def measures(self, run: Solve) -> ProblemSource:
        """Return the problem."""
        return run.problem

    def timed(self, run: Solve, shared: SharedProblem) -> tuple[float, float]:
        """Time a few iterations and measurements."""
        problem = shared.problem_of(run)
        few = run.model_copy(update={"iterations": _TIMED_ITERATIONS, "evaluate_every": 1, "spacing": None})
        began = time.perf_counter()
        steps = list(iterations(problem, run.solver, few, begin(problem, run.solver, run.seed)))
        evaluation = sum(step.evaluate_seconds for step in steps) / len(steps)
        return (time.perf_counter() - began) / len(steps) - evaluation, evaluation


_WARM_UP, _TIMED_ROUNDS = 2, 5  # rounds; the first compile kernels


class ExperimentKind(RunKind):
    """A study of experiments: trials are chosen by validation metrics, bits and simulated time."""

    section: ClassVar[str] = "experiment"
    steps: ClassVar[str] = "rounds"
    model: ClassVar[type[Experiment]] = Experiment
    costs: ClassVar[Mapping[str, str]] = EXPERIMENT_COSTS
    run_trials = staticmethod(run_trials)

    def defaults(self, origin: str) -> Defaults:
        """Return the defaults of an experiment that is read from a file."""
        return defaults_for(origin)

    def build(self, values: dict[str, Any], origin: str) -> Experiment:
        """Return the validated experiment."""
        return build_experiment(values, origin)

    def of_worker(self, run: Experiment) -> Experiment:
        """Return the experiment on the local backend; its last round returns a state in any case."""
        return run.model_copy(update={"backend": LocalBackend(), "checkpoint_every": run.rounds})

    def identity(self, run: Experiment) -> dict[str, Any]:
        """Return the experiment's identity and its rounds."""
        return run.identity() | {"rounds": run.rounds}

    def source(self, run: Experiment) -> DataSource:
        """Return the data source."""
        return run.data_source

    def load(self, run: Experiment) -> SharedData:
        """Read the data set."""
        return SharedData(run.data_source, load_checked(run.data_source))

    def check(self, run: Experiment, shared: SharedData) -> None:
        """Make the task of an experiment with the data set that is shared."""
        if run.data_source == shared.source:
            run.task(shared.data)

    def check_place(self, run: Experiment, shared: SharedData, backend: RayBackend | None, together: int) -> None:
        """Check the cluster, or this process."""
        del together
        (backend or run.backend).check(shared.run_of(run))

    def selectable(self, run: Experiment, shared: SharedData) -> tuple[list[str], Collection[str]]:
        """Return the validation metrics, and all that are measured."""
        prepared = shared.run_of(run)
        measured = measure(prepared, start(prepared))
        return sorted(name for name in measured if name.startswith("validation.")), measured

    def measures(self, run: Experiment) -> Model:
        """Return the model."""
        return run.model

    def timed(self, run: Experiment, shared: SharedData) -> tuple[float, float]:
        """Time a few rounds after a warm-up, and a measurement of the first model."""
        rounds = _WARM_UP + _TIMED_ROUNDS
        few = run.model_copy(update={"rounds": rounds, "evaluate_every": rounds, "checkpoint_every": 10**9})
        prepared = shared.run_of(few)
        state = start(prepared)
        with one_thread():
            measure(prepared, state)
            began = time.perf_counter()
            measure(prepared, state)
            evaluation = time.perf_counter() - began
        with closing(LocalBackend().run(prepared, state)) as outcomes:
            seconds = [outcome.wall_seconds for outcome in outcomes]
        timed = seconds[_WARM_UP:-1]  # the last round has an evaluation
        return sum(timed) / len(timed), evaluation
