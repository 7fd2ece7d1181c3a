"""Contracts of data: what is loaded of all clients, and the source that a file names."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, Self

from narrowcast.platform.errors import UserError
from narrowcast.platform.rounds.client_contracts import ClientSplit
from narrowcast.platform.types import Arrays, IntArray, RunInput


class Dataset(RunInput):
    """The data of all clients, held once and indexed by client."""

    if TYPE_CHECKING:

        @property
        def n_clients(self) -> int:
            """The number of clients, U."""

        @property
        def examples(self) -> IntArray:
            """The number of training examples of every client, [U]."""

    @property
    def of_server(self) -> Dataset | None:
        """The samples of the server's own as the data set of one client; None, the default, without any."""
        return None

    @property
    def labels_at_clients(self) -> bool:
        """Return whether some training samples of clients have targets; True by default."""
        return True

    @property
    def inputs(self) -> Arrays:
        """The inputs of the training samples by name; none by default."""
        return {}

    def examples_of(self, split: ClientSplit) -> IntArray:
        """Return the number of each client's own samples of a split, [U].

        Raise `UserError` if it has none by definition; by default, whose the samples are is not known.
        """
        del split
        raise UserError(f"{self.name} does not say which samples are whose; leave evaluate_clients out")


class Source(ABC):  # noqa: B024 - what is loaded differs between its subclasses
    """The origin of a run's input, as its file names it: a frozen model whose fields are its settings.

    A field `seed: int | None = None` follows the seed of the run unless it is set. A field `path` is the file or folder
    that is read.
    """

    if TYPE_CHECKING:

        @property
        def kind(self) -> str:
            """The source's name in the catalog."""

    @property
    def own_seed(self) -> int | None:
        """The seed that is set; None without one."""
        seed: int | None = vars(self).get("seed")
        return seed

    @property
    def follows_seed(self) -> bool:
        """True if the source takes the seed of the run: it has a field `seed`, which is not set."""
        return "seed" in vars(self) and self.own_seed is None

    @property
    def location(self) -> Path | None:
        """The file or folder that is read, None for sources without a field `path`."""
        path: Path | None = vars(self).get("path")
        return path

    def of_seed(self, seed: int) -> Self:
        """Return the source for runs of this seed; itself if it does not follow it."""
        if not self.follows_seed:
            return self
        seeded: Self = self.model_copy(update={"seed": seed})  # type: ignore[attr-defined] # a pydantic model
        return seeded


class DataSource(Source):
    """A data set as an experiment names it."""

    @abstractmethod
    def load(self) -> Dataset:
        """Read the `Dataset`; raise `UserError` with the folders searched and the command that fetches it."""
