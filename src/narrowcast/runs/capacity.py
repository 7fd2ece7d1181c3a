"""Capacity of a cluster for an experiment, checked before imports that take seconds, such as those of `submission`."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import ValidationError

from narrowcast.cluster.dashboard import Dashboard
from narrowcast.cluster.decisions import HostResources
from narrowcast.packaged import names_solve, read_benchmark, read_experiment, read_study
from narrowcast.platform.config.files import apply_overrides


def check_capacity(source: str, overrides: Sequence[str], dashboard: Dashboard) -> None:
    """Raise `UserError` if the client hosts of an experiment could not run even on the idle cluster.

    Solves have none, and studies and benchmarks start their own workers, so these are not checked; invalid values are
    reported when the file is read.
    """
    if read_study(source, overrides) or read_benchmark(source, overrides) or names_solve(source):
        return
    backend = apply_overrides(read_experiment(source)[0], overrides).get("backend", {})
    try:
        resources = HostResources.model_validate({"kind": backend} if isinstance(backend, str) else backend)
    except ValidationError:
        return
    dashboard.check_fits(resources.least_actors, resources.need())
