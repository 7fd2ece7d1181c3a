"""The Ray backend: starts or joins a cluster, runs the driver actor there, and leaves."""

from __future__ import annotations

import logging
import math
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import ray
import torch
from pydantic import ConfigDict, Field
from ray.exceptions import RayActorError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from narrowcast.cluster.driver import Batch, Driver
from narrowcast.cluster.failure import FailurePolicy, Reaction
from narrowcast.cluster.head import CHECK_SECONDS, Head
from narrowcast.cluster.hosts import PlacementRequest, alive_nodes
from narrowcast.cluster.placement import Node, Policy
from narrowcast.cluster.ray_internals import IN_JOB_VARIABLE, handshake_command, on_this_machine_only, stream_ahead
from narrowcast.cluster.ray_token import check_token, ensure_token
from narrowcast.cluster.resources import HostResources
from narrowcast.platform import plugins
from narrowcast.platform.config import suggest
from narrowcast.platform.errors import RunFailed, UserError
from narrowcast.platform.host_time import host_time
from narrowcast.platform.interruption import interruptible
from narrowcast.platform.outcome import Outcome
from narrowcast.platform.run import Run
from narrowcast.platform.sampling import cohort_size
from narrowcast.platform.schedule import Buffered
from narrowcast.platform.state import Interrupted, RunState

logger = logging.getLogger(__name__)

_PROBE_SECONDS = 5.0
_HEALTH_SECONDS = 9.0
_FRUITLESS_DRIVERS = 3
_STOP_SECONDS = 20.0  # for the driver to send the state after the last round; otherwise the last checkpoint is used
_OUTCOMES_AHEAD = 16  # batches of rounds that the driver may be ahead of the recorder


