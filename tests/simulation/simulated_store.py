"""An MLflow store in memory, behind MLflow's own registry of stores: it may be down, or fail after it has applied."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

from mlflow.entities import (
    Experiment,
    ExperimentTag,
    LifecycleStage,
    Metric,
    Param,
    Run,
    RunData,
    RunInfo,
    RunStatus,
    RunTag,
)
from mlflow.exceptions import MlflowException
from mlflow.store.artifact.artifact_repo import ArtifactRepository
from mlflow.store.entities.paged_list import PagedList
from mlflow.store.tracking.abstract_store import AbstractStore
from mlflow.tracking._tracking_service import utils
from simulated_host import SimulatedHost

SCHEME = "simulated"
_STORES: dict[str, SimulatedStore] = {}


@dataclass
class _StoredRun:
    info: RunInfo
    status: str = "RUNNING"
    metrics: dict[str, set[tuple[int, float, int]]] = field(default_factory=lambda: defaultdict(set))
    params: dict[str, str] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)
    artifacts: set[str] = field(default_factory=set)
    inputs: int = 0


class SimulatedStore(AbstractStore):
    """Keeps runs as MLflow's SQL store does: a metric that is sent twice with one time and step is stored once.

    `failures`: the chance of each call to begin an outage, or to be applied and answered with an error.
    """

    def __init__(self, host: SimulatedHost, failures: float) -> None:
        super().__init__()
        self.uri = f"{SCHEME}://store"
        self._host, self._failures = host, failures
        self._chances = host.chances("store")
        self._experiments: dict[str, Experiment] = {}
        self._down_for = 0
        self.runs: dict[str, _StoredRun] = {}

    def go_up(self, *, for_good: bool = False) -> None:
        """Answer every call from now on, until the next outage begins."""
        self._down_for = 0
        if for_good:
            self._failures = 0.0

    def _call(self, name: str, apply: Callable[[], Any]) -> Any:
        self._host.check_alive()
        if self._down_for:
            self._down_for -= 1
            raise MlflowException(f"{name}: the store is down")
        drawn = self._chances.random()
        if drawn < self._failures / 2:
            self._down_for = self._chances.randrange(1, 12)
            self._host.tell(f"store: down at {name}")
            raise MlflowException(f"{name}: the store is down")
        result = apply()
        if drawn < self._failures:
            self._host.tell(f"store: applied {name}, and answered with an error")
            raise MlflowException(f"{name}: the answer was lost")
        return result

    def search_experiments(self, *_: Any, **__: Any) -> PagedList:
        return self._call("search_experiments", lambda: PagedList(list(self._experiments.values()), None))

    def get_experiment_by_name(self, experiment_name: str) -> Experiment | None:
        return self._call("get_experiment_by_name", lambda: self._experiments.get(experiment_name))

    def get_experiment(self, experiment_id: str) -> Experiment:
        return self._call("get_experiment", lambda: self._of(experiment_id))

    def set_experiment_tag(self, experiment_id: str, tag: ExperimentTag) -> None:
        self._call("set_experiment_tag", lambda: self._of(experiment_id)._add_tag(tag))

    def _of(self, experiment_id: str) -> Experiment:
        return next(each for each in self._experiments.values() if each.experiment_id == experiment_id)

    def create_experiment(self, name: str, artifact_location: Any = None, tags: Any = None) -> str:
        def apply() -> str:
            if name in self._experiments:
                raise MlflowException(f"the experiment {name} exists")
            number = str(len(self._experiments))
            self._experiments[name] = Experiment(number, name, artifact_location, LifecycleStage.ACTIVE)
            return number

        return self._call("create_experiment", apply)

    def create_run(self, experiment_id: str, user_id: str, start_time: int, tags: Any, run_name: str) -> Run:
        def apply() -> Run:
            run_id = f"{len(self.runs):032x}"
            info = RunInfo(
                run_id, experiment_id, user_id, RunStatus.RUNNING, start_time, None, LifecycleStage.ACTIVE,
                artifact_uri=f"{self.uri}/{run_id}", run_name=run_name,
            )  # fmt: skip
            self.runs[run_id] = _StoredRun(info, tags={tag.key: tag.value for tag in tags})
            return self._as_run(run_id)

        return self._call("create_run", apply)

    def _search_runs(self, experiment_ids: Any, filter_string: str, *_: Any) -> tuple[list[Run], None]:
        """Return the running runs, which is the only search of a run."""
        assert "RUNNING" in filter_string
        del experiment_ids
        return self._call(
            "search_runs",
            lambda: (
                [self._as_run(run_id) for run_id, kept in self.runs.items() if kept.status == "RUNNING"],
                None,
            ),
        )

    def _as_run(self, run_id: str) -> Run:
        if run_id not in self.runs:
            raise MlflowException(f"no run {run_id}")
        kept = self.runs[run_id]
        return Run(kept.info, RunData(tags=[RunTag(key, value) for key, value in kept.tags.items()]))

    def get_run(self, run_id: str) -> Run:
        return self._call("get_run", lambda: self._as_run(run_id))

    def update_run_info(self, run_id: str, run_status: int, end_time: int | None, run_name: str | None) -> RunInfo:
        def apply() -> RunInfo:
            self.runs[run_id].status = RunStatus.to_string(run_status)
            return self.runs[run_id].info

        return self._call("update_run_info", apply)

    def log_batch(
        self, run_id: str, metrics: Sequence[Metric], params: Sequence[Param], tags: Sequence[RunTag]
    ) -> None:
        def apply() -> None:
            kept = self.runs[run_id]
            for metric in metrics:
                kept.metrics[metric.key].add((metric.step, metric.value, metric.timestamp))
            for param in params:
                if kept.params.setdefault(param.key, param.value) != param.value:
                    raise MlflowException(f"the param {param.key} has another value")
            kept.tags |= {tag.key: tag.value for tag in tags}

        self._call("log_batch", apply)

    def log_inputs(self, run_id: str, datasets: Any = None, models: Any = None) -> None:
        def apply() -> None:
            self.runs[run_id].inputs += 1

        self._call("log_inputs", apply)

    def log_artifact(self, run_id: str, name: str) -> None:
        self._call("log_artifact", lambda: self.runs[run_id].artifacts.add(name))

    def shut_down_async_logging(self) -> None:
        pass


class _Artifacts(ArtifactRepository):
    """Notes the names of artifacts, and keeps no copy."""

    def __init__(self, artifact_uri: str, tracking_uri: Any = None, registry_uri: Any = None) -> None:
        self.artifact_uri = artifact_uri

    def log_artifact(self, local_file: str, artifact_path: str | None = None) -> None:
        uri, _, run_id = self.artifact_uri.rpartition("/")
        _STORES[uri].log_artifact(run_id, f"{artifact_path or '.'}/{re.sub('.*/', '', local_file)}")

    def log_artifacts(self, local_dir: str, artifact_path: str | None = None) -> None:
        raise NotImplementedError

    def list_artifacts(self, path: str | None = None) -> list[Any]:
        raise NotImplementedError


@contextmanager
def in_force(store: SimulatedStore) -> Iterator[None]:
    """Register the store with MLflow, and let runs without an address of their own be tracked there."""
    from mlflow.store.artifact.artifact_repository_registry import _artifact_repository_registry

    utils._tracking_store_registry.register(SCHEME, lambda store_uri, **_: _STORES[store_uri])
    _artifact_repository_registry.register(SCHEME, _Artifacts)
    utils._tracking_store_registry._get_store_with_resolved_uri.cache_clear()
    _STORES[store.uri] = store
    utils._artifact_repos_cache.clear()  # keyed by the run alone, and each store counts its runs from 0
    try:
        with patch.dict("os.environ", {"MLFLOW_TRACKING_URI": store.uri}):
            yield
    finally:
        del _STORES[store.uri]
