"""The parts of Ray outside its documented interface that narrowcast uses; no other module names a private part of Ray.

`CHECKED_VERSION` is the latest version that it was checked against; a test fails where a later one is installed.

The private folder of a local cluster, and a guard: Ray's processes and files do not outlive the run that began them.

After SIGKILL of a run, Ray 2.60 itself ends all but two agents within seconds, these after 60 to 90 s, and leaves the
folder. The guard is this file, run as a program with the standard library alone. It waits for the end of the process
that started it, whatever ends that, then kills what is left of the cluster and removes the folder. If the guard is
killed too, the next local cluster of this user does it: the folder of a live process has a lock, which the kernel
releases.
"""

from __future__ import annotations

import fcntl
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from inspect import signature
from pathlib import Path
from typing import Any

from narrowcast.cluster import RAY_SETTINGS

_PREFIX, _LOCK = "nc-ray-", "in-use"
_MARK = "NARROWCAST_RAY_FOLDER"
"""Variable with the folder, by which the cluster's processes are told from others; they inherit it."""
_END_SECONDS = 20.0
_LONGEST_PARENT = 20  # of the 107 bytes of a socket's path, Ray and we need some 80


@contextmanager
def ray_folder() -> Iterator[Path]:
    """Yield a new folder that only this user can enter; at the end, no process started meanwhile and no file is left.

    Folders of this user whose processes were killed are removed first.
    """
    parent = Path(tempfile.gettempdir())
    if len(str(parent)) > _LONGEST_PARENT:
        parent = Path("/tmp")
    remove_abandoned(parent)
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
    held = _lock(folder)
    command, before = [sys.executable, "-I", __file__, str(folder)], os.environ.get(_MARK)
    with subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True) as guard:
        os.environ[_MARK] = str(folder)
        try:
            yield folder
        finally:
            os.environ.pop(_MARK)
            if before is not None:
                os.environ[_MARK] = before
            assert guard.stdin is not None
            guard.stdin.close()
            try:
                guard.wait(_END_SECONDS)
            except subprocess.TimeoutExpired:
                guard.kill()
            os.close(held)


def remove_abandoned(parent: Path) -> None:
    """Remove the folders in which no live process has a lock, and kill what is left of their clusters."""
    for folder in parent.glob(f"{_PREFIX}*"):
        with suppress(OSError):  # of another user, or removed meanwhile
            if folder.stat().st_uid != os.getuid():
                continue
            descriptor = os.open(folder / _LOCK, os.O_RDONLY)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                clean_up(folder)
            finally:
                os.close(descriptor)


def clean_up(folder: Path) -> None:
    """Kill the processes of a folder's cluster, and remove the folder."""
    deadline = time.monotonic() + _END_SECONDS / 2
    while (left := _processes_of(folder)) and time.monotonic() < deadline:
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)
    shutil.rmtree(folder, ignore_errors=True)


def _lock(folder: Path) -> int:
    """Return the descriptor of a lock that ends with this process; the file only becomes visible once it is locked."""
    part = folder / f"{_LOCK}.part"
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    part.rename(folder / _LOCK)
    return descriptor


def _processes_of(folder: Path) -> list[int]:
    """Return the processes of this user that inherited the mark, and Ray's agents with a file of the folder open.

    The agents write their title over the end of their environment. The process that this one was started by is spared:
    a driver at its end.
    """
    mark, found = f"{_MARK}={folder}".encode(), []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # ended, or of another user
            marked = mark in (process / "environ").read_bytes().split(b"\0")
            titled = not marked and (process / "cmdline").read_bytes().startswith(b"ray::")
            pid = int(process.name)
            if pid not in (os.getpid(), os.getppid()) and (marked or (titled and _has_open(process, folder))):
                found.append(pid)
    return found


def _has_open(process: Path, folder: Path) -> bool:
    for descriptor in (process / "fd").iterdir():
        with suppress(OSError):  # closed meanwhile
            if descriptor.readlink().is_relative_to(folder):
                return True
    return False


if __name__ == "__main__":
    sys.stdin.buffer.read()  # ends with the process that has the other end
    clean_up(Path(sys.argv[1]))


CHECKED_VERSION = "2.60.0"

_START_SECONDS = 120.0
"""Longest time in which a node that is started here has to register; a busy machine needs more than the 30 s of Ray."""

_AGENT_PORTS = ("metrics_agent_port", "metrics_export_port", "dashboard_agent_listen_port", "runtime_env_agent_port")
"""Ports of a node's agents. A node whose agents choose them dies unless it learns them in 15 s (Ray issue 65983)."""

