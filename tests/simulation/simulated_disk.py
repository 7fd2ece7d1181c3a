"""A disk with a cache that a power cut loses: unsynced writes may be gone, torn or reordered, and the disk may be full.

Durable is the content of a file that was synced, and an entry of a folder that was synced. After a power cut every file
has, beyond its synced content, some of the later writes in their order, the last one perhaps torn or zeroed; every
folder has some of its later entries in their order. Files and folders do so independently, which includes the orders
that ext4 allows.
"""

from __future__ import annotations

import errno
import itertools
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from simulated_host import KilledError, PowerCutError, SimulatedHost

from narrowcast.platform.storage.disk import Disk, without_part

_INSIDE = ("create", "append", "fill")
_NEEDS_ROOM = (*_INSIDE, "make_folder")


@dataclass(eq=False)
class _File:
    """A file's durable content, its content in the cache after each later write, and its time."""

    durable: bytes = b""
    later: list[bytes] = field(default_factory=list)

    @property
    def now(self) -> bytes:
        return self.later[-1] if self.later else self.durable


@dataclass(eq=False)
class _Folder:
    """A folder's durable entries, and its later changes: names, and the file or folder that each has from then on."""

    durable: dict[str, _File | _Folder] = field(default_factory=dict)
    later: list[dict[str, _File | _Folder | None]] = field(default_factory=list)

    def entries(self, changes: int | None = None) -> dict[str, _File | _Folder]:
        found = dict(self.durable)
        for change in self.later[:changes]:
            for name, entry in change.items():
                if entry is None:
                    found.pop(name, None)
                else:
                    found[name] = entry
        return found


@dataclass
class Accident:
    """What happens at an operation, counted from 1 in each process: a death, or errors for so many operations."""

    at: int
    kind: str
    stage: str = "before"
    operations: int = 1


