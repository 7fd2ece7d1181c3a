"""The view of an experiment's runs in the MLflow UI: columns of test metrics and costs, charts in sections.

MLflow opens an experiment as one of generative AI, without metric columns, unless a tag says otherwise. A shared view,
which its button "Share" writes too, is another tag; the address of the page names it. The format of that tag is
undocumented; it was checked in a browser with `mlflow_internals.CHECKED_VERSION`. A page that does not understand it
says so and shows its own columns.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from mlflow.exceptions import MlflowException

from narrowcast.platform.client_statistics import CLIENTS, STATISTICS
from narrowcast.platform.step import ITERATION_COLUMNS
from narrowcast.platform.tracking.metric_labels import metric_label, metrics_of

if TYPE_CHECKING:
    from mlflow import MlflowClient

_VIEW, _KIND, _MEASURED = "mlflow.sharedViewState.narrowcast", "mlflow.experimentKind", "narrowcast.metrics"
PAGE = "#/experiments/{experiment_id}/runs?workflowType=machine_learning&viewStateShareKey=narrowcast"
"""The address of the view, below that of the MLflow UI."""
EXPERIMENTS = "#/experiments?workflowType=machine_learning"
"""The address of the list of experiments; without the parameter MLflow's sidebar is that of generative AI."""
_SOLVER_SECONDS = "solver_seconds"
_PARAMS_OF_SOLVE = ("solver.kind", "problem.kind", "seed")
_PARAMS = ("algorithm.kind", "data.kind", "seed")
_COSTS = ("total_uplink_bits", "total_bits", "simulated_seconds", "wall_seconds")
_AGAINST = {"step": "round", "total_uplink_bits": "uplink", "total_bits": "total traffic", "simulated_seconds": "time"}


def set_up_view(client: MlflowClient, experiment_id: str, measured: Iterable[str] = ()) -> None:
    """Tag an experiment as one of model training, with a view of the metrics that its runs have measured so far.

    `measured` are the names of a run's metrics, as MLflow has them. Nothing is sent if nothing is new.
    """
    tags: Mapping[str, str] = client.get_experiment(experiment_id).tags
    known = [each for each in tags.get(_MEASURED, "").split(",") if each]
    new = list(measured)
    of_solve = _SOLVER_SECONDS in new
    chosen = (each for each in new if (each not in ITERATION_COLUMNS and "_to." not in each) or each == _SOLVER_SECONDS)
    metrics = list(dict.fromkeys((*known, *(chosen if of_solve else filter(_is_of_split, new)))))
    wanted = {_KIND: "custom_model_development", _MEASURED: ",".join(metrics), _VIEW: _encoded(view(metrics))}
    for key, value in wanted.items():
        if tags.get(key) != value:
            with suppress(MlflowException):  # a user who may log runs, and not change the experiment, has no view
                client.set_experiment_tag(experiment_id, key, value)


def _is_of_split(metric: str) -> bool:
    return metric.startswith(("test.", "validation."))


def view(metrics: Sequence[str]) -> dict[str, Any]:
    """Return the state of the UI's list of runs and of its charts."""
    if _SOLVER_SECONDS in metrics:
        return _view_of_solves([each for each in metrics if each != _SOLVER_SECONDS])
    test = [f"test.{each}" for each in _ordered(metrics, "test")]
    validation = [f"validation.{each}" for each in _ordered(metrics, "validation")]
    columns = [f"params.`{each}`" for each in _PARAMS]
    columns += [f"metrics.`{each}`" for each in (*(test or validation), *_COSTS)]
    against_costs = [each for each in test if each != "test.loss"] or test  # runs of several tasks share a store
    shown = [
        *((metric_label(_plain(each)), each, "step") for each in test),
        *(
            (f"{metric_label(_plain(each))} by {_AGAINST[cost]}", each, cost)
            for each in against_costs
            for cost in _COSTS[:3]
        ),
    ]
    primary = (test or validation)[:1]
    over_clients = [f"{each}.{statistic}" for each in primary for statistic in STATISTICS if statistic != CLIENTS]
    sections = {
        "Test metrics": shown,
        "Metrics over clients": [
            (metric_label(_plain(each)), each, "step") for each in over_clients if each in metrics
        ],
        "Validation metrics": [(metric_label(_plain(each)), each, "step") for each in validation],
        "Training loss": [("training loss", "loss", "step"), ("training loss by time", "loss", "simulated_seconds")],
        "Costs": [(each.replace("_", " "), each, "step") for each in _COSTS],
    }
    return _state(columns, {name: charts for name, charts in sections.items() if charts})


