"""Runs as Ray jobs: started once, joined by who asks again, taken up anew where they failed, followed and stopped.

A job's name is its run's. What Ray calls a submission is an attempt at it: NAME, then NAME.2 where that one ended
before the run did, and so on, so that the log of every attempt is kept.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp
import requests
from ray.job_submission import JobDetails, JobStatus, JobSubmissionClient

from narrowcast.cluster.dashboard import Dashboard, headers
from narrowcast.cluster.ray_internals import NOISY_LOGGERS
from narrowcast.platform.errors import RunFailed

MARK = "narrowcast"
"""The entry of a job's metadata by which ours are told from others."""

_POLL_SECONDS = 0.5
_LOST_SECONDS = 60.0
STOP_SECONDS = 120
"""How long a run that is stopped may take to write down what it has; Ray's own default is three seconds."""

for _noisy in NOISY_LOGGERS:
    logging.getLogger(_noisy).setLevel(logging.ERROR)


@dataclass(frozen=True)
class RayJob:
    """An attempt at a run; times in seconds since 1970, None where it has not begun or ended."""

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
        """What Ray calls it."""
        return self.name if self.attempt == 1 else f"{self.name}.{self.attempt}"

    @property
    def over(self) -> bool:
        """Whether it has ended."""
        return JobStatus(self.status).is_terminal()


class RayJobs:
    """The jobs of a cluster."""

    def __init__(self, dashboard: Dashboard) -> None:
        self.address = dashboard.address
        self._client = JobSubmissionClient(dashboard.address, headers=headers())

    def all(self) -> list[RayJob]:
        """Every attempt at a run, the latest first."""
        jobs = [_job(details) for details in self._client.list_jobs() if MARK in (details.metadata or {})]
        return sorted(jobs, key=lambda job: job.began or time.time(), reverse=True)

    def latest(self, name: str) -> RayJob | None:
        """The last attempt at a run; also one given by its own id."""
        attempts = [job for job in self.all() if name in (job.name, job.submission_id)]
        return max(attempts, key=lambda job: job.attempt, default=None)

    def start(
        self, name: str, attempt: int, entrypoint: str, runtime_env: Mapping[str, Any], metadata: Mapping[str, str]
    ) -> RayJob:
        """Start an attempt, or join the one that somebody else has just started."""
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
                raise RunFailed(f"the cluster at {self.address} took no job: {_first_line(error)}") from error
        return job

    def now(self, job: RayJob) -> RayJob:
        """The job as it is now; raises `RunFailed` where the cluster has not answered for a minute."""
        deadline = time.monotonic() + _LOST_SECONDS
        while True:
            try:
                return _job(self._client.get_job_info(job.submission_id))
            except (requests.RequestException, RuntimeError) as error:
                if time.monotonic() > deadline:
                    raise RunFailed(
                        f"the cluster at {self.address} no longer answers ({_first_line(error)}); the job may go on"
                    ) from error
                time.sleep(_POLL_SECONDS)

    def follow(self, job: RayJob, say: Callable[[str], None]) -> RayJob:
        """Hand on the job's log line by line as it is written, from its beginning, until the job is over."""
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
        """Hand on whole lines but the first `seen`, while the connection lasts; how many were handed on by then."""
        number, rest = 0, ""
        try:
            async for text in self._client.tail_job_logs(job.submission_id):
                *lines, rest = (rest + text).split("\n")
                for line in lines:
                    number += 1
                    if number > seen:
                        say(line)
        except (RuntimeError, aiohttp.ClientError, OSError):
            pass  # `follow` sees what became of the job, and goes on from here
        return max(seen, number)

    def log(self, job: RayJob) -> str:
        """All that the job has written so far."""
        try:
            return str(self._client.get_job_logs(job.submission_id))
        except (requests.RequestException, RuntimeError) as error:
            raise RunFailed(f"no log of {job.submission_id} could be had: {_first_line(error)}") from error

    def stop(self, job: RayJob) -> RayJob:
        """Ask the job to write down what it has and end, and wait for that."""
        self._client.stop_job(job.submission_id)
        deadline = time.monotonic() + STOP_SECONDS + 10
        while not (job := self.now(job)).over:
            if time.monotonic() > deadline:
                raise RunFailed(f"{job.submission_id} is still {job.status}; look at narrowcast jobs list")
            time.sleep(_POLL_SECONDS)
        return job

    def forget(self, job: RayJob) -> None:
        """Remove what the cluster keeps of a job that is over."""
        self._client.delete_job(job.submission_id)


def _job(details: JobDetails) -> RayJob:
    metadata = details.metadata or {}
    return RayJob(
        name=metadata.get(MARK, str(details.submission_id)),
        attempt=int(metadata.get("attempt", "1")),
        status=str(details.status.value),
        message=_first_line(details.message or ""),
        began=details.start_time / 1000 if details.start_time else None,
        ended=details.end_time / 1000 if details.end_time else None,
        exit_code=details.driver_exit_code,
        metadata=metadata,
    )


def _first_line(text: object) -> str:
    """The first line that says something, without what might be a secret in an address."""
    lines = [line.strip() for line in str(text).splitlines() if line.strip()]
    return re.sub(r"//[^/\s@]*@", "//***@", lines[0] if lines else "")[:300]
