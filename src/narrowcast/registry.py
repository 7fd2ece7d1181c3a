"""All registries: kind -> class, from the catalog, an entry point or `package.module:Class`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from narrowcast.catalog import REGISTRIES as OF_EXPERIMENTS
from narrowcast.platform.errors import UserError
from narrowcast.platform.kinds import Registry, members
from narrowcast.tuning.pruning import PRUNERS
from narrowcast.tuning.samplers import SAMPLERS

REGISTRIES: Mapping[str, Registry] = {**OF_EXPERIMENTS, "sampler": SAMPLERS, "pruner": PRUNERS}
"""By name: those of experiments, and those of studies."""


def _asked_for(registry: Registry) -> str:
    """Return a few of the members that a contract asks for."""
    asked = sorted(members(registry.contract))
    return ", ".join(asked[:3]) + (", ..." if len(asked) > 3 else "")


def registry_of(found: Any, spec: str) -> Registry:
    """Return the registry whose contract a class keeps; raise `UserError` if it keeps none, or several."""
    keeping, refusals = [], []
    for registry in REGISTRIES.values():
        try:
            registry.checked(found, spec)
            keeping.append(registry)
        except UserError as error:
            refusals.append((": it lacks" not in str(error), -registry.offered(found), str(error).count(","), error))
    # A contract that asks for nothing but what another asks for too says less: a sampler's make is a pruner's as well.
    most = max((registry.size for registry in keeping), default=0)
    likely = [registry for registry in keeping if registry.size == most]
    if len(likely) == 1:
        return likely[0]
    if not likely and not any(registry.offered(found) for registry in REGISTRIES.values()):
        kinds = ", ".join(f"{name} ({_asked_for(registry)})" for name, registry in REGISTRIES.items() if registry.size)
        raise UserError(f"{spec} is of no kind: it has none of the methods that one asks for: {kinds}")
    if not likely:
        raise min(refusals, key=lambda refusal: refusal[:-1])[-1]  # of the contract that it comes nearest to
    names = ", ".join(registry.name for registry in likely)
    raise UserError(f"{spec} may be of several kinds: {names}; say which with --kind")
