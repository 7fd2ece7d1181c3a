"""Partitions of a classification data set across clients: its training samples, and held-out samples like them."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from narrowcast.platform.config.catalog import PARTITIONS
from narrowcast.platform.config.files import Section
from narrowcast.platform.errors import UserError
from narrowcast.platform.seeds import generator
from narrowcast.platform.types import IntArray


class ClientIndex(NamedTuple):
    """Samples of clients by index: client u has `order[indptr[u]:indptr[u + 1]]`. Shapes: order [n]; indptr [U + 1]."""

    order: IntArray
    indptr: IntArray

    def rows(self, clients: IntArray) -> tuple[IntArray, IntArray]:
        """Return the samples of these clients one client after the other, [m], and the number of each, [C]."""
        counts = self.indptr[clients + 1] - self.indptr[clients]
        starts = np.repeat(self.indptr[clients] - np.cumsum(counts) + counts, counts)
        return self.order[starts + np.arange(len(starts))], counts


def index_of_owners(owners: IntArray, n_clients: int) -> ClientIndex:
    """Return the index of samples whose clients are known, [n]; those of client -1 are left out."""
    indptr = np.zeros(n_clients + 1, dtype=np.int64)
    np.cumsum(np.bincount(owners[owners >= 0], minlength=n_clients), out=indptr[1:])
    return ClientIndex(np.argsort(owners, kind="stable")[int((owners < 0).sum()) :], indptr)


def random_ranks(owners: IntArray, random: np.random.Generator) -> IntArray:
    """Return the place of each sample, [n], in a random order of those of its client."""
    order = np.lexsort((random.random(len(owners)), owners))
    counts = np.bincount(owners)
    ranks = np.empty(len(owners), dtype=np.int64)
    ranks[order] = np.arange(len(owners)) - np.repeat(np.cumsum(counts) - counts, counts)
    return ranks


MOST_REDRAWS = 1000
"""Number of draws after which a Dirichlet partition with `min_examples` is refused."""


class Partitioner(Section):
    """Base of the partitions: a subclass gives each sample a client in `owners`, from which `deal` builds the index.

    `by_class`: it follows the classes of samples. `by_user`: the clients are the users that the data set has.
    """

    by_class: ClassVar[bool] = False
    by_user: ClassVar[bool] = False

    def deal(
        self, labels: IntArray, n_clients: int, seed: int, users: IntArray | None = None
    ) -> tuple[IntArray, IntArray]:
        """Assign every sample to one client; client u gets the rows `order[indptr[u]:indptr[u + 1]]`, ascending.

        Shapes: labels [n]; users [n], if the data set has users of its own; order [n]; indptr [n_clients + 1]. Raise
        `UserError` if the samples cannot be partitioned in this way.
        """
        owners = self.owners(labels, n_clients, generator(seed, "partition"), users)
        return index_of_owners(owners, n_clients)

    def owners(self, labels: IntArray, n_clients: int, random: np.random.Generator, users: IntArray | None) -> IntArray:
        """Return the client of every sample, [n]."""
        raise NotImplementedError


class IID(Partitioner):
    """Samples assigned at random, with sizes that differ by at most one.

    Reference: the IID partition of McMahan et al., AISTATS 2017.
    """

    kind: Literal["iid"] = "iid"

    def owners(self, labels: IntArray, n_clients: int, random: np.random.Generator, _: IntArray | None) -> IntArray:
        """Return owners of equal numbers of samples, in random order."""
        return random.permutation(np.arange(len(labels)) * n_clients // max(len(labels), 1))


class Quantity(Partitioner):
    """Samples assigned at random, with sizes whose inequality is `skew`; 0 gives equal sizes.

    "lognormal": sizes in proportion to exp(skew * z) with z standard normal. "power_law": sizes in proportion to rank
    ** -skew over the clients in random order. Every client has at least `min_examples`.
    """

    kind: Literal["quantity"] = "quantity"
    sizes: Literal["lognormal", "power_law"] = Field("lognormal", description="distribution of client sizes")
    skew: float = Field(default=1.0, ge=0, le=20, description="inequality of the sizes; 0: equal")
    min_examples: int = Field(default=0, ge=0, description="least training samples per client")

    def owners(self, labels: IntArray, n_clients: int, random: np.random.Generator, _: IntArray | None) -> IntArray:
        """Return owners of as many samples as the drawn sizes say, in random order."""
        n = len(labels)
        _check_enough(self.kind, n, n_clients, self.min_examples)
        if self.sizes == "lognormal":
            weights = np.exp(self.skew * random.standard_normal(n_clients))
        else:
            weights = (1.0 + random.permutation(n_clients)) ** -self.skew
        sizes = self.min_examples + _split(n - n_clients * self.min_examples, weights)
        return random.permutation(np.repeat(np.arange(n_clients), sizes))


class Dirichlet(Partitioner):
    """Each class split by proportions from a symmetric Dirichlet(alpha); a smaller alpha gives a client fewer classes.

    `capped` follows Yurochkin et al. (ICML 2019) and FedMA (Wang et al., ICLR 2020): a client that already holds its
    equal share receives nothing of the classes that follow. The partition is redrawn until every client has
    `min_examples`, which is 10 in these papers. With `capped: false` and `min_examples: 0` the proportions alone
    decide.
    """

    by_class: ClassVar[bool] = True
    kind: Literal["dirichlet"] = "dirichlet"
    alpha: float = Field(default=0.5, ge=1e-3, le=1e6, description="concentration; small: few classes per client")
    min_examples: int = Field(default=0, ge=0, description="least training samples per client")
    capped: bool = Field(True, description="a client at its equal share gets no further classes")

    def owners(self, labels: IntArray, n_clients: int, random: np.random.Generator, _: IntArray | None) -> IntArray:
        """Return the owners of the first draw in which every client has enough."""
        n = len(labels)
        _check_enough(self.kind, n, n_clients, self.min_examples)
        classes = rows_by_class(labels)
        for _draw in range(MOST_REDRAWS):
            owners, held = self._draw(classes, n, n_clients, random)
            if held.min() >= self.min_examples:
                return owners
        raise UserError(
            f"partition dirichlet: none of {MOST_REDRAWS} draws with alpha {self.alpha:g} gave each of {n_clients} "
            f"clients {self.min_examples} of {n} samples; lower min_examples or clients, or raise alpha"
        )

    def _draw(
        self, classes: list[IntArray], n: int, n_clients: int, random: np.random.Generator
    ) -> tuple[IntArray, IntArray]:
        """Return the owners [n] and the number of samples of each client [n_clients]."""
        owners = np.empty(n, dtype=np.int64)
        held = np.zeros(n_clients, dtype=np.int64)
        for rows in classes:
            # Setting proportions to zero and rescaling, as published, is a Dirichlet over the remaining clients.
            takers = np.flatnonzero(held * n_clients < n) if self.capped else np.arange(n_clients)
            # In random order, since rounding would otherwise favour the same clients in every class.
            takers = random.permutation(takers)
            sizes = _split(len(rows), random.dirichlet(np.full(len(takers), self.alpha)))
            owners[random.permutation(rows)] = np.repeat(takers, sizes)
            held[takers] += sizes
        return owners, held


class Shards(Partitioner):
    """Each class cut into shards of nearly equal size, of which every client gets `classes_per_client` at random.

    As McMahan et al. (AISTATS 2017), except that no shard spans two classes, so that a client never has more than
    `classes_per_client` classes; it has fewer if two of its shards are of one class.
    """

    by_class: ClassVar[bool] = True
    kind: Literal["shards"] = "shards"
    classes_per_client: int = Field(default=2, ge=1, description="shards, hence most classes, per client")

    def owners(self, labels: IntArray, n_clients: int, random: np.random.Generator, _: IntArray | None) -> IntArray:
        """Return the owners of the shards, each of which is of one class."""
        classes = rows_by_class(labels)
        n_shards = n_clients * self.classes_per_client
        if self.classes_per_client > len(classes):
            raise UserError(
                f"partition shards: classes_per_client is {self.classes_per_client}, but the samples have "
                f"{len(classes)} classes; use 1 to {len(classes)}"
            )
        if n_shards < len(classes):
            raise UserError(
                f"partition shards: {n_clients} clients with {self.classes_per_client} classes each cannot hold all "
                f"{len(classes)} classes; raise clients or classes_per_client"
            )
        counts = np.array([len(rows) for rows in classes], dtype=np.float64)
        # One shard for each class first, so that small classes are assigned too.
        shards = 1 + _split(n_shards - len(classes), counts)
        clients = random.permutation(n_shards) // self.classes_per_client
        owners = np.empty(len(labels), dtype=np.int64)
        first = 0
        for rows, n in zip(classes, shards.tolist(), strict=True):
            owners[random.permutation(rows)] = clients[first + np.arange(len(rows)) * n // len(rows)]
            first += n
        return owners


class Similarity(Partitioner):
    """A share of the samples assigned at random, and the others in the order of their classes, in equal parts.

    `share` 1 is `iid`; with 0 a client has the neighbouring classes of one contiguous part.

    Reference: Karimireddy et al., SCAFFOLD, ICML 2020 (arXiv:1910.06378), section 7, "s% similarity", after Hsu et al.,
    2019 (arXiv:1909.06335).
    """

    by_class: ClassVar[bool] = True
    kind: Literal["similarity"] = "similarity"
    share: float = Field(default=0.1, ge=0, le=1, description="share of the samples that is assigned at random")

    def owners(self, labels: IntArray, n_clients: int, random: np.random.Generator, _: IntArray | None) -> IntArray:
        """Return owners of equal parts of the samples drawn at random, and of the others sorted by class."""
        rows = random.permutation(len(labels))
        mixed, rest = np.split(rows, [round(self.share * len(rows))])
        owners = np.empty(len(labels), dtype=np.int64)
        for part in (mixed, rest[np.argsort(labels[rest], kind="stable")]):
            owners[part] = np.arange(len(part)) * n_clients // max(len(part), 1)
        return owners


class Natural(Partitioner):
    """One client for each user of the data set."""

    by_user: ClassVar[bool] = True
    kind: Literal["natural"] = "natural"

    def owners(self, labels: IntArray, n_clients: int, _: np.random.Generator, users: IntArray | None) -> IntArray:
        """Return the users of the data set."""
        if users is None:
            raise UserError("partition natural: the data set has no users; use iid, dirichlet, shards or quantity")
        assert len(users) == len(labels)
        assert users.max(initial=-1) < n_clients
        return users


Partition = Annotated[IID | Quantity | Dirichlet | Shards | Similarity | Natural, PARTITIONS]


def rows_by_class(labels: IntArray) -> list[IntArray]:
    """Return the rows of each class that has any, in order of the classes."""
    counts = np.bincount(labels)
    rows = np.split(np.argsort(labels, kind="stable"), np.cumsum(counts)[:-1])
    return [row for row in rows if len(row)]


def _split(n: int, weights: NDArray[np.float64]) -> IntArray:
    """Split n in proportion to the weights; exact for whole results, and the sizes sum to n."""
    sums = np.cumsum(weights, dtype=np.float64)
    ends = np.minimum((sums * n / sums[-1]).astype(np.int64), n)
    ends[-1] = n
    return np.diff(ends, prepend=0)


def _check_enough(kind: str, n: int, n_clients: int, min_examples: int) -> None:
    if n < n_clients * min_examples:
        raise UserError(
            f"partition {kind}: {n_clients} clients with min_examples {min_examples} need "
            f"{n_clients * min_examples} samples, but there are {n}; lower min_examples or clients"
        )


def split_like_training(
    classes: IntArray, owners: IntArray, held_out: IntArray, n_clients: int, seed: int, split: str
) -> ClientIndex:
    """Split held-out samples so that a client has of each class the share that it has of the training samples.

    The held-out samples of a client are then distributed as its training samples, as if its own samples had been split
    after the partition, which FedProx (Li et al., MLSys 2020), q-FFL (Li et al., ICLR 2020) and LEAF (Caldas et al.
    2018) do. Each sample goes to one client; a class without training samples to none. Of each class a client gets
    its share rounded down or up, up if it has lost most by the rounding of the classes before.

    Shapes: classes [n] and owners [n] of the training samples; held_out [m], the classes of those to be split.
    """
    random = generator(seed, split + " of clients")
    clients, lost = np.full(len(held_out), -1, dtype=np.int64), np.zeros(n_clients)
    for label in np.unique(held_out):
        rows = random.permutation(np.flatnonzero(held_out == label))
        counts = np.bincount(owners[classes == label], minlength=n_clients)
        if not (total := counts.sum()):
            continue
        sizes, rest = np.divmod(len(rows) * counts, total)
        lost += rest / total
        able = random.permutation(np.flatnonzero(rest))
        up = able[np.argsort(-lost[able], kind="stable")][: len(rows) - sizes.sum()]
        sizes[up] += 1
        lost[up] -= 1
        clients[rows] = np.repeat(np.arange(n_clients), sizes)
    return index_of_owners(clients, n_clients)
