"""Code from outside the package: classes by `package.module:Class` or entry point, their files, and optional libraries.

A run keeps copies of the files that its classes come from, so that it is resumed with the code that it began with. A
library that only an extra of the package brings is named with that extra where it is missing.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import importlib.metadata
import importlib.util
import json
import re
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from types import ModuleType
from typing import Any

from narrowcast.platform.config.trust import check_may_run, own_files, read_json
from narrowcast.platform.errors import UserError, described
from narrowcast.platform.storage.disk import write_atomically

GROUP = "narrowcast"
"""The group of entry points; a name is REGISTRY.KIND, such as algorithm.fedavgm."""

_ORIGINS = "origins.json"
_SPEC = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*$")
_loaded: dict[str, Path] = {}  # as sys.modules is: what this process imported, top-level module -> its file or folder


@lru_cache
def entry_points(registry: str) -> Mapping[str, str]:
    """Return kind -> module:Class of the installed packages' entry points for one registry."""
    prefix = f"{registry}."
    points = importlib.metadata.entry_points(group=GROUP)
    return {point.name.removeprefix(prefix): point.value for point in points if point.name.startswith(prefix)}


def load(spec: str, folders: Iterable[Path] = ()) -> Any:
    """Return `package.module:Class`, imported from the first of the folders that has it, or from what is installed.

    Raise `UserError` if the module or the class cannot be had, or if the file that names it is only looked at.
    Importing runs the module's code.
    """
    check_may_run(spec)
    return load_installed(spec, folders)


def load_installed(spec: str, folders: Iterable[Path] = ()) -> Any:
    """Return the class of an entry point, which the user has installed, whether a file is run or only looked at."""
    path, _, name = spec.partition(":")
    if not all(part.isidentifier() for part in (*path.split("."), *name.split("."))):
        raise UserError(f'"{spec}" is not a class; write package.module:Class')
    module = _import(path, list(folders))
    member: Any = module
    for part in name.split("."):
        try:
            member = getattr(member, part)
        except AttributeError as error:
            classes = sorted(name for name, value in vars(module).items() if _is_class_of(value, path))
            raise UserError(
                f"{path} ({module.__file__}) has no {name}; its classes: {', '.join(classes) or 'none'}"
            ) from error
    record(path)
    return member


def _is_class_of(value: Any, module: str) -> bool:
    return isinstance(value, type) and value.__module__ == module


def _import(path: str, folders: list[Path]) -> ModuleType:
    top = path.partition(".")[0]
    source = next((candidate for folder in folders if (candidate := _source_in(folder, top)) is not None), None)
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
        raise UserError(f"{path} cannot be imported: {said(error)}") from error
    except (Exception, SystemExit) as error:
        raise UserError(f"{path} cannot be imported: {said(error)}") from error
    return module


def said(error: BaseException) -> str:
    """Return the kind, first line and place of an error, as one line; the place in a module of the user, if any."""
    where, trace, of_user = "", error.__traceback__, False
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if not file.startswith("<") and Path(file).parent.name not in ("importlib", "platform"):
            is_own = not _is_installed(Path(file)) and not Path(file).is_relative_to(Path(__file__).parents[2])
            if is_own or not of_user:
                where, of_user = f" ({Path(file).name}, line {trace.tb_lineno})", is_own
        trace = trace.tb_next
    return f"{described(error)}{where}"


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
        # Python's own processes, and Ray's, put the current directory before everything else.
        origin = None if spec is None or spec.origin is None else Path(spec.origin)
        clash = _source_in(Path.cwd(), top) or (origin and _top_of(origin))
    else:
        file = vars(loaded).get("__file__")
        clash = None if file is None else _top_of(Path(file))
    if clash == source or (clash is not None and _contents(clash) == _contents(source)):
        return
    raise UserError(
        f"{source}: another module is called {top} too ({clash or 'of Python itself'}) and would be imported in its "
        "place; rename one of them, or start a new process from another folder"
    )


def _contents(source: Path) -> dict[str, str]:
    return {path: _digest(file) for path, file in _files(source).items()}


def _top_of(file: Path) -> Path:
    file = file.resolve()
    return file.parent if file.name == "__init__.py" else file


def record(module: str) -> None:
    """Remember a module that did not come with narrowcast, so that other processes can be given it."""
    top = module.partition(".")[0]
    file = vars(sys.modules[top]).get("__file__") if top in sys.modules else None
    if top not in (GROUP, "__main__") and file is not None and not _is_installed(Path(file)):
        _loaded[top] = _top_of(Path(file))


def _is_installed(file: Path) -> bool:
    if not {"site-packages", "dist-packages"}.isdisjoint(file.parts):  # an environment may add those of another
        return True
    return any(file.is_relative_to(sysconfig.get_path(scheme)) for scheme in ("purelib", "platlib", "stdlib"))


def loaded() -> list[Path]:
    """Return the file or folder of each top-level module that this process took plugins from, and of what they import.

    Installed packages are left out: other machines have them installed too. So are files that have been removed since,
    and what a file imports that is not valid Python: an earlier run of this process may have been refused for them.
    """
    present = {top: source for top, source in _loaded.items() if source.exists()}
    return list(_with_imported(present, _imports_if_valid).values())


