"""From a run, a study or a benchmark to a Ray job: a folder of what the cluster does not have, and a command."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import quote

from pydantic import BaseModel

from narrowcast import _version
from narrowcast.cluster.backend import RayBackend
from narrowcast.cluster.dashboard import Dashboard
from narrowcast.cluster.preflight import SCRIPT, check_packages
from narrowcast.cluster.ray_jobs import STOP_SECONDS, RayJob, RayJobs
from narrowcast.experiment import Experiment, load_experiment
from narrowcast.packaged import names_solve, read_benchmark, read_experiment, read_study
from narrowcast.platform.config import plugins
from narrowcast.platform.config.fields import check_name
from narrowcast.platform.config.files import plugin_folders, set_value
from narrowcast.platform.config.redaction import hide_secrets, redact, redact_values
from narrowcast.platform.config.run_fields import StoreAddress, Tracking
from narrowcast.platform.config.trust import check_shipped, leads_out
from narrowcast.platform.config.yaml import write_yaml
from narrowcast.platform.errors import UserError, shown
from narrowcast.solve_run import Solve, load_solve

_CONFIG = "config.yaml"
_ON_THE_CLUSTER = ("data.", "problem.")
"""Sections of data, which may be large."""
_SECRET = re.compile(r"PASSW|SECRET|TOKEN|CREDENTIAL|(^|_)KEY(_|$)", re.IGNORECASE)


@dataclass(frozen=True)
class Submission:
    """A job to submit: the values of `config.yaml`, the files that go with it, the job's name and its command.

    `values` may hold a password in tracking.uri; nothing else here does, and nothing but the packed folder has them.
    """

    name: str
    values: Mapping[str, Any]
    files: Mapping[str, Path]
    command: str
    sha256: str
    output: PurePosixPath
    environment: Mapping[str, str]
    experiment: Experiment | Solve | None

    def pack(self, folder: Path) -> None:
        """Fill the folder that becomes the job's working directory."""
        write_yaml(self.values, folder / _CONFIG)
        shutil.copy(SCRIPT, folder)
        for target, source in self.files.items():
            if leads_out(folder / target, folder):
                raise UserError(f"{shown(target)} is outside the folder of a job; rename {source}")
            (folder / target).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, folder / target)

    def metadata(self) -> dict[str, str]:
        """Metadata that is visible to everyone who lists the cluster's jobs."""
        return {"version": _version.__version__, "config_sha256": self.sha256, "folder": str(self.output / self.name)}


@dataclass(frozen=True)
class _Asked:
    """A request for a job: a source with overrides, the name and folder of the job, and variables of its environment.

    `of_caller`: the source is what this process was given, not a user's file.
    """

    source: str
    overrides: Sequence[str]
    name: str | None
    output: PurePosixPath
    variables: Mapping[str, str]
    of_caller: bool

    def check_files(self, named: Iterable[tuple[str, Path]]) -> None:
        """Raise `UserError` if a file to be sent, given with its setting, is such by the word of a file elsewhere."""
        if not self.of_caller:
            check_shipped(named, self.source, self.overrides)

    def modules(self, values: Any, source: str) -> dict[str, Path]:
        """Return the files of the modules that values name, after the same check; they may lie where Python looks."""
        folders = plugin_folders(source)
        files = plugins.files_of(values, folders)
        search_path = [*folders, *map(Path, sys.path)]
        self.check_files(
            (path, file) for path, file in files.items() if all(leads_out(file, folder) for folder in search_path)
        )
        return files


