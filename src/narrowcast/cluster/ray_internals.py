"""The parts of Ray outside its documented interface that narrowcast uses; no other module names a private part of Ray.

`CHECKED_VERSION` is the latest version that it was checked against; a test fails where a later one is installed.
"""

from __future__ import annotations

import sys
from typing import Any

CHECKED_VERSION = "2.60.0"

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

LOCAL_ONLY: dict[str, Any] = {"_node_ip_address": "127.0.0.1"}
"""Option of `ray.init` that keeps a cluster of this machine off the network."""

_HANDSHAKE = "import sys; from ray._raylet import GcsClient; GcsClient(address=sys.argv[1])"


def handshake_command(address: str) -> list[str]:
    """Return a command that exits with 0 if a Ray cluster of this version and token answers at host:port.

    It does what `ray health-check` does first, with a third of its imports. `ray.init` would try for many minutes.
    """
    return [sys.executable, "-c", _HANDSHAKE, address]


def stream_ahead(objects: int) -> dict[str, Any]:
    """Return the options of a method that streams its results, and may be ahead of the reader by so many objects."""
    return {"num_returns": "streaming", "_generator_backpressure_num_objects": objects}
