"""narrowcast: communication-constrained federated learning.

```python
import narrowcast as nc

result = nc.run("scolr-ml100k", {"algorithm.rank": 8})
result.final["test.hr@10"]
```

Importing the package imports neither torch nor ray; each name below is imported when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from narrowcast._version import __version__ as __version__

if TYPE_CHECKING:
    from narrowcast.api import (
        Namespace,
        benchmark,
        compare,
        iterations,
        load_run,
        rounds,
        run,
        site,
        solve,
        submit,
        tune,
    )
    from narrowcast.cluster.job import ClusterJob
    from narrowcast.experiment import Experiment
    from narrowcast.platform.errors import RunFailed, UserError
    from narrowcast.runs.comparison import Comparison
    from narrowcast.runs.result import Result, SolveResult
    from narrowcast.solve_run import Solve

    aggregators: Namespace
    allocations: Namespace
    attacks: Namespace
    topologies: Namespace
    availabilities: Namespace
    samplings: Namespace
    backends: Namespace
    channels: Namespace
    codecs: Namespace
    data: Namespace
    downlinks: Namespace
    fleets: Namespace
    learning_rate_schedules: Namespace
    server_optimizers: Namespace
    losses: Namespace
    metrics: Namespace
    models: Namespace
    partitions: Namespace
    problems: Namespace
    rank_policies: Namespace
    schedules: Namespace
    secure: Namespace
    solvers: Namespace
    training: Namespace

__all__ = [  # noqa: RUF022 - in the order of use
    "run",
    "solve",
    "tune",
    "benchmark",
    "compare",
    "site",
    "submit",
    "load_run",
    "rounds",
    "iterations",
    "Experiment",
    "Solve",
    "Result",
    "SolveResult",
    "Comparison",
    "ClusterJob",
    "UserError",
    "RunFailed",
    "algorithms",
    "data",
    "models",
    "learning_rate_schedules",
    "server_optimizers",
    "aggregators",
    "attacks",
    "topologies",
    "losses",
    "metrics",
    "training",
    "codecs",
    "fleets",
    "partitions",
    "rank_policies",
    "schedules",
    "channels",
    "downlinks",
    "allocations",
    "availabilities",
    "samplings",
    "secure",
    "backends",
    "problems",
    "solvers",
]
_FUNCTIONS = ("run", "solve", "tune", "benchmark", "compare", "site", "submit", "load_run", "rounds", "iterations")
_HOMES = {
    **dict.fromkeys(_FUNCTIONS, "narrowcast.api"),
    "Experiment": "narrowcast.experiment",
    "Solve": "narrowcast.solve_run",
    "SolveResult": "narrowcast.runs.result",
    "Result": "narrowcast.runs.result",
    "Comparison": "narrowcast.runs.comparison",
    "ClusterJob": "narrowcast.cluster.job",
    "UserError": "narrowcast.platform.errors",
    "RunFailed": "narrowcast.platform.errors",
}


def namespace(name: str) -> Namespace:
    """Return the classes of one part of an experiment, such as `models`."""
    return getattr(import_module("narrowcast.api"), name)


def __getattr__(name: str) -> Any:
    if name == "algorithms":  # a package of this one too, which bears the same classes
        return import_module("narrowcast.algorithms")
    if name not in __all__:
        raise AttributeError(f"module 'narrowcast' has no attribute '{name}'")
    value = getattr(import_module(_HOMES[name]), name) if name in _HOMES else namespace(name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
