"""Checkpoints: safetensors files named after their own sha256, in a local folder or any location of fsspec.

Files are written atomically. A file whose content does not have the sha256 of its name is skipped in favour of the one
before it. Loading never runs code.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Generic, NamedTuple, TypeVar

import fsspec
from fsspec.implementations.arrow import ArrowFSWrapper
from fsspec.implementations.local import LocalFileSystem
from safetensors import SafetensorError
from safetensors.numpy import save_file

from narrowcast.platform.errors import UserError
from narrowcast.platform.storage.disk import disk, make_folders, read_tensors, replace_by
from narrowcast.platform.storage.host import defer_signals
from narrowcast.platform.types import Arrays, KeptState

_S3 = "s3://"
_ATTEMPTS = 3
_CONNECT_SECONDS, _REQUEST_SECONDS = 5.0, 60.0


def file_system(url: str) -> tuple[Any, str]:
    """Return the file system of a folder or URL, and the path on it.

    S3 is reached through pyarrow, which is a dependency anyway, and everything else through fsspec. Raise `ValueError`
    for an unknown protocol and `ImportError` if its package is not installed. Credentials, region and endpoint of S3
    come from the environment or from ~/.aws: AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_DEFAULT_REGION,
    AWS_ENDPOINT_URL_S3 or AWS_ENDPOINT_URL. s3fs is not used: it needs an older botocore than MLflow's S3 store.
    """
    if not url.startswith(_S3):
        files, path = fsspec.core.url_to_fs(url)
        return files, path
    from pyarrow.fs import AwsStandardS3RetryStrategy, S3FileSystem

    files = S3FileSystem(
        endpoint_override=os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL"),
        retry_strategy=AwsStandardS3RetryStrategy(max_attempts=_ATTEMPTS),
        connect_timeout=_CONNECT_SECONDS,
        request_timeout=_REQUEST_SECONDS,
        allow_delayed_open=True,  # a small file is one put
    )
    return ArrowFSWrapper(files), url.removeprefix(_S3)


logger = logging.getLogger(__name__)

KEPT = 2
_FORMAT = "narrowcast-3"
_NAME = re.compile(r"(round|iteration)-\d{9}\.[0-9a-f]{64}\.safetensors")
_OURS = ("round-", "iteration-")
_SCRATCH = ".tmp"  # what safetensors writes before it renames, and leaves if it is killed
_TEMPORARY = "narrowcast-checkpoint-"
StateT = TypeVar("StateT", bound=KeptState)


@dataclass(frozen=True)
class Checkpoint(Generic[StateT]):
    """A checkpoint: its state and the digests of its configuration and data; if it is damaged, only the problem."""

    step: int
    state: StateT | None
    digest: str = ""
    data_sha256: str = ""
    problem: str = ""


class Kept(NamedTuple, Generic[StateT]):
    """A state to resume from, and the digests of the configuration and of the data set or problem that it came from.

    `data_sha256` is empty in checkpoints of versions before 0.3.
    """

    state: StateT
    digest: str
    data_sha256: str


def save_checkpoint(
    address: str | Path, state: KeptState, digest: str, keep: int = KEPT, *, data_sha256: str = ""
) -> None:
    """Write the state of a run with the digests of its configuration and of its data, and keep the last few.

    Raise `OSError`.
    """
    folder = CheckpointStore.at(address)
    with defer_signals():
        tensors, metadata = state.packed()
        ours = {"config": digest, "data": data_sha256, "format": _FORMAT}
        folder.write(_stem(state), tensors, {**metadata, **ours})
        folder.keep_last(keep, state.step)


def prune_checkpoints(address: str | Path, state: KeptState, keep: int) -> None:
    """Remove what a crash between a checkpoint and the removal of earlier ones has left; raise `OSError`."""
    with defer_signals():
        CheckpointStore.at(address).keep_last(keep, state.step)


def remove_checkpoints(address: str | Path) -> None:
    """Remove all checkpoints, and their folder if it is on this machine; raise `OSError`."""
    folder = CheckpointStore.at(address)
    with defer_signals():
        folder.remove_all_but([])
        if isinstance(folder.files, LocalFileSystem):
            disk().remove_folder(Path(folder.path))


class NoCheckpointError(UserError):
    """A run has no checkpoint yet."""


def load_checkpoint(
    address: str | Path, kind: type[StateT], reached: int | None = None, journal: str = ""
) -> Kept[StateT]:
    """Return the last undamaged state, of this kind.

    States after step `reached`, the last one in the run's journal, are not used; `journal` describes it in an error.
    Raise `UserError` if there is no state to return, `NoCheckpointError` if there never was one.
    """
    folder = CheckpointStore.at(address)
    try:
        names = folder.checkpoints()
    except OSError as error:
        raise UserError(
            f"the checkpoints in {address} cannot be read ({error}); make them readable, or wait"
        ) from error
    if not names:
        raise NoCheckpointError(f"no checkpoint in {address}; the run stopped before its first one, start it again")
    usable = [name for name in names if reached is None or _step(name) <= reached]
    if not usable:
        steps = ", ".join(str(_step(name)) for name in names)
        raise UserError(
            f"{journal}, before the checkpoints in {address} ({kind.step_name}s {steps}); start the run again"
        )
    refused = [
        f"{kind.step_name} {_step(name)} is not in the journal" for name in reversed(names) if name not in usable
    ]
    for name in reversed(usable):
        saved = _read(folder, name, kind)
        if saved.state is None:
            refused.append(f"{name} is damaged ({saved.problem})")
            continue
        for problem in refused:
            logger.warning("%s: %s; going on from %s %d", address, problem, kind.step_name, saved.step)
        return Kept(saved.state, saved.digest, saved.data_sha256)
    raise UserError(f"{address}: {'; '.join(refused)}; delete the run's folder and start it again")


def read_checkpoints(address: str | Path, kind: type[StateT]) -> Iterator[Checkpoint[StateT]]:
    """Yield all checkpoints of states of this kind, damaged ones too, oldest first."""
    folder = CheckpointStore.at(address)
    yield from (_read(folder, name, kind) for name in folder.checkpoints())


def _read(folder: CheckpointStore, name: str, kind: type[StateT]) -> Checkpoint[StateT]:
    try:
        with folder.at_hand(name) as path:
            return Checkpoint(_step(name), *_unpacked(path, name, kind))
    except (SafetensorError, KeyError, ValueError, OSError) as error:
        return Checkpoint(_step(name), None, problem=str(error))


def check_place(address: str | Path) -> None:
    """Raise `UserError` if a new run cannot write its checkpoints there, or if another run has."""
    try:
        folder = CheckpointStore.at(address)
        folder.write_empty(probe := f"{_OURS[0]}probe")
        folder.remove(probe)
        taken = folder.checkpoints()
    except OSError as error:
        raise UserError(f"checkpoint_path: cannot write to {address} ({error}); give another") from error
    if taken:
        raise UserError(f"checkpoint_path: {address} holds another run's checkpoints; give another, or another name")


@dataclass(frozen=True)
class CheckpointStore:
    """The folder of a run's checkpoints: local, or any location for which `fsspec` has a protocol."""

    files: Any
    path: str

    @classmethod
    def at(cls, address: str | Path) -> CheckpointStore:
        """Return the folder at an address.

        Raise `UserError` if the protocol is unknown or its package is not installed.
        """
        try:
            files, path = file_system(str(address))
        except (ValueError, ImportError) as error:
            raise UserError(
                f"checkpoint_path = {address}: {error}; give a folder, or a URL that fsspec knows"
            ) from error
        return cls(files, path)

    def checkpoints(self) -> list[str]:
        """Return the names of all checkpoints, oldest first."""
        return sorted(name for name in self._names() if _NAME.fullmatch(name))

    def _names(self) -> list[str]:
        with _as_os_errors():
            self.files.invalidate_cache()
            try:
                entries = self.files.ls(self.path, detail=True)
            except (FileNotFoundError, NotADirectoryError):
                return []
        return [entry["name"].rpartition("/")[2] for entry in entries if entry["type"] == "file"]

    @contextmanager
    def at_hand(self, name: str) -> Iterator[Path]:
        """Provide a local path to a file; the copy of a remote file is removed afterwards."""
        if isinstance(self.files, LocalFileSystem):
            yield Path(self.path, name)
            return
        with TemporaryDirectory(prefix=_TEMPORARY) as folder:
            with _as_os_errors():
                self.files.get_file(f"{self.path}/{name}", str(copy := Path(folder, name)))
            yield copy

    def write_empty(self, name: str) -> None:
        """Write an empty file, which shows whether the folder is writable."""
        if isinstance(self.files, LocalFileSystem):
            make_folders(Path(self.path))
            disk().append(Path(self.path, name), b"")
            return
        with _as_os_errors():
            self.files.makedirs(self.path, exist_ok=True)
            self.files.pipe_file(f"{self.path}/{name}", b"")

    def write(self, stem: str, tensors: Arrays, metadata: dict[str, str]) -> str:
        """Write a checkpoint atomically, without a copy of the tensors, which may be large; return its name."""
        if isinstance(self.files, LocalFileSystem):
            make_folders(Path(self.path))
            part = Path(self.path, f"{stem}.part")
            try:
                replace_by(part, part.with_name(name := _saved(part, stem, tensors, metadata)))
            except OSError:
                with suppress(OSError):
                    disk().remove(part)
                raise
            return name
        with TemporaryDirectory(prefix=_TEMPORARY) as folder:
            name = _saved(part := Path(folder, "part"), stem, tensors, metadata)
            with _as_os_errors():  # an object store shows a put when it is through
                self.files.makedirs(self.path, exist_ok=True)
                self.files.put_file(str(part), f"{self.path}/{name}")
        return name

    def remove(self, name: str) -> None:
        """Remove a file, unless it is gone already."""
        with suppress(FileNotFoundError), _as_os_errors():
            if isinstance(self.files, LocalFileSystem):
                disk().remove(Path(self.path, name))
                return
            self.files.rm_file(f"{self.path}/{name}")

    def keep_last(self, number: int, reached: int) -> None:
        """Remove all but the last checkpoints; those after step `reached` were refused when the run was resumed."""
        self.remove_all_but([name for name in self.checkpoints() if _step(name) <= reached][-number:])

    def remove_all_but(self, kept: list[str]) -> None:
        """Remove other checkpoints, and the remains of interrupted writes."""
        for name in self._names():
            if name.startswith((*_OURS, _SCRATCH)) and name not in kept:
                self.remove(name)


