"""Laws of data sets: of interactions, of labelled samples, and of any other `Dataset`."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from narrowcast.laws.law import LawBrokenError, require
from narrowcast.platform.data.dataset import Dataset, DataSource
from narrowcast.platform.data.soundness import UnsoundDataError, check_counts, check_held_out, check_ownership


@dataclass(frozen=True)
class Loaded:
    """A data source, and what it loads."""

    source: DataSource

    @cached_property
    def data(self) -> Any:
        """The data set."""
        return self.source.load()


def cases(source: DataSource) -> dict[str, Loaded]:
    """Return the only case."""
    return {"": Loaded(source)}


def loading_again_gives_the_same_digest(case: Loaded) -> None:
    """Load the set again, from a pickled source."""
    again: Dataset = pickle.loads(pickle.dumps(case.source)).load()
    require(len(case.data.digest) == 64, f"the digest {case.data.digest!r} is not a sha256")
    require(again.digest == case.data.digest, "the digests differ")


def every_client_has_examples_that_are_counted(case: Loaded) -> None:
    """Look at the number of clients and their examples."""
    _sound(check_counts, case.data)


def it_reaches_other_processes_unchanged(case: Loaded) -> None:
    """Pickle and unpickle the set."""
    require(pickle.loads(pickle.dumps(case.data)).digest == case.data.digest, "its digest is another")


def training_examples_match_their_owners(case: Loaded) -> None:
    """Follow the index from clients to examples."""
    _sound(check_ownership, case.data)


def held_out_examples_are_not_trained_on(case: Loaded) -> None:
    """Look for validation and test examples among those of the clients, and at all targets."""
    _sound(check_held_out, case.data)


def _sound(check: Callable[[Dataset], None], data: Dataset) -> None:
    try:
        check(data)
    except UnsoundDataError as fault:
        raise LawBrokenError(str(fault)) from fault


def digest_of(case: Loaded) -> str:
    """Return the digest of the data, loaded anew."""
    data: Dataset = case.source.load()
    return data.digest


LAWS = (
    loading_again_gives_the_same_digest,
    every_client_has_examples_that_are_counted,
    it_reaches_other_processes_unchanged,
    training_examples_match_their_owners,
    held_out_examples_are_not_trained_on,
)
