"""A run on this machine opens nothing to other machines, and little to other accounts: real Ray, sockets and uids."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import ray
import requests

from narrowcast.cluster.backend import RayBackend
from narrowcast.cluster.ray_token import token
from narrowcast.runs.doctor import LISTENERS, beyond_loopback, listening

# Write to the cluster's state as another account, with or without the token; root cannot start our Python as nobody.
_WRITE = """
import os, sys
from ray._raylet import GcsClient
if os.geteuid() == 0:
    os.setgroups([]); os.setgid(65534); os.setuid(65534)
client = GcsClient(address=sys.argv[1])
client.internal_kv_put(b"key", b"value", True, b"test")
print(client.internal_kv_get(b"key", b"test"))
"""


def test_the_documentation_has_the_list() -> None:
    text = (Path(__file__).parents[2] / "docs" / "shared-machine.md").read_text()
    table = dict(re.findall(r"^\| `([\w.]+)` \| (.*) \|$", text, re.MULTILINE))
    assert table == LISTENERS


_FIXED_PORTS = {"dashboard.py", "monitor.py"}
"""Processes with ports that do not depend on the cluster: those of another cluster on this machine keep them."""


@pytest.fixture(scope="module")
def expected() -> set[str]:
    """The processes that have to listen beside whatever else runs here."""
    return set(LISTENERS) - ({process for process, _ in listening()} & _FIXED_PORTS)


@pytest.fixture(scope="module")
def found(expected: set[str]) -> Iterator[set[tuple[str, str]]]:
    """What listens while a cluster of one run is up, with an actor."""
    before = set(listening())
    with RayBackend().cluster(1):

        @ray.remote
        class Actor:
            def ready(self) -> bool:
                return True

        actor = Actor.remote()  # type: ignore[attr-defined]
        assert ray.get(actor.ready.remote())
        there: set[tuple[str, str]] = set()
        deadline = time.monotonic() + 60
        while not expected <= {process for process, _ in there} and time.monotonic() < deadline:
            time.sleep(0.5)
            ports = _ports()
            there = {each for each in set(listening()) - before if _port(each[1]) in ports}
        yield there


def _port(address: str) -> int:
    return int(address.rpartition(":")[2])


def _ports() -> set[int]:
    """Return the ports that this process and its children have open: another test's cluster may start meanwhile."""
    mine, ports = psutil.Process(), set()
    for process in [mine, *mine.children(recursive=True)]:
        with suppress(psutil.NoSuchProcess):  # Ray's workers come and go
            ports |= {each.laddr.port for each in process.net_connections("tcp") if each.status == psutil.CONN_LISTEN}
    return ports


@pytest.mark.ray
@pytest.mark.slow
def test_every_listening_process_is_on_the_list_and_on_loopback(
    found: set[tuple[str, str]], expected: set[str]
) -> None:
    assert expected <= {process for process, _ in found} <= set(LISTENERS)
    assert [each for each in sorted(found) if beyond_loopback(each[1])] == []
    assert _ports() <= {_port(address) for _, address in found}, "a process that we do not look at"


@pytest.mark.ray
@pytest.mark.slow
def test_only_the_named_ports_answer_without_a_token(found: set[tuple[str, str]], expected: set[str]) -> None:
    answered = set()
    for process, address in found:
        try:
            answer = requests.get(f"http://127.0.0.1:{_port(address)}/metrics", timeout=3)
        except requests.RequestException:  # gRPC
            continue
        answered |= {process} if answer.ok else set()
    named = {process for process, what in LISTENERS.items() if "no token" in what}
    assert expected & named <= answered <= named


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.usefixtures("found")
def test_another_account_needs_the_token_to_write_to_the_cluster() -> None:
    given = {key: value for key, value in os.environ.items() if not key.startswith("RAY_AUTH_TOKEN")}
    write = [sys.executable, "-c", _WRITE, ray.get_runtime_context().gcs_address]
    for env, accepted in (
        ({"HOME": "/nonexistent"}, False),
        ({"RAY_AUTH_TOKEN": "0" * 64}, False),
        ({"RAY_AUTH_TOKEN": str(token())}, True),
    ):
        done = subprocess.run(
            write, check=False, env={**given, **env}, capture_output=True, text=True, timeout=60, cwd="/"
        )
        assert (done.returncode == 0) is accepted, done.stderr
        assert ("b'value'" in done.stdout) is accepted


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.usefixtures("found")
def test_its_files_are_in_a_folder_of_this_account_and_go_with_it() -> None:
    servers = [each for each in psutil.Process().children(recursive=True) if each.name() == "gcs_server"]
    (log,) = (word.partition("=")[2] for word in servers[0].cmdline() if word.startswith("--log_dir="))
    private = Path("/tmp", Path(log).relative_to("/tmp").parts[0])
    assert private.stat().st_mode & 0o777 == 0o700
    assert private.stat().st_uid == os.geteuid()
