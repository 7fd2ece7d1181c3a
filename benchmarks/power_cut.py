"""Power cuts on a real file system: ext4 on a loop device, whose image is copied while the processes are stopped.

A run, solve, study, benchmark or masked run writes to the mounted image. At a random moment all of its processes are
stopped with SIGSTOP, and the image is copied: what the file system has not written yet is not in the copy, as after a
power cut. The copy is mounted, which replays the file system's journal, and the same work is continued there. Needs
root, mkfs.ext4 and loop devices.

    sudo python benchmarks/power_cut.py FILE [--cuts 40] [--only WORKLOAD]
"""

from __future__ import annotations

import argparse
import csv
import os
import random
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import psutil

from interrupted import IN_PROCESS, Attempt, Reference, undisturbed

IMAGE_MIB = 256
MOUNTS = ("defaults", "commit=300", "commit=300,data=writeback,noauto_da_alloc")
"""Options of ext4 in turn: the default, and two that write late and in any order."""


@dataclass
class Cut:
    """One power cut and what became of the work.

    `steps`: rounds, trials or lines that were there when the power was cut; `left`: those on the copied disk.
    """

    workload: str
    number: int
    mount: str
    steps: int
    left: int
    started_again: bool
    same: bool
    seconds: float
    load: float
    said: str = ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--cuts", type=int, default=40, help="in all, spread over the workloads")
    parser.add_argument("--only", action="append", choices=list(IN_PROCESS))
    arguments = parser.parse_args()
    records = list(csv.DictReader(arguments.file.open(newline=""))) if arguments.file.exists() else []
    done = {(record["workload"], int(record["number"])) for record in records}
    names = arguments.only or list(IN_PROCESS)
    references = dict[str, Reference]()
    with tempfile.TemporaryDirectory(prefix="narrowcast-power-cut-") as parent:
        work = Path(parent)
        for place in range(arguments.cuts):
            name, number = names[place % len(names)], place // len(names)
            if (name, number) in done:
                continue
            if name not in references:
                references[name] = undisturbed(IN_PROCESS[name], Path(tempfile.mkdtemp(dir=work)))
            record = cut(work, name, number, references[name])
            with arguments.file.open("a", newline="") as stream:
                writer = csv.DictWriter(stream, [each.name for each in fields(Cut)])
                if not stream.tell():
                    writer.writeheader()
                writer.writerow(asdict(record))
            print(record, flush=True)
    cuts = list(csv.DictReader(arguments.file.open(newline="")))
    print(f"{len(cuts)} cuts, {sum(each['same'] == 'True' for each in cuts)} with the end of an undisturbed one")


def cut(work: Path, name: str, number: int, reference: Reference) -> Cut:
    """Stop the processes of a workload after some steps, copy the image, and continue on the copy."""
    workload, chances, mount = IN_PROCESS[name], random.Random(f"{name} {number}"), MOUNTS[number % len(MOUNTS)]
    image, copy, began = work / "disk.img", work / "copy.img", time.monotonic()
    subprocess.run(["truncate", "-s", f"{IMAGE_MIB}M", image], check=True)
    subprocess.run(["mkfs.ext4", "-q", "-F", image], check=True)
    with mounted(image, work / "disk", mount) as disk:
        attempt = Attempt(workload, disk)
        os.sync()  # the files of the workload are older than the cut
        attempt.begin(workload.start)
        if attempt.reach(chances.randrange(reference.steps)):
            attempt.wait(chances.random() * reference.seconds / reference.steps)
        stopped = attempt.processes()
        for each in stopped:
            with suppress(psutil.NoSuchProcess):
                each.send_signal(signal.SIGSTOP)
        steps = workload.progress(disk)
        subprocess.run(["cp", "--sparse=always", image, copy], check=True)
        for each in stopped:
            with suppress(psutil.NoSuchProcess):
                each.kill()
        attempt.kill()
        psutil.wait_procs(stopped)
    image.unlink()
    with mounted(copy, work / "disk", mount) as disk:
        left, attempt = workload.progress(disk), Attempt(workload, disk)
        attempt.begin(workload.resume)
        if again := bool(attempt.wait()) and any(word in attempt.last_line() for word in ("again", "no run at")):
            shutil.rmtree(disk / "run", ignore_errors=True)
            attempt.begin(workload.start)
        said = attempt.last_line().replace(str(work), "") if attempt.wait() else ""
        same = workload.fingerprint(disk) == reference.fingerprint
        attempt.left_behind()
    copy.unlink()
    load = round(os.getloadavg()[0], 1)
    return Cut(name, number, mount, steps, left, again, same, round(time.monotonic() - began, 1), load, said)


@contextmanager
def mounted(image: Path, place: Path, options: str) -> Iterator[Path]:
    place.mkdir()
    subprocess.run(["mount", "-o", f"loop,{options}", image, place], check=True)
    try:
        yield place
    finally:
        subprocess.run(["umount", place], check=True)
        shutil.rmtree(place)


if __name__ == "__main__":
    main()
