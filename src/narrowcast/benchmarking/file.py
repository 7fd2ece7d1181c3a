"""The file of a benchmark, its instances, and the folder that keeps how each of them ended.

The file has problems, solvers, seeds and the end of each solve; its instances are all combinations.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from narrowcast import packaged
from narrowcast.platform.config.fields import Matches, Name
from narrowcast.platform.config.files import (
    Defaults,
    Section,
    apply_overrides,
    command,
    flatten,
    not_a_mapping,
    plugin_folders,
    set_value,
    suggest,
    validate,
)
from narrowcast.platform.config.redaction import redact_values
from narrowcast.platform.config.yaml import read_yaml, write_yaml
from narrowcast.platform.errors import UserError
from narrowcast.platform.storage.disk import disk, make_folders, remove_tree, write_atomically
from narrowcast.platform.storage.journal import locked
from narrowcast.runs.folder import CONFIG, RESULT
from narrowcast.solve_run import Solve, build_solve

_ELSEWHERE = {"problem": "problems", "solver": "solvers", "seed": "seeds", "name": "name", "replicas": "seeds"}
"""Fields of a solve that a benchmark sets, and its own field for each."""
_PLACE = ("name", "tracking", "checkpoint_every", "checkpoint_seconds", "checkpoints_kept", "checkpoint_path")
"""Fields of a solve on which neither its iterations nor its records depend."""
Label = Annotated[
    str, Matches(r"[A-Za-z0-9][\w-]*", "should begin with a letter or digit, and have only these, '_' and '-'", 80)
]


class BenchmarkFile(Section):
    """Problems and solvers, each combination of which is solved once for each seed."""

    name: Name = Field(max_length=60, description="name of the benchmark and of its folder; by default the file's")
    problems: dict[Label, dict[str, Any]] = Field(
        min_length=1, description="problems by name, each with the fields of a solve's `problem`"
    )
    solvers: dict[Label, dict[str, Any]] = Field(
        min_length=1, description="solvers by name, each with the fields of a solve's `solver`"
    )
    seeds: list[Annotated[int, Field(ge=0, lt=2**63)]] = Field(
        [0], min_length=1, description="seeds of the solvers, and of problems without a seed of their own"
    )
    solve: dict[str, Any] = Field(
        {}, description="other fields of every solve, such as iterations, tolerance, solver_seconds and spacing"
    )
    settings: dict[str, dict[str, Any]] = Field(
        {},
        description="fields of single solves by dotted path, for each pattern of PROBLEM.SOLVER, such as "
        '"movielens.*": {solver.rank: 5}; later ones count more',
    )
    backend: Literal["local", "ray"] = Field("local", description="one solve after the other here, or workers on Ray")
    workers: int = Field(1, ge=1, le=4096, description="number of solves side by side, each on an actor of Ray")
    cpus_per_worker: float = Field(1.0, gt=0, description="CPUs, and threads of the solver, of a worker on Ray")
    address: str | None = Field(None, description="running Ray cluster to join, host:port or auto")

    @model_validator(mode="after")
    def _fit_together(self) -> BenchmarkFile:
        if len(set(self.seeds)) < len(self.seeds):
            raise ValueError(f"seeds = {self.seeds}: give different seeds")
        if self.workers > 1 and self.backend == "local":
            raise ValueError(
                f"workers = {self.workers}: solves side by side need Ray; add backend=ray, or --backend ray"
            )
        for where, fields in {
            "solve": self.solve,
            **{f"settings.{key}": fields for key, fields in self.settings.items()},
        }.items():
            first = {path.partition(".")[0]: path for path in flatten(fields)}
            wrong = first.keys() & (_ELSEWHERE.keys() - ({"solver"} if where != "solve" else set()))
            for name in sorted(wrong):
                raise ValueError(f"{where}.{first[name]}: all solves of a benchmark have this from {_ELSEWHERE[name]}")
        return self


@dataclass(frozen=True)
class Instance:
    """One solve of a benchmark, with the names that its problem and solver have there."""

    problem: str
    solver: str
    solve: Solve

    @property
    def name(self) -> str:
        """The name of the run and of its folder, PROBLEM.SOLVER.seed-SEED."""
        return self.solve.name

    def digest(self) -> str:
        """Return the sha256 of what its iterations, their end and their records depend on."""
        plain = {key: value for key, value in self.solve.plain().items() if key not in _PLACE}
        return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True)
class Benchmark:
    """A benchmark's file, `values` as it was written after overrides, and its instances, problem by problem.

    `whole` are those of the file, `instances` those to be solved.
    """

    file: BenchmarkFile
    values: dict[str, Any]
    whole: tuple[Instance, ...]
    instances: tuple[Instance, ...]

    def only(self, problems: Sequence[str], solvers: Sequence[str]) -> Benchmark:
        """Return the benchmark with the instances that match one of the patterns each, or all without patterns.

        Raise `UserError` for a pattern that matches none.
        """
        for patterns, known, what in (
            (problems, self.file.problems, "problem"),
            (solvers, self.file.solvers, "solver"),
        ):
            for pattern in patterns:
                if not any(fnmatchcase(name, pattern) for name in known):
                    known_names = f"{', '.join(known)}{suggest(pattern, known)}"
                    raise UserError(f'{self.file.name} has no {what} "{pattern}"; it has {known_names}')
        kept = (
            instance
            for instance in self.instances
            if _is_chosen(instance.problem, problems) and _is_chosen(instance.solver, solvers)
        )
        return replace(self, instances=tuple(kept))


def _is_chosen(name: str, patterns: Sequence[str]) -> bool:
    return not patterns or any(fnmatchcase(name, pattern) for pattern in patterns)


def load_benchmark(name_or_path: str, overrides: Iterable[str] = ()) -> Benchmark:
    """Read a benchmark from a YAML file, or the packaged one of this name; raise `UserError`."""
    text, origin = packaged.read(name_or_path, packaged.BENCHMARKS, "benchmark")
    values = read_yaml(text, origin)
    if not isinstance(values, dict):
        raise UserError(f"{origin}: {not_a_mapping(values)}")
    if values.keys() & {"problem", "solver", "data", "algorithm"}:
        raise UserError(
            f"{origin} is a single run, with no problems and solvers; run it with: {command('run', origin)}"
        )
    values.setdefault("name", Path(origin).stem)
    values = apply_overrides(values, overrides, Defaults(BenchmarkFile, plugin_folders(origin)))
    for section in ("problems", "solvers"):
        if isinstance(given := values.get(section), dict):
            values[section] = {
                key: {"kind": entry} if isinstance(entry, str) else entry for key, entry in given.items()
            }
    file = validate(BenchmarkFile, values, origin)
    whole = tuple(_instances(file, origin))
    return Benchmark(file, values, whole, whole)


def _instances(file: BenchmarkFile, origin: str) -> Iterable[Instance]:
    unused = dict.fromkeys(file.settings)
    instances = []
    for problem in file.problems:
        for seed in file.seeds:
            for solver in file.solvers:
                values = {
                    "tracking": {"experiment": file.name},
                    **deepcopy(file.solve),
                    "problem": deepcopy(file.problems[problem]),
                    "solver": deepcopy(file.solvers[solver]),
                    "seed": seed,
                    "name": f"{problem}.{solver}.seed-{seed}",
                }
                for pattern, fields in file.settings.items():
                    if fnmatchcase(f"{problem}.{solver}", pattern):
                        unused.pop(pattern, None)
                        for path, value in flatten(fields).items():
                            set_value(values, path, deepcopy(value))
                try:
                    instances.append(Instance(problem, solver, build_solve(values, origin)))
                except UserError as error:
                    reason = str(error).removeprefix(f"{origin}: ")
                    raise UserError(f"{origin}: {solver} on {problem}: {reason}") from error
    for pattern in unused:
        raise UserError(
            f'{origin}: settings."{pattern}" matches no PROBLEM.SOLVER, such as '
            f"{instances[0].problem}.{instances[0].solver}"
        )
    return instances


def packaged_benchmarks() -> dict[str, str]:
    """Return the names of the packaged benchmarks, with the first comment line of each."""
    return packaged.summaries(packaged.BENCHMARKS)


FILE, ENDS, TABLE = "benchmark.yaml", "instances.jsonl", "instances.csv"


@dataclass(frozen=True)
class BenchmarkFolder:
    """The folder OUTPUT/NAME, which is the output folder of all runs of the benchmark too.

    `instances.jsonl` has a line when an instance begins, with the digest of its settings, and one when it ends.
    """

    path: Path

    def create(self) -> None:
        """Create the folder; raise `UserError` if it is that of a run."""
        if (self.path / CONFIG).is_file():
            raise UserError(f"{self.path} is a run's folder; give the benchmark another name (name=...)")
        make_folders(self.path)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other processes from running this benchmark; raise `UserError` if one does."""
        with locked(self.path, ENDS):
            yield

    def write(self, benchmark: Benchmark) -> None:
        """Write the benchmark's file after overrides."""
        text = io.StringIO()
        write_yaml(redact_values(benchmark.values), text)
        write_atomically(self.path / FILE, text.getvalue().encode())

    def note(self, instance: Instance, state: str, reason: str = "") -> None:
        """Append a line; a benchmark that is resumed relies on it."""
        line = {"instance": instance.name, "state": state, "reason": reason, "digest": instance.digest()}
        path = self.path / ENDS
        cut = _last_byte(path) not in (b"", b"\n")  # a full disk may have cut the last line
        disk().append(path, b"\n" * cut + json.dumps(line).encode() + b"\n")
        disk().sync(path)

    def states(self) -> dict[str, Mapping[str, str]]:
        """Return the last line of each instance; a line that is cut or damaged counts as none."""
        last_lines: dict[str, Mapping[str, str]] = {}
        path = self.path / ENDS
        for line in path.read_bytes().split(b"\n") if path.is_file() else ():
            try:
                entry = json.loads(line)
                words = {name: entry[name] for name in ("instance", "state", "reason", "digest")}
            except (ValueError, KeyError, TypeError, RecursionError):
                continue
            if all(isinstance(word, str) for word in words.values()):
                last_lines[words["instance"]] = words
        return last_lines

    def is_finished(self, instance: Instance) -> bool:
        """Return whether the instance has a result."""
        return (self.path / instance.name / RESULT).is_file()

    def left(self, instances: Iterable[Instance], *, retry: bool) -> list[Instance]:
        """Return the instances that have not ended; with `retry` those that failed or were skipped too, to begin anew.

        Raise `UserError` for one that was run with other settings.
        """
        states, left = self.states(), []
        for instance in instances:
            entry = states.get(instance.name)
            if entry is not None and entry["digest"] != instance.digest():
                raise UserError(
                    f"{self.path / instance.name} was begun with other settings of its problem, its solver or the end "
                    "of a solve; give the benchmark another name (name=...), or remove this folder's runs"
                )
            state = "waiting" if entry is None else entry["state"]
            failed = state in ("failed", "skipped")
            if failed and retry and (self.path / instance.name).is_dir():
                remove_tree(self.path / instance.name)
            if (failed and not retry) or (state == "finished" and self.is_finished(instance)):
                continue
            left.append(instance)
        return left


def _last_byte(path: Path) -> bytes:
    """Return the last byte of a file; nothing of one that is empty or not there."""
    if not path.is_file() or not path.stat().st_size:
        return b""
    with path.open("rb") as stream:
        stream.seek(-1, os.SEEK_END)
        return stream.read()
