"""A real MLflow server on this machine that can be killed and started again on the same port and database."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import requests

_START_SECONDS = 120.0


class MlflowServer:
    """`mlflow server` in a process group of its own."""

    def __init__(
        self, folder: Path, store: str | None = None, artifacts: str = "", environment: Mapping[str, str] | None = None
    ) -> None:
        """`store` is a database's URI, `artifacts` a URL; none: SQLite and files in the folder."""
        self._artifacts, self._environment = artifacts or str(folder / "artifacts"), environment or {}
        self.folder, self._store = folder, store or f"sqlite:///{folder}/mlflow.db"
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port: int = free.getsockname()[1]
        self.uri = f"http://127.0.0.1:{self.port}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it unless it runs, and wait until it answers."""
        if self._process is not None:
            return
        command = f"server --host 127.0.0.1 --port {self.port} --workers 1"
        with (self.folder / "server.log").open("ab") as log:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "mlflow", *command.split()),
                    *("--backend-store-uri", self._store),
                    *("--artifacts-destination", self._artifacts),
                ],
                env={**os.environ, **self._environment, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        deadline = time.monotonic() + _START_SECONDS
        while not self._answers():
            assert self._process.poll() is None, self.log()
            assert time.monotonic() < deadline, self.log()
            time.sleep(0.1)

    def _answers(self) -> bool:
        try:
            return requests.get(f"{self.uri}/health", timeout=5).ok
        except requests.RequestException:
            return False

    def kill(self) -> None:
        """SIGKILL the server and all that it started."""
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None

    def log(self) -> str:
        """All that it ever printed."""
        return (self.folder / "server.log").read_text()

    def requests_for(self, path: str) -> int:
        """How many requests its access log has for an API path."""
        return len(re.findall(rf'"\w+ /api/2\.0/mlflow/{path}[ ?]', self.log()))
