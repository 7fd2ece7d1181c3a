"""Who may import whom, read from the sources."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import narrowcast

ROOT = Path(narrowcast.__file__).parent
# What a room may import of the package; the files at its top may import everything.
_BELOW = {"_version", "experiment", "solve_run", "laws", "catalog", "registry", "platform", "algorithms", "cluster"}
MAY_IMPORT = {
    "platform": {"platform"},
    "algorithms": {"platform", "algorithms"},
    "cluster": {"_version", "platform", "cluster"},
    "runs": {*_BELOW, "runs"},
    "tuning": {*_BELOW, "runs", "tuning"},
    "benchmarking": {*_BELOW, "runs", "benchmarking"},
    "reproduce": {*_BELOW, "runs", "reproduce"},
}
ONLY_IN = {"ray": "cluster", "optuna": "tuning", "mlflow": "platform/tracking"}
OF_PLATFORM = {
    "narrowcast.platform." + name
    for name in (
        "types",
        "contracts",
        "client_contracts",
        "secure_contracts",
        "solver_contracts",
        "seeds",
        "global_generators",
        "errors",
        "kinds",
        "plugins",
        "trust",
        "section",
        "data",
        "models",
        "atomic_files",
        "disk",
        "units",
    )
}


def modules() -> list[Path]:
    return sorted(ROOT.rglob("*.py"))


def imports(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found.add(str(node.module))
    return found


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_keep_to_the_rules(path: Path) -> None:
    room = path.relative_to(ROOT).parts[0]
    for name in imports(path):
        parts = name.split(".")
        if parts[0] == "narrowcast" and len(parts) > 1 and room in MAY_IMPORT:
            assert parts[1] in MAY_IMPORT[room], f"{room} must not import {name}"
        if room == "algorithms" and parts[:2] == ["narrowcast", "platform"]:
            assert ".".join(parts[:3]) in OF_PLATFORM, f"algorithms may import only types and contracts, not {name}"
        if parts[0] in ONLY_IN:
            home = ONLY_IN[parts[0]]
            assert str(path.relative_to(ROOT)).startswith(f"{home}/"), f"{parts[0]} belongs in {home}"


def test_the_rules_see_the_rooms() -> None:
    rooms = {path.relative_to(ROOT).parts[0] for path in modules()}
    assert {
        "platform",
        "algorithms",
        "cluster",
        "tuning",
        "benchmarking",
        "runs",
        "reproduce",
        "cli",
        "catalog.py",
    } <= rooms


HEAVY = {"torch", "ray", "mlflow", "numba", "matplotlib", "pandas", "optuna", "sklearn", "scipy", "requests", "plotly"}


@pytest.mark.parametrize(
    ("module", "wanted"),
    [
        ("narrowcast", set()),
        ("narrowcast.cli.main", set()),
        ("narrowcast.runs.session", {"torch"}),
        ("narrowcast.cli.run_tables", set()),
    ],
)
def test_what_takes_long_to_import_waits_until_it_is_used(module: str, wanted: set[str]) -> None:
    program = f"import sys, {module}; print(*sys.modules)"
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert HEAVY.intersection(said.stdout.split()) <= wanted
