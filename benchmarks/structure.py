"""The structure of the package: files, circles of imports, probes, names, files that a walk enters, moved functions.

    python benchmarks/structure.py counts                 files, lines, circles, probes and names
    python benchmarks/structure.py walks                  files entered by a round, `run`, `tune` and a solve
    python benchmarks/structure.py moved REVISION         functions that differ from those of a revision

`moved` finds a function by its syntax tree, wherever it stands: a commit that moves code changes none.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import json
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from statistics import median
from types import FrameType
from typing import Literal

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "narrowcast"
SHORT, LONG = 80, 600
PRONOUNS = {
    *("each", "found", "place", "places", "one", "another", "said", "here"),
    *("there", "these", "those", "some", "both", "its", "everybody"),
}
COMPREHENSIONS = {"<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>"}
Scope = Literal["top", "function", "type"]
SCOPES: tuple[Scope, ...] = ("top", "function", "type")
Graph = Mapping[str, Mapping[Scope, set[str]]]


def module_of(path: Path) -> str:
    """Return the dotted name of a file of the package."""
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def sources() -> dict[str, ast.Module]:
    """Return the syntax tree of each module."""
    return {module_of(path): ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}


def imported(tree: ast.Module, modules: Mapping[str, ast.Module]) -> dict[Scope, set[str]]:
    """Return the modules of the package that a module imports: at its top, in functions, or for types alone."""
    by_scope: dict[Scope, set[str]] = {scope: set() for scope in SCOPES}

    def visit(node: ast.AST, scope: Scope) -> None:
        for child in ast.iter_child_nodes(node):
            inner = scope
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
                inner = "function"
            elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
                inner = "type"
            if isinstance(child, ast.Import):
                by_scope[scope] |= {alias.name for alias in child.names if alias.name in modules}
            elif isinstance(child, ast.ImportFrom) and child.module:
                names = {f"{child.module}.{alias.name}" for alias in child.names}
                deeper = {name for name in names if name in modules}
                by_scope[scope] |= deeper
                if child.module in modules and len(deeper) < len(names):
                    by_scope[scope].add(child.module)
            visit(child, inner)

    visit(tree, "top")
    return by_scope


def graph(modules: Mapping[str, ast.Module]) -> Graph:
    """Return what each module of the package imports of it, by scope."""
    return {name: imported(tree, modules) for name, tree in modules.items()}


def circles(imports: Graph, scopes: Sequence[Scope]) -> list[list[str]]:
    """Return the groups of modules that import one another in a circle, by the imports of these scopes."""
    edges = {name: {other for scope in scopes for other in of[scope]} - {name} for name, of in imports.items()}
    rings: list[list[str]] = []
    while True:
        try:
            TopologicalSorter(edges).prepare()
            return rings
        except CycleError as error:
            start = error.args[1][0]
            ring = {module for module in _reached(edges, start) if start in _reached(edges, module)}
            rings.append(sorted(ring))
            edges = {name: others - ring for name, others in edges.items() if name not in ring}


def _reached(edges: Mapping[str, set[str]], start: str) -> set[str]:
    seen, waiting = set[str](), [start]
    while waiting:
        for other in edges.get(waiting.pop(), ()):
            if other not in seen:
                seen.add(other)
                waiting.append(other)
    return seen


def probes(modules: Mapping[str, ast.Module]) -> int:
    """Return how often an attribute is asked for that may be missing: abilities that are sniffed."""
    calls = (node for tree in modules.values() for node in ast.walk(tree) if isinstance(node, ast.Call))
    names = Counter((call.func.id, len(call.args)) for call in calls if isinstance(call.func, ast.Name))
    return sum(names[call] for call in (("getattr", 3), ("hasattr", 2)))


def pronouns(modules: Mapping[str, ast.Module]) -> int:
    """Return how many variables and parameters are bound by a word that does not say what they are."""
    nodes = [node for tree in modules.values() for node in ast.walk(tree)]
    names = [node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)]
    names += [node.arg for node in nodes if isinstance(node, ast.arg)]
    return sum(name in PRONOUNS for name in names)


def counts() -> dict[str, int]:
    """Return the figures of the package as it lies there."""
    modules, paths = sources(), sorted(PACKAGE.rglob("*.py"))
    imports = graph(modules)
    lines = [len(path.read_text().splitlines()) for path in paths]
    bodies = [size for size, path in zip(lines, paths, strict=True) if path.name != "__init__.py"]
    return {
        "files": len(paths),
        "lines": sum(lines),
        "median lines": int(median(bodies)),
        f"files below {SHORT} lines": sum(size < SHORT for size in bodies),
        f"files above {LONG} lines": sum(size > LONG for size in bodies),
        "loose modules of platform/": len(list((PACKAGE / "platform").glob("[!_]*.py"))),
        "circles, imports at the top": len(circles(imports, ["top"])),
        "circles, those in functions too": len(circles(imports, ["top", "function"])),
        "circles, those for types too": len(circles(imports, SCOPES)),
        "probes of attributes": probes(modules),
        "names that are pronouns": pronouns(modules),
    }


WALKS = {
    "round of scolr-ml100k": ("round", []),
    "the same, coded": ("round", ["algorithm.codec=[quantise, entropy]"]),
    "run scolr-ml100k": ("command", ["run", "scolr-ml100k", "rounds=3", "--backend", "local"]),
    "run a solve": ("command", ["run", "completion-ill-conditioned", "iterations=3"]),
    "tune": (
        "command",
        ["tune", "scolr-ml100k-rank-bits", "study.trials=3", "experiment.rounds=3", "study.holdout.trials=0"],
    ),
}
"""A round in this process, and commands, by what they are given. Data: MovieLens-100K."""


def walk(kind: str, words: list[str]) -> tuple[int, int, int]:
    """Return how many files of the package a walk enters, in how many functions, and the modules that it loads."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "entered", kind, json.dumps(words)]
        output = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout
    files, functions, loaded = json.loads(output.splitlines()[-1])
    return files, functions, loaded


