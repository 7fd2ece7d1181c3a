"""A job of a Ray cluster, as `nc.submit` returns it; apart from Ray's jobs, which only its calls import."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from narrowcast.cluster.dashboard import Dashboard
from narrowcast.platform.errors import RunFailed, UserError

if TYPE_CHECKING:
    from narrowcast.cluster.ray_jobs import RayJob, RayJobs

_POLL_SECONDS = 1.0


@dataclass(frozen=True)
class ClusterJob:
    """A submitted run or study, by its name; a failed one that is submitted again keeps its name."""

    name: str
    dashboard: Dashboard

    def status(self) -> str:
        """Return PENDING, RUNNING, SUCCEEDED, FAILED or STOPPED, of the last attempt."""
        queue, job = self._latest()
        return queue.now(job).status

    def logs(self) -> str:
        """Return the log of the last attempt."""
        queue, job = self._latest()
        return queue.log(job)

    def wait(self, timeout_seconds: float | None = None) -> str:
        """Wait until the job is over and return its status.

        Raise `RunFailed` if it failed or was stopped, `TimeoutError` if it still runs after `timeout_seconds`.
        """
        deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        queue, job = self._latest()
        while not (job := queue.now(job)).over:
            if deadline is not None and time.monotonic() > deadline:
                raise TimeoutError(f"{self.name} is {job.status} after {timeout_seconds:g} s")
            time.sleep(_POLL_SECONDS)
        if job.status != "SUCCEEDED":
            raise RunFailed(f"{job.submission_id} is {job.status}: {job.message}; see logs()")
        return job.status

    def stop(self) -> str:
        """Stop the job after a checkpoint, from which submitting it again resumes, and return its status."""
        queue, job = self._latest()
        return job.status if job.over else queue.stop(job).status

    def _latest(self) -> tuple[RayJobs, RayJob]:
        from narrowcast.cluster.ray_jobs import RayJobs

        queue = RayJobs(self.dashboard)
        if (job := queue.latest(self.name)) is None:
            raise UserError(f"no job {self.name} at {self.dashboard.address}")
        return queue, job
