"""The one module that plugins import: its names, and that no page imports anything deeper."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from narrowcast import extend
from narrowcast.platform.config.catalog import REGISTRIES

DOCS = Path(__file__).parents[1] / "docs"
PUBLIC = {"narrowcast", "narrowcast.extend", "narrowcast.studies"}


def imports_for_types() -> dict[str, str]:
    """Return name -> module of what type checkers read."""
    tree = ast.parse(Path(extend.__file__).read_text())
    nodes = (node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom))
    return {
        alias.name: str(node.module)
        for node in nodes
        for alias in node.names
        if str(node.module).startswith("narrowcast.")
    }


def test_every_name_is_that_of_its_module() -> None:
    types = imports_for_types()
    assert sorted(types) == sorted(extend.__all__)
    assert set(extend.__all__) <= set(dir(extend))
    for name, module in types.items():
        assert getattr(extend, name) is getattr(import_module(module), name)


def test_the_contract_of_every_registry_is_there() -> None:
    contracts = {registry.contract.__name__ for registry in REGISTRIES.values()}
    assert contracts <= set(extend.__all__)


def test_an_unknown_name_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'Algoritm'; it has EACH, NO_STATE, SERVER_ONLY, "):
        _ = extend.Algoritm  # type: ignore[attr-defined]


def test_importing_it_loads_neither_torch_nor_the_catalog() -> None:
    program = "import sys, narrowcast.extend; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    assert not {"torch", "numpy", "ray", "narrowcast.platform.config.catalog"}.intersection(loaded)


def texts() -> list[Path]:
    pages = [DOCS.parent / "README.md", *sorted(DOCS.rglob("*.md")), *sorted((DOCS / "examples").glob("*.py"))]
    return [page for page in pages if "reference" not in page.parts]


@pytest.mark.parametrize("page", texts(), ids=lambda page: str(page.relative_to(DOCS.parent)))
def test_no_page_imports_anything_deeper(page: Path) -> None:
    found = re.findall(r"^(?:from|import) (narrowcast[\w.]*)", page.read_text(), re.MULTILINE)
    assert set(found) <= PUBLIC
