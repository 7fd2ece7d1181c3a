"""The Ray runtime: starts or joins a cluster, runs the driver actor there, and leaves."""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

# Ray reads both when it is imported. Token authentication must be the same for everyone on a cluster, so it is set here
# and not left to Ray, which would decide by whether a token file happens to lie in the home folder.
os.environ.setdefault("RAY_AUTH_MODE", "token")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import ray
import torch
from ray.exceptions import RayActorError

from narrowcast.cluster.driver import Driver
from narrowcast.cluster.failure import FailureBudget
from narrowcast.platform.contracts import Algorithm, Task
from narrowcast.platform.errors import RunFailed, UserError
from narrowcast.platform.plan import Plan
from narrowcast.platform.rounds import Outcome
from narrowcast.platform.run_state import RunState

logger = logging.getLogger(__name__)

_PROBE_SECONDS = 5.0
_HEALTH_SECONDS = 8.0
_OUTCOMES_AHEAD = 16  # lists of rounds that the driver may be ahead of whoever writes them down


class RayRuntime(BaseModel):
    """Client hosts and the driver as Ray actors, on a cluster that is started for the run or joined.

    Without `address`, the cluster of a surrounding Ray job (RAY_ADDRESS) is used, else one is started on this machine
    and stopped at the end.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["ray"] = "ray"
    actors: int = Field(2, ge=1, le=4096, description="client hosts; each hosts whichever clients a round brings it")
    cpus_per_actor: float = Field(1.0, ge=0)
    gpus_per_actor: float = Field(0.0, ge=0, description="0.5 lets two client hosts share a GPU")
    address: str | None = Field(None, description="host:port of a running cluster, or auto")
    max_failures: int = Field(20, ge=0, description="actors that may die in a run before it is given up")
    round_timeout_seconds: float = Field(600.0, gt=0, description="a host that has not answered by then is replaced")

    def check(self, task: Task) -> None:
        """Join the cluster once; raises `UserError` within seconds where it does not answer or is too small."""
        if task.training.device == "cuda" and not self.gpus_per_actor:
            raise UserError("training.device = cuda: client hosts have no GPU; set executor.gpus_per_actor=0.5")
        address = self._address()
        if address == "local":
            if self.gpus_per_actor:
                self._fits("GPU", self.gpus_per_actor, torch.cuda.device_count(), "this machine")
            return
        if address != "auto":
            probe(address)
        with self._cluster():
            resources = ray.cluster_resources()
        for kind, each in (("CPU", self.cpus_per_actor), ("GPU", self.gpus_per_actor)):
            self._fits(kind, each, resources.get(kind, 0.0), f"the cluster at {address}")

    def _fits(self, kind: str, each: float, there: float, where: str) -> None:
        if (needed := self.actors * each) > there:
            raise UserError(
                f"executor.actors = {self.actors} with {each:g} {kind}s each need {needed:g} {kind}s; "
                f"{where} has {there:g}; lower executor.actors or executor.{kind.lower()}s_per_actor"
            )

    def play(self, plan: Plan, algorithm: Algorithm, task: Task, state: RunState) -> Generator[Outcome, None, None]:
        """Play the rounds that `state` has not seen, starting the driver over from the last state if it dies."""
        budget = FailureBudget(self.max_failures, self.round_timeout_seconds)
        with self._cluster():
            shared = (ray.put(algorithm), ray.put(task))
            done = state.round_index
            while True:
                try:
                    for outcome in self._stream(plan, shared, state, budget):
                        state = outcome.state or state
                        if outcome.record.round > done:
                            done = outcome.record.round
                            yield outcome
                    return
                except RayActorError as error:
                    budget = budget.spend(f"the driver died ({type(error).__name__})")
                    logger.warning("the driver died; it starts over after round %d", state.round_index)

    def _stream(
        self, plan: Plan, shared: tuple[ray.ObjectRef[Any], ray.ObjectRef[Any]], state: RunState, budget: FailureBudget
    ) -> Generator[Outcome, None, None]:
        driver = Driver.remote(list(shared), self.actors, self.cpus_per_actor, self.gpus_per_actor, budget)  # type: ignore[attr-defined]
        try:
            stream = driver.play.options(
                num_returns="streaming", _generator_backpressure_num_objects=_OUTCOMES_AHEAD
            ).remote(plan, state)
            for reference in stream:
                yield from ray.get(reference)
        except ray.exceptions.RayTaskError as error:
            raise (error.cause if isinstance(error.cause, RunFailed) else RunFailed(str(error.cause))) from error
        finally:
            ray.kill(driver)

    def _address(self) -> str:
        return self.address or os.environ.get("RAY_ADDRESS") or "local"

    @contextmanager
    def _cluster(self) -> Iterator[None]:
        address = self._address()
        options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.WARNING}
        if address == "local":
            options |= {
                "num_cpus": max(os.cpu_count() or 1, int(self.actors * self.cpus_per_actor + 0.999)),
                "include_dashboard": False,
                "_node_ip_address": "127.0.0.1",
            }
        on_sigterm = signal.getsignal(signal.SIGTERM)
        try:
            ray.init(address=address, **options)
        except (ConnectionError, RuntimeError, ValueError, SystemExit) as error:
            if isinstance(error, SystemExit) and error.code == signal.SIGTERM:
                signal.alarm(0)
                raise KeyboardInterrupt from None
            raise UserError(
                f"no Ray cluster could be had at {address}: {error}; start one, or leave out --address"
            ) from error
        finally:
            if threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGTERM, on_sigterm)  # Ray's own arms an alarm that aborts the process
        try:
            yield
        finally:
            ray.shutdown()


def probe(address: str) -> None:
    """Raise `UserError` unless a Ray cluster answers at host:port; `ray.init` would try for many minutes."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise UserError(f'executor.address = "{address}" is no Ray address; give host:port, or auto')
    try:
        socket.create_connection((host, int(port)), timeout=_PROBE_SECONDS).close()
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise UserError(f"no Ray cluster answers at {address} ({reason}); start one, or leave out --address") from error
    health_check = [sys.executable, "-m", "ray.scripts.scripts", "health-check", "--address", address]
    try:
        done = subprocess.run(health_check, capture_output=True, timeout=_HEALTH_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        done = None
    if done is None or done.returncode:
        raise UserError(
            f"what answers at {address} is no Ray cluster of this version and token; give the address that "
            "`ray start --head` prints"
        )