def _view_of_solves(metrics: Sequence[str]) -> dict[str, Any]:
    """Return the state of the list of solves: their errors by iteration and against the time of the solver."""
    metrics = sorted(metrics, key=lambda each: not _is_of_split(each))
    columns = [f"params.`{each}`" for each in _PARAMS_OF_SOLVE]
    columns += [f"metrics.`{each}`" for each in (*metrics, "residual", _SOLVER_SECONDS)]
    names = [*metrics, "residual"]
    sections = {
        "By iteration": [(metric_label(each), each, "step") for each in names],
        "Against the time of the solver": [(f"{metric_label(each)} by time", each, _SOLVER_SECONDS) for each in names],
    }
    return _state(columns, sections, scale="log")


def _state(
    columns: Sequence[str], sections: Mapping[str, Sequence[tuple[str, str, str]]], scale: str = "linear"
) -> dict[str, Any]:
    return {
        "searchFilter": "",
        "orderByKey": "attributes.start_time",
        "orderByAsc": False,
        "selectedColumns": ["attributes.`Duration`", *columns],
        "columnOrder": ["attributes.`Duration`", *columns],
        "compareRunCharts": [
            _line(f"{section}-{place}", section, *chart, scale)
            for section, charts in sections.items()
            for place, chart in enumerate(charts)
        ],
        "compareRunSections": [
            *(_section(name, shown=True) for name in sections),
            _section("Model metrics", shown=False),
            _section("System metrics", shown=False),
        ],
        "isAccordionReordered": True,
    }


def _ordered(metrics: Sequence[str], split: str) -> list[str]:
    """Return the metrics of a split as MLflow has them, the primary one first."""
    names = {_plain(each): each for each in metrics}
    return [names[f"{split}.{each}"].removeprefix(f"{split}.") for each in metrics_of(names, split)]


def _plain(name: str) -> str:
    return name.replace("_at_", "@")


def _section(name: str, *, shown: bool) -> dict[str, Any]:
    return {
        "uuid": name,
        "name": name,
        "display": shown,
        "isReordered": False,
        "deleted": False,
        "isGenerated": name in ("Model metrics", "System metrics"),
    }


def _line(uuid: str, section: str, label: str, metric: str, across: str, scale: str) -> dict[str, Any]:
    by_step = across == "step"
    return {
        "type": "LINE",
        "uuid": uuid,
        "metricSectionId": section,
        "deleted": False,
        "isGenerated": False,
        "displayName": label,
        "metricKey": metric,
        "selectedMetricKeys": [metric],
        "lineSmoothness": 0,
        "scaleType": scale,
        "xAxisScaleType": "linear",
        "xAxisKey": "step" if by_step else "metric",
        "selectedXAxisMetricKey": "" if by_step else across,
        "useGlobalXaxisKey": False,
        "useGlobalLineSmoothing": True,
        "range": {},
        "yAxisKey": "metric",
        "yAxisExpressions": [],
        "ignoreOutliers": False,
        "runsCountToCompare": 20,
    }


def _encoded(state: Mapping[str, Any]) -> str:
    packed = base64.b64encode(zlib.compress(json.dumps(state).encode(), 9)).decode()
    return f"deflate;{packed}"
