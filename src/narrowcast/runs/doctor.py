"""Checks of the environment of a run, on this machine and on a cluster, each with advice if it fails.

One of them looks at the addresses on which Ray's processes of this user listen on this machine.
"""

from __future__ import annotations

import os
import shutil
import socket
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from ipaddress import IPv6Address, ip_address
from pathlib import Path
from typing import Literal

import psutil
import torch

from narrowcast._version import __version__
from narrowcast.cluster import dashboard
from narrowcast.cluster.backend import RayBackend
from narrowcast.cluster.preflight import requirements
from narrowcast.cluster.ray_token import check_token, token, token_path
from narrowcast.experiment import Experiment
from narrowcast.platform.config.run_fields import StoreAddress, Tracking
from narrowcast.platform.data import download
from narrowcast.platform.errors import UserError
from narrowcast.platform.tracking.sender import check_store

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
    ports = set()
    for process in psutil.process_iter():
        try:
            ports |= {(role, address) for role, listener in _roles(process) for address in _addresses(listener)}
        except psutil.Error:  # it has ended, or belongs to another user
            continue
    return sorted(ports)


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
    for connection in process.net_connections("tcp"):
        if connection.status == psutil.CONN_LISTEN:
            ip = connection.laddr.ip
            yield f"[{ip}]:{connection.laddr.port}" if ":" in ip else f"{ip}:{connection.laddr.port}"


_GIB = 2**30
_LITTLE_DISK_GIB, _LITTLE_MEMORY_GIB = 2.0, 2.0
_PORTS = {5000: "narrowcast ui", 6379: "a Ray head", 8265: "its dashboard"}
Verdict = Literal["ok", "note", "wrong"]


@dataclass(frozen=True)
class Finding:
    """The finding of one check, with advice unless it is ok."""

    what: str
    verdict: Verdict
    found: str
    advice: str = ""


def diagnose(experiment: Experiment | None, address: str | None, output: Path) -> Iterator[Finding]:
    """Check versions, authentication, ports, memory, disk, data, the MLflow store, and the cluster if one is given."""
    yield _packages()
    yield _authentication()
    yield _ray_ports()
    yield _ports()
    yield _memory()
    yield _disk(output)
    yield _data(experiment)
    tracking = experiment.tracking if experiment is not None else Tracking()
    yield _store(tracking.resolve(output))
    if address is not None:
        yield from _cluster(address, experiment)


def _packages() -> Finding:
    bad = []
    for needed in requirements():
        try:
            if not needed.specifier.contains(version(needed.name), prereleases=True):
                bad.append(f"{needed} (has {version(needed.name)})")
        except PackageNotFoundError:
            bad.append(f"{needed} (has none)")
    python = ".".join(map(str, sys.version_info[:3]))
    try:
        ray = f"Ray {version('ray')}"
    except PackageNotFoundError:
        ray = "no Ray (extra ray)"
    versions = f"narrowcast {__version__}, Python {python}, {ray}, torch {torch.__version__}"
    if bad:
        return Finding(
            "packages", "wrong", f"{versions}; needs {', '.join(bad)}", "pip install -c constraints.txt narrowcast"
        )
    return Finding("packages", "ok", versions)


def _authentication() -> Finding:
    mode = os.environ.get("RAY_AUTH_MODE", "token")
    if mode != "token":
        advice = "export RAY_AUTH_MODE=token, on every machine of the cluster"
        return Finding(
            "Ray token", "note", f"RAY_AUTH_MODE={mode}: anyone who reaches the cluster can run code there", advice
        )
    try:
        check_token()
    except UserError as error:
        return _wrong("Ray token", error)
    if token() is None:
        return Finding("Ray token", "ok", f"none yet; a run on this machine creates {token_path()}, for you alone")
    return Finding("Ray token", "ok", "in RAY_AUTH_TOKEN" if os.environ.get("RAY_AUTH_TOKEN") else f"in {token_path()}")


def _ray_ports() -> Finding:
    ports = listening()
    reachable = [f"{process} {address}" for process, address in ports if beyond_loopback(address)]
    if reachable:
        advice = "`ray start` opens them to all networks: let a firewall allow only the cluster's machines"
        return Finding("Ray ports", "note", f"reachable from other machines: {', '.join(reachable)}", advice)
    now = "".join(f"; now {process} {address}" for process, address in ports)
    return Finding("Ray ports", "ok", f"on 127.0.0.1 only, as those of any run on this machine{now}")


