"""The base of prepared runs of any kind, and the place of such a run: its folder and its MLflow store.

A place is new, or as a run that is resumed left it.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from narrowcast.platform.config import plugins
from narrowcast.platform.config.files import PLUGINS
from narrowcast.platform.config.run_fields import StoreAddress
from narrowcast.platform.errors import UserError
from narrowcast.platform.storage.checkpoint import Kept, NoCheckpointError, check_place, load_checkpoint
from narrowcast.platform.storage.disk import disk
from narrowcast.platform.storage.journal import Journal, locked
from narrowcast.platform.tracking.sender import check_store
from narrowcast.platform.types import KeptState, RunInput
from narrowcast.runs.folder import CONFIG, RunConfig, checkpoint_place, free_folder, make_writable, saved_config

WriteOutputs = Callable[[Journal, Any, str], dict[str, Any]]
"""Writes the outputs of a finished run from its journal, its state and the id of its MLflow run.

Returns the content of `result.json`, which is written last; raises `NoLearningError` for a run without a result.
"""


@dataclass(frozen=True, kw_only=True)
class PreparedRun(ABC):
    """A run that has passed every check and has written nothing yet.

    Attributes:
        folder: the folder of the run.
        store: the address of the MLflow store.
        state: the `KeptState` from which the run goes on.
        resuming: True if the folder has a run to go on with.

    """

    folder: Path
    store: StoreAddress
    state: Any
    resuming: bool = False

    @property
    @abstractmethod
    def config(self) -> RunConfig:
        """The model of the whole run."""

    @property
    @abstractmethod
    def input(self) -> RunInput:
        """The data set or problem."""

    @abstractmethod
    def tags(self) -> dict[str, str]:
        """Return the tags of the run in MLflow."""

    def keep_inputs(self) -> None:
        """Write to the run's folder what a resume needs besides checkpoints: nothing if all follows from `config`."""
        return

    @abstractmethod
    def steps(self) -> Generator[Any, None, None]:
        """Run from `state` on and yield each `Step`."""

    @abstractmethod
    def watch(self, journal: Journal) -> Callable[[Any], None]:
        """Return a function that logs a step, to be called after each; it raises `NoLearningError`."""

    @abstractmethod
    def begin_outputs(self) -> WriteOutputs:
        """Begin to draw what does not depend on the run; return the function that writes the outputs."""


logger = logging.getLogger(__name__)
StateT = TypeVar("StateT", bound=KeptState)
ConfigT = TypeVar("ConfigT", bound=RunConfig)


def new_place(config: RunConfig, output: Path) -> tuple[Path, StoreAddress]:
    """Return the folder of a new run and its store; remove the output folder again if a check of either fails."""
    plugins.files_of(config.plain())  # of which the run will keep copies
    created = not output.exists()
    make_writable(output)
    folder = free_folder(output, config.name)
    try:
        if config.checkpoint_path is not None:  # before the store, of which a new file would be left
            check_place(checkpoint_place(config, folder))
        store = checked_store(config, output)
    except UserError:
        if created:
            with suppress(OSError):
                disk().remove_folder(output)
        raise
    return folder, store


def checked_store(config: RunConfig, output: Path) -> StoreAddress:
    """Return the address of the tracking store after the check that it answers."""
    store = config.tracking.resolve(output)
    check_store(store)
    return store


def to_resume(
    folder: Path, changed: ConfigT | None, load: Callable[[str], ConfigT], kind: type[StateT]
) -> tuple[ConfigT, Kept[StateT] | None, Journal]:
    """Return the configuration that a run is resumed with, what was kept of its state, and the journal as it is.

    `changed` may differ from the folder's own configuration only in settings that results do not depend on. There is no
    state if a power cut came before the first checkpoint. Raise `UserError` for a folder that cannot be resumed.
    """
    _check_resumable(folder, changed)
    saved = load(saved_config(folder))
    if changed is not None:
        _check_same(folder, saved, changed)
    config = saved if changed is None else changed
    kept, journal = _kept_state(folder, saved, kind)
    check_digest(folder, kept, config)
    return config, kept, journal


def _check_resumable(folder: Path, changed: RunConfig | None) -> None:
    """Raise `UserError` unless the folder has a run, whose own classes are those of `changed`."""
    if not (folder / CONFIG).is_file():
        if Journal.read(folder).rounds:  # else it stopped before it wrote any
            raise UserError(f"{folder} has no {CONFIG} any more; put it back, or start the run again")
        known = sorted(entry.parent.name for entry in folder.parent.glob(f"*/{CONFIG}"))
        raise UserError(f"no run at {folder}; runs in {folder.parent}: {', '.join(known) or 'none'}")
    if changed is not None:
        plugins.check_same(changed.plain(), folder / PLUGINS)
    for file in plugins.changed(folder / PLUGINS):
        logger.warning("%s has changed since the run began; it resumes with the copy in %s", file, folder / PLUGINS)


def _check_same(folder: Path, saved: RunConfig, changed: RunConfig) -> None:
    """Raise `UserError` if results would differ, or if checkpoints cannot go to another place."""
    before, now = saved.identity(), changed.identity()
    if differing := sorted(key for key in before | now if before.get(key) != now.get(key)):
        shown = "; ".join(f"{key} was {before.get(key)!r}, now {now.get(key)!r}" for key in differing[:3])
        raise UserError(f"{folder.name} was run with another configuration: {shown}; resume with its own")
    if changed.checkpoint_path not in (None, saved.checkpoint_path):
        check_place(checkpoint_place(changed, folder))


def check_digest(folder: Path, kept: Kept[Any] | None, config: RunConfig) -> None:
    """Raise `UserError` if the checkpoint is not of the configuration; another version may give it another digest."""
    if kept is not None and kept.digest != config.digest():
        raise UserError(
            f"the checkpoint in {folder} is not of its {CONFIG}; start the run again, or resume it with the version of "
            "narrowcast that began it"
        )


def check_same_data(folder: Path, kept: Kept[Any] | None, data: RunInput) -> None:
    """Raise `UserError` if the data set or problem is not the one that the run began with, as far as that is known."""
    if kept is not None and kept.data_sha256 not in ("", data.digest):
        raise UserError(
            f"{folder.name} began with other data than {data.source} now gives (sha256 {kept.data_sha256[:12]}, now "
            f"{data.digest[:12]}); put back the files as they were, or start a new run with these"
        )


def _kept_state(folder: Path, saved: RunConfig, kind: type[StateT]) -> tuple[Kept[StateT] | None, Journal]:
    make_writable(folder)
    with locked(folder):
        journal = Journal.read(folder)
        address = checkpoint_place(saved, folder)
        try:
            return load_checkpoint(address, kind, journal.last_step, journal.extent), journal
        except NoCheckpointError as error:
            if journal.last_step:
                done = f"finished {journal.step_name} {journal.last_step}"
                raise UserError(
                    f"{folder.name} has {done}, but {address} has no checkpoint any more; put one back, or start the "
                    "run again"
                ) from error
    return None, journal
