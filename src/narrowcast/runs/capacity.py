"""Whether a cluster has room for what an experiment asks for, told before anything that takes seconds to import is."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import ValidationError

from narrowcast.cluster.dashboard import Dashboard
from narrowcast.cluster.resources import HostResources
from narrowcast.platform.config import apply_overrides
from narrowcast.runs.packaged import read_experiment, read_study


def check_capacity(source: str, overrides: Sequence[str], dashboard: Dashboard) -> None:
    """Raise `UserError` where the client hosts could never run, however idle the cluster is.

    A study starts its own workers, and a section that is no good is told by whoever reads all of the file.
    """
    if read_study(source, overrides) is not None:
        return
    backend = apply_overrides(read_experiment(source)[0], overrides).get("backend", {})
    try:
        resources = HostResources.model_validate({"kind": backend} if isinstance(backend, str) else backend)
    except ValidationError:
        return
    dashboard.check_fits(resources.least_actors, resources.need())
