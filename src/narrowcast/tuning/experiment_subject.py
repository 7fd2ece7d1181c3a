"""Experiments as the subject of a study."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from contextlib import closing
from typing import Any, ClassVar

from narrowcast.cluster.ray_backend import RayBackend
from narrowcast.experiment import Experiment, build_experiment, defaults_for
from narrowcast.platform.contracts import DataSource, Model
from narrowcast.platform.data.soundness import load_checked
from narrowcast.platform.evaluation import measure
from narrowcast.platform.local_backend import LocalBackend
from narrowcast.platform.overrides import Defaults
from narrowcast.platform.state import start
from narrowcast.platform.threads import one_thread
from narrowcast.tuning.study_settings import EXPERIMENT_COSTS
from narrowcast.tuning.subject import Subject
from narrowcast.tuning.trial_runner import SharedData, run_trials

_WARM_UP, _TIMED = 2, 5  # rounds; the first compile kernels


class ExperimentSubject(Subject):
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
        made = shared.run_of(run)
        measured = measure(made, start(made))
        return sorted(name for name in measured if name.startswith("validation.")), measured

    def measures(self, run: Experiment) -> Model:
        """Return the model."""
        return run.model

    def timed(self, run: Experiment, shared: SharedData) -> tuple[float, float]:
        """Time a few rounds after a warm-up, and a measurement of the first model."""
        rounds = _WARM_UP + _TIMED
        few = run.model_copy(update={"rounds": rounds, "evaluate_every": rounds, "checkpoint_every": 10**9})
        made = shared.run_of(few)
        state = start(made)
        with one_thread():
            measure(made, state)
            began = time.perf_counter()
            measure(made, state)
            evaluation = time.perf_counter() - began
        with closing(LocalBackend().run(made, state)) as outcomes:
            seconds = [outcome.wall_seconds for outcome in outcomes]
        timed = seconds[_WARM_UP:-1]  # the last round has an evaluation
        return sum(timed) / len(timed), evaluation