NODES_PATH = "/api/v0/nodes?limit=10000"
"""Path of the dashboard that lists the nodes, as `ray.util.state` asks for it."""

NOISY_LOGGERS = (
    "ray.dashboard.modules.dashboard_sdk",
    "ray.dashboard.modules.job.sdk",
    "ray._private.runtime_env.packaging",
)
"""Loggers of the job client that report every upload of a file."""

IN_JOB_VARIABLE = "RAY_JOB_CONFIG_JSON_ENV_VAR"
"""Variable that Ray sets in the process of a submitted job."""


@contextmanager
def on_this_machine_only() -> Iterator[dict[str, Any]]:
    """Yield options of `ray.init` with which every port of the cluster that it starts is bound to 127.0.0.1.

    Ray binds to the address of the node if that is a loopback address, and to all interfaces otherwise; but it takes
    127.0.0.1 as a node's address on systems only where it supports no clusters, and replaces it on Linux.
    Its files, such as sockets and logs, have mode 777, so that they are in a folder which only this user can enter.
    """
    from ray._private import ray_constants  # `submit` takes seconds less without Ray

    with ray_folder() as private, slow_starts():
        supported = ray_constants.ENABLE_RAY_CLUSTER
        ray_constants.ENABLE_RAY_CLUSTER = False
        try:
            yield {"_node_ip_address": "127.0.0.1", "_temp_dir": str(private / "ray")}
        finally:
            ray_constants.ENABLE_RAY_CLUSTER = supported


@contextmanager
def slow_starts() -> Iterator[None]:
    """Let `ray.init` wait for the node that it starts, and that node for its agents, for `_START_SECONDS`."""
    from ray._private import services
    from ray._raylet import DASHBOARD_AGENT_LISTEN_PORT_NAME, persist_port  # type: ignore[attr-defined]

    ask, start = services.get_node, services.start_raylet
    nodes = list[subprocess.Popen[bytes]]()

    def asked_until_it_is_there(gcs_address: str, node_id: str) -> Any:
        end = time.monotonic() + _START_SECONDS
        while True:
            try:
                return ask(gcs_address, node_id)  # type: ignore[no-untyped-call]
            except RuntimeError:  # not registered yet
                if time.monotonic() >= end or any(node.poll() is not None for node in nodes):
                    raise
                time.sleep(0.2)

    def started_with_ports(*positional: Any, **named: Any) -> Any:
        given = signature(start).bind(*positional, **named).arguments
        missing = [name for name in _AGENT_PORTS if not given.get(name)]
        given |= dict(zip(missing, free_ports(len(missing)), strict=True))
        # The node is not told this port, but reads it where the agent is to leave it.
        listen_port = given["dashboard_agent_listen_port"]
        persist_port(given["session_dir"], given["node_id"], DASHBOARD_AGENT_LISTEN_PORT_NAME, listen_port)
        longer = {"RAY_agent_register_timeout_ms": str(round(1e3 * _START_SECONDS))}
        started = start(**given | {"env_updates": longer | (given.get("env_updates") or {})})
        nodes.append(started.process)
        return started

    services.get_node, services.start_raylet = asked_until_it_is_there, started_with_ports
    try:
        yield
    finally:
        services.get_node, services.start_raylet = ask, start


def free_ports(count: int) -> list[int]:
    """Return ports below those that Linux gives to connections, and above those of Ray's workers."""
    with ExitStack() as held:
        found = list[int]()
        while len(found) < count:
            probe = held.enter_context(socket.socket())
            with suppress(OSError):  # taken: another one
                probe.bind(("", random.SystemRandom().randrange(20_000, 32_768)))
                found.append(probe.getsockname()[1])
        return found


def latest_address() -> str | None:
    """Return host:port of the cluster that `ray start` started last on this machine, running or not."""
    with RAY_SETTINGS.in_force():
        from ray._private import services

    address: str | None = services.find_bootstrap_address(None)
    return address


_HANDSHAKE = "import sys; from ray._raylet import GcsClient; print(flush=True); GcsClient(address=sys.argv[1])"


def handshake_command(address: str) -> list[str]:
    """Return a command that exits with 0 if a Ray cluster of this version and token answers at host:port.

    It writes a line before it asks, since its imports take longer than the answer.
    It does what `ray health-check` does first, with a third of its imports. `ray.init` would try for many minutes.
    """
    return [sys.executable, "-c", _HANDSHAKE, address]


def stream_ahead(objects: int) -> dict[str, Any]:
    """Return the options of a method that streams its results, and may be ahead of the reader by so many objects."""
    return {"num_returns": "streaming", "_generator_backpressure_num_objects": objects}
