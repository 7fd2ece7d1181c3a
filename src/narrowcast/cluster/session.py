"""A session of Ray: a cluster joined or started, the driver run there, and the health of its head."""

from __future__ import annotations

import logging
import math
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from narrowcast.cluster.decisions import FailurePolicy
from narrowcast.cluster.executor import Batch, Driver
from narrowcast.cluster.hosts import PlacementRequest, alive_nodes
from narrowcast.cluster.ray_internals import IN_JOB_VARIABLE, handshake_command, stream_ahead
from narrowcast.platform.config import plugins
from narrowcast.platform.errors import RunFailed, UserError
from narrowcast.platform.rounds.outcome import Outcome
from narrowcast.platform.rounds.state import Interrupted, Run, RunState
from narrowcast.platform.storage.host import allow_signals, block_signals, host_clock

CHECK_SECONDS = 2.0
_TIMEOUT_SECONDS = 10.0  # a head that restarts within this time is not missed
_CONNECT_SECONDS = 3.0


@dataclass
class Head:
    """The head of a cluster at host:port, with the times of the last check and the last answer.

    It is checked because Ray ends this process within a minute without a message if the head is gone.
    """

    address: str
    checked_at: float = field(default_factory=time.monotonic)
    answered_at: float = field(default_factory=time.monotonic)

    def check(self) -> None:
        """Check the head if the last check is old enough; raise `RunFailed` after the timeout without an answer."""
        if time.monotonic() - self.checked_at >= CHECK_SECONDS:
            self.answers()

    def answers(self) -> bool:
        """Return whether the head answers now; raise `RunFailed` after the timeout without an answer."""
        host, _, port = self.address.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_SECONDS).close()
        except OSError as error:
            self.checked_at = time.monotonic()
            if self.checked_at - self.answered_at > _TIMEOUT_SECONDS:
                raise RunFailed(
                    f"the head of the cluster at {self.address} is gone ({error.strerror or error}); start it again, "
                    "then resume"
                ) from error
            return False
        self.checked_at = self.answered_at = time.monotonic()
        return True

    def wait(self) -> None:
        """Wait until the head answers; raise `RunFailed` after the timeout without an answer."""
        while not self.answers():
            time.sleep(CHECK_SECONDS / 4)


__all__ = ["PlacementRequest", "alive_nodes", "joined", "probe", "run_rounds"]

logger = logging.getLogger(__name__)

_PROBE_SECONDS = 5.0
_HEALTH_SECONDS = 9.0
_FRUITLESS_DRIVERS = 3
_STOP_SECONDS = 20.0  # for the driver to send the state after the last round; otherwise the last checkpoint is used
_OUTCOMES_AHEAD = 16  # batches of rounds that the driver may be ahead of the recorder


def run_rounds(
    run: Run, state: RunState, policy: FailurePolicy, request: PlacementRequest
) -> Generator[Outcome, None, None]:
    """Run the rounds after `state` on the joined cluster; if the driver dies, start another from the state kept."""
    shared = [ray.put(run.detached())]
    head = Head(ray.get_runtime_context().gcs_address)
    done, fruitless = state.round_index, 0
    while True:
        driver = Driver.options(  # type: ignore[attr-defined]
            # On this node it dies with this process only, and is next to the objects that the hosts read.
            scheduling_strategy=NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True)
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


@contextmanager
def joined(address: str, options: dict[str, Any]) -> Iterator[None]:
    """Start or join the cluster at the address and leave it at the end; raise `UserError` if that fails."""
    options |= {"log_to_driver": False, "logging_level": logging.WARNING}
    if (modules := plugins.loaded()) and IN_JOB_VARIABLE not in os.environ:  # a job has them in its working directory
        options["runtime_env"] = {"py_modules": [str(module) for module in modules]}
    on_sigterm = signal.getsignal(signal.SIGTERM)
    try:
        with allow_signals(), block_signals(signal.SIGHUP):
            ray.init(address=address, **options)
    except (Exception, SystemExit) as error:  # of a node that starts too slowly Ray raises a plain `Exception`
        if isinstance(error, SystemExit) and error.code == signal.SIGTERM:
            signal.alarm(0)
            raise KeyboardInterrupt from None
        failed, advice = f"joined at {address}", "start one, or leave out --address"
        if address == "local":
            failed, advice = "started on this machine", "begin again when it has less to do"
        raise UserError(f"no Ray cluster could be {failed}: {error}; {advice}") from error
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, on_sigterm)  # Ray's own arms an alarm that aborts the process
    try:
        yield
    finally:
        ray.shutdown()


def _stream(driver: Any, state: RunState, head: Head) -> Generator[Outcome, None, None]:
    """Yield the outcomes of the driver, and log its incidents."""
    options = driver.run.options(**stream_ahead(_OUTCOMES_AHEAD))
    stream = options.remote(state)
    stop_by = math.inf
    try:
        while True:
            try:
                with allow_signals() if stop_by == math.inf else nullcontext():
                    _wait(stream, head, stop_by)
            except KeyboardInterrupt:
                if stop_by < math.inf:
                    raise
                driver.stop.remote()
                stop_by = host_clock().monotonic() + _STOP_SECONDS
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
        known = isinstance(error.cause, RunFailed | UserError)
        raise (error.cause if known else RunFailed(str(error.cause))) from error
    except RayActorError:
        if stop_by < math.inf:
            raise KeyboardInterrupt from None
        raise


def _wait(stream: Any, head: Head, stop_by: float) -> None:
    """Wait for the driver's next batch; raise `KeyboardInterrupt` after its time to stop."""
    while not ray.wait([stream], timeout=CHECK_SECONDS)[0]:
        head.check()
        if host_clock().monotonic() > stop_by:
            raise KeyboardInterrupt
    head.check()


def probe(address: str) -> None:
    """Raise `UserError` unless a Ray cluster answers at host:port; `ray.init` would try for many minutes."""
    host, _, port = address.rpartition(":")
    if not host or "@" in host or not port.isdigit():
        raise UserError(
            f'backend.address = "{address.rpartition("@")[2]}" is not a Ray address; give host:port, or auto'
        )
    try:
        socket.create_connection((host, int(port)), timeout=_PROBE_SECONDS).close()
    except (OSError, OverflowError) as error:
        told = error.strerror if isinstance(error, OSError) else None
        reason = told or str(error) or type(error).__name__
        raise UserError(f"no Ray cluster answers at {address} ({reason}); start one, or leave out --address") from error
    with subprocess.Popen(handshake_command(address), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as handshake:
        assert handshake.stdout is not None
        try:
            handshake.stdout.readline()
            with suppress(subprocess.TimeoutExpired):
                handshake.wait(_HEALTH_SECONDS)
        finally:
            handshake.kill()
    if handshake.returncode:
        raise UserError(
            f"{address} answers, but is not a Ray cluster of this version and token; give the address that "
            "`ray start --head` prints"
        )
