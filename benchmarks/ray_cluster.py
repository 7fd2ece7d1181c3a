"""A real Ray cluster of several nodes on one machine, whose nodes can be killed, frozen and disconnected.

If run as root, every worker node has its own network namespace, so that its link can be taken down.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

import psutil

QUICK_CHECKS = {
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_failure_threshold": "3",
    "RAY_raylet_start_wait_time_s": "80",
}
"""A node that does not answer is dead after six seconds and not after twenty."""
STORE_BYTES = 80_000_000
_NUMBERS = count(1)
_COUNT = """
import sys, time, ray
ray.init(address=sys.argv[1], log_to_driver=False)
while sum(node["Alive"] for node in ray.nodes()) != int(sys.argv[2]):
    time.sleep(0.2)
"""


@dataclass
class Node:
    """A node: `ray start --block` in its own process group."""

    process: subprocess.Popen[bytes]
    link: str = ""
    given_up: bool = False
    """Whether it was frozen or cut off, so that the cluster takes it for dead and it will end by itself."""

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the node's raylet and all processes that it started."""
        os.killpg(self.process.pid, number)

    def alive(self) -> bool:
        return self.process.poll() is None

    def kill(self) -> None:
        """Kill all processes of the node with SIGKILL, and remove its link."""
        family = _family(self.process.pid)
        self.process.send_signal(signal.SIGKILL)
        for each in family:
            with suppress(psutil.NoSuchProcess):
                each.kill()
        self.process.wait()
        if self.link:
            _ip("link", "del", self.link, check=False)
            _ip("netns", "del", self.link, check=False)


def _family(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def _ip(*words: str, check: bool = True) -> None:
    subprocess.run(["ip", *words], check=check, capture_output=True)


@dataclass
class RayCluster:
    """A head and its worker nodes."""

    log: Path
    head_cpus: int = 1
    isolated: bool = os.geteuid() == 0
    nodes: list[Node] = field(default_factory=list)
    head: Node | None = None
    port: int = 0
    ip: str = "127.0.0.1"

    @property
    def address(self) -> str:
        return f"{self.ip}:{self.port}"

    def start(self) -> None:
        """Start the head, on its former port if it had one, and wait until it answers."""
        if self.isolated and self.ip == "127.0.0.1":
            self.ip = f"10.{77 + os.getpid() % 100}.0.1"
            _ip("link", "add", self._bridge, "type", "bridge")
            _ip("addr", "add", f"{self.ip}/24", "dev", self._bridge)
            _ip("link", "set", self._bridge, "up")
        if not self.port:
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                self.port = free.getsockname()[1]
        words = ["--head", "--port", str(self.port), "--node-ip-address", self.ip, "--include-dashboard", "false"]
        self.head = Node(self._ray_start([], words, self.head_cpus))
        self._wait(lambda: b"Ray runtime started" in self.log.read_bytes(), self.head)

    @property
    def _bridge(self) -> str:
        return f"ncb{os.getpid() % 100000}"

    def add_node(self, cpus: int = 1, resources: str = "{}", gpus: int = 0) -> Node:
        """Start a worker node, which joins within seconds."""
        words = ["--address", self.address, "--resources", resources, "--num-gpus", str(gpus)]
        link, before = "", []
        if self.isolated:
            number = next(_NUMBERS)
            link = f"nc{os.getpid() % 10000}x{number}"
            own = f"{self.ip.rsplit('.', 1)[0]}.{number + 1}"
            _ip("netns", "add", link)
            _ip("link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", link)
            _ip("link", "set", link, "master", self._bridge, "up")
            _ip("-n", link, "addr", "add", f"{own}/24", "dev", "eth0")
            _ip("-n", link, "link", "set", "eth0", "up")
            _ip("-n", link, "link", "set", "lo", "up")
            before, words = ["ip", "netns", "exec", link], [*words, "--node-ip-address", own]
        node = Node(self._ray_start(before, words, cpus), link)
        self.nodes.append(node)
        # Two that start at once take the same names for their sockets, and one of them fails.
        self._wait(lambda: b"Ray runtime started" in self.log.read_bytes(), node)
        return node

    def cut(self, node: Node) -> None:
        """Take a node's link down; its connections are not closed."""
        node.given_up = True
        _ip("link", "set", node.link, "down")

    def freeze(self, node: Node) -> None:
        """Stop raylet, workers and agents with SIGSTOP; connections stay open without an answer."""
        node.given_up = True
        for each in _family(node.process.pid):
            each.send_signal(signal.SIGSTOP)

    def restore(self) -> None:
        """Bring links up and continue frozen processes; nodes that the cluster has declared dead then end."""
        for node in self.nodes:
            if node.link and node.alive():
                _ip("link", "set", node.link, "up", check=False)
            for each in _family(node.process.pid):
                with suppress(psutil.NoSuchProcess):
                    each.send_signal(signal.SIGCONT)

    def _ray_start(self, before: list[str], words: list[str], cpus: int) -> subprocess.Popen[bytes]:
        start = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats"]
        limits = ["--num-cpus", str(cpus), "--object-store-memory", str(STORE_BYTES)]
        with self.log.open("wb") as log:
            return subprocess.Popen(
                [*before, *start, *limits, *words],
                env={**os.environ, **QUICK_CHECKS, "RAY_AUTH_MODE": "token"},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def _wait(self, answers: Callable[[], bool], node: Node) -> None:
        deadline = time.monotonic() + 90
        while not answers():
            if not node.alive() or time.monotonic() > deadline:
                raise RuntimeError(f"the cluster did not start; see {self.log}")
            time.sleep(0.2)

    def wait_for_nodes(self, wanted: int) -> None:
        """Wait until the cluster reports exactly this number of nodes as alive."""
        command = [sys.executable, "-c", _COUNT, self.address, str(wanted)]
        env = {**os.environ, "RAY_AUTH_MODE": "token"}
        subprocess.run(command, check=True, env=env, timeout=120, capture_output=True)

    def workers(self, actor: str) -> list[psutil.Process]:
        """Return the processes of this actor class, on any node."""
        roots = [node.process.pid for node in (self.head, *self.nodes) if node and node.alive()]
        found = []
        for process in (each for root in roots for each in _family(root)):
            try:
                if any(f"ray::{actor}" in part for part in process.cmdline()):
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def bystanders(self) -> list[Node]:
        """Return the worker nodes to which the run is not attached; Ray may attach it to any node of its machine."""
        drivers = set(self.workers("Driver"))
        return [node for node in self.nodes if node.alive() and not drivers & set(_family(node.process.pid))]

    def stop(self) -> None:
        """Stop every node and remove the network."""
        for node in [*self.nodes, *([self.head] if self.head else [])]:
            node.kill()
        self.nodes, self.head = [], None
        if self.isolated and self.ip != "127.0.0.1":
            _ip("link", "del", self._bridge, check=False)
