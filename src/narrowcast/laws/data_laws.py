"""Laws of data sets of interactions, of labelled samples or of other data, and of how samples are dealt to clients."""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from narrowcast.laws.law import LawBrokenError, require
from narrowcast.laws.small_tasks import digest
from narrowcast.platform.data.dataset import Dataset, DataSource
from narrowcast.platform.data.partition import Partitioner
from narrowcast.platform.data.soundness import UnsoundDataError, check_counts, check_held_out, check_ownership
from narrowcast.platform.errors import UserError
from narrowcast.platform.types import IntArray

_SEED = 3


@dataclass(frozen=True)
class DataCase:
    """A data source, and what it loads."""

    source: DataSource

    @cached_property
    def data(self) -> Any:
        """The data set."""
        return self.source.load()


def data_cases(source: DataSource) -> dict[str, DataCase]:
    """Return the only case."""
    return {"": DataCase(source)}


def loading_again_gives_the_same_digest(case: DataCase) -> None:
    """Load the set again, from a pickled source."""
    again: Dataset = pickle.loads(pickle.dumps(case.source)).load()
    require(len(case.data.digest) == 64, f"the digest {case.data.digest!r} is not a sha256")
    require(again.digest == case.data.digest, "the digests differ")


def every_client_has_examples_that_are_counted(case: DataCase) -> None:
    """Look at the number of clients and their examples."""
    _sound(check_counts, case.data)


def it_reaches_other_processes_unchanged(case: DataCase) -> None:
    """Pickle and unpickle the set."""
    require(pickle.loads(pickle.dumps(case.data)).digest == case.data.digest, "its digest is another")


def training_examples_match_their_owners(case: DataCase) -> None:
    """Follow the index from clients to examples."""
    _sound(check_ownership, case.data)


def held_out_examples_are_not_trained_on(case: DataCase) -> None:
    """Look for validation and test examples among those of the clients, and at all targets."""
    _sound(check_held_out, case.data)


def _sound(check: Callable[[Dataset], None], data: Dataset) -> None:
    try:
        check(data)
    except UnsoundDataError as fault:
        raise LawBrokenError(str(fault)) from fault


def digest_of_data(case: DataCase) -> str:
    """Return the digest of the data, loaded anew."""
    data: Dataset = case.source.load()
    return data.digest


DATA_LAWS = (
    loading_again_gives_the_same_digest,
    every_client_has_examples_that_are_counted,
    it_reaches_other_processes_unchanged,
    training_examples_match_their_owners,
    held_out_examples_are_not_trained_on,
)


@dataclass(frozen=True)
class PartitionCase:
    """A partition, and the samples that it deals to some clients."""

    partition: Partitioner
    labels: IntArray
    users: IntArray
    clients: int

    def deal(self, partition: Partitioner | None = None) -> tuple[IntArray, IntArray]:
        """Deal the samples."""
        return (partition or self.partition).deal(self.labels, self.clients, _SEED, self.users)

    def refused(self) -> bool:
        """Return whether the partition says that it cannot deal these samples; any other error is for the laws."""
        try:
            self.deal()
        except (Exception, SystemExit) as error:
            return isinstance(error, UserError)
        return False

    @cached_property
    def index(self) -> tuple[IntArray, IntArray]:
        """The samples in order of their clients [n], and where each client's begin [U + 1]."""
        return self.deal()


def partition_cases(partition: Partitioner) -> dict[str, PartitionCase]:
    """Return the partition of even and of uneven classes, without those that it refuses."""
    draw = np.random.default_rng(0)
    sets = {
        "even classes": (draw.permutation(np.arange(1200) % 10), 12),
        "uneven classes": (draw.choice(10, 700, p=np.arange(1, 11) / 55), 7),
    }
    cases = {}
    for name, (labels, clients) in sets.items():
        case = PartitionCase(partition, labels, draw.integers(0, clients, len(labels)), clients)
        for values in (case.labels, case.users):
            values.flags.writeable = False
        if not case.refused():
            cases[name] = case
    return cases


def every_sample_has_one_client(case: PartitionCase) -> None:
    """Look for each sample in the order of all."""
    order = case.index[0]
    require(np.issubdtype(order.dtype, np.integer), f"order is {order.dtype}, not whole numbers")
    twice = len(order) - len(np.unique(order))
    require(not twice, f"{twice} samples are dealt more than once")
    complete = np.array_equal(np.sort(order), np.arange(len(case.labels)))
    require(complete, f"{len(order)} of {len(case.labels)} samples are dealt, or others")


def every_client_has_its_part_of_the_order(case: PartitionCase) -> None:
    """Follow the index from clients to samples."""
    order, indptr = case.index
    require(indptr.shape == (case.clients + 1,), f"indptr has the shape {indptr.shape}, not [{case.clients + 1}]")
    require(np.issubdtype(indptr.dtype, np.integer), f"indptr is {indptr.dtype}, not whole numbers")
    require(indptr[0] == 0, f"indptr begins with {indptr[0]}")
    require((np.diff(indptr) >= 0).all(), "indptr falls")
    require(indptr[-1] == len(order), f"indptr ends at {indptr[-1]}, and {len(order)} samples are dealt")
    for client, samples in enumerate(np.split(order, indptr[1:-1])):
        require((np.diff(samples) > 0).all(), f"the samples of client {client} do not ascend")


def dealing_again_gives_the_same(case: PartitionCase) -> None:
    """Deal a second time, from a pickled partition."""
    again = case.deal(pickle.loads(pickle.dumps(case.partition)))
    require(all(np.array_equal(*pair) for pair in zip(case.index, again, strict=True)), "the same seed deals otherwise")


def no_global_generator_is_used(case: PartitionCase) -> None:
    """Compare the states of Python's and NumPy's global generators before and after."""
    before = _global_states()
    case.deal()
    for name, state in _global_states().items():
        require(state == before[name], f"it draws from {name}, or seeds it; use platform.seeds.generator")


def _global_states() -> dict[str, Any]:
    return {"random": random.getstate(), "numpy.random": pickle.dumps(np.random.get_state())}


def digest_of_partition(case: PartitionCase) -> str:
    """Return the sha256 of the order of the samples and of where each client's begin."""
    order, indptr = case.deal()
    return digest({"order": order, "indptr": indptr})


PARTITION_LAWS = (
    every_sample_has_one_client,
    every_client_has_its_part_of_the_order,
    dealing_again_gives_the_same,
    no_global_generator_is_used,
)
