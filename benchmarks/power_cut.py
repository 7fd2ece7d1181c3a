"""Power cuts on a real file system: ext4 on a loop device, whose image is copied while the run is stopped.

A run writes to the mounted image. After a random time it is stopped with SIGSTOP, and the image is copied: what the
file system has not written yet is not in the copy, as after a power cut. The copy is mounted, which replays the file
system's journal, and the run is resumed there. Needs root, mkfs.ext4 and loop devices.

    sudo python benchmarks/power_cut.py [--cuts 10] [--source OTHER_CHECKOUT/src] [--csv FILE]
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

NAME, INTERVAL_SECONDS = "fedavg-digits", 2.0
SETTINGS = (f"checkpoint_seconds={INTERVAL_SECONDS}", "evaluate_every=100", "tracking.system_metrics=false")
IMAGE_MIB = 256
EARLIEST_SECONDS, LATEST_SECONDS = 2.0, 20.0
"""After round 1; 3,000 rounds take about thirty seconds on two cores that do nothing else."""


@dataclass
class Cut:
    """One power cut and what became of the run.

    Attributes:
        rounds: rounds that the run had finished when the power was cut.
        in_journal: rounds in the journal that was left.
        resumed_after: the round after which the run was resumed, -1 if it could not be.
        lost_rounds: rounds that were repeated.
        lost_seconds: the wall time that they had taken.

    """

    cut: int
    seconds: float
    rounds: int
    in_journal: int
    resumed_after: int
    lost_rounds: int
    lost_seconds: float
    same_sha256: bool
    message: str = ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cuts", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=3000, help="enough for the last moment at which power is cut")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("--source", help="the src folder of another version of narrowcast")
    parser.add_argument("--csv", type=Path)
    arguments = parser.parse_args()
    environment = {**os.environ, **({"PYTHONPATH": arguments.source} if arguments.source else {})}
    rng, cuts, run = random.Random(arguments.seed), [], (NAME, *SETTINGS, f"rounds={arguments.rounds}")
    with tempfile.TemporaryDirectory(prefix="narrowcast-power-cut-") as name:
        work = Path(name)
        reference = finish(start(work / "reference", environment, *run), work / "reference")
        for number in range(1, arguments.cuts + 1):
            seconds = rng.uniform(EARLIEST_SECONDS, LATEST_SECONDS)
            cuts.append(cut(work, environment, run, number, seconds, reference))
            print(cuts[-1], flush=True)
    resumed = [each for each in cuts if each.resumed_after >= 0]
    rounds, seconds = (
        max((getattr(each, name) for each in resumed), default=0) for name in ("lost_rounds", "lost_seconds")
    )
    print(
        f"{len(cuts)} cuts: {len(resumed)} resumable, {sum(each.same_sha256 for each in cuts)} with the same sha256, "
        f"at most {rounds} rounds or {seconds:.1f} s lost at one checkpoint every {INTERVAL_SECONDS:g} s, "
        f"load {os.getloadavg()[0]:.1f}"
    )
    if arguments.csv:
        with arguments.csv.open("w", newline="") as stream:
            writer = csv.DictWriter(stream, list(asdict(cuts[0])))
            writer.writeheader()
            writer.writerows(asdict(each) for each in cuts)


def cut(
    work: Path, environment: dict[str, str], run: tuple[str, ...], number: int, seconds: float, reference: str
) -> Cut:
    """Stop a run after some seconds, copy the image, and resume the run on the copy."""
    image, copy = work / f"{number}.img", work / f"{number}-copy.img"
    subprocess.run(["truncate", "-s", f"{IMAGE_MIB}M", image], check=True)
    subprocess.run(["mkfs.ext4", "-q", image], check=True)
    with mounted(image, work / "disk") as disk:
        process = start(disk / "runs", environment, *run)
        try:
            journal = disk / "runs" / NAME / "journal.jsonl"
            while not journal.exists() or not journal.stat().st_size:
                if process.poll() is not None:
                    raise SystemExit("the run failed before its first round")
                time.sleep(0.05)
            time.sleep(seconds)
            process.send_signal(signal.SIGSTOP)
            wall = wall_seconds(journal)
            subprocess.run(["cp", "--sparse=always", image, copy], check=True)
        finally:
            process.kill()
            process.wait()
    image.unlink()
    with mounted(copy, work / "disk") as disk:
        left = len(wall_seconds(disk / "runs" / NAME / "journal.jsonl"))
        process = start(disk / "runs", environment, "--resume", NAME)
        status, out, err = process.wait(), *((disk / f"runs.{stream}").read_text() for stream in ("out", "err"))
        if status:
            outcome = Cut(number, seconds, len(wall), left, -1, len(wall), wall[-1], same_sha256=False, message=err)
        else:
            after = int(found[1]) if (found := re.search(r"resuming after round (\d+)", out)) else 0
            lost = wall[-1] - wall[after - 1] if after else wall[-1]
            result = json.loads((disk / "runs" / NAME / "result.json").read_text())
            same = result["model_sha256"] == reference
            outcome = Cut(number, seconds, len(wall), left, after, len(wall) - after, lost, same)
    copy.unlink()
    outcome.message = outcome.message.strip().replace(str(work), "")
    return outcome


def start(output: Path, environment: dict[str, str], *words: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "narrowcast", "run", *words, "--backend", "local", "--output", str(output)]
    with output.with_suffix(".out").open("w") as out, output.with_suffix(".err").open("w") as err:
        return subprocess.Popen(command, env=environment, stdout=out, stderr=err)


def finish(process: subprocess.Popen[bytes], output: Path) -> str:
    """Wait for a run and return its model_sha256."""
    if process.wait():
        raise SystemExit(output.with_suffix(".err").read_text())
    return str(json.loads((output / NAME / "result.json").read_text())["model_sha256"])


def wall_seconds(journal: Path) -> list[float]:
    """Return the wall seconds of the run after each round in a journal, which may be cut."""
    found: list[float] = []
    for line in journal.read_bytes().split(b"\n")[:-1] if journal.exists() else ():
        try:
            found.append(json.loads(line)["round"]["wall_seconds"])
        except ValueError:
            break
    return found


@contextmanager
def mounted(image: Path, place: Path) -> Iterator[Path]:
    place.mkdir()
    subprocess.run(["mount", "-o", "loop", image, place], check=True)
    try:
        yield place
    finally:
        subprocess.run(["umount", place], check=True)
        shutil.rmtree(place)


if __name__ == "__main__":
    main()
