"""What is broken in a run of the fault campaign, and when."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable

from fault_play import DEADLINE_SECONDS, Play


def nothing(play: Play) -> None:
    play.start()


def kill_actor(actor: str, all_of_them: bool = False) -> Callable[[Play], None]:
    def fault(play: Play) -> None:
        play.start()
        play.midway()
        found = play.actors(actor)
        for each in found if all_of_them else [play.random.choice(found)]:
            each.kill()

    return fault


def kill_nodes(count: int) -> Callable[[Play], None]:
    def fault(play: Play) -> None:
        play.start()
        play.midway()
        for node in play.cluster.bystanders()[:count]:
            node.kill()

    return fault


def node_joins(play: Play) -> None:
    play.start("backend.actors=auto")
    play.midway()
    play.cluster.add_node()


def node_leaves(play: Play) -> None:
    play.start()
    play.midway()
    play.random.choice(play.cluster.bystanders()).process.send_signal(signal.SIGTERM)


def nodes_change(play: Play) -> None:
    play.start("backend.actors=auto")
    play.midway()
    leaving = play.random.choice(play.cluster.bystanders())
    play.cluster.add_node()
    leaving.kill()


def freeze_host(play: Play) -> None:
    play.start("backend.round_timeout_seconds=5")
    play.midway()
    play.random.choice(play.actors("ClientHost")).send_signal(signal.SIGSTOP)


def freeze_node(play: Play) -> None:
    play.start()
    play.midway()
    play.cluster.freeze(play.random.choice(play.cluster.bystanders()))


def cut_network(play: Play) -> None:
    play.start()
    play.midway()
    play.cluster.cut(play.random.choice(play.cluster.bystanders()))


def kill_run(play: Play) -> None:
    play.start()
    play.midway()
    assert play.process is not None
    play.process.kill()


def stop_run(play: Play) -> None:
    play.start()
    play.midway()
    assert play.process is not None
    play.process.terminate()


def damage_checkpoint(play: Play) -> None:
    """`kill -9`, and the last checkpoint cut off at any byte."""
    kill_run(play)
    play.wait(time.monotonic() + 30)
    last = max((play.folder / "run" / "checkpoint").iterdir())
    os.truncate(last, play.random.randrange(last.stat().st_size))


def kill_head(play: Play) -> None:
    play.start()
    play.midway()
    assert play.cluster.head is not None
    play.cluster.head.kill()


FILLER = """
import sys, time, numpy as np, ray
ray.init(address=sys.argv[1], log_to_driver=False)
held = []
for _ in range(40):
    held.append(ray.put(np.random.default_rng(0).random(2_000_000)))
    time.sleep(0.1)
time.sleep(600)
"""


def fill_store(play: Play) -> None:
    """Another program on the cluster holds eight times what the head's object store has room for."""
    command = [sys.executable, "-c", FILLER, play.cluster.address]
    filler = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        play.start()
        play.wait(time.monotonic() + DEADLINE_SECONDS)
    finally:
        filler.kill()
        filler.wait()


def fill_disk(play: Play) -> None:
    """Checkpoints go to a small file system of their own; room is made once the run has said what it lacks."""
    disk = play.folder / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1300k", "tmpfs", disk], check=True)
    try:
        play.start("chunk_size=10", f"checkpoint_path={disk}")
        if play.wait(time.monotonic() + DEADLINE_SECONDS / 2) == 1:
            play.said.append(play.err().splitlines()[-1])
            subprocess.run(["mount", "-o", "remount,size=50m", disk], check=True)
            play.resume()
        play.wait(time.monotonic() + DEADLINE_SECONDS / 2)
    finally:
        subprocess.run(["umount", disk], check=True)


def kill_mlflow(play: Play) -> None:
    """The tracking server dies for good in mid-run; what it lacks is sent to another one later."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    store = ["--backend-store-uri", f"sqlite:///{play.folder}/server.db", "--artifacts-destination", str(play.folder)]
    command = [sys.executable, "-m", "mlflow", "server", "--port", str(port), "--workers", "1", *store]
    uri = f"http://127.0.0.1:{port}"

    def serve() -> subprocess.Popen[bytes]:
        env = {**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
        with (play.folder / "server.log").open("ab") as log:
            started = subprocess.Popen(command, env=env, stdout=log, stderr=log, start_new_session=True)
        for _ in range(300):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    return started
            time.sleep(0.2)
        raise RuntimeError("the MLflow server did not start")

    server = serve()
    try:
        play.start(f"tracking.uri={uri}", "tracking.flush_seconds=3")
        play.midway()
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()
        play.wait(time.monotonic() + DEADLINE_SECONDS / 2)
        play.said.append(play.err().splitlines()[-1])
        server = serve()
        sync = [sys.executable, "-m", "narrowcast", "sync", "run", "--output", "."]
        subprocess.run(sync, cwd=play.folder, check=True, capture_output=True)
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()


FAULTS: dict[str, Callable[[Play], None]] = {
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
