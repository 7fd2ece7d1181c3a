"""Nothing in a run's folder is written around the disk: the system calls of a run are the operations it records."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

TRACE = "trace=write,pwrite64,fsync,fdatasync,ftruncate,truncate,rename,renameat,renameat2,unlink,unlinkat,mkdir,rmdir"
CALLS = {"fsync": "sync", "fdatasync": "sync", "unlink": "remove", "mkdir": "make_folder", "rmdir": "remove_folder"}
WRITES = {"create", "append", "fill", "write", "pwrite64", "ftruncate", "truncate"}
SCRATCH = ".tmp"  # safetensors writes such a file and renames it
RUN = """
import json, sys
from pathlib import Path
sys.path.append(sys.argv[1])
from narrowcast.platform.storage.disk import use_disk
from narrowcast.runs import session
from recording_disk import RecordingDisk

output = Path(sys.argv[2])
settings = ["name=run", "rounds=4", "checkpoint_every=1", "data.clients=10", "clients_per_round=2", "model.hidden=[4]"]
with use_disk(disk := RecordingDisk()):
    (prepared,) = session.prepare_runs("fedavg-digits", [*settings, "backend=local"], output)
    session.run(prepared, lambda _: None, keep_checkpoints=False)
operations = [(each.kind, str(each.target or each.path)) for each in disk.operations]
(output / "operations.json").write_text(json.dumps(operations))
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.program("strace")
def test_the_system_calls_of_a_run_are_its_recorded_operations(tmp_path: Path) -> None:
    fixtures, log, folder = Path(__file__).parents[1] / "fixtures", tmp_path / "calls", tmp_path / "run"
    command = [sys.executable, "-W", "ignore", "-c", RUN, str(fixtures), str(tmp_path)]
    strace = ["strace", "-ff", "-y", "-qq", "--seccomp-bpf", "-s", "1", "-e", TRACE, "-o", str(log)]
    subprocess.run([*strace, *command], check=True, capture_output=True)
    operations = json.loads((tmp_path / "operations.json").read_text())
    done, called = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
    for kind, path in operations:
        if Path(path).is_relative_to(folder):
            done["write" if kind in WRITES else kind, path] += 1
    # A file for each thread, so that a call during which another thread calls is one line, with its result.
    for line in (line for file in tmp_path.glob("calls.*") for line in file.read_text().splitlines()):
        if (found := re.search(r"(\w+)\((.*)\) += \d", line)) is None:
            continue  # a call that failed
        name, words = found.groups()
        open_files, names = re.findall(r"<(/[^>]*)>", words), re.findall(r'"(/[^"]*)"', words)
        paths = open_files[:1] if name in WRITES or "sync" in name else names
        if not paths or not Path(paths[-1]).is_relative_to(folder) or Path(paths[-1]).name.startswith(SCRATCH):
            continue
        if name in WRITES or Path(paths[0]).name.startswith(SCRATCH):
            called["write", paths[-1]] += 1
        else:
            called["rename" if name.startswith("rename") else CALLS.get(name, name), paths[-1]] += 1
    assert {each for each in called if each[0] == "write"} == {each for each in done if each[0] == "write"}
    assert {each: n for each, n in called.items() if each[0] != "write"} == {
        each: n for each, n in done.items() if each[0] != "write"
    }
    assert len(done) > 40