def entered(kind: str, words: list[str]) -> tuple[int, int, int]:
    """Take a walk in this process, and note its functions; bodies of modules and classes are not counted.

    A comprehension at the top of a module is its body, as which Python 3.12 runs most of them.
    """
    functions, home = set[tuple[str, str]](), str(PACKAGE)

    def note(frame: FrameType, event: str, argument: object) -> None:
        del argument
        code = frame.f_code
        is_body = code.co_qualname in COMPREHENSIONS or not code.co_flags & inspect.CO_OPTIMIZED
        if event == "call" and code.co_filename.startswith(home) and not is_body:
            functions.add((code.co_filename, code.co_qualname))

    threading.setprofile(note)
    if kind == "round":
        from narrowcast.experiment import load_experiment
        from narrowcast.platform.rounds.loop import LocalBackend
        from narrowcast.platform.rounds.state import Run, start

        experiment = load_experiment("scolr-ml100k", words)
        run = Run(experiment, experiment.secured_algorithm, experiment.task(experiment.data_source.load()))
        outcomes = LocalBackend().run(run, start(run))
        sys.setprofile(note)
        next(outcomes)
    else:
        from narrowcast.cli.main import cli

        sys.setprofile(note)
        with suppress(SystemExit):
            cli(words, "narrowcast")
    sys.setprofile(None)
    loaded = sum(name.split(".")[0] == "narrowcast" for name in sys.modules)
    return len({file for file, _ in functions}), len(functions), loaded


def functions_of(texts: Iterator[str]) -> Counter[str]:
    """Return every function and method by its syntax tree, docstring included, and how often it stands there."""
    functions = Counter[str]()
    for text in texts:
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                functions[f"{node.name} {ast.dump(node)}"] += 1
    return functions


def moved(revision: str) -> tuple[list[str], list[str]]:
    """Return the functions of a revision that are no longer there as they were, and those that are new."""

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout

    names = git("ls-tree", "-r", "--name-only", revision, "src/narrowcast").split()
    before = functions_of(git("show", f"{revision}:{name}") for name in names if name.endswith(".py"))
    after = functions_of(path.read_text() for path in PACKAGE.rglob("*.py"))
    gone, new = (
        sorted(function.partition(" ")[0] for function in ones.elements()) for ones in (before - after, after - before)
    )
    return gone, new


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["counts", "walks", "moved", "entered"])
    parser.add_argument("words", nargs="*")
    given = parser.parse_args()
    if given.what == "entered":  # by `walk`, in a process of its own
        print(json.dumps(entered(given.words[0], json.loads(given.words[1]))))
    elif given.what == "counts":
        _print(["", "now"], [[name, f"{count:,}"] for name, count in counts().items()])
    elif given.what == "walks":
        rows = [[name, *map(str, walk(*walk_of))] for name, walk_of in WALKS.items()]
        _print(["walk", "files entered", "functions", "modules loaded"], rows)
    else:
        gone, new = moved(*given.words)
        print(f"{len(gone)} functions are gone or changed: {', '.join(gone)}")
        print(f"{len(new)} functions are new or changed: {', '.join(new)}")


def _print(head: list[str], rows: list[list[str]]) -> None:
    table = Table(*head)
    for row in rows:
        table.add_row(*row)
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