def prepare(
    source: str,
    overrides: Sequence[str],
    *,
    name: str | None,
    output: str,
    environment: Iterable[str] = (),
    of_caller: bool = False,
) -> Submission:
    """Read what is to be submitted, or raise `UserError`; `environment` has NAME=VALUE, or NAME for its value here.

    `of_caller`: the source is what this process was given, not a user's file.
    """
    where = PurePosixPath(output)
    if not where.is_absolute():
        raise UserError(f"--output {output}: give an absolute path on the cluster, on a disk that its nodes share")
    asked = _Asked(source, overrides, name, where, dict(_variable(text) for text in environment), of_caller)
    if (study := read_study(source, overrides)) is not None:
        return _prepare_study(study, asked)
    if (benchmark := read_benchmark(source, overrides)) is not None:
        return _prepare_benchmark(benchmark, asked)
    load = load_solve if names_solve(source) else load_experiment
    experiment = load(source, overrides)
    if isinstance(experiment, Experiment) and "backend" not in experiment.model_fields_set:
        overrides = [*overrides, "backend=ray"]  # on a cluster, a run that does not say otherwise is on Ray
        experiment = load(source, overrides)
    _, files = with_files(experiment)
    asked.check_files(_files_of(experiment))
    modules = asked.modules(experiment.plain(), source)
    sha256 = _sha256([{**experiment.plain(), "name": ""}, output, _digests_of(files | modules)])
    name = name or f"{experiment.name}-{sha256[:8]}"
    experiment = load(source, [*overrides, f"name={json.dumps(name)}"])  # which refuses an invalid name
    values, _ = with_files(experiment)
    values["tracking"] |= _store_of_job(experiment.tracking)
    if isinstance(experiment, Experiment) and isinstance(experiment.backend, RayBackend):
        values["backend"]["address"] = None  # the cluster that the job is on
    command = shlex.join(["python", "-m", "narrowcast", "run", _CONFIG, "--continue", "--output", output])
    return Submission(name, values, files | modules, command, sha256, where, asked.variables, experiment)


def submit(
    submission: Submission, dashboard: Dashboard, *, send_package: bool, say: Callable[[str], None]
) -> tuple[RayJob, bool]:
    """Start the job, take it up where its last attempt failed, or join it; whether a new attempt was started."""
    jobs = RayJobs(dashboard)
    last = jobs.latest(submission.name)
    if last is not None and last.metadata.get("config_sha256") != submission.sha256:
        raise UserError(f"{submission.name} is a job of another configuration; give another (--id, or name= in Python)")
    if last is not None and (not last.over or last.status == "SUCCEEDED"):
        return last, False
    with tempfile.TemporaryDirectory(prefix="narrowcast-") as folder:
        submission.pack(Path(folder))
        runtime_env: dict[str, Any] = {
            "working_dir": folder,
            "env_vars": {
                **submission.environment,
                "PYTHONUNBUFFERED": "1",
                "RAY_JOB_STOP_WAIT_TIME_S": str(STOP_SECONDS),
            },
        }
        if send_package:
            runtime_env["py_modules"] = [str(Path(_version.__file__).parent)]
        for line in check_packages(jobs, runtime_env):
            say(line)
        attempt = 1 if last is None else last.attempt + 1
        return jobs.start(submission.name, attempt, submission.command, runtime_env, submission.metadata()), True


def _store_of_job(tracking: Tracking) -> dict[str, str | None]:
    """Return the store of a job as fields of `tracking`: that of the file, else of this machine's environment, if any.

    The job's own environment need not name it, so the job is told whether it may have credentials.
    """
    store = tracking.resolve(Path())
    store.say_what_is_withheld("set tracking.credentials=environment")
    if tracking.uri is None and store.named_by != "user":
        return {"uri": None}
    return {"uri": with_password(store), "credentials": "environment" if store.named_by == "user" else None}


def with_password(store: StoreAddress) -> str:
    """Return the URI with MLFLOW_TRACKING_USERNAME and _PASSWORD in it, if the store gets them and has no other."""
    user, password = (os.environ.get(f"MLFLOW_TRACKING_{field}") for field in ("USERNAME", "PASSWORD"))
    if not user or not store.gets_credentials(store.uri) or store.shown != store.uri:
        return store.uri
    scheme, _, rest = store.uri.partition("://")
    return f"{scheme}://{quote(user, safe='')}:{quote(password or '', safe='')}@{rest}"


def _variable(entry: str) -> tuple[str, str]:
    name, given, value = entry.partition("=")
    if _SECRET.search(name):
        raise UserError(f"--env {name}: everybody can see a job's environment; set secrets on the cluster's nodes")
    if not given and name not in os.environ:
        raise UserError(f"--env {name} is not set here; write {name}=VALUE")
    value = value if given else os.environ[name]
    if redact(value) != value:
        raise UserError(
            f"--env {name}: its value names a password, and everybody can see a job's environment; set it on the nodes"
        )
    return name, value


