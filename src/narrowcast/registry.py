"""All registries, those of studies too; apart from the catalog, as runs need not import Optuna."""

from __future__ import annotations

from collections.abc import Mapping

from narrowcast.catalog import REGISTRIES as OF_EXPERIMENTS
from narrowcast.platform.config.kinds import Registry, spec_of
from narrowcast.platform.errors import UserError
from narrowcast.tuning.pruning import PRUNERS
from narrowcast.tuning.samplers import SAMPLERS

REGISTRIES: Mapping[str, Registry] = {**OF_EXPERIMENTS, "sampler": SAMPLERS, "pruner": PRUNERS}
"""By name: those of experiments, and those of studies."""


_NEURAL_NETWORK = "narrowcast.platform.models.neural_network:NeuralNetwork"


def registry_of(cls: object, spec: str) -> Registry:
    """Return the registry whose contract, or class of the catalog, a class extends; raise `UserError` without one."""
    extended = [registry for registry in REGISTRIES.values() if registry.is_extended_by(cls)]
    if not extended and isinstance(cls, type) and _NEURAL_NETWORK in map(spec_of, cls.__mro__):
        extended = [REGISTRIES["model"]]  # whose contract asks for no base class
    if len(extended) != 1:
        raise UserError(f"{spec} extends no class that has a kind; say its own with --kind: {', '.join(REGISTRIES)}")
    return extended[0]
