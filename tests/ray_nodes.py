"""A real Ray cluster of several nodes on this machine, with a token, in process groups of its own."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import requests

_START_SECONDS = 90.0


class RayNodes:
    """A head with its dashboard, and nodes that joined it; each keeps its files apart, as machines do."""

    def __init__(self, nodes: int, cpus: int = 1, path: str | None = None) -> None:
        # Jobs call `python`, which is to be this one, as where its environment is active.
        self._path = path or os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        # Ray's sockets lie in these folders, and the path of a socket is short.
        self._folders = [Path(tempfile.mkdtemp(prefix="nc", dir="/tmp")) for _ in range(nodes)]
        self._processes: list[subprocess.Popen[bytes]] = []
        self.token = secrets.token_hex(16)
        gcs, dashboard, *rest = _free_ports(2 + 2 * nodes)
        self.address, self.gcs = f"http://127.0.0.1:{dashboard}", f"127.0.0.1:{gcs}"
        self.metrics = rest[:nodes]
        try:
            head = ["--head", f"--port={gcs}", f"--dashboard-port={dashboard}"]
            for place in range(nodes):
                role = head if place == 0 else [f"--address={self.gcs}"]
                self._start(
                    place, [*role, f"--num-cpus={cpus}", f"--dashboard-agent-listen-port={rest[nodes + place]}"]
                )
                self._wait_for(place + 1)
        except BaseException:
            self.kill()
            raise

    def _start(self, place: int, words: list[str]) -> None:
        given = ["--block", "--disable-usage-stats", "--object-store-memory=100000000"]
        given += [f"--metrics-export-port={self.metrics[place]}", f"--temp-dir={self._folders[place]}"]
        with (self._folders[place] / "start.log").open("ab") as log:
            self._processes.append(
                subprocess.Popen(
                    [sys.executable, "-m", "ray.scripts.scripts", "start", *words, *given],
                    env={**os.environ, "PATH": self._path, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": self.token},
                    cwd=self._folders[place],
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            )

    def _wait_for(self, nodes: int) -> None:
        deadline = time.monotonic() + _START_SECONDS
        while self._alive() < nodes:
            log = (self._folders[nodes - 1] / "start.log").read_text()
            assert self._processes[-1].poll() is None, log
            assert time.monotonic() < deadline, log
            time.sleep(0.2)

    def _alive(self) -> int:
        try:
            answer = requests.get(f"{self.address}/api/v0/nodes", headers=self.headers, timeout=5)
            return sum(row["state"] == "ALIVE" for row in answer.json()["data"]["result"]["result"])
        except (requests.RequestException, ValueError, KeyError, TypeError):
            return 0

    @property
    def headers(self) -> dict[str, str]:
        """What the dashboard wants to see."""
        return {"Authorization": f"Bearer {self.token}"}

    def scraped(self) -> str:
        """What Prometheus would read from all nodes."""
        return "".join(requests.get(f"http://127.0.0.1:{port}/metrics", timeout=10).text for port in self.metrics)

    def kill(self) -> None:
        """End every process of every node, and remove what they wrote."""
        family = [psutil.Process(each.pid) for each in self._processes if each.poll() is None]
        family += [child for process in family for child in process.children(recursive=True)]
        for process in family:
            try:
                process.send_signal(signal.SIGKILL)
            except psutil.NoSuchProcess:
                continue
        psutil.wait_procs(family, timeout=20)
        for each in self._processes:
            each.wait()
        for folder in self._folders:
            shutil.rmtree(folder, ignore_errors=True)


def _free_ports(count: int) -> list[int]:
    """Ports that nobody has, above those that Ray gives to its workers."""
    found: list[int] = []
    candidate = 20_000 + secrets.randbelow(10_000)
    while len(found) < count:
        candidate += 1
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", candidate))
            except OSError:
                continue
        found.append(candidate)
    return found
