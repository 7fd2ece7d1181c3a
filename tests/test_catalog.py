"""The catalog: every line names the class of its kind, and loads it when it is named."""

from __future__ import annotations

import inspect
import subprocess
import sys
from typing import ClassVar

import pytest

from narrowcast.platform.config.catalog import REGISTRIES

KINDS = [(name, kind) for name, registry in REGISTRIES.items() for kind in registry]
MOST_MODULES = {
    "from narrowcast.platform.config.catalog import REGISTRIES; [one.summaries() for one in REGISTRIES.values()]": 30,
    "narrowcast.Experiment.model_fields": 120,
    "from narrowcast.cli.main import cli; cli(['list'], standalone_mode=False)": 60,
}
"""Of the package, after a program; before a class was loaded when it is named, all had 381."""


@pytest.mark.parametrize(("name", "kind"), KINDS, ids=[f"{name}-{kind}" for name, kind in KINDS])
def test_a_line_names_the_class_of_its_kind(name: str, kind: str) -> None:
    registry = REGISTRIES[name]
    found = registry[kind]
    assert found.model_fields["kind"].default == kind
    assert registry.names()[kind] == found.__name__
    assert registry.checked(found, kind) is found
    assert registry.kind_of(found.model_construct()) == kind


@pytest.mark.parametrize("name", REGISTRIES)
def test_the_line_on_a_kind_is_the_first_of_its_docstring(name: str) -> None:
    registry = REGISTRIES[name]
    lines = {kind: inspect.getdoc(registry[kind]).split("\n\n")[0].split() for kind in registry}
    assert {kind: line.split() for kind, line in registry.summaries().items()} == lines


def test_a_class_of_the_same_name_elsewhere_is_not_that_of_the_catalog() -> None:
    class FedAvg(REGISTRIES["algorithm"]["fedavg"]):  # type: ignore[misc]
        model_config: ClassVar = {"frozen": True, "extra": "forbid"}

    assert REGISTRIES["algorithm"].kind_of(FedAvg()).endswith(":" + FedAvg.__qualname__)


def test_a_class_of_an_own_module_of_the_same_path_is_not_that_of_the_catalog() -> None:
    registry = REGISTRIES["codec"]
    own = type("TopK", (registry["top_k"],), {"__module__": "algorithms.codecs.sparsify", "__qualname__": "TopK"})
    assert registry.kind_of(own.model_construct()) == "algorithms.codecs.sparsify:TopK"


@pytest.mark.parametrize("program", MOST_MODULES)
def test_what_is_not_named_is_not_loaded(program: str) -> None:
    said = subprocess.run(
        [sys.executable, "-c", f"import narrowcast, sys; {program}; print(*sys.modules, file=sys.stderr)"],
        capture_output=True,
        text=True,
        check=True,
    )
    loaded = [module for module in said.stderr.split() if module.partition(".")[0] == "narrowcast"]
    assert "narrowcast.algorithms.federated.scaffold" not in loaded
    assert not [module for module in loaded if module.startswith("narrowcast.solves.")]
    assert len(loaded) <= MOST_MODULES[program]
