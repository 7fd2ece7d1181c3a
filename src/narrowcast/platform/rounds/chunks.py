"""Chunks: how a cohort is divided, and how chunks are trained, of one run or of several runs as one program."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np

from narrowcast.platform.config.plugins import said
from narrowcast.platform.contracts import Broadcast, LinkAllocation, LocalCall
from narrowcast.platform.errors import RunFailed, UnresumableFailure, UserError, notes_of
from narrowcast.platform.rounds.client_contracts import ClientKeyStore, refusals_end_the_run
from narrowcast.platform.rounds.ledger import ChunkResult
from narrowcast.platform.rounds.state import Population, Run
from narrowcast.platform.types import Arrays, BoolArray, Chunk, FloatArray, IntArray, LocalUpdates, arrays_sha256


@dataclass(frozen=True)
class TrainingCall:
    """Chunks that train from the same broadcast."""

    broadcast: Arrays
    chunks: Sequence[Chunk]


@dataclass(frozen=True)
class OpenRound:
    """A synchronous round whose clients are chosen and have not trained yet: cohort, links, broadcast and chunks.

    Shapes: cohort [C] ascending; downlink_bits [C], the download of each client; download_seconds [C].
    """

    run: Run
    round_index: int
    cohort: IntArray
    link_allocation: LinkAllocation
    broadcast: Broadcast
    downlink_bits: IntArray
    download_seconds: FloatArray
    chunks: Sequence[Chunk] = ()

    @property
    def calls(self) -> list[TrainingCall]:
        """One call: all chunks train from the round's broadcast."""
        return [TrainingCall(self.broadcast.arrays, self.chunks)]

    def upload_bits(self) -> IntArray | None:
        """Return the bits that each client will send if nothing limits it, [C]; None if only the training can tell."""
        return self.run.algorithm.upload_bits(self.broadcast.arrays, self.run.task, self.cohort)

    def exchanged_bits(self, uploads: IntArray) -> tuple[IntArray, IntArray]:
        """Return the bits that each client sends and receives in the round, [C] each, if uploads have these sizes."""
        of_cohort = self.run.algorithm.exchanged_bits(
            self.broadcast.arrays, self.run.task, self.round_index, uploads, self.downlink_bits
        )
        return (uploads, self.downlink_bits) if of_cohort is None else of_cohort

    def seconds_until_done(self, examples: IntArray, sent: IntArray, received: IntArray) -> FloatArray:
        """Return the seconds from the start of the round until each client's messages are in, [C] in cohort order.

        `sent` and `received` are its `exchanged_bits`.
        """
        links, run, profiles = self.link_allocation, self.run, self.run.task.profiles.take(self.cohort)
        upload_seconds = sent / links.uplink_bits_per_second
        download_seconds, from_clients = self.download_seconds, received - self.downlink_bits
        if from_clients.any():
            download_seconds = download_seconds + from_clients / links.downlink_bits_per_second
        work = run.algorithm.relative_work(self.broadcast.arrays, run.task, self.cohort)
        weighed = examples if work is None else examples * work
        return run.plan.clock.client_seconds(profiles, weighed, download_seconds, upload_seconds)


