"""The faults of the fault-injection benchmark."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable

from fault_run import DEADLINE_SECONDS, FaultRun


def nothing(run: FaultRun) -> None:
    run.start()


def kill_actor(actor: str, all_of_them: bool = False) -> Callable[[FaultRun], None]:
    def fault(run: FaultRun) -> None:
        run.start()
        run.midway()
        found = run.actors(actor)
        for each in found if all_of_them else [run.random.choice(found)]:
            each.kill()

    return fault


def kill_nodes(count: int) -> Callable[[FaultRun], None]:
    def fault(run: FaultRun) -> None:
        run.start()
        run.midway()
        for node in run.cluster.bystanders()[:count]:
            node.kill()

    return fault


def node_joins(run: FaultRun) -> None:
    run.start("backend.actors=auto")
    run.midway()
    run.cluster.add_node()


def node_leaves(run: FaultRun) -> None:
    run.start()
    run.midway()
    run.random.choice(run.cluster.bystanders()).process.send_signal(signal.SIGTERM)


def nodes_change(run: FaultRun) -> None:
    run.start("backend.actors=auto")
    run.midway()
    leaving = run.random.choice(run.cluster.bystanders())
    run.cluster.add_node()
    leaving.kill()


def freeze_host(run: FaultRun) -> None:
    run.start("backend.round_timeout_seconds=5")
    run.midway()
    run.random.choice(run.actors("ClientHost")).send_signal(signal.SIGSTOP)


def freeze_node(run: FaultRun) -> None:
    run.start()
    run.midway()
    run.cluster.freeze(run.random.choice(run.cluster.bystanders()))


def cut_network(run: FaultRun) -> None:
    run.start()
    run.midway()
    run.cluster.cut(run.random.choice(run.cluster.bystanders()))


def kill_run(run: FaultRun) -> None:
    run.start()
    run.midway()
    assert run.process is not None
    run.process.kill()


def stop_run(run: FaultRun) -> None:
    run.start()
    run.midway()
    assert run.process is not None
    run.process.terminate()


def damage_checkpoint(run: FaultRun) -> None:
    """Kill the run with SIGKILL, and truncate the last checkpoint at a random byte."""
    kill_run(run)
    run.wait(time.monotonic() + 30)
    last = max((run.folder / "run" / "checkpoint").iterdir())
    os.truncate(last, run.random.randrange(last.stat().st_size))


def kill_head(run: FaultRun) -> None:
    run.start()
    run.midway()
    assert run.cluster.head is not None
    run.cluster.head.kill()


FILLER = """
import sys, time, numpy as np, ray
ray.init(address=sys.argv[1], log_to_driver=False)
held = []
for _ in range(40):
    held.append(ray.put(np.random.default_rng(0).random(2_000_000)))
    time.sleep(0.1)
time.sleep(600)
"""


def fill_store(run: FaultRun) -> None:
    """Fill the head's object store with eight times its capacity from another program."""
    command = [sys.executable, "-c", FILLER, run.cluster.address]
    filler = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        run.start()
        run.wait(time.monotonic() + DEADLINE_SECONDS)
    finally:
        filler.kill()
        filler.wait()


def fill_disk(run: FaultRun) -> None:
    """Write checkpoints to a small file system, which is enlarged once the run has ended with an error."""
    disk = run.folder / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1300k", "tmpfs", disk], check=True)
    try:
        run.start("chunk_size=10", f"checkpoint_path={disk}")
        if run.wait(time.monotonic() + DEADLINE_SECONDS / 2) == 1:
            run.said.append(run.err().splitlines()[-1])
            subprocess.run(["mount", "-o", "remount,size=50m", disk], check=True)
            run.resume()
        run.wait(time.monotonic() + DEADLINE_SECONDS / 2)
    finally:
        subprocess.run(["umount", disk], check=True)


def kill_mlflow(run: FaultRun) -> None:
    """Kill the tracking server during the run; send the missing metrics to a new one afterwards."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    store = ["--backend-store-uri", f"sqlite:///{run.folder}/server.db", "--artifacts-destination", str(run.folder)]
    command = [sys.executable, "-m", "mlflow", "server", "--port", str(port), "--workers", "1", *store]
    uri = f"http://127.0.0.1:{port}"

    def serve() -> subprocess.Popen[bytes]:
        env = {**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
        with (run.folder / "server.log").open("ab") as log:
            started = subprocess.Popen(command, env=env, stdout=log, stderr=log, start_new_session=True)
        for _ in range(300):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    return started
            time.sleep(0.2)
        raise RuntimeError("the MLflow server did not start")

    server = serve()
    try:
        run.start(f"tracking.uri={uri}", "tracking.flush_seconds=3")
        run.midway()
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()
        run.wait(time.monotonic() + DEADLINE_SECONDS / 2)
        run.said.append(run.err().splitlines()[-1])
        server = serve()
        sync = [sys.executable, "-m", "narrowcast", "sync", "run", "--output", "."]
        subprocess.run(sync, cwd=run.folder, check=True, capture_output=True)
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()


FAULTS: dict[str, Callable[[FaultRun], None]] = {
    "none": nothing,
    "client host killed": kill_actor("ClientHost"),
    "all client hosts killed": kill_actor("ClientHost", all_of_them=True),
    "driver actor killed": kill_actor("Driver"),
    "node killed": kill_nodes(1),
    "two nodes killed": kill_nodes(2),
    "node joins": node_joins,
    "node leaves (SIGTERM)": node_leaves,
    "node joins, another is killed": nodes_change,
    "client host frozen": freeze_host,
    "node frozen": freeze_node,
    "network of a node cut": cut_network,
    "head killed": kill_head,
    "run killed (kill -9)": kill_run,
    "run stopped (SIGTERM)": stop_run,
    "kill -9, last checkpoint cut off": damage_checkpoint,
    "object store full": fill_store,
    "disk full at a checkpoint": fill_disk,
    "MLflow server killed": kill_mlflow,
}
ROOT_ONLY = ("network of a node cut", "disk full at a checkpoint")
