"""Check of the packages on a cluster's nodes, by a job of a few seconds before that of the run."""

from __future__ import annotations

import json
import secrets
import shlex
import time
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from packaging.requirements import Requirement
from packaging.version import Version

from narrowcast._version import __version__
from narrowcast.platform.errors import RunFailed, UserError

if TYPE_CHECKING:
    from narrowcast.cluster.ray_jobs import RayJob, RayJobs


SCRIPT = Path(__file__).with_name("node_probe.py")
_SECONDS = 60.0
_NODES_SHOWN = 3
_RAY_LINE = "Running entrypoint for job"  # may come after the job's first lines
_NOT_FOUND = 127  # exit status of a shell for an unknown command
_NUMERICAL = ("numpy", "numba", "torch")
_IMAGE = "use an image that has them (narrowcast manifest dockerfile)"


def requirements() -> list[Requirement]:
    """Return the requirements of narrowcast without extras."""
    try:
        stated = [Requirement(line) for line in requires("narrowcast") or ()]
    except PackageNotFoundError:
        return []
    return [
        requirement
        for requirement in stated
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""})
    ]


def check_packages(jobs: RayJobs, runtime_env: Mapping[str, Any]) -> list[str]:
    """Return warnings on the cluster's packages; raise `UserError` if one is missing or too old."""
    needed = requirements()
    entrypoint = shlex.join(["python", SCRIPT.name, *(requirement.name for requirement in needed)])
    return judge_nodes(_ask(jobs, entrypoint, runtime_env), needed)


def judge_nodes(answers: Mapping[str, Mapping[str, Any] | None], needed: list[Requirement]) -> list[str]:
    """Return warnings on the packages of the nodes, with equal nodes grouped; raise as `judge` does."""
    alike: dict[str, list[str]] = {}
    for node, answer in answers.items():
        alike.setdefault(json.dumps(answer, sort_keys=True), []).append(node)
    warnings = []
    for kind, nodes in alike.items():
        answer = json.loads(kind)
        more = f" and {len(nodes) - _NODES_SHOWN} more" if len(nodes) > _NODES_SHOWN else ""
        shown = ", ".join(nodes[:_NODES_SHOWN]) + more
        if answer is None:
            warnings.append(f"these nodes did not report their packages: {shown}")
            continue
        where = "the cluster" if len(alike) == 1 else f"the cluster, at {shown},"
        warnings += judge(answer["python"], answer["packages"], needed, where)
    return warnings


def judge(
    python: str, packages: Mapping[str, str | None], needed: list[Requirement], where: str = "the cluster"
) -> list[str]:
    """Return warnings on the packages of nodes; raise `UserError` if a run cannot start there."""
    if Version(python) < Version("3.11"):
        raise UserError(f"{where} has Python {python}; narrowcast needs 3.11 or later there")
    if packages["narrowcast"] is None:
        raise UserError(f"{where} has no narrowcast; use an image that has it, or send this one with --send-package")
    missing = [requirement.name for requirement in needed if packages[requirement.name] is None]
    if missing:
        raise UserError(f"{where} lacks {', '.join(missing)}; {_IMAGE}")
    if packages["narrowcast"] != __version__:
        raise UserError(
            f"{where} has narrowcast {packages['narrowcast']}, this machine {__version__}; "
            "use an image of this version, or send this one with --send-package"
        )
    old = [
        f"{requirement} (has {packages[requirement.name]})"
        for requirement in needed
        if not requirement.specifier.contains(str(packages[requirement.name]), prereleases=True)
    ]
    if old:
        raise UserError(f"{where} has packages that are too old: narrowcast needs {', '.join(old)}; {_IMAGE}")
    return [
        f"{where} has {name} {packages[name]}, this machine {version(name)}: results may differ in their last bits"
        for name in _NUMERICAL
        if name in packages and packages[name] != version(name)
    ]


def _ask(jobs: RayJobs, entrypoint: str, runtime_env: Mapping[str, Any]) -> dict[str, Any]:
    job = jobs.start(f"check-{secrets.token_hex(4)}", 1, entrypoint, runtime_env, {"check": "packages"})
    deadline = time.monotonic() + _SECONDS
    while not (job := jobs.now(job)).over:
        if time.monotonic() > deadline:
            _withdraw(jobs, job)
            raise RunFailed(f"the cluster did not run a check within {_SECONDS:g} s ({job.status}: {job.message})")
        time.sleep(0.2)
    log = jobs.log(job)
    jobs.forget(job)
    try:
        answer: dict[str, Any] = json.loads(log.splitlines()[-1])
    except (IndexError, ValueError) as error:
        raise RunFailed(f"the cluster could not run a check: {_why(job, log)}") from error
    return answer


def _why(job: RayJob, log: str) -> str:
    """Return the last line of the check's log, with advice if the nodes' `python` is not the one that runs Ray."""
    lines = [line.strip() for line in log.splitlines() if line.strip() and not line.startswith(_RAY_LINE)]
    last_line = lines[-1][-300:] if lines else job.message
    if job.exit_code == _NOT_FOUND or "No module named 'ray'" in last_line:
        last_line += (
            "; start Ray on its nodes with the folder of its own python first on PATH, as in an active environment"
        )
    return last_line


def _withdraw(jobs: RayJobs, job: RayJob) -> None:
    if jobs.stop(job).over:
        jobs.forget(job)
