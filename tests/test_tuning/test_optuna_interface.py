"""Tuning uses Optuna's public interface only."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from narrowcast import tuning

FILES = sorted(Path(tuning.__file__).parent.glob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_no_private_name_of_another_package_is_used(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            parts = [*str(node.module).split("."), *(alias.name for alias in node.names)]
            private = any(part.startswith("_") for part in parts) and parts[0] not in ("__future__", "narrowcast")
            assert not private, f"{path.name}:{node.lineno} imports a private name"
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
            own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            assert own, f"{path.name}:{node.lineno} uses the private name {node.attr}"
