"""Fields and steps of classification data sets: the validation split, the partition across clients, public samples."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal, NamedTuple, Self

import numpy as np
from pydantic import Field, model_validator

from narrowcast.platform.config.catalog import DATA
from narrowcast.platform.config.files import Section
from narrowcast.platform.data.dataset import DataSource
from narrowcast.platform.data.partition import IID, Partition, index_of_owners, random_ranks
from narrowcast.platform.data.samples import Features, Labelled, Samples, Unlabelled, described, rows_of_inputs, tenths
from narrowcast.platform.data.shift import Shift
from narrowcast.platform.errors import UserError
from narrowcast.platform.rounds.client_contracts import ClientSplit
from narrowcast.platform.seeds import generator
from narrowcast.platform.types import IntArray

MOST_CLIENTS = 10_000_000
DEFAULT_CLIENTS = 100
"""Number of clients in McMahan et al. (AISTATS 2017)."""
HELD_OUT: tuple[ClientSplit, ...] = ("validation", "test")
Set = Literal["mnist", "fashion-mnist", "cifar-10"]


class Splits(NamedTuple):
    """The labelled samples of a data set before they are partitioned; `validation` and `test` may be empty."""

    train: Labelled
    validation: Labelled
    test: Labelled


class PublicSet(Section):
    """Samples that all clients hold: held out of the training samples before these are partitioned, or another set's.

    They are drawn by the seed of the data set and are in no client's own samples, in no validation and in no test set.
    """

    samples: int = Field(200, ge=1, description="number of public samples")
    set: Set | None = Field(
        None, description="data set whose training samples they are; null: held out of those of this data set"
    )

    def drawn(self, train: Labelled, n_classes: int, seed: int) -> tuple[Labelled, IntArray]:
        """Return the public samples, and the rows of `train` that remain the clients', ascending.

        Raise `UserError` if there are too few samples, or if those of another set are of another shape.
        """
        source = train if self.set is None else _other_set(self.set, train, n_classes)
        most = len(source) - (self.set is None)
        if self.samples > most:
            raise UserError(f"data.public.samples = {self.samples}: there are {len(source)}; use at most {most}")
        kept, held_out = _rows_apart(len(source), self.samples, seed, "public samples")
        return source.take(held_out), np.arange(len(train)) if self.set else kept


class ServerSet(Section):
    """Samples of the server's own, held out of the training samples before these are partitioned.

    They are drawn by the seed of the data set, uniformly, and are in no client's own samples, in no public, validation
    and test set; a `shift` leaves them as they are.
    """

    samples: int = Field(100, ge=1, description="number of samples")

    def drawn(self, train: Labelled, seed: int) -> tuple[Labelled, IntArray]:
        """Return the server's samples, and the rows of `train` that remain the clients', ascending.

        Raise `UserError` if none would remain.
        """
        if self.samples >= len(train):
            raise UserError(
                f"data.server.samples = {self.samples}: there are {len(train)}; use at most {len(train) - 1}"
            )
        kept, held_out = _rows_apart(len(train), self.samples, seed, "server samples")
        return train.take(held_out), kept


class LabelledPart(Section):
    """Part of each client's samples that keeps its labels; the others become `Samples.unlabelled`, without labels.

    The samples that keep them are drawn by the seed of the data set, uniformly over a client's own, whatever their
    labels. With `samples: 0` no client has a label, and those of `data.server` are all that there are.
    """

    samples: int | None = Field(
        None, ge=0, description="samples of each client that keep their labels; 0: labels at the server alone; or share"
    )
    share: float | None = Field(
        None, gt=0, le=1, description="share of each client's samples that keep their labels, one at least; or samples"
    )

    @model_validator(mode="after")
    def _by_one_unit(self) -> Self:
        if (self.samples is None) == (self.share is None):
            raise ValueError("labelled is a number of samples or a share of them; give one of the two")
        return self

    def of(self, data: Samples) -> Samples:
        """Return the data set in which the other samples have lost their labels.

        Raise `UserError` if a client has fewer samples than keep them, or if there would be no label at all.
        """
        ranks = random_ranks(data.owners, generator(data.seed, "labelled samples"))
        kept = np.zeros(len(data.train), dtype=bool)
        kept[data.order[ranks < self._counts(data)[data.owners]]] = True
        whose = data.client_of_each("train")
        with_labels, without = np.flatnonzero(kept), np.flatnonzero(~kept & (whose >= 0))
        known, unknown = (index_of_owners(whose[part], data.n_clients) for part in (with_labels, without))
        # what clients are measured on is like all of their samples
        held_out: dict[str, IntArray] = {
            split: data.client_of_each(split) for split in HELD_OUT if len(getattr(data, split))
        }
        train = data.train.take(with_labels)
        if data.server is not None and not len(with_labels):
            train = data.server
        return replace(
            data,
            train=train,
            order=known.order,
            indptr=known.indptr,
            held_out_users=held_out,
            unlabelled=Unlabelled(rows_of_inputs(data.train.features, without), *unknown),
        )

    def _counts(self, data: Samples) -> IntArray:
        """Return how many samples of each client keep their labels, [U]."""
        have = data.examples
        if self.share is not None:
            return np.where(have > 0, np.maximum(np.round(self.share * have).astype(np.int64), 1), 0)
        wanted = self.samples or 0
        if not wanted and data.server is None:
            raise UserError(
                "data.labelled.samples = 0 leaves no label anywhere; give data.server, such as "
                "data.server.samples=100, or let clients keep some"
            )
        least = int(have.argmin())
        if have[least] < wanted:
            raise UserError(
                f"data.labelled.samples = {wanted}: client {least} has {have[least]} samples; use at most these, "
                "data.labelled.share, or a partition with min_examples"
            )
        return np.full(len(have), wanted)


class Classification(DataSource, Section):
    """A classification data set whose training samples are partitioned across clients.

    `validation_share` of the training samples is held out by `seed`; the others are distributed by `partition`.
    """

    partition: Partition = Field(default=IID(), description="distribution of the training samples across clients")
    validation_share: float = Field(
        default=0.1, ge=0, lt=1, description="share of the training samples held out for validation on the server"
    )
    seed: int | None = Field(
        None, ge=0, description="seed of the validation split and the partition; null: that of the run"
    )
    public: PublicSet | None = Field(
        None, description="samples that all clients hold besides their own, for distillation; null: none"
    )
    server: ServerSet | None = Field(
        None,
        description="samples that the server alone has, for aggregator = fltrust and labelled.samples = 0; null: none",
    )
    labelled: LabelledPart | None = Field(
        None, description="part of each client's samples that keeps its labels; null: all of them"
    )
    shift: Shift | None = Field(
        None, description="how the samples of groups of clients differ in kind: turned images, or permuted classes"
    )

    def _dealt(
        self,
        name: str,
        source: str,
        n_classes: int,
        train: Labelled,
        test: Labelled,
        *,
        clients: int,
        users: IntArray | None = None,
        test_users: IntArray | None = None,
    ) -> Samples:
        """Hold out validation samples and partition the others; raise `UserError` if that is impossible.

        Shapes: users [n] and test_users [n], the user of each sample of `train` and `test`, for the partition
        `natural`.
        """
        kept, held_out = hold_out(len(train), self.validation_share, self.seed or 0)
        validation, validation_users = train.take(held_out), None if users is None else users[held_out]
        if len(held_out):
            train = train.take(kept)
            users = None if users is None else users[kept]
        splits = Splits(train, validation, test)
        held_out_users = {"validation": validation_users, "test": test_users}
        return self._indexed(
            name, source, n_classes, splits, clients=clients, users=users, held_out_users=held_out_users
        )

    def _indexed(
        self,
        name: str,
        source: str,
        n_classes: int,
        splits: Splits,
        *,
        clients: int,
        users: IntArray | None,
        held_out_users: Mapping[str, IntArray | None],
    ) -> Samples:
        """Partition the training samples as given; `held_out_users` counts for the partition `natural`."""
        nobody, train, public, server = np.empty(0, dtype=np.int64), splits.train, None, None
        if self.public is not None:
            public, kept = self.public.drawn(train, n_classes, self.seed or 0)
            train, users = train.take(kept), None if users is None else users[kept]
        if self.server is not None:
            server, kept = self.server.drawn(train, self.seed or 0)
            train, users = train.take(kept), None if users is None else users[kept]
        data = Samples(
            name=name,
            source=source,
            n_classes=n_classes,
            train=train,
            validation=splits.validation,
            test=splits.test,
            order=nobody,
            indptr=nobody,
            public=public,
            server=server,
        )
        if data.targets == "tokens" and self.partition.by_class:
            raise UserError(f"partition {self.partition.kind}: {name} has no classes; use natural, iid or quantity")
        labels = tenths(data.train.labels[:, 0]) if data.targets == "numbers" else data.train.labels
        order, indptr = self.partition.deal(labels, clients, self.seed or 0, users)
        natural = held_out_users if self.partition.by_user else {}
        known = {split: owners for split, owners in natural.items() if owners is not None}
        dealt = replace(data, order=order, indptr=indptr, held_out_users=known, seed=self.seed or 0)
        shifted = dealt if self.shift is None else self.shift.of(dealt)
        return shifted if self.labelled is None else self.labelled.of(shifted)


def hold_out(n: int, share: float, seed: int, part: str = "validation") -> tuple[IntArray, IntArray]:
    """Return the rows kept and the rows held out, both ascending; they do not depend on the partition.

    Raise `UserError` if no row would be kept.
    """
    held_out = round(share * n)
    if n - held_out < 1:
        raise UserError(f"{part}_share {share:g} leaves no training samples of {n}; use a smaller share")
    return _rows_apart(n, held_out, seed, part)


def _rows_apart(n: int, held_out: int, seed: int, purpose: str) -> tuple[IntArray, IntArray]:
    """Return the rows kept and the rows held out, both ascending."""
    rows = generator(seed, purpose).permutation(n)
    return np.sort(rows[held_out:]), np.sort(rows[:held_out])


def cuts_in_time(length: int, validation_share: float, test_share: float) -> tuple[int, int, int, int]:
    """Return the boundaries of the training, validation and test part of a text or a recording."""
    test = length - int(test_share * length)
    return 0, test - int(validation_share * test), test, length


def check_labels(labels: IntArray, n_classes: int, where: str) -> None:
    """Raise `UserError` if a label is not one of the classes 0 to n_classes - 1."""
    wrong = np.flatnonzero((labels < 0) | (labels >= n_classes))
    if len(wrong):
        raise UserError(
            f"{where}: label {labels[wrong[0]]} of sample {wrong[0]} is not one of 0 to {n_classes - 1}; "
            "download the file again"
        )


def _other_set(name: Set, train: Labelled, n_classes: int) -> Labelled:
    source: Any = DATA[name](clients=1, validation_share=0.0)
    other: Samples = source.load()

    def of(features: Features, classes: int) -> str:
        return f"{described(features)} in {classes} classes"

    got, wanted = of(other.train.features, other.n_classes), of(train.features, n_classes)
    if got != wanted:
        raise UserError(f"data.public.set = {name}: its samples are {got}, those of the clients {wanted}; use another")
    return other.train
