"""Commands for clusters: `submit`, `jobs`, `doctor` and `manifest`."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.table import Table
from ruamel.yaml import YAML

from narrowcast.cli.shared import FOLDER, TRUST, console, experiments
from narrowcast.platform.config.trust import looking
from narrowcast.platform.config.yaml import read_limited
from narrowcast.platform.errors import RunFailed, UserError

if TYPE_CHECKING:
    from narrowcast.cluster.ray_jobs import RayJob, RayJobs


ADDRESS = click.option(
    "--address",
    required=True,
    envvar="RAY_API_SERVER_ADDRESS",
    metavar="http://HEAD:8265",
    help="Address of the cluster's dashboard; also read from RAY_API_SERVER_ADDRESS.",
)


@click.group()
def jobs() -> None:
    """List, follow and stop the runs submitted to a Ray cluster."""


@jobs.command("list")
@ADDRESS
def list_jobs(address: str) -> None:
    """List the jobs of a cluster, latest first."""
    from narrowcast.platform.tracking.units import format_seconds

    table = Table("job", "attempt", "status", "began", "took", "folder on the cluster", box=None, pad_edge=False)
    for job in _jobs(address).all():
        began = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(job.began)) if job.began else "-"
        took = format_seconds((job.ended or time.time()) - job.began) if job.began else "-"
        table.add_row(job.name, str(job.attempt), job.status, began, took, job.metadata.get("folder", "-"))
    console().print(table)


@jobs.command("logs")
@click.argument("name")
@ADDRESS
@click.option("--follow", is_flag=True, help="Follow the log until the job ends, and exit with its status.")
def logs(name: str, address: str, follow: bool) -> None:
    """Print the log of the last attempt at the job NAME; NAME.2 is its second attempt."""
    queue = _jobs(address)
    job = _find(queue, name)
    if follow:
        follow_to_the_end(queue, job)
    else:
        click.echo(queue.log(job), nl=False)


@jobs.command("stop")
@click.argument("name")
@ADDRESS
def stop(name: str, address: str) -> None:
    """Stop NAME, keeping a checkpoint to resume from."""
    queue = _jobs(address)
    job = _find(queue, name)
    if job.over:
        raise UserError(f"{job.submission_id} has already ended ({job.status})")
    job = queue.stop(job)
    click.echo(f"{job.submission_id}: {job.status}; submit it again to resume from its last checkpoint")


def follow_to_the_end(queue: RayJobs, job: RayJob) -> None:
    """Print the job's log as it grows; raise the error that ended the job, as if it had run here."""
    reason = ""

    def say(line: str) -> None:
        nonlocal reason
        if line.startswith("narrowcast: "):
            reason = line.removeprefix("narrowcast: ")
        else:
            click.echo(line)

    try:
        job = queue.follow(job, say)
    except KeyboardInterrupt:
        raise RunFailed(
            f"{job.name} continues on the cluster; narrowcast jobs logs {job.name} --follow --address {queue.address}"
        ) from None
    if job.status == "SUCCEEDED":
        return
    if job.exit_code == 2 and reason:
        raise UserError(f"{reason} [job {job.submission_id}]")
    # The run advises a command for the cluster; from here the job is submitted again.
    reason = re.sub(r" \[narrowcast run .*\]$|; (go on|resume) with: narrowcast .*$", "", reason) or job.message
    ended = "was stopped" if job.status == "STOPPED" else "failed"
    raise RunFailed(f"{job.submission_id} {ended}: {reason}; submit it again to resume from its last checkpoint")


def _jobs(address: str) -> RayJobs:
    from narrowcast.cluster.dashboard import reach
    from narrowcast.cluster.ray_jobs import RayJobs

    return RayJobs(reach(address))


def _find(queue: RayJobs, name: str) -> RayJob:
    job = queue.latest(name)
    if job is None:
        known = ", ".join(dict.fromkeys(job.name for job in queue.all())) or "none"
        raise UserError(f"no job {name} at {queue.address}; jobs there: {known}")
    return job


_MARKS = {"ok": "ok", "note": "note", "wrong": "WRONG"}


@click.command()
@click.argument("experiment", required=False, shell_complete=experiments)
@click.argument("overrides", nargs=-1, metavar="[A.B=VALUE]...")
@click.option("--address", envvar="RAY_API_SERVER_ADDRESS", metavar="http://HEAD:8265", help="Also check this cluster.")
@click.option("--output", type=FOLDER, default=Path("runs"), show_default=True, help="Folder of all runs.")
@TRUST
def doctor(
    experiment: str | None, overrides: tuple[str, ...], address: str | None, output: Path, *, trust: bool
) -> None:
    """Check the environment: this machine, a cluster if --address is given, and what EXPERIMENT needs.

    Prints each finding, with advice for each problem. The exit status is 1 if there is a problem.
    """
    from narrowcast.experiment import load_experiment
    from narrowcast.runs.doctor import diagnose

    with looking(Path(experiment or ".").parent, trust=trust):
        loaded = load_experiment(experiment, overrides) if experiment is not None else None
    table = Table("check", "", "found", "advice", box=None, pad_edge=False)
    wrong = []
    for finding in diagnose(loaded, address, output):
        table.add_row(finding.what, _MARKS[finding.verdict], finding.found, finding.advice)
        wrong += [finding.what] if finding.verdict == "wrong" else []
    console().print(table)
    if wrong:
        raise RunFailed(f"{len(wrong)} of these would stop a run: {', '.join(wrong)}")


