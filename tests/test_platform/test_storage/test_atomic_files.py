"""Files that are there wholly or not at all."""

from __future__ import annotations

import errno
import os
import resource
import signal
from pathlib import Path

import pytest

from narrowcast.platform.errors import RunFailed
from narrowcast.platform.storage.disk import GO_ON, Disk, disk, use_disk, write_atomically, writing


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


def test_a_write_that_fails_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "folder"
    path.mkdir()
    with pytest.raises(IsADirectoryError) as failure:
        write_atomically(path, b"new")
    assert str(failure.value) == f"[Errno 21] Is a directory: '{path}'"


def test_what_a_killed_write_left_is_removed_and_what_others_write_is_not(tmp_path: Path) -> None:
    path, fork = tmp_path / "a[1]", os.fork()
    if not fork:
        disk = Disk()
        disk.rename = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign]
        with use_disk(disk):
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


@pytest.mark.parametrize(
    ("path", "advice"),
    [
        ("/dev/full", "make room"),
        ("a" * 300, "give a shorter name, or another output folder"),
        (".", "remove what has the place of a file"),
        ("file/b", "remove what has the place of a file"),
        ("gone/b", "put back the folder that was removed"),
    ],
)
def test_what_cannot_be_written_is_said_with_what_to_do_about_it(path: str, advice: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RunFailed) as failed, writing(tmp_path, GO_ON):
        disk().append(tmp_path / path, b"content")
    reason = f"[Errno {failed.value.__cause__.errno}]"  # type: ignore[union-attr]
    assert str(failed.value).startswith(f"cannot write to {tmp_path} ({reason} ")
    assert str(failed.value).endswith(f"); {advice}, then {GO_ON}")


@pytest.mark.parametrize("number", sorted(errno.errorcode))
def test_only_a_full_disk_is_said_to_be_full(number: int) -> None:
    with pytest.raises(RunFailed) as failed, writing(Path("runs"), "resume the run"):
        raise OSError(number, os.strerror(number))
    line = str(failed.value)
    assert ("make room" in line) == (number in (errno.ENOSPC, errno.EDQUOT))
    assert ("mount the disk so that it can be written" in line) == (number == errno.EROFS)
    assert ("see to the disk, which fails" in line) == (number == errno.EIO)
    assert ("let this user write there" in line) == (number in (errno.EACCES, errno.EPERM))
    assert os.strerror(number) in line
