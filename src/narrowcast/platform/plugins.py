"""Classes from outside the package: found by `package.module:Class` or entry point, and the files they come from."""

from __future__ import annotations

import ast
import hashlib
import importlib
import importlib.metadata
import importlib.util
import sys
import sysconfig
from collections.abc import Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

from narrowcast.platform.errors import UserError

GROUP = "narrowcast"
"""The group of entry points; a name is REGISTRY.KIND, such as algorithm.fedavgm."""

_loaded: dict[str, Path] = {}  # as sys.modules is: what this process imported, top-level module -> its file or folder


@lru_cache
def entry_points(registry: str) -> Mapping[str, str]:
    """Return kind -> module:Class of the installed packages' entry points for one registry."""
    prefix = f"{registry}."
    found = importlib.metadata.entry_points(group=GROUP)
    return {each.name.removeprefix(prefix): each.value for each in found if each.name.startswith(prefix)}


def load_class(spec: str, folders: Iterable[Path] = ()) -> Any:
    """Import `package.module:Class` from the first of the folders that has it, or from what is installed.

    Raise `UserError` if the module or the class cannot be had. Importing runs the module's code.
    """
    path, _, name = spec.partition(":")
    if not all(part.isidentifier() for part in (*path.split("."), *name.split("."))):
        raise UserError(f'"{spec}" is not a class; write package.module:Class')
    module = _import(path, list(folders))
    found: Any = module
    for part in name.split("."):
        if not hasattr(found, part):
            there = sorted(each for each, value in vars(module).items() if _is_defined_in(value, path))
            raise UserError(f"{path} ({module.__file__}) has no {name}; its classes: {', '.join(there) or 'none'}")
        found = getattr(found, part)
    if isinstance(found, type):
        record(found)
    return found


def _is_defined_in(value: Any, module: str) -> bool:
    return isinstance(value, type) and value.__module__ == module


def _import(path: str, folders: list[Path]) -> ModuleType:
    top = path.partition(".")[0]
    source = next((each for folder in folders if (each := _source_in(folder, top)) is not None), None)
    if source is not None:
        _make_importable(top, source)
    try:
        module = importlib.import_module(path)
    except ModuleNotFoundError as error:
        if error.name is not None and (path == error.name or path.startswith(f"{error.name}.")):
            where = ", ".join(dict.fromkeys(str(folder.absolute()) for folder in folders))
            raise UserError(
                f"no module {error.name}: neither installed nor in {where or 'a folder of the experiment'}; put "
                f"{error.name.partition('.')[0]}.py beside the experiment's file"
            ) from error
        raise UserError(f"{path} cannot be imported: {_said(error)}") from error
    except (Exception, SystemExit) as error:
        raise UserError(f"{path} cannot be imported: {_said(error)}") from error
    return module


def _said(error: BaseException) -> str:
    """Return the kind, first line and place of an error, as one line."""
    where, trace = "", error.__traceback__
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if not file.startswith("<frozen") and Path(file).parent.name not in ("importlib", "platform"):
            where = f" ({Path(file).name}, line {trace.tb_lineno})"
        trace = trace.tb_next
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else 'no message'}{where}"


def _source_in(folder: Path, top: str) -> Path | None:
    """Return the file or package folder of a top-level module in a folder."""
    if (folder / top / "__init__.py").is_file():
        return (folder / top).resolve()
    return (folder / f"{top}.py").resolve() if (folder / f"{top}.py").is_file() else None


def _make_importable(top: str, source: Path) -> None:
    """Let `top` be imported from this file or folder; raise `UserError` if another module has the name."""
    loaded = sys.modules.get(top)
    if loaded is None:
        # At the end, so that a file of the user's never hides a module of Python's or of an installed package.
        if str(source.parent) not in sys.path:
            sys.path.append(str(source.parent))
        importlib.invalidate_caches()
        spec = importlib.util.find_spec(top)
        found = None if spec is None or spec.origin is None else _top_of(Path(spec.origin))
    else:
        file = getattr(loaded, "__file__", None)
        found = None if file is None else _top_of(Path(file))
    if found == source or (found is not None and _digest(_files(found)) == _digest(_files(source))):
        return
    raise UserError(
        f"{source}: another module is called {top} already ({found or 'of Python itself'}); rename one of them, or "
        "start a new process"
    )


def _top_of(file: Path) -> Path:
    file = file.resolve()
    return file.parent if file.name == "__init__.py" else file


def record(found: type) -> None:
    """Remember the files of a class that did not come with narrowcast, so that other processes can be given them."""
    top = found.__module__.partition(".")[0]
    file = getattr(sys.modules.get(top), "__file__", None)
    if top not in ("narrowcast", "__main__") and file is not None and not _is_installed(Path(file)):
        _loaded[top] = _top_of(Path(file))


def _is_installed(file: Path) -> bool:
    return any(file.is_relative_to(sysconfig.get_path(each)) for each in ("purelib", "platlib", "stdlib"))


def loaded() -> dict[str, Path]:
    """Return the top-level modules that this process took plugins from, with those beside them that they import."""
    found: dict[str, Path] = {}
    queue = list(_loaded.items())
    while queue:
        top, source = queue.pop()
        if top in found:
            continue
        found[top] = source
        for file in _files(source).values():
            names = _imports(file) if file.suffix == ".py" else ()
            queue += [(name, beside) for name in names if (beside := _source_in(source.parent, name)) is not None]
    return dict(sorted(found.items()))


def _imports(file: Path) -> set[str]:
    """Return the top-level names that a source file imports."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_bytes())):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.partition(".")[0])
    return names


def _files(source: Path) -> dict[str, Path]:
    """Return the files of a module or package by their path below its parent folder."""
    if source.is_file():
        return {source.name: source}
    files = (each for each in sorted(source.rglob("*")) if each.is_file() and "__pycache__" not in each.parts)
    return {str(each.relative_to(source.parent)): each for each in files}


def files() -> dict[str, Path]:
    """Return the files of all modules of `loaded`, by the path at which they can be imported."""
    return {path: file for source in loaded().values() for path, file in _files(source).items()}


def _digest(files: Mapping[str, Path]) -> str:
    """Return the sha256 of names and contents."""
    digest = hashlib.sha256()
    for path, file in sorted(files.items()):
        content = file.read_bytes()
        digest.update(f"{path} {len(content)}\n".encode() + content)
    return digest.hexdigest()