@click.command()
@click.argument("source", metavar="EXPERIMENT|STUDY|BENCHMARK", shell_complete=experiments)
@click.argument("overrides", nargs=-1, metavar="[A.B=VALUE]...")
@ADDRESS
@click.option(
    "--id", "name", metavar="NAME", help="Name of the job and its run; derived from the configuration by default."
)
@click.option(
    "--output", default="/runs", show_default=True, metavar="PATH", help="Folder of all runs, on the cluster."
)
@click.option(
    "--env", "environment", multiple=True, metavar="NAME[=VALUE]", help="Environment variable of the job; no secrets."
)
@click.option("--send-package", is_flag=True, help="Upload this version of narrowcast with the job.")
@click.option("--no-wait", is_flag=True, help="Return as soon as the job is submitted.")
def submit(
    source: str, overrides: tuple[str, ...], address: str, *, send_package: bool, no_wait: bool, **job_options: Any
) -> None:
    """Run EXPERIMENT, tune STUDY, or run BENCHMARK, as a job on a Ray cluster, and follow it to its end.

    \b
    narrowcast submit scolr-ml1m --address http://HEAD:8265
    narrowcast submit my.yaml backend.actors=16 --address http://HEAD:8265 --no-wait

    Submitting the same request again follows the job while it runs, and resumes it from its last checkpoint if it
    failed or was stopped. Ctrl-C does not stop the job. Data is read on the cluster; traces that the file names are
    uploaded.
    For details, see docs/running-on-a-cluster.md.
    """  # noqa: D301 - click wants the character
    from narrowcast.api import check_source
    from narrowcast.cluster.dashboard import reach
    from narrowcast.runs.capacity import check_capacity

    check_source(source, overrides)
    dashboard = reach(address)
    check_capacity(source, overrides, dashboard)
    from narrowcast.cluster.ray_jobs import RayJobs
    from narrowcast.runs import submission  # which takes seconds to import

    sent = submission.prepare(source, overrides, **job_options)
    job, started = submission.submit(sent, dashboard, send_package=send_package, say=click.echo)
    attempt = f" (attempt {job.attempt})" if job.attempt > 1 else ""
    if started:
        click.echo(f"{job.name}: submitted to {dashboard.address}{attempt}")
    elif job.over:
        click.echo(f"{job.name}: finished already{attempt}; give another name with --id to run it once more")
    else:
        click.echo(f"{job.name}: running already{attempt}; joining it")
    if no_wait and not job.over:
        click.echo(f"follow it with: narrowcast jobs logs {job.name} --follow --address {dashboard.address}")
    if not no_wait:
        follow_to_the_end(RayJobs(dashboard), job)


_KINDS = ("raycluster", "dockerfile", "description")


@click.command()
@click.argument("kind", metavar="KIND", type=click.Choice(_KINDS))
@click.argument("overrides", nargs=-1, metavar="[A.B=VALUE]...")
@click.option("--from", "source", type=click.Path(path_type=Path), help="Description of the cluster, a YAML file.")
def manifest(kind: str, overrides: tuple[str, ...], source: Path | None) -> None:
    """Print a deployment file of this KIND, generated from one description of the cluster.

    \b
    narrowcast manifest description > cluster.yaml           all settings with their defaults; edit this file
    narrowcast manifest dockerfile --from cluster.yaml > Dockerfile
    narrowcast manifest raycluster --from cluster.yaml | kubectl apply -f -

    Override a setting by its dotted path, such as workers.0.count=8. Secrets are referenced by name, never written.
    Files for a single job on Kubernetes, Docker Compose and Ray's launcher are in the folder deploy of the repository.
    """  # noqa: D301 - click wants the character
    from narrowcast.cluster.deployment import Deployment, dockerfile, ray_cluster
    from narrowcast.platform.config.files import Defaults, apply_overrides, validate
    from narrowcast.platform.config.yaml import read_yaml

    settings = {} if source is None else read_yaml(_read(source), str(source))
    values = {**Deployment().model_dump(mode="json"), **settings} if isinstance(settings, Mapping) else settings
    if isinstance(values, dict):
        values = apply_overrides(values, overrides, Defaults(Deployment))
    deployment = validate(Deployment, values, str(source or "description"))
    if kind == "dockerfile":
        click.echo(dockerfile(deployment), nl=False)
        return
    yaml = YAML(pure=True)
    yaml.width = 4096
    yaml.representer.ignore_aliases = lambda *_: True
    yaml.dump(ray_cluster(deployment) if kind == "raycluster" else deployment.model_dump(mode="json"), sys.stdout)


def _read(path: Path) -> str:
    try:
        return read_limited(path)
    except OSError as error:
        raise UserError(f"{path}: cannot be read as a cluster description: {error}") from error
