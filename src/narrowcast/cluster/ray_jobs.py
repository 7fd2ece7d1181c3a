"""Runs as Ray jobs: submitted once, joined by later requests, restarted after a failure, followed and stopped.

A job has the name of its run. A Ray submission is one attempt at it: NAME, then NAME.2 if the first ended before the
run was finished, and so on; the log of every attempt is kept.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp
import requests

from narrowcast.cluster import RAY_SETTINGS
from narrowcast.cluster.dashboard import Dashboard, headers
from narrowcast.cluster.ray_internals import NOISY_LOGGERS
from narrowcast.platform.config.redaction import redact
from narrowcast.platform.errors import RunFailed

with RAY_SETTINGS.in_force():
    from ray.job_submission import JobDetails, JobStatus, JobSubmissionClient

MARK = "narrowcast"
"""The metadata entry that marks jobs of narrowcast."""

_POLL_SECONDS = 0.5
_LOST_SECONDS = 60.0
STOP_SECONDS = 120
"""Time for a stopped run to write its checkpoint; Ray's default is three seconds."""

for _noisy in NOISY_LOGGERS:
    logging.getLogger(_noisy).setLevel(logging.ERROR)


@dataclass(frozen=True)
class RayJob:
    """An attempt at a run; times in seconds since 1970, None if it has not started or ended."""

    name: str
    attempt: int
    status: str
    message: str
    began: float | None
    ended: float | None
    exit_code: int | None
    metadata: Mapping[str, str]

    @property
    def submission_id(self) -> str:
        """The id of the attempt in Ray."""
        return self.name if self.attempt == 1 else f"{self.name}.{self.attempt}"

    @property
    def over(self) -> bool:
        """True once the attempt has ended."""
        return JobStatus(self.status).is_terminal()


class RayJobs:
    """The jobs of narrowcast on a cluster."""

    def __init__(self, dashboard: Dashboard) -> None:
        self.address = dashboard.address
        self._client = JobSubmissionClient(dashboard.address, headers=headers())

    def all(self) -> list[RayJob]:
        """Return every attempt at every run, latest first."""
        jobs = [job_of(details) for details in self._client.list_jobs() if MARK in (details.metadata or {})]
        return sorted(jobs, key=lambda job: job.began or time.time(), reverse=True)

    def latest(self, name: str) -> RayJob | None:
        """Return the last attempt at the run of this name, or the attempt with this id; None if there is none."""
        attempts = [job for job in self.all() if name in (job.name, job.submission_id)]
        return max(attempts, key=lambda job: job.attempt, default=None)

    def start(
        self, name: str, attempt: int, entrypoint: str, runtime_env: Mapping[str, Any], metadata: Mapping[str, str]
    ) -> RayJob:
        """Start an attempt, or join it if another process has just started it."""
        job = RayJob(name, attempt, "PENDING", "", None, None, None, metadata)
        try:
            self._client.submit_job(
                entrypoint=entrypoint,
                submission_id=job.submission_id,
                runtime_env=dict(runtime_env),
                metadata={MARK: name, "attempt": str(attempt), **metadata},
            )
        except (RuntimeError, ValueError) as error:
            if "already exists" not in str(error):
                raise RunFailed(f"the cluster at {self.address} refused the job: {_first_line(error)}") from error
        return job

    def now(self, job: RayJob) -> RayJob:
        """Return the present state of the job; raise `RunFailed` if the cluster has not answered for a minute."""
        deadline = time.monotonic() + _LOST_SECONDS
        while True:
            try:
                return job_of(self._client.get_job_info(job.submission_id))
            except (requests.RequestException, RuntimeError) as error:
                if time.monotonic() > deadline:
                    raise RunFailed(
                        f"the cluster at {self.address} no longer answers ({_first_line(error)}); the job may still run"
                    ) from error
                time.sleep(_POLL_SECONDS)

    def follow(self, job: RayJob, say: Callable[[str], None]) -> RayJob:
        """Call `say` with each line of the job's log from the first on, until the job ends; return its last state."""
        seen, told = 0, ""
        while True:
            job = self.now(job)
            if job.status == "PENDING":
                if job.began and time.time() - job.began > 10 and job.message != told:
                    told = job.message
                    say(f"waiting: {told}")
                time.sleep(_POLL_SECONDS)
                continue
            seen = asyncio.run(self._tail(job, seen, say))
            job = self.now(job)
            if job.over:
                # The tail may have been cut off, and ends before the last lines are read where a job is short.
                for line in self.log(job).splitlines()[seen:]:
                    say(line)
                return job
            time.sleep(_POLL_SECONDS)

    async def _tail(self, job: RayJob, seen: int, say: Callable[[str], None]) -> int:
        """Call `say` with whole lines after the first `seen`, while the connection lasts; return the lines seen."""
        number, part = 0, ""
        try:
            async for text in self._client.tail_job_logs(job.submission_id):
                *lines, part = (part + text).split("\n")
                for line in lines:
                    number += 1
                    if number > seen:
                        say(line)
        except (RuntimeError, aiohttp.ClientError, OSError):
            pass  # `follow` asks for the state of the job, and continues here
        return max(seen, number)

    def log(self, job: RayJob) -> str:
        """Return the whole log of the job so far."""
        try:
            return str(self._client.get_job_logs(job.submission_id))
        except (requests.RequestException, RuntimeError) as error:
            raise RunFailed(f"the log of {job.submission_id} cannot be read: {_first_line(error)}") from error

    def stop(self, job: RayJob) -> RayJob:
        """Ask the job to write a checkpoint and end, and wait until it has; return its last state."""
        self._client.stop_job(job.submission_id)
        deadline = time.monotonic() + STOP_SECONDS + 10
        while not (job := self.now(job)).over:
            if time.monotonic() > deadline:
                raise RunFailed(f"{job.submission_id} is still {job.status}; see narrowcast jobs list")
            time.sleep(_POLL_SECONDS)
        return job

    def forget(self, job: RayJob) -> None:
        """Delete the cluster's record of a finished job."""
        self._client.delete_job(job.submission_id)


def job_of(details: JobDetails) -> RayJob:
    """Return the attempt that a cluster describes; one whose number is none counts as the first."""
    metadata = details.metadata or {}
    attempt = metadata.get("attempt", "1")
    return RayJob(
        name=metadata.get(MARK, str(details.submission_id)),
        attempt=int(attempt) if attempt.isdecimal() and len(attempt) < 10 else 1,
        status=str(details.status.value),
        message=_first_line(details.message or ""),
        began=details.start_time / 1000 if details.start_time else None,
        ended=details.end_time / 1000 if details.end_time else None,
        exit_code=details.driver_exit_code,
        metadata=metadata,
    )


def _first_line(text: object) -> str:
    """Return the first line with text, without the secrets in it."""
    lines = [line.strip() for line in str(text).splitlines() if line.strip()]
    return redact(lines[0] if lines else "")[:300]
