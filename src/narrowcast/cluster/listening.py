"""The addresses on which Ray's processes of this user listen, on this machine."""

from __future__ import annotations

from collections.abc import Iterator
from ipaddress import IPv6Address, ip_address
from pathlib import Path

import psutil

LISTENERS = {
    "gcs_server": "the cluster's state; token",
    "raylet": "node manager and object manager; token",
    "worker": "an actor or a task; token",
    "driver": "the process of the run; token",
    "DashboardAgent": "jobs, logs and gRPC; token. Metrics of the node and of narrowcast; **no token**",
    "RuntimeEnvAgent": "set-up of a job's environment; token",
    "dashboard.py": "Ray's own metrics; **no token**",
    "monitor.py": "metrics of the autoscaler; **no token**",
}
"""Every process of a local run that listens, and what answers there; docs/shared-machine.md has this table."""


def listening() -> list[tuple[str, str]]:
    """Return the process, one of `LISTENERS`, and the host:port of each port of Ray that this user has open."""
    found = set()
    for process in psutil.process_iter():
        try:
            found |= {(role, address) for role, each in _roles(process) for address in _addresses(each)}
        except psutil.Error:  # it has ended, or belongs to another user
            continue
    return sorted(found)


def beyond_loopback(address: str) -> bool:
    """Return whether other machines may reach the host:port."""
    host = ip_address(address.rpartition(":")[0].strip("[]"))
    mapped = host.ipv4_mapped if isinstance(host, IPv6Address) else None
    return not (mapped or host).is_loopback


def _roles(process: psutil.Process) -> Iterator[tuple[str, psutil.Process]]:
    """Yield what the process is in Ray; a server also names the process that started it."""
    words = process.cmdline()
    if not words:
        return
    path = Path(words[0])
    if words[0].startswith("ray::"):
        agent = words[0].removeprefix("ray::")
        yield (agent if agent in LISTENERS else "worker"), process
    elif path.name in ("gcs_server", "raylet") and "ray" in path.parts:
        yield path.name, process
        if path.name == "gcs_server" and (parent := process.parent()) is not None:
            yield "driver", parent
    else:
        scripts = {Path(word).name for word in words[1:4] if "/ray/" in word}
        for name in scripts & {"dashboard.py", "monitor.py"}:
            yield name, process


def _addresses(process: psutil.Process) -> Iterator[str]:
    for each in process.net_connections("tcp"):
        if each.status == psutil.CONN_LISTEN:
            ip = each.laddr.ip
            yield f"[{ip}]:{each.laddr.port}" if ":" in ip else f"{ip}:{each.laddr.port}"