def _prepare_study(study: dict[str, Any], asked: _Asked) -> Submission:
    files = asked.modules(study, asked.source)
    section = "solve" if "solve" in study else "experiment"
    base = study.get(section, {}).get("base")
    if base is not None and Path(base).is_file():
        asked.check_files([(f"{section}.base", Path(base))])
        files |= {"files/base.yaml": Path(base)}
        files |= asked.modules(read_experiment(base)[0], base)
        set_value(study, f"{section}.base", "files/base.yaml")
    _set_store(study, f"{section}.tracking", "a study's")
    return _of_several_runs("tune", study, files, asked)


def _prepare_benchmark(benchmark: dict[str, Any], asked: _Asked) -> Submission:
    benchmark.setdefault("backend", "ray")
    benchmark["address"] = None  # the cluster that the job is on
    _set_store(benchmark, "solve.tracking", "a benchmark's")
    files = asked.modules(benchmark, asked.source)
    for label, solver in benchmark.get("solvers", {}).items():
        if isinstance(solver, dict) and "script" in solver and (script := Path(str(solver["script"]))).is_file():
            asked.check_files([(f"solvers.{label}.script", script)])
            target = f"files/{check_name(str(label), 'the name of a solver')}-{script.name}"
            files[target], solver["script"] = script, target
    return _of_several_runs("benchmark", benchmark, files, asked)


def _set_store(values: dict[str, Any], path: str, owner: str) -> None:
    """Set the store of this machine's environment, if it has one."""
    of_job = _store_of_job(Tracking())
    if (uri := of_job["uri"]) is None:
        return
    if hide_secrets(uri) != uri:
        raise UserError(f"{owner} store with a password: set MLFLOW_TRACKING_URI on the head, and not here")
    for key, value in of_job.items():
        set_value(values, f"{path}.{key}", value)


def _of_several_runs(command: str, values: Mapping[str, Any], files: Mapping[str, Path], asked: _Asked) -> Submission:
    output = asked.output
    sha256 = _sha256([redact_values(values), str(output), _digests_of(files)])
    name = check_name(asked.name or f"{values.get('name', Path(asked.source).stem)}-{sha256[:8]}", "name")
    words = shlex.join(["python", "-m", "narrowcast", command, _CONFIG, "--output", str(output)])
    return Submission(name, {**values, "name": name}, files, words, sha256, output, asked.variables, None)


def with_files(experiment: Experiment | Solve) -> tuple[dict[str, Any], dict[str, Path]]:
    """Return the plain values with the files that they name as files/..., and these files by that path."""
    values, files = experiment.plain(), dict[str, Path]()
    for index, (path, file) in enumerate(_files_of(experiment)):
        target = f"files/{index}-{file.name}"
        set_value(values, path, target)
        files[target] = file
    return values, files


def _files_of(experiment: Experiment | Solve) -> list[tuple[str, Path]]:
    """The files that an experiment names by dotted path, but its data or problem, which is to lie on the cluster."""
    named = _paths_in(experiment)
    return [(path, file) for path, file in named if not path.startswith(_ON_THE_CLUSTER) and file.is_file()]


def _paths_in(model: BaseModel, prefix: str = "") -> Iterator[tuple[str, Path]]:
    for name in type(model).model_fields:
        yield from _paths_at(prefix + name, getattr(model, name))


def _paths_at(setting: str, value: object) -> Iterator[tuple[str, Path]]:
    if isinstance(value, Path):
        yield setting, value
    elif isinstance(value, BaseModel):
        yield from _paths_in(value, f"{setting}.")
    elif isinstance(value, Mapping):
        for key, part in value.items():
            yield from _paths_at(f"{setting}.{key}", part)
    elif isinstance(value, list | tuple):
        for index, part in enumerate(value):
            yield from _paths_at(f"{setting}.{index}", part)


def _digests_of(files: Mapping[str, Path]) -> list[str]:
    return [hashlib.sha256(path.read_bytes()).hexdigest() for path in files.values()]


def _sha256(values: Any) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True, default=str).encode()).hexdigest()
