"""`narrowcast submit`."""

from __future__ import annotations

from typing import Any

import click

from narrowcast.cli.completion import experiments
from narrowcast.cli.jobs import ADDRESS, follow_to_the_end


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
    from narrowcast.api.cluster_job import check_source
    from narrowcast.cluster.dashboard import reach
    from narrowcast.runs.capacity import check_capacity

    check_source(source, overrides)
    dashboard = reach(address)
    check_capacity(source, overrides, dashboard)
    from narrowcast.cluster.ray_jobs import RayJobs
    from narrowcast.runs import submission  # which takes seconds to import

    sent = submission.prepare(source, overrides, **job_options)
    job, started = submission.submit(sent, dashboard, send_package=send_package, say=click.echo)
    again = f" (attempt {job.attempt})" if job.attempt > 1 else ""
    if started:
        click.echo(f"{job.name}: submitted to {dashboard.address}{again}")
    elif job.over:
        click.echo(f"{job.name}: finished already{again}; give another name with --id to run it once more")
    else:
        click.echo(f"{job.name}: running already{again}; joining it")
    if no_wait and not job.over:
        click.echo(f"follow it with: narrowcast jobs logs {job.name} --follow --address {dashboard.address}")
    if not no_wait:
        follow_to_the_end(RayJobs(dashboard), job)
