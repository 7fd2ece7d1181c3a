"""Files that are there wholly or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from narrowcast.platform.atomic_files import write_atomically


def test_a_write_that_fails_leaves_the_former_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_atomically(path, b"former")
    (tmp_path / "file.part").mkdir()
    with pytest.raises(IsADirectoryError):
        write_atomically(path, b"new")
    assert path.read_bytes() == b"former"


def test_a_file_is_its_owners_alone_from_its_first_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, modes, fsync = tmp_path / "key", [], os.fsync

    def look(descriptor: int) -> None:
        modes.append(os.fstat(descriptor).st_mode & 0o777)
        fsync(descriptor)

    path.with_name("key.part").touch(mode=0o666)  # what a write that was cut off left
    monkeypatch.setattr(os, "fsync", look)
    write_atomically(path, b"secret", mode=0o600)
    assert (modes[0], path.stat().st_mode & 0o777) == (0o600, 0o600)
