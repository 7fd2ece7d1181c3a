"""The parts of Ray outside its documented interface that narrowcast uses; no other module names a private part of Ray.

`CHECKED_VERSION` is the latest version that it was checked against; a test fails where a later one is installed.
"""

from __future__ import annotations

import random
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from inspect import signature
from typing import Any

from narrowcast.cluster import RAY_SETTINGS
from narrowcast.cluster.ray_folder import ray_folder

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
        arguments = signature(start).bind(*positional, **named).arguments
        missing = [name for name in _AGENT_PORTS if not arguments.get(name)]
        arguments |= dict(zip(missing, free_ports(len(missing)), strict=True))
        # The node is not told this port, but reads it where the agent is to leave it.
        listen_port = arguments["dashboard_agent_listen_port"]
        persist_port(arguments["session_dir"], arguments["node_id"], DASHBOARD_AGENT_LISTEN_PORT_NAME, listen_port)
        longer = {"RAY_agent_register_timeout_ms": str(round(1e3 * _START_SECONDS))}
        started = start(**arguments | {"env_updates": longer | (arguments.get("env_updates") or {})})
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
        ports = list[int]()
        while len(ports) < count:
            probe = held.enter_context(socket.socket())
            with suppress(OSError):  # taken: another one
                probe.bind(("", random.SystemRandom().randrange(20_000, 32_768)))
                ports.append(probe.getsockname()[1])
        return ports


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
