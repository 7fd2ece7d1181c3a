"""The classes that experiments are made of, by their names: `nc.data.Digits`, `nc.models.MLP`, `nc.codecs.Quantise`."""

from __future__ import annotations

from typing import Any

from narrowcast.platform import plugins
from narrowcast.platform.config import suggest

REGISTRY_NAMES = {
    "aggregators": "aggregator",
    "algorithms": "algorithm",
    "allocations": "allocation",
    "availabilities": "availability",
    "backends": "backend",
    "channels": "channel",
    "codecs": "codec",
    "data": "data",
    "downlinks": "downlink",
    "fleets": "fleet",
    "learning_rate_schedules": "learning_rate_schedule",
    "server_optimizers": "server_optimizer",
    "losses": "loss",
    "metrics": "metric",
    "models": "model",
    "partitions": "partition",
    "problems": "problem",
    "rank_policies": "rank_policy",
    "schedules": "schedule",
    "secure": "secure",
    "solvers": "solver",
    "training": "training",
}


class Namespace:
    """The classes of one registry: those of the catalog, and those of installed packages by their entry points.

    They are imported when one of them is first used.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def _kinds(self) -> dict[str, str]:
        """Return the kind of each class by the name of the class."""
        from narrowcast.catalog import REGISTRIES

        registry = REGISTRIES[REGISTRY_NAMES[self._name]]
        installed = {spec.rpartition(":")[2]: kind for kind, spec in plugins.entry_points(registry.name).items()}
        return installed | {name: kind for kind, name in registry.names().items()}

    def __getattr__(self, name: str) -> Any:
        if not name[:1].isupper():  # no class, but what Python and IPython look for in any object
            raise AttributeError(f"narrowcast.{self._name} has no {name}")
        from narrowcast.catalog import REGISTRIES

        kinds = self._kinds()
        if name not in kinds:
            known = ", ".join(kinds)
            raise AttributeError(f"narrowcast.{self._name} has no {name}; it has {known}{suggest(name, kinds)}")
        return REGISTRIES[REGISTRY_NAMES[self._name]].resolve(kinds[name])

    def __dir__(self) -> list[str]:
        return list(self._kinds())

    def __repr__(self) -> str:
        return f"narrowcast.{self._name}: {', '.join(self._kinds())}"


def __getattr__(name: str) -> Namespace:
    if name not in REGISTRY_NAMES:
        raise AttributeError(name)
    return Namespace(name)