def make_chunks(
    cohort: IntArray,
    examples: IntArray,
    chunk_size: int,
    round_index: int,
    population: Population,
    link_allocation: LinkAllocation | None = None,
    epochs: IntArray | None = None,
    draws: IntArray | None = None,
    apart: BoolArray | None = None,
) -> list[Chunk]:
    """Split a cohort, clients with most examples first, into equal chunks of at most `chunk_size` clients.

    Shapes: cohort [C] ascending; examples [U], of all clients; epochs [C], the most that each client has time for;
    draws [C], how often each was drawn; apart [C], those that are one chunk, the last, whatever their number.
    """
    by_size = np.lexsort((cohort, -examples[cohort]))
    together = by_size[:0] if apart is None else by_size[apart[by_size]]
    rest = by_size if apart is None else by_size[~apart[by_size]]
    n_chunks = -(-len(rest) // chunk_size)
    parts = [*(rest[index::n_chunks] for index in range(n_chunks)), *([together] if len(together) else [])]
    budget_bits, lost = (None, None) if link_allocation is None else (link_allocation.budget_bits, link_allocation.lost)
    return [
        Chunk(
            round_index,
            index,
            cohort[part],
            population.take(cohort[part]),
            None if budget_bits is None else budget_bits[part],
            None if lost is None else lost[part],
            None if epochs is None else epochs[part],
            None if draws is None else draws[part],
        )
        for index, part in enumerate(_ascending(part, cohort) for part in parts)
    ]


def _ascending(indices: IntArray, cohort: IntArray) -> IntArray:
    return indices[np.argsort(cohort[indices])]


logger = logging.getLogger(__name__)
_OUT_OF_MEMORY = ("allocate memory", "out of memory")


def train_chunks(
    run: Run, broadcast: Arrays, chunks: Iterable[Chunk], key_store: ClientKeyStore | None = None
) -> list[ChunkResult]:
    """Train chunks one after the other, with their clients' secrets if there is a key store.

    Raise `UnresumableFailure` that names the chunk size if the memory does not suffice, and `RunFailed` that names the
    round, the client and the step for any other error.
    """
    if key_store is not None:
        chunks = _with_secrets(chunks, arrays_sha256(broadcast), key_store)
    return [_train_chunk(run, broadcast, chunk) for chunk in chunks]


def _with_secrets(chunks: Iterable[Chunk], model_sha256: bytes, key_store: ClientKeyStore) -> Iterator[Chunk]:
    """Yield the chunks with their clients' secrets, each when it is asked for: secrets of a cohort are large."""
    model = np.frombuffer(model_sha256, dtype=np.uint8)
    for chunk in chunks:
        with refusals_end_the_run(chunk.round_index):
            secrets = key_store.call("secrets", chunk.key_round, {"clients": chunk.clients, "model": model})
        yield replace(chunk, secrets=secrets)


def _train_chunk(run: Run, broadcast: Arrays, chunk: Chunk) -> ChunkResult:
    with naming_round(chunk.round_index, chunk.clients):
        began = time.perf_counter()
        try:
            result = run.algorithm.train(broadcast, chunk, run.task)
        except (Exception, SystemExit) as error:
            if (
                len(chunk.clients) > 1
                and not (chunk.secrets or chunk.relayed or chunk.watched)
                and not _is_of_memory(error)
            ):
                _train_each(run, broadcast, chunk)  # to know which client fails
            raise
        return replace(result, seconds=time.perf_counter() - began)


def _train_each(run: Run, broadcast: Arrays, chunk: Chunk) -> None:
    """Train each client by itself until one fails; raise `RunFailed` that names it."""
    for index in range(len(chunk.clients)):
        alone = chunk.take(np.array([index]))
        with naming_round(alone.round_index, alone.clients):
            run.algorithm.train(broadcast, alone, run.task)


@contextmanager
def naming_round(round_index: int, clients: IntArray | None = None) -> Iterator[None]:
    """Raise an error of the block as a `RunFailed` of one line that names the round, its clients and the step.

    The error may be of a class of the user's. If the memory does not suffice for the clients at once, that is an
    `UnresumableFailure` that says what to do.
    """
    try:
        yield
    except (UserError, RunFailed):
        raise
    except (Exception, SystemExit) as error:
        if clients is not None and _is_of_memory(error):
            raise UnresumableFailure(
                f"round {round_index}: not enough memory for {len(clients)} clients at once; "
                "lower chunk_size, training.batch_size or training.epochs, and start the run again"
            ) from error
        logger.debug("round %d", round_index, exc_info=error)
        where = ", ".join((f"round {round_index}", *_shown(clients), *_steps_of(error)))
        raise RunFailed(f"{where}: {said(error)}") from error


def _is_of_memory(error: BaseException) -> bool:
    is_of_torch = isinstance(error, RuntimeError) and any(words in str(error) for words in _OUT_OF_MEMORY)
    return isinstance(error, MemoryError) or is_of_torch


def _steps_of(error: BaseException) -> list[str]:
    """Return the step that local training has noted on the error, if it knows it."""
    return [note for note in notes_of(error) if note.startswith("step ")]


def _shown(clients: IntArray | None) -> list[str]:
    if clients is None:
        return []
    if len(clients) == 1:
        return [f"client {clients[0]}"]
    more = f" and {len(clients) - 3} more" if len(clients) > 3 else ""
    return [f"one of clients {', '.join(map(str, clients[:3]))}{more}"]


@dataclass(frozen=True)
class _ChunkCall:
    """One chunk of one run."""

    run: Run
    broadcast: Arrays
    chunk: Chunk

    def local_calls(self) -> Sequence[LocalCall] | None:
        """Return the local training to do together with other runs, or None if the algorithm trains by itself."""
        return self.run.algorithm.training_calls(self.broadcast, self.chunk, self.run.task)

    def result(self, updates: Sequence[LocalUpdates] | None) -> ChunkResult:
        """Return the result of the chunk from its local training, or train it here if that was not done yet."""
        began = time.perf_counter()
        if updates is None:
            result = self.run.algorithm.train(self.broadcast, self.chunk, self.run.task)
        else:
            result = self.run.algorithm.send(self.broadcast, self.chunk, self.run.task, updates)
        return replace(result, seconds=time.perf_counter() - began)


def train_together(work: Sequence[tuple[Run, Sequence[TrainingCall]]]) -> list[list[ChunkResult] | RunFailed]:
    """Train the first chunks of all runs as one program, then the second chunks, and so on.

    If that raises, the runs train one by one, and those that fail have their error in place of results.
    """
    chunks = [
        [_ChunkCall(run, call.broadcast, chunk) for call in calls for chunk in call.chunks] for run, calls in work
    ]
    results: list[list[ChunkResult]] = [[] for _ in chunks]
    failures: dict[int, RunFailed] = {}
    for index in range(max(map(len, chunks))):
        present = [
            (run_index, calls[index])
            for run_index, calls in enumerate(chunks)
            if index < len(calls) and run_index not in failures
        ]
        try:
            for run_index, result in _train_present(present):
                results[run_index].append(result)
        except RunFailed as error:
            if isinstance(error, UnresumableFailure):
                raise
            for run_index, chunk_call in present:
                del results[run_index][index:]
                try:
                    results[run_index].append(_train_chunk(chunk_call.run, chunk_call.broadcast, chunk_call.chunk))
                except RunFailed as own:
                    failures[run_index] = own
    return [failures.get(run_index, of_run) for run_index, of_run in enumerate(results)]


def _train_present(present: Sequence[tuple[int, _ChunkCall]]) -> Iterator[tuple[int, ChunkResult]]:
    """Train a chunk of each run as one program; yield the place of each run with its result."""
    if not present:
        return
    clients = np.concatenate([chunk_call.chunk.clients for _, chunk_call in present])
    with naming_round(present[0][1].chunk.round_index, clients):
        calls = {
            run_index: trainings
            for run_index, chunk_call in present
            if (trainings := chunk_call.local_calls()) is not None
        }
        updates: dict[int, Sequence[LocalUpdates]] = {}
        if work := [call for trainings in calls.values() for call in trainings]:
            trained = iter(work[0].task.training.train_together(work))
            updates = {run_index: list(islice(trained, len(trainings))) for run_index, trainings in calls.items()}
        for run_index, chunk_call in present:
            yield run_index, chunk_call.result(updates.get(run_index))