class RayBackend(HostResources):
    """Client hosts and the driver as Ray actors, on a cluster that is started for the run or joined.

    Without `address`, the cluster of a surrounding Ray job (RAY_ADDRESS) is used, else one is started on this machine
    and stopped at the end.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    placement: Policy = Field(
        "spread", description="spread: hosts evenly over the nodes; pack: on as few nodes as possible"
    )
    address: str | None = Field(None, description="host:port of a running cluster, or auto")
    on_failure: Reaction = Field(
        "redo", description="clients of a failed host: redo trains them elsewhere, drop counts them as stragglers"
    )
    max_failures: int = Field(20, ge=0, description="failures of hosts or nodes that a run tolerates")
    round_timeout_seconds: float = Field(
        600.0, gt=0, description="a host that does not answer within this time is replaced"
    )
    placement_timeout_seconds: float = Field(120.0, gt=0, description="wait for a first host to start")

    def check(self, run: Run) -> None:
        """Join the cluster once; raise `UserError` within seconds if it does not answer or is too small."""
        if run.task.training.device == "cuda" and not self.gpus_per_actor:
            raise UserError("training.device = cuda: client hosts have no GPU; set backend.gpus_per_actor=0.5")
        if self.clients_per_actor is not None and run.plan.chunk_size > self.clients_per_actor:
            raise UserError(
                f"backend.clients_per_actor = {self.clients_per_actor}: a host trains whole chunks, and chunk_size is "
                f"{run.plan.chunk_size}; set chunk_size={self.clients_per_actor} too"
            )
        check_token()
        address, hosts = self._address(), self._hosts(run)
        if address == "local":
            here = {"CPU": self._local_cpus(run), "GPU": torch.cuda.device_count()}
            self._fits(hosts, [Node("", here)], "this machine")
            return
        if address != "auto":
            probe(address)
        with self.cluster(1):
            nodes = alive_nodes()
        self._fits(hosts, nodes, f"the cluster at {address}")

    def _hosts(self, run: Run) -> int:
        """Return the number of client hosts that the run asks for."""
        plan, schedule = run.plan, run.plan.schedule
        cohort = (
            schedule.buffer_size
            if isinstance(schedule, Buffered)
            else cohort_size(plan.clients_per_round, plan.over_selection, run.task.data.n_clients)
        )
        if self.clients_per_actor is not None:
            return -(-cohort // self.clients_per_actor)
        return -(-cohort // plan.chunk_size) if self.actors == "auto" else self.actors

    def _fits(self, hosts: int, nodes: Sequence[Node], where: str) -> None:
        offered = {kind for node in nodes for kind, there in node.offers.items() if there}
        for name in self.resources_per_actor:
            if name not in offered:
                raise UserError(
                    f'backend.resources_per_actor: {where} offers no "{name}", only {", ".join(sorted(offered))}; '
                    f"start a node with ray start --resources='{{\"{name}\": 1}}'{suggest(name, offered)}"
                )
        needed = 1 if self.actors == "auto" and self.clients_per_actor is None else hosts
        if (capacity := sum(node.room_for(self.need(), hosts) for node in nodes)) < needed:
            each = " and ".join(f"{amount:g} {kind}" for kind, amount in self.need().items() if amount)
            raise UserError(
                f"{hosts} client hosts that need {each} each: {where} has room for {capacity}; lower backend.actors or "
                "what each needs, or set backend.actors=auto"
            )

    def run(self, run: Run, state: RunState) -> Generator[Outcome, None, None]:
        """Run the rounds after `state`; if the driver dies, start another from the last state that was kept."""
        policy = FailurePolicy(self.on_failure, self.max_failures, self.round_timeout_seconds)
        request = PlacementRequest(self._hosts(run), self.need(), self.placement, self.placement_timeout_seconds)
        with self.cluster(self._local_cpus(run)):
            shared = [ray.put(run.detached())]
            head = Head(ray.get_runtime_context().gcs_address)
            done, fruitless = state.round_index, 0
            while True:
                driver = Driver.options(  # type: ignore[attr-defined]
                    # On this node it dies with this process only, and is next to the objects that the hosts read.
                    scheduling_strategy=NodeAffinitySchedulingStrategy(
                        ray.get_runtime_context().get_node_id(), soft=True
                    )
                ).remote(shared, request, policy)
                try:
                    for outcome in _stream(driver, state, head):
                        fruitless = 0
                        state = outcome.state or state
                        if outcome.record.round > done:
                            done = outcome.record.round
                            yield outcome
                    return
                except RayActorError as error:
                    head.wait()
                    fruitless += 1
                    if fruitless == _FRUITLESS_DRIVERS:
                        raise RunFailed(
                            f"{fruitless} driver actors in a row died before they finished a round, last: "
                            f"{str(error).strip().splitlines()[-1]}; is narrowcast the same on every node?"
                        ) from error
                    policy = policy.spend(f"the driver died ({type(error).__name__})")
                    state = replace(state, settled_round=max(done, state.settled_round))
                    logger.warning("the driver died; another one continues after round %d", state.round_index)
                finally:
                    ray.kill(driver)

    def _local_cpus(self, run: Run) -> int:
        """Return the CPUs that a cluster on this machine declares: enough for all hosts, which share the real ones."""
        cores = os.cpu_count() or 1
        if self.actors == "auto" and self.clients_per_actor is None:
            return cores
        return max(cores, math.ceil(self._hosts(run) * self.cpus_per_actor))

    def _address(self) -> str:
        return self.address or os.environ.get("RAY_ADDRESS") or "local"

    @contextmanager
    def cluster(self, local_cpus: int) -> Iterator[None]:
        """Start a cluster here with this number of CPUs, or join one; raise `UserError` if that fails."""
        address = self._address()
        if address != "local":
            check_token()
            with _joined(address, {}):
                yield
            return
        ensure_token()
        local = {"num_cpus": local_cpus, "include_dashboard": False}
        with on_this_machine_only() as private, _joined(address, {**local, **private}):
            yield


@contextmanager
def _joined(address: str, options: dict[str, Any]) -> Iterator[None]:
    """Start or join the cluster at the address and leave it at the end; raise `UserError` if that fails."""
    options |= {"log_to_driver": False, "logging_level": logging.WARNING}
    if (modules := plugins.loaded()) and IN_JOB_VARIABLE not in os.environ:  # a job has them in its working directory
        options["runtime_env"] = {"py_modules": [str(each) for each in modules]}
    on_sigterm = signal.getsignal(signal.SIGTERM)
    try:
        with interruptible(), _hangups_deferred():
            ray.init(address=address, **options)
    except (ConnectionError, RuntimeError, ValueError, SystemExit) as error:
        if isinstance(error, SystemExit) and error.code == signal.SIGTERM:
            signal.alarm(0)
            raise KeyboardInterrupt from None
        raise UserError(
            f"no Ray cluster could be joined or started at {address}: {error}; start one, or leave out --address"
        ) from error
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, on_sigterm)  # Ray's own arms an alarm that aborts the process
    try:
        yield
    finally:
        ray.shutdown()


@contextmanager
def _hangups_deferred() -> Iterator[None]:
    """Block SIGHUP in this block and in the processes that it starts: a closed terminal sends it to them too."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _stream(driver: Any, state: RunState, head: Head) -> Generator[Outcome, None, None]:
    """Yield the outcomes of the driver, and log its incidents."""
    options = driver.run.options(**stream_ahead(_OUTCOMES_AHEAD))
    stream = options.remote(state)
    stop_by = math.inf
    try:
        while True:
            try:
                with interruptible() if stop_by == math.inf else nullcontext():
                    _wait(stream, head, stop_by)
            except KeyboardInterrupt:
                if stop_by < math.inf:
                    raise
                driver.stop.remote()
                stop_by = host_time().monotonic() + _STOP_SECONDS
                continue
            try:
                batch: Batch = ray.get(next(stream))
            except StopIteration:
                return
            for incident in batch.incidents:
                logger.warning(incident)
            yield from batch.outcomes
            if batch.stopped is not None:
                raise Interrupted([batch.stopped])
    except RayTaskError as error:
        raise (error.cause if isinstance(error.cause, RunFailed) else RunFailed(str(error.cause))) from error
    except RayActorError:
        if stop_by < math.inf:
            raise KeyboardInterrupt from None
        raise


def _wait(stream: Any, head: Head, stop_by: float) -> None:
    """Wait for the driver's next batch; raise `KeyboardInterrupt` after its time to stop."""
    while not ray.wait([stream], timeout=CHECK_SECONDS)[0]:
        head.check()
        if host_time().monotonic() > stop_by:
            raise KeyboardInterrupt
    head.check()


def probe(address: str) -> None:
    """Raise `UserError` unless a Ray cluster answers at host:port; `ray.init` would try for many minutes."""
    host, _, port = address.rpartition(":")
    if not host or "@" in host or not port.isdigit():
        raise UserError(f'backend.address = "{address.rpartition("@")[2]}" is no Ray address; give host:port, or auto')
    try:
        socket.create_connection((host, int(port)), timeout=_PROBE_SECONDS).close()
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise UserError(f"no Ray cluster answers at {address} ({reason}); start one, or leave out --address") from error
    try:
        done = subprocess.run(handshake_command(address), capture_output=True, timeout=_HEALTH_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        done = None
    if done is None or done.returncode:
        raise UserError(
            f"{address} answers, but is no Ray cluster of this version and token; give the address that "
            "`ray start --head` prints"
        )
