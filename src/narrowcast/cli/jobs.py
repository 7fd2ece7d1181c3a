"""`narrowcast jobs`."""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING

import click
from rich.table import Table

from narrowcast.cli.terminal import console
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
        known = ", ".join(dict.fromkeys(each.name for each in queue.all())) or "none"
        raise UserError(f"no job {name} at {queue.address}; jobs there: {known}")
    return job
