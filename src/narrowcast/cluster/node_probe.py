"""Print the Python and package versions of every node; a script of its own, which needs Ray and nothing else.

It runs on the cluster as a short job before a run is submitted.
"""

from __future__ import annotations

import json
import logging
import platform
import sys
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

SECONDS_FOR_ALL_NODES = 30.0


def versions(names: list[str]) -> dict[str, str | None]:
    """Return the version of each distribution, None if it is not installed."""
    installed: dict[str, str | None] = {}
    for name in names:
        try:
            installed[name] = version(name)
        except PackageNotFoundError:
            installed[name] = None
    try:  # narrowcast may be sent as source, without metadata
        installed["narrowcast"] = import_module("narrowcast").__version__
    except ImportError:
        installed["narrowcast"] = None
    return installed


def report(names: list[str]) -> dict[str, Any]:
    """Return the versions on this machine."""
    return {"python": platform.python_version(), "packages": versions(names)}


def reports(names: list[str]) -> dict[str, dict[str, Any] | None]:
    """Return the versions on each node by its address, None for a node that did not answer in time."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    ray.init(log_to_driver=False, logging_level=logging.ERROR)
    ask = ray.remote(num_cpus=0, max_retries=0)(report)
    asked = {
        ask.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)).remote(names): node
        for node in ray.nodes()
        if node["Alive"]
    }
    answered, _ = ray.wait(list(asked), num_returns=len(asked), timeout=SECONDS_FOR_ALL_NODES)
    by_node: dict[str, dict[str, Any] | None] = {}
    for reference, node in asked.items():
        try:
            answer = ray.get(reference) if reference in answered else None
        except ray.exceptions.RayError:  # the node left, or cannot start a worker
            answer = None
        by_node[f"{node['NodeManagerAddress']} ({node['NodeID'][:8]})"] = answer
    return by_node


if __name__ == "__main__":
    print(json.dumps(reports(sys.argv[1:])))