def _ports() -> Finding:
    taken = [f"{port} ({use})" for port, use in _PORTS.items() if _is_taken(port)]
    if taken:
        advice = "fine if you started it; otherwise give --port, or ray start --port and --dashboard-port"
        return Finding("ports", "note", f"in use: {', '.join(taken)}", advice)
    return Finding("ports", "ok", f"free: {', '.join(map(str, _PORTS))}")


def _is_taken(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1.0)
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _memory() -> Finding:
    free, shared = psutil.virtual_memory().available / _GIB, _free_gib(Path("/dev/shm"))
    memory = f"{free:.1f} GiB of memory free, {os.cpu_count()} CPUs"
    if free < _LITTLE_MEMORY_GIB:
        return Finding("memory", "wrong", memory, "close other programs, or lower backend.actors and chunk_size")
    if shared is not None and shared < 0.3 * free:
        advice = "start the container with --shm-size of a third of its memory"
        return Finding("memory", "note", f"{memory}, but {shared:.1f} GiB in /dev/shm: Ray spills to disk", advice)
    return Finding("memory", "ok", memory)


def _disk(output: Path) -> Finding:
    folder = output.resolve()
    while not folder.exists():
        folder = folder.parent
    free = _free_gib(folder) or 0.0
    space = f"{free:.1f} GiB free at {folder}"
    if not os.access(folder, os.W_OK):
        return Finding("disk", "wrong", f"{folder} cannot be written", "give another folder with --output")
    if free < _LITTLE_DISK_GIB:
        return Finding("disk", "wrong", space, "free some space, or give another folder with --output")
    return Finding("disk", "ok", space)


def _free_gib(path: Path) -> float | None:
    return shutil.disk_usage(path).free / _GIB if path.is_dir() else None


def _data(experiment: Experiment | None) -> Finding:
    if experiment is not None:
        return _try("data", lambda: f"{(data := experiment.data_source.load()).name} in {data.source}")
    present = [row.name for row in download.status() if row.folder]
    missing = [row.name for row in download.status() if not row.folder]
    state = f"here: {', '.join(present) or 'none'}" + (f"; not here: {', '.join(missing)}" if missing else "")
    return Finding("data", "ok" if present else "note", state, "" if present else f"narrowcast data fetch {missing[0]}")


def _store(store: StoreAddress) -> Finding:
    uri, shown = store.uri, store.shown
    if uri.startswith("sqlite:///") and not Path(uri.removeprefix("sqlite:///")).exists():
        return Finding("MLflow store", "ok", f"{shown}, which the first run creates")

    def answers() -> str:
        check_store(store)
        return shown

    return _try("MLflow store", answers)


def _cluster(address: str, experiment: Experiment | None) -> Iterator[Finding]:
    try:
        cluster = dashboard.reach(address)
        nodes = cluster.nodes()
    except UserError as error:
        yield _wrong("cluster", error)
        return
    cpus, gpus = (sum(node.resources.get(kind, 0) for node in nodes) for kind in ("CPU", "GPU"))
    summary = f"Ray {cluster.ray_version} at {cluster.address}, {len(nodes)} nodes, {cpus:g} CPUs, {gpus:g} GPUs"
    yield Finding("cluster", "ok", summary)
    if dashboard.is_open(address):
        yield Finding(
            "dashboard", "wrong", "no authentication", "start every node with RAY_AUTH_MODE=token and one token"
        )
    if experiment is not None and isinstance(backend := experiment.backend, RayBackend):

        def fits() -> str:
            cluster.check_fits(backend.least_actors, backend.need())
            return f"enough for backend.actors = {backend.actors}"

        yield _try("capacity", fits)


def _try(what: str, check: Callable[[], str]) -> Finding:
    try:
        return Finding(what, "ok", check())
    except UserError as error:
        return _wrong(what, error)


def _wrong(what: str, error: UserError) -> Finding:
    """Return the finding of a `UserError`, whose message ends in the advice."""
    problem, _, advice = str(error).partition("; ")
    return Finding(what, "wrong", problem, advice)
