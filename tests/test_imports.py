"""Who may import whom, read from the sources."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))
from structure import SCOPES, Graph, circles, graph, sources

# What a room may import of the package besides itself and `_version`: at the top, in functions and for types alike.
_KINDS = {"platform", "algorithms", "solves", "cluster"}
_FILES = {*_KINDS, "packaged", "experiment", "solve_run", "runs"}
MAY_IMPORT: dict[str, set[str]] = {
    "_version": set(),
    "platform": set(),
    "algorithms": {"platform", "solves"},  # the cut of a cohort over two bands
    "solves": {"platform"},
    "cluster": {"platform"},
    "packaged": {"platform"},
    "experiment": {*_KINDS, "packaged"},
    "solve_run": {*_KINDS, "packaged", "experiment"},
    "runs": {*_KINDS, "packaged", "experiment", "solve_run", "laws"},
    "laws": {*_FILES, "tuning"},
    "tuning": {*_FILES, "laws"},
    "benchmarking": {*_FILES, "laws"},
    "studies": {*_FILES, "laws"},
    "api": {*_FILES, "tuning", "benchmarking"},
    "extend": {*_FILES, "tuning"},
    "narrowcast": {*_FILES, "api"},
    "reference": {*_FILES, "tuning", "benchmarking", "api"},
    "cli": {*_FILES, "laws", "tuning", "benchmarking", "studies", "api", "reference"},
    "__main__": {"cli"},
}
ONLY_IN = {"ray": "cluster", "optuna": "tuning", "mlflow": "platform.tracking"}
OF_PLATFORM = (
    *("types", "contracts", "traits", "solving", "seeds", "errors", "compiled", "config", "data", "models"),
    *("storage.disk", "rounds.adversary", "rounds.client_contracts", "rounds.ledger"),
)
"""What algorithms may import of it."""


@pytest.fixture(scope="module")
def modules() -> dict[str, ast.Module]:
    return sources()


@pytest.fixture(scope="module")
def imports(modules: dict[str, ast.Module]) -> Graph:
    return graph(modules)


def room_of(module: str) -> str:
    return [*module.split("."), "narrowcast"][1]


def crossings(imports: Graph) -> list[str]:
    """Return the imports that lead from a room to one that it may not import."""
    return [
        f"{module} imports {other}"
        for module, by_scope in imports.items()
        for other in sorted(set().union(*by_scope.values()))
        if room_of(other) not in {"_version", room_of(module), *MAY_IMPORT[room_of(module)]}
    ]


def test_a_room_imports_the_rooms_below_it(imports: Graph) -> None:
    assert crossings(imports) == ["narrowcast.algorithms imports narrowcast"]  # it is `nc.algorithms` too


def test_every_room_and_file_at_the_top_has_its_rule(imports: Graph) -> None:
    assert {room_of(module) for module in imports} == set(MAY_IMPORT)


@pytest.mark.parametrize(
    "text",
    [
        "from narrowcast import cluster",
        "import narrowcast.cluster.hosts",
        "from narrowcast.cluster.hosts import X",
        "def f():\n    from narrowcast import cluster",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import narrowcast.runs.session",
        "from narrowcast.extend import Task",
    ],
)
def test_the_rules_see_every_way_to_import(text: str) -> None:
    there = dict.fromkeys(("cluster", "cluster.hosts", "runs.session", "extend"), "")
    planted = graph({f"narrowcast.{name}": ast.parse(of) for name, of in {**there, "platform.types": text}.items()})
    (seen,) = crossings(planted)
    assert seen.startswith("narrowcast.platform.types imports narrowcast.")


def test_algorithms_import_types_and_contracts_of_the_platform(imports: Graph) -> None:
    used = {
        other.removeprefix("narrowcast.platform.")
        for module, by_scope in imports.items()
        if room_of(module) in ("algorithms", "solves")
        for other in set().union(*by_scope.values())
        if room_of(other) == "platform"
    }
    assert not [other for other in used if not f"{other}.".startswith(tuple(f"{name}." for name in OF_PLATFORM))]


def test_engines_are_imported_in_one_room_each(modules: dict[str, ast.Module]) -> None:
    for module, tree in modules.items():
        for node in ast.walk(tree):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{module}: relative import"
                names = [str(node.module)]
            for name in names:
                home = ONLY_IN.get(name.split(".")[0])
                assert home is None or module.startswith(f"narrowcast.{home}."), f"{module} imports {name}"


def test_no_modules_import_one_another(imports: Graph) -> None:
    assert circles(imports, SCOPES) == []  # at the top, in functions and for types alike


def test_attacks_are_imported_by_what_makes_them_alone(imports: Graph) -> None:
    attacks = "narrowcast.algorithms.attacks"
    importers = {module for module, by_scope in imports.items() if any(attacks in name for name in _names(by_scope))}
    assert {module for module in importers if not module.startswith(attacks)} == {"narrowcast.runs.attack_trial"}
    trials = {module for module, by_scope in imports.items() if "narrowcast.runs.attack_trial" in _names(by_scope)}
    assert trials == {"narrowcast.extend"}  # by name, and for types


def _names(by_scope: dict[str, set[str]]) -> set[str]:
    return set().union(*by_scope.values())


HEAVY = {"torch", "ray", "mlflow", "numba", "matplotlib", "pandas", "optuna", "sklearn", "scipy", "requests", "plotly"}


@pytest.mark.parametrize(
    ("module", "wanted"),
    [
        ("narrowcast", set()),
        ("narrowcast.cli.main", set()),
        ("narrowcast.runs.session", {"torch"}),
        ("narrowcast.runs.comparison", set()),
        ("narrowcast.studies.targets", set()),  # of `reproduce --list`
    ],
)
def test_what_takes_long_to_import_waits_until_it_is_used(module: str, wanted: set[str]) -> None:
    program = f"import sys, {module}; print(*sys.modules)"
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert HEAVY.intersection(said.stdout.split()) <= wanted