def files_of(values: Any, folders: Iterable[Path] = ()) -> dict[str, Path]:
    """Return the files of the modules that plain values name, by the path at which they can be imported.

    Modules are those that this process took plugins from, else those in the folders; none is imported here.
    """
    searched = list(folders)
    tops = {}
    for top in (spec.partition(":")[0].partition(".")[0] for spec in specs_in(values)):
        sources = (candidate for folder in searched if (candidate := _source_in(folder, top)) is not None)
        if (source := _loaded.get(top) or next(sources, None)) is not None:
            tops[top] = source
    return {path: file for source in _with_imported(tops, _imports).values() for path, file in _files(source).items()}


def is_own(value: object) -> bool:
    """Return whether the class of an object comes with narrowcast."""
    return type(value).__module__.partition(".")[0] == GROUP


def named_in(values: Any) -> bool:
    """Return whether plain values name a class or factory as module:name."""
    return any(True for _ in specs_in(values))


def line_of(error: BaseException) -> str:
    """Return the innermost line of an error's traceback in a file that plugins come from, such as (a.py, line 3)."""
    sources = loaded()
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        file = Path(frame.filename)
        if any(file == source or source in file.parents for source in sources):
            return f"({file.name}, line {frame.lineno})"
    return ""


def specs_in(values: Any) -> Iterator[str]:
    """Yield each class or factory that plain values name as module:name."""
    if isinstance(values, str) and _SPEC.match(values):
        yield values
    elif isinstance(values, Mapping):
        yield from (spec for part in values.values() for spec in specs_in(part))
    elif isinstance(values, list | tuple):
        yield from (spec for part in values for spec in specs_in(part))


def _with_imported(tops: Mapping[str, Path], imports: Callable[[Path], set[str]]) -> dict[str, Path]:
    """Return these modules and those beside them that they import, at the top of a file or inside a function."""
    modules: dict[str, Path] = {}
    queue = list(tops.items())
    while queue:
        top, source = queue.pop()
        if top in modules:
            continue
        modules[top] = source
        for file in _files(source).values():
            names = imports(file) if file.suffix == ".py" else ()
            queue += [(name, beside) for name in names if (beside := _source_in(source.parent, name)) is not None]
    return dict(sorted(modules.items()))


def _imports(file: Path) -> set[str]:
    """Return the top-level names that a source file imports."""
    names: set[str] = set()
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError) as error:  # ValueError: null bytes
        raise UserError(
            f"{file}: not valid Python ({error}); fix it, or move it away from the modules beside it"
        ) from None
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.partition(".")[0])
    return names


def _imports_if_valid(file: Path) -> set[str]:
    with suppress(UserError):
        return _imports(file)
    return set()


def _files(source: Path) -> dict[str, Path]:
    """Return the files of a module or package by their path below its parent folder."""
    if source.is_file():
        return {source.name: source}
    files = (file for file in own_files(source) if "__pycache__" not in file.parts)
    return {str(file.relative_to(source.parent)): file for file in files}


def _digest(file: Path) -> str:
    """Return the sha256 of a file's content, empty if there is no file."""
    return hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else ""


def keep(values: Any, folder: Path) -> None:
    """Copy the files of `files_of`, so that a run can be resumed with the code it began with.

    `origins.json` beside them has, for each, the place that it was copied from and its sha256.
    """
    origins: dict[str, dict[str, str]] = {}
    for path, file in files_of(values).items():
        target = folder / path
        if not target.exists():
            write_atomically(target, file.read_bytes())
        origins[path] = {"from": str(file), "sha256": _digest(target)}
    if origins and not (folder / _ORIGINS).exists():
        write_atomically(folder / _ORIGINS, (json.dumps(origins, indent=2) + "\n").encode())


def changed(folder: Path) -> list[Path]:
    """Return the files that have changed since they were copied into this folder by `keep`; removed ones have not."""
    if not (folder / _ORIGINS).is_file():
        return []
    remedy = "remove it, and the run resumes with its copies"
    origins = read_json(folder / _ORIGINS, remedy)
    try:
        files = {Path(origin["from"]): str(origin["sha256"]) for origin in origins.values()}
        return [file for file, sha256 in files.items() if file.is_file() and _digest(file) != sha256]
    except (KeyError, TypeError, ValueError, OSError) as error:
        raise UserError(f"{folder / _ORIGINS}: damaged ({error}); {remedy}") from error


def check_same(values: Any, folder: Path) -> None:
    """Raise `UserError` if the files of `files_of` are not those that a run began with, as far as it has any."""
    for path, file in files_of(values).items():
        if (folder / path).is_file() and _digest(file) != _digest(folder / path):
            raise UserError(
                f"{file} is not what the run began with, which is kept as {folder / path}; resume without naming the "
                "experiment to go on with that, or start a new run"
            )


EXTRA_OF = {
    **{"ray": "ray", "optuna": "tune", "cmaes": "tune", "plotly": "tune", "mlflow": "ui", "aiohttp": "cluster"},
    "pymetis": "graphs",
    **dict.fromkeys(("gguf", "tokenizers", "transformers"), "transformers"),
}
"""The extra of each library; without `ui`, MLflow is its small distribution, mlflow-skinny, which has no server."""


def check_installed(library: str, wanted_by: str) -> None:
    """Raise a `UserError` that names the extra if the library is not installed."""
    try:
        distribution(library)
    except PackageNotFoundError as error:
        raise UserError(missing_extra_message(library, wanted_by)) from error


def missing_extra_message(library: str, wanted_by: str) -> str:
    """Return the line for a library that is missing."""
    return f"{wanted_by} needs {library}, which is not installed; pip install 'narrowcast[{EXTRA_OF[library]}]'"
