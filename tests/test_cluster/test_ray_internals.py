"""The private parts of Ray that narrowcast uses are there, in the version that they were checked against."""

from __future__ import annotations

import inspect
import logging
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from packaging.version import Version
from ray._private import node, ray_constants, services
from ray.job_submission import JobSubmissionClient

import narrowcast
from narrowcast.cluster import ray_internals


def test_no_later_version_is_installed() -> None:
    installed, checked = ray.__version__, ray_internals.CHECKED_VERSION
    assert Version(installed) <= Version(checked), (
        f"Ray {installed} is installed, and cluster/ray_internals.py was checked against {checked}: check each entry "
        "of that module against the new version, run the tests of tests/test_cluster, then raise CHECKED_VERSION"
    )


def test_no_other_module_names_a_private_part_of_ray() -> None:
    package = Path(narrowcast.__file__).parent
    private = re.compile(r"ray\._\w+|_raylet|ray\.dashboard\.|_node_ip_address|_generator_backpressure|/api/v0/")
    found = {path.name for path in package.rglob("*.py") if private.search(path.read_text())}
    assert found == {"ray_internals.py"}


def test_the_handshake_fails_where_no_cluster_answers() -> None:
    """It must fail for want of an answer, not because Ray has moved the client."""
    imported = [sys.executable, "-c", ray_internals._HANDSHAKE.partition("; GcsClient(")[0]]
    assert subprocess.run(imported, check=False, capture_output=True).returncode == 0
    assert ray_internals.handshake_command("127.0.0.1:1")[-1] == "127.0.0.1:1"


def test_ray_takes_the_private_options() -> None:
    class Streams:
        @ray.method(**ray_internals.stream_ahead(2))  # type: ignore[untyped-decorator]
        def run(self) -> Iterator[None]:
            yield

    ray.remote(Streams)  # raises where an option is not known
    with ray_internals.on_this_machine_only() as options:
        assert all(name in inspect.getsource(ray.init) for name in options)
        assert ray_constants.ENABLE_RAY_CLUSTER is False
    assert ray_constants.ENABLE_RAY_CLUSTER is True


def test_a_node_that_registers_late_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "ray._private.services.get_node(" in inspect.getsource(node.Node.__init__)
    asked = list[tuple[str, str]]()

    def ask(gcs_address: str, node_id: str) -> str:
        asked.append((gcs_address, node_id))
        if len(asked) < 3 or node_id == "never":
            raise RuntimeError("GCS cannot find the node")
        return "found"

    monkeypatch.setattr(services, "get_node", ask)
    with ray_internals.slow_starts():
        assert services.get_node("127.0.0.1:1", "late") == "found"
        assert asked == [("127.0.0.1:1", "late")] * 3
        monkeypatch.setattr(ray_internals, "_START_SECONDS", 0.5)
        with pytest.raises(RuntimeError, match="cannot find"):
            services.get_node("127.0.0.1:1", "never")
    assert services.get_node is ask


def test_the_ports_of_a_node_are_chosen_before_its_agents_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A node that has to be told them by its agents dies if that takes 15 s, and then it is not waited for."""
    node_id = 28 * "ab"
    sleeper = [sys.executable, "-c", "import time; time.sleep(60)"]
    given = dict[str, Any]()

    def start(
        node_id: str,
        session_dir: str,
        metrics_agent_port: int,
        metrics_export_port: int,
        dashboard_agent_listen_port: int,
        runtime_env_agent_port: int,
        env_updates: dict[str, str] | None = None,
    ) -> SimpleNamespace:
        given.update(locals())
        return SimpleNamespace(process=subprocess.Popen(sleeper))

    def not_registered(*_: str) -> None:
        raise RuntimeError("GCS cannot find the node")

    real = inspect.signature(services.start_raylet).parameters
    assert {"node_id", "session_dir", "env_updates", *ray_internals._AGENT_PORTS} <= real.keys()
    monkeypatch.setattr(services, "start_raylet", start)
    monkeypatch.setattr(services, "get_node", not_registered)
    with ray_internals.slow_starts():
        process = services.start_raylet(node_id, str(tmp_path), 0, 21_000, 0, runtime_env_agent_port=0).process
        try:
            ports = {given[name] for name in ray_internals._AGENT_PORTS}
            assert len(ports) == 4
            assert all(20_000 <= port < 32_768 for port in ports)
            assert given["metrics_export_port"] == 21_000
            assert given["env_updates"] == {"RAY_agent_register_timeout_ms": "120000"}
            (file,) = tmp_path.iterdir()
            assert (file.name, int(file.read_text())) == (
                f"dashboard_agent_listen_port_{node_id}",
                given["dashboard_agent_listen_port"],
            )
        finally:
            process.kill()
            process.wait()
        monkeypatch.setattr(ray_internals, "_START_SECONDS", 600.0)
        with pytest.raises(RuntimeError):  # at once, since its process has ended
            services.get_node("127.0.0.1:1", node_id)
    assert services.start_raylet is start


def test_the_loggers_of_the_job_client_have_these_names() -> None:
    module = sys.modules[JobSubmissionClient.__module__]
    assert module.__name__ in ray_internals.NOISY_LOGGERS
    assert all(name in logging.root.manager.loggerDict for name in ray_internals.NOISY_LOGGERS)
