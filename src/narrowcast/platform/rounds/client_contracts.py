"""Contracts of secure aggregation: the clients' key store, and the server's side around the training of a round."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, Protocol

from narrowcast.platform.errors import RunFailed, UserError
from narrowcast.platform.rounds.ledger import ChunkResult
from narrowcast.platform.types import Arrays, Chunk, PayloadError

ClientSplit = Literal["train", "validation", "test"]
"""A split of which clients have samples of their own."""


class ClientKeyStore(Protocol):
    """The clients' secrets, held in a process other than the server's; it answers a round once.

    A round of the keys is a sum: those of a run are numbered by `Chunk.key_round`, from 1.
    """

    def call(self, method: str, round_index: int, arrays: Arrays) -> Arrays:
        """Return what the clients of a round reveal when asked by `method`: the same bytes for the same request.

        Raise `PayloadError` for an earlier round, and for another request in the same round. `secrets` is asked by the
        host of some clients, and answers with what `Chunk.secrets` is to hold.
        """
        ...


class SecureRounds(Protocol):
    """The server's side of secure aggregation within one run, called around the training of each round."""

    @property
    def answered_round(self) -> int:
        """The last round that clients had answered before: up to it, rounds are repeated as they were."""
        ...

    def distribute_keys(self, chunks: Sequence[Chunk]) -> list[Chunk]:
        """Return the chunks with `relayed` and `key_round`; the first call of a sum has its clients make their keys."""
        ...

    def open_sum(self, results: list[ChunkResult]) -> list[ChunkResult]:
        """Return the results of a round with the opened sum in place of each partial sum.

        If too few clients delivered, no sum is opened and no client counts as delivered.
        """
        ...

    def next_sum(self, results: list[ChunkResult]) -> Arrays | None:
        """Return what the server sends besides the broadcast to have another sum made, from results with an opened one.

        It is None if the round has no further sum.
        """
        ...


def check_answered(rounds: SecureRounds, answered: Path | None, recorded_round: int) -> None:
    """Raise `UserError` if the clients' record has not all rounds that the run has; None: they keep no record."""
    if answered is not None and rounds.answered_round < recorded_round:
        raise UserError(
            f"{answered} has clients' answers up to round {rounds.answered_round}, and the run has recorded "
            f"{recorded_round} rounds: it was removed or cut; put it back, or start a new run"
        )


@contextmanager
def refusals_end_the_run(round_index: int) -> Iterator[None]:
    """Raise what a key store refuses as a `RunFailed`: a round that clients have answered otherwise is not repeated."""
    try:
        yield
    except PayloadError as error:
        raise RunFailed(
            f"round {round_index}: {error}; resume the run as it was interrupted, with its files and on a processor of "
            "the same kind, or start a new one"
        ) from error
