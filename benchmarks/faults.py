"""Runs with faults injected, on a real Ray cluster of several nodes: what becomes of each, beside one left in peace.

Every run must end with the `model_sha256` of the run without a cluster, or with one clear line after which
`narrowcast run --resume` gets there; within its deadline, and leaving no process behind. What was played is kept in
FILE, and is not played again.

    python benchmarks/faults.py FILE [--seeds 3] [--only FAULT] [--table]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

from ray_cluster import RayCluster

ROUNDS = 30
DEADLINE_SECONDS = 240.0
"""For a run with its resume; a fault-free one takes about 30 s, most of it imports and start-up."""
WORKLOADS = {
    "scolr": ["scolr-ml100k", "training.epochs=20", "chunk_size=10"],
    "scaffold": ["fedavg-digits", "algorithm=scaffold", "training.epochs=20", "chunk_size=5"],
}
SHARED = [f"rounds={ROUNDS}", "evaluate_every=20", "checkpoint_every=5", "tracking.system_metrics=false"]
_MARK = "NARROWCAST_FAULTS"


class EndedEarlyError(Exception):
    """The run was over before its fault could be injected."""


@dataclass
class Play:
    """A run of the campaign: the command at work, and where it writes."""

    cluster: RayCluster
    folder: Path
    workload: str
    random: random.Random
    settings: list[str]
    store: str
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)
    process: subprocess.Popen[bytes] | None = None
    resumes: int = 0
    said: list[str] = field(default_factory=list)

    def start(self, *words: str) -> None:
        self._run("run", *WORKLOADS[self.workload], *SHARED, "name=run", *self.settings, *words)

    def resume(self, *words: str) -> None:
        self.resumes += 1
        self._run("run", "--resume", "run", *words)

    def _run(self, *words: str) -> None:
        with (self.folder / "out").open("ab") as out, (self.folder / "err").open("wb") as err:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "narrowcast", *words, "--address", self.cluster.address, "--output", "."],
                cwd=self.folder,
                env={**os.environ, _MARK: self.mark, "RAY_AUTH_MODE": "token", "MLFLOW_TRACKING_URI": self.store},
                stdout=out,
                stderr=err,
                start_new_session=True,
            )

    def rounds(self) -> int:
        journal = self.folder / "run" / "journal.jsonl"
        return journal.read_bytes().count(b"\n") if journal.exists() else 0

    def reach(self, round_index: int) -> None:
        """Wait until this round is written down."""
        while self.rounds() < round_index:
            assert self.process is not None
            if self.process.poll() is not None:
                raise EndedEarlyError
            time.sleep(0.01)

    def midway(self) -> None:
        """Wait until some round in the middle, and a little into the next."""
        self.reach(self.random.randint(4, ROUNDS - 10))
        time.sleep(self.random.uniform(0, 0.1))

    def actors(self, name: str) -> list[psutil.Process]:
        """The processes of this actor, once there are any."""
        while not (found := self.cluster.workers(name)):
            if self.process is None or self.process.poll() is not None:
                raise EndedEarlyError
        return found

    def wait(self, until: float) -> int | None:
        """The exit status, or None where it hangs."""
        assert self.process is not None
        try:
            return self.process.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            return None

    def err(self) -> str:
        return (self.folder / "err").read_text().strip()

    def sha256(self) -> str:
        result = self.folder / "run" / "result.json"
        return str(json.loads(result.read_text())["model_sha256"]) if result.exists() else ""

    def left_behind(self) -> list[str]:
        """What the run started and did not take along."""
        deadline = time.monotonic() + 30
        while True:
            mine = [each for each in psutil.process_iter() if _environment(each).get(_MARK) == self.mark]
            actors = [*self.cluster.workers("ClientHost"), *self.cluster.workers("Driver")]
            names = [each.name() for each in {*mine, *actors} if each.is_running()]
            if not names or time.monotonic() > deadline:
                return names
            time.sleep(0.5)


def _environment(process: psutil.Process) -> dict[str, str]:
    try:
        return process.environ() if process.status() != psutil.STATUS_ZOMBIE else {}
    except psutil.Error:
        return {}


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
    play.start("executor.actors=auto")
    play.midway()
    play.cluster.add_node()


def node_leaves(play: Play) -> None:
    play.start()
    play.midway()
    play.random.choice(play.cluster.bystanders()).process.send_signal(signal.SIGTERM)


def nodes_change(play: Play) -> None:
    play.start("executor.actors=auto")
    play.midway()
    leaving = play.random.choice(play.cluster.bystanders())
    play.cluster.add_node()
    leaving.kill()


def freeze_host(play: Play) -> None:
    play.start("executor.round_timeout_seconds=5")
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


def heal(cluster: RayCluster, nodes: int = 2) -> None:
    """A head and two nodes, whatever the last run did to them."""
    whole = [node for node in cluster.nodes if node.alive() and not node.given_up]
    for node in cluster.nodes:
        if node not in whole[:nodes]:
            node.kill()
    cluster.nodes = whole[:nodes]
    if cluster.head is None or not cluster.head.alive():
        for node in cluster.nodes:
            node.kill()
        cluster.nodes = []
        cluster.start()
    while len(cluster.nodes) < nodes:
        cluster.add_node()
    cluster.wait_for_nodes(1 + nodes)


def play_one(cluster: RayCluster, fault: str, seed: int, reference: dict[str, str], store: str) -> dict[str, Any]:
    """One run, its fault, and if it comes to that its resume; what became of it."""
    workload = "scolr" if fault == "disk full at a checkpoint" else list(WORKLOADS)[seed % len(WORKLOADS)]
    with tempfile.TemporaryDirectory(prefix="narrowcast-faults-") as folder:
        choices = random.Random(f"{fault} {seed}")
        play = Play(cluster, Path(folder), workload, choices, ["executor.kind=ray", "executor.actors=3"], store)
        began, until = time.monotonic(), time.monotonic() + DEADLINE_SECONDS
        try:
            FAULTS[fault](play)
        except EndedEarlyError:
            print(f"{fault}, {seed}: over before its fault", flush=True)
        status = play.wait(until)
        if status not in (0, None) and not play.sha256():
            play.said.append((play.err().splitlines() or [f"status {status}"])[-1])
            paused = time.monotonic()
            heal(cluster)
            paused = time.monotonic() - paused  # which is not the run's doing
            began, until = began + paused, until + paused
            play.resume()
            status = play.wait(until)
        seconds = time.monotonic() - began
        if status is None:
            assert play.process is not None
            play.process.kill()
        cluster.restore()
        warnings = [line for line in play.err().splitlines() if line.startswith("WARNING")]
        return {
            "fault": fault,
            "seed": seed,
            "workload": workload,
            "same": play.sha256() == reference[workload],
            "resumed": play.resumes,
            "hung": status is None,
            "traceback": "Traceback" in play.err() or any("Traceback" in line for line in play.said),
            "seconds": seconds,
            "left": play.left_behind(),
            "said": play.said,
            "warnings": warnings[:6],
            "load": os.getloadavg()[0],
        }


def references() -> dict[str, str]:
    """The models of the same runs in one process."""
    found = {}
    for name, words in WORKLOADS.items():
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "narrowcast", "run", *words, *SHARED, "name=run", "--executor", "local"]
            subprocess.run([*command, "--output", folder], check=True, stdout=subprocess.DEVNULL)
            found[name] = str(json.loads(Path(folder, "run", "result.json").read_text())["model_sha256"])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", action="append", choices=list(FAULTS))
    parser.add_argument("--table", action="store_true", help="print what was played, and play nothing")
    arguments = parser.parse_args()
    records = [json.loads(line) for line in arguments.file.read_text().splitlines()] if arguments.file.exists() else []
    done = {(record["fault"], record["seed"]) for record in records}
    faults = [each for each in arguments.only or FAULTS if os.geteuid() == 0 or each not in ROOT_ONLY]
    todo = [(fault, seed) for seed in range(arguments.seeds) for fault in faults if (fault, seed) not in done]
    if todo and not arguments.table:
        reference, store = references(), f"sqlite:///{arguments.file.absolute()}.db"
        cluster = RayCluster(arguments.file.with_suffix(".cluster.log"))
        try:
            for fault, seed in todo:
                heal(cluster)
                record = play_one(cluster, fault, seed, reference, store)
                records.append(record)
                with arguments.file.open("a") as stream:
                    stream.write(json.dumps(record) + "\n")
                verdict = "same" if record["same"] else "DIFFERENT"
                print(f"{fault}, {seed}: {verdict}, {record['seconds']:.0f} s, {record['said']}", flush=True)
        finally:
            cluster.stop()
    print_table(records)


def print_table(records: list[dict[str, Any]]) -> None:
    table = Table("fault", "runs", "same model", "resumed", "hung", "left", "median s", "longest s")
    for fault in FAULTS:
        mine = [record for record in records if record["fault"] == fault]
        if mine:
            seconds = [record["seconds"] for record in mine]
            table.add_row(
                fault,
                str(len(mine)),
                str(sum(record["same"] for record in mine)),
                str(sum(bool(record["resumed"]) for record in mine)),
                str(sum(record["hung"] for record in mine)),
                str(sum(bool(record["left"]) for record in mine)),
                f"{median(seconds):.0f}",
                f"{max(seconds):.0f}",
            )
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