class SimulatedDisk(Disk):
    """The folder `root` on the machine's own disk, with what of it would outlive a power cut."""

    def __init__(self, host: SimulatedHost, root: Path, now: Callable[[], float]) -> None:
        self._host, self._root, self._now = host, root, now
        self._chances = host.chances("disk")
        self._top = _Folder()
        self._images: dict[Path, bytes] | None = None
        self.count = 0
        self.accidents: list[Accident] = []
        self.durable_round, self.durable_at = -1, 0.0
        host.on_death.append(self._keep_image)

    # operations

    def create(self, path: Path, content: bytes, mode: int = 0o666) -> None:
        def partly(part: float) -> None:
            super(SimulatedDisk, self).create(path, content[: int(len(content) * part)], mode)
            self._enter(path, _File(b"", [content[: int(len(content) * part)]]))

        self._do("create", path, partly)

    def write_with(self, path: Path, write: Callable[[Path], object]) -> None:
        def partly(part: float) -> None:
            super(SimulatedDisk, self).write_with(path, write)
            content = path.read_bytes()
            if part < 1:
                os.truncate(path, int(len(content) * part))
                content = content[: int(len(content) * part)]
            if isinstance(known := self._find(path), _File):
                known.later.append(content)
            else:
                self._enter(path, _File(b"", [content]))

        self._do("fill", path, partly)

    def append(self, path: Path, content: bytes) -> None:
        def partly(part: float) -> None:
            written = content[: int(len(content) * part)]
            super(SimulatedDisk, self).append(path, written)
            if (known := self._find(path)) is None:
                self._enter(path, known := _File())
            assert isinstance(known, _File)
            known.later.append(known.now + written)

        self._do("append", path, partly)

    def truncate(self, path: Path, size: int) -> None:
        def whole(_: float) -> None:
            super(SimulatedDisk, self).truncate(path, size)
            known = self._find(path)
            assert isinstance(known, _File)
            known.later.append(known.now[:size])

        self._do("truncate", path, whole)

    def sync(self, path: Path) -> None:
        def whole(_: float) -> None:
            known = self._find(path)
            if isinstance(known, _File):
                known.durable, known.later = known.now, []
            elif known is not None:
                known.durable, known.later = known.entries(), []
                if path.name == "checkpoint":
                    rounds = [int(name[6:15]) for name in known.durable if name.endswith(".safetensors")]
                    self.durable_round, self.durable_at = max([self.durable_round, *rounds]), self._now()

        self._do("sync", path, whole)

    def rename(self, source: Path, target: Path) -> None:
        def whole(_: float) -> None:
            super(SimulatedDisk, self).rename(source, target)
            self._folder_of(source).later.append({target.name: self._find(source), source.name: None})

        self._do("rename", source, whole)

    def remove(self, path: Path) -> None:
        def whole(_: float) -> None:
            super(SimulatedDisk, self).remove(path)
            self._enter(path, None)

        self._do("remove", path, whole)

    def make_folder(self, path: Path, mode: int = 0o777) -> None:
        def whole(_: float) -> None:
            super(SimulatedDisk, self).make_folder(path, mode)
            self._enter(path, _Folder())

        self._do("make_folder", path, whole)

    def remove_folder(self, path: Path) -> None:
        def whole(_: float) -> None:
            super(SimulatedDisk, self).remove_folder(path)
            self._enter(path, None)

        self._do("remove_folder", path, whole)

    # accidents

    def start_process(self, accidents: list[Accident]) -> None:
        self.count, self.accidents = 0, accidents

    def _do(self, kind: str, path: Path, act: Callable[[float], None]) -> None:
        self._host.check_alive()
        self.count += 1
        where = f"{kind} {path.relative_to(self._root.parent)}"
        for accident in self.accidents:
            if accident.kind in ("power cut", "kill") and accident.at == self.count:
                if accident.stage == "inside" and kind in _INSIDE:
                    act(self._chances.random())
                elif accident.stage == "after":
                    act(1.0)
                death = PowerCutError if accident.kind == "power cut" else KilledError
                self._host.die(death, f"{accident.stage} operation {self.count}: {_shown(where)}")
            if accident.at <= self.count < accident.at + accident.operations:
                if accident.kind == "full" and kind in _NEEDS_ROOM:
                    self._host.tell(f"disk full at operation {self.count}: {_shown(where)}")
                    if kind in ("append", "fill"):
                        act(self._chances.random())
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
                if accident.kind == "no sync" and kind == "sync":
                    self._host.tell(f"sync fails at operation {self.count}: {_shown(where)}")
                    raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        act(1.0)

    def _keep_image(self, death: type[BaseException]) -> None:
        """Keep what the machine or process leaves, before the code that is unwound changes it."""
        self._images = self._image(self._root)

    def restart(self) -> None:
        """Put in place what the dead process, or the machine without power, has left."""
        assert self._images is not None
        shutil.rmtree(self._root)
        if self._host.death is PowerCutError:
            self._top = self._after_power_cut(self._top)
            self._write(self._root, self._top)
        else:
            self._root.mkdir()
            for path, content in self._images.items():
                if content is _FOLDER:
                    path.mkdir(exist_ok=True)
                else:
                    path.write_bytes(content)
        self._images = None

    def _image(self, folder: Path) -> dict[Path, bytes]:
        found: dict[Path, bytes] = {}
        for each in folder.iterdir():
            if each.is_dir():
                found[each] = _FOLDER
                found |= self._image(each)
            else:
                found[each] = each.read_bytes()
        return found

    def _after_power_cut(self, folder: _Folder) -> _Folder:
        survived: dict[str, _File | _Folder] = {}
        kept = self._chances.choice((0, len(folder.later), self._chances.randint(0, len(folder.later))))
        for name, entry in folder.entries(kept).items():
            survived[name] = self._after_power_cut(entry) if isinstance(entry, _Folder) else _File(self._torn(entry))
        return _Folder(survived)

    def _torn(self, file: _File) -> bytes:
        """Return a content that the disk may have: the synced one, or that after some writes, the last one torn."""
        states = [file.durable, *file.later]
        place = self._chances.choice((0, len(states) - 1, self._chances.randrange(len(states))))
        content = states[place]
        if place + 1 < len(states) and len(after := states[place + 1]) > len(content):
            how = self._chances.choice(("whole", "torn", "zeroed"))
            part = after[: len(content) + int(self._chances.random() * (len(after) - len(content)))]
            content = {"whole": content, "torn": part, "zeroed": content + bytes(len(part) - len(content))}[how]
        return content

    def _write(self, path: Path, entry: _File | _Folder) -> None:
        if isinstance(entry, _File):
            path.write_bytes(entry.durable)
            return
        path.mkdir()
        for name, each in entry.durable.items():
            self._write(path / name, each)

    # the tree in the cache

    def _find(self, path: Path) -> _File | _Folder | None:
        found: _File | _Folder | None = self._top
        for name in path.relative_to(self._root).parts:
            found = found.entries().get(name) if isinstance(found, _Folder) else None
        return found

    def _enter(self, path: Path, entry: _File | _Folder | None) -> None:
        self._folder_of(path).later.append({path.name: entry})

    def _folder_of(self, path: Path) -> _Folder:
        folder = self._find(path.parent)
        assert isinstance(folder, _Folder), f"{path.parent} was not made through the disk"
        return folder

    def written_around(self) -> list[str]:
        """Return the files whose content is not what was written through this disk."""
        there = {path: content for path, content in self._image(self._root).items() if content is not _FOLDER}
        known: dict[Path, bytes] = {}

        def add(path: Path, entry: _File | _Folder) -> None:
            if isinstance(entry, _File):
                known[path] = entry.now
            else:
                for name, each in entry.entries().items():
                    add(path / name, each)

        add(self._root, self._top)
        return sorted(
            str(path.relative_to(self._root))
            for path in itertools.chain(there, known)
            if there.get(path) != known.get(path)
        )


_FOLDER = b"\0folder"


def _shown(where: str) -> str:
    """Leave out hashes, and the numbers of processes in temporary names, which say nothing."""
    head, _, tail = where.partition("checkpoint/round-")
    return f"{head}checkpoint/round-{tail[:9]}" if tail else without_part(where)
