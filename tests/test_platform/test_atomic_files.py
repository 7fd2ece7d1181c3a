"""Files that are there wholly or not at all."""

from __future__ import annotations

import os
import resource
import signal
from pathlib import Path

import pytest

from narrowcast.platform.atomic_files import write_atomically
from narrowcast.platform.disk import Disk, using


def test_a_write_that_fails_leaves_the_former_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_atomically(path, b"former")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            write_atomically(path, b"new" * 1000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)
    assert path.read_bytes() == b"former"
    assert [each.name for each in tmp_path.iterdir()] == ["file"]


def test_what_a_killed_write_left_is_removed_and_what_others_write_is_not(tmp_path: Path) -> None:
    path, fork = tmp_path / "a[1]", os.fork()
    if not fork:
        disk = Disk()
        disk.rename = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign]
        with using(disk):
            write_atomically(path, b"cut off")
    os.waitpid(fork, 0)
    (left,) = tmp_path.iterdir()
    others = [
        path.with_name(left.name.replace(f"-{fork}-", new))
        for new in (f"-{os.getppid()}-", "-x-", "-²-", f"-{10**20}-")
    ]
    for other in others:
        other.touch()
    write_atomically(path, b"whole")
    assert sorted(tmp_path.iterdir()) == sorted([path, *others])
    assert path.read_bytes() == b"whole"


def test_processes_that_write_one_file_at_once_write_it_whole(tmp_path: Path) -> None:
    path, children = tmp_path / "file", []
    contents = [bytes([65 + number]) * 50_000 for number in range(4)]
    for content in contents:
        children.append(os.fork())
        if not children[-1]:
            try:
                for _ in range(50):
                    write_atomically(path, content)
                    assert path.read_bytes() in contents
            except BaseException:
                os._exit(1)
            os._exit(0)
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * 4
    assert [each.name for each in tmp_path.iterdir()] == ["file"]


def test_a_file_is_its_owners_alone_from_its_first_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, modes, fsync = tmp_path / "key", [], os.fsync

    def look(descriptor: int) -> None:
        modes.append(os.fstat(descriptor).st_mode & 0o777)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", look)
    write_atomically(path, b"secret", mode=0o600)
    assert (modes[0], path.stat().st_mode & 0o777) == (0o600, 0o600)