@contextmanager
def _as_os_errors() -> Iterator[None]:
    """Convert the errors that object stores raise in place of an `OSError`."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        raise OSError(f"{type(error).__name__}: {error}") from error


def _stem(state: KeptState) -> str:
    return f"{state.step_name}-{state.step:09d}"


def _step(name: str) -> int:
    return int(name.partition("-")[2].partition(".")[0])


_ERROR_NUMBER = re.compile(r"\(os error (\d+)\)")


def _saved(part: Path, stem: str, tensors: Arrays, metadata: dict[str, str]) -> str:
    """Write the file `part`, and return the name of a checkpoint with its content."""
    try:
        disk().write_with(part, lambda path: save_file(dict(tensors), path, metadata))
    except SafetensorError as error:
        number = _ERROR_NUMBER.search(str(error))
        raise OSError(*([int(number[1]), os.strerror(int(number[1]))] if number else [str(error)])) from error
    return f"{stem}.{_sha256(part)}.safetensors"


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _unpacked(path: Path, name: str, kind: type[StateT]) -> Kept[StateT]:
    """Return the state of a file; raise `ValueError`, `KeyError` or `SafetensorError` if it is not what was saved."""
    if (sha256 := _sha256(path)) != name.split(".")[1]:
        raise ValueError(f"its {path.stat().st_size} bytes have another sha256, {sha256[:12]}...")
    tensors, metadata = read_tensors(path)
    if metadata.get("format") != _FORMAT:
        raise ValueError(f'format "{metadata.get("format")}"; this version reads {_FORMAT}')
    return Kept(kind.unpacked(tensors, metadata), metadata["config"], metadata.get("data", ""))
