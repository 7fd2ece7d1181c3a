"""A server that has a round answered again, otherwise than before, and subtracts one sum from the other.

Two sums of a round that differ by one client give that client's update to the bit. The server deviates from the
protocol (another cohort, an earlier round, another model), or it was interrupted: clients then come with new keys, and
a round that is repeated may lose other uploads. The control is a server whose clients forget what they have answered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from narrowcast.algorithms.secure.aggregation import SecureAggregation
from narrowcast.platform.compiled import one_thread
from narrowcast.platform.errors import RunFailed
from narrowcast.platform.rounds.chunks import train_chunks
from narrowcast.platform.rounds.client_contracts import ClientKeyStore
from narrowcast.platform.rounds.state import Run
from narrowcast.platform.types import Arrays, Chunk, PayloadError


class Crash(Exception):  # noqa: N818 - of the server, not of this program
    """The server is gone."""


@dataclass(frozen=True)
class RepeatResult:
    """The result of an attack: of the `values` of the victim's update that are not zero, it has `read` some exactly."""

    attack: str
    values: int
    read: int


@dataclass
class CrashingStore:
    """A key store whose server is gone before its call number `calls` is answered, or right after.

    `opened` tells whether it got what opens a sum.
    """

    inner: ClientKeyStore
    calls: int
    after: bool = False
    opened: bool = False

    def call(self, method: str, round_index: int, arrays: Arrays) -> Arrays:
        """Return the key store's answer; raise `Crash` at the chosen call."""
        if method == "public":
            return self.inner.call(method, round_index, arrays)
        self.calls -= 1
        if self.calls == 0 and not self.after:
            raise Crash
        answer = self.inner.call(method, round_index, arrays)
        self.opened |= method in ("reveal", "open")
        if self.calls == 0:
            raise Crash
        return answer


@dataclass(frozen=True)
class AskingStore:
    """A key store whose server asks some of the clients alone to sign a list of survivors and to reveal shares."""

    inner: ClientKeyStore
    asked: Sequence[int]

    def call(self, method: str, round_index: int, arrays: Arrays) -> Arrays:
        """Return the key store's answer."""
        if "asked" in arrays:
            arrays = {**arrays, "asked": np.intersect1d(arrays["asked"], self.asked)}
        return self.inner.call(method, round_index, arrays)


@dataclass(frozen=True)
class RepeatingServer:
    """Has the clients of a run answer; they write their answers to `answered`, or forget them if it is None."""

    run: Run
    answered: Path | None

    def clients(self) -> ClientKeyStore:
        """Return the clients' key store after a restart of everything: with new keys, and what they wrote down."""
        return self._algorithm.key_store(self.answered)

    @one_thread()
    def sum_of(
        self,
        store: ClientKeyStore,
        round_index: int,
        clients: Sequence[int],
        *,
        last_is_lost: bool = False,
        model_of_last: Arrays | None = None,
    ) -> Arrays | None:
        """Return the opened sum over these clients; None if they refuse it.

        The last client is a chunk by itself, whose upload may be lost, and which may be sent another model.
        """
        rounds = self._algorithm.rounds(store, self.run.task)
        chunks = [
            replace(self._chunk(round_index, clients[:-1]), index=0),
            replace(self._chunk(round_index, clients[-1:]), index=1, lost=np.array([last_is_lost])),
        ]
        models = self.model, self.model if model_of_last is None else model_of_last
        try:
            results = [
                result
                for model, chunk in zip(models, rounds.distribute_keys(chunks), strict=True)
                for result in train_chunks(self.run, model, [chunk], store)
            ]
            opened = rounds.open_sum(results)
        except (RunFailed, PayloadError):
            return None
        return opened[0].partial if any(each.ledger.delivered.any() for each in opened) else None

    def needed(self, cohort: int) -> int:
        """Return how many clients of a cohort have to answer."""
        return self._algorithm.scheme.survivors_needed(cohort)

    @one_thread()
    def update_of(self, client: int, round_index: int, model: Arrays | None = None) -> Arrays:
        """Return a client's own update as the sums have it."""
        algorithm, task = self._algorithm, self.run.task
        chunk, layout = self._chunk(round_index, [client]), algorithm.messages(task).layout
        partial = algorithm.algorithm.train(self.model if model is None else model, chunk, task).partial
        numbers, sent = algorithm.messages(task).fixed_point, np.ones(len(layout.groups), dtype=bool)
        integers = numbers.of_client(partial, layout, sent, task.private_seed, (round_index, client))
        return numbers.total(integers, layout)

    @cached_property
    def model(self) -> Arrays:
        """The run's first broadcast."""
        task = self.run.task
        return self._algorithm.broadcast(self._algorithm.init(task), task, 1).arrays

    @cached_property
    def other_model(self) -> Arrays:
        """A broadcast of half its values."""
        return {name: np.asarray(values * values.dtype.type(0.5)) for name, values in self.model.items()}

    @property
    def _algorithm(self) -> SecureAggregation:
        assert isinstance(self.run.algorithm, SecureAggregation)
        return self.run.algorithm

    def _chunk(self, round_index: int, clients: Sequence[int]) -> Chunk:
        states = self._algorithm.init_clients(self.run.task)
        state = {name: np.asarray(values[list(clients)]) for name, values in states.items()}
        return Chunk(round_index, 0, np.array(clients, dtype=np.int64), state)


@dataclass(frozen=True)
class RepeatAttacks:
    """The attacks on the last of the first `cohort` clients of a run.

    Clients write down what they answer in files of `folder`; None: they forget it, and what one key store has answered
    is asked of another.
    """

    run: Run
    cohort: int
    folder: Path | None

    def results(self) -> Iterator[RepeatResult]:
        """Yield what each attack reads."""
        for attack, restart in (("another cohort", False), ("another cohort after a restart", True)):
            yield self._read(attack, self._others_only, restart=restart)
        for attack, restart in (("other survivors", False), ("other survivors after a restart", True)):
            yield self._read(attack, self._last_is_lost, restart=restart)
        yield self._read("an earlier round", self._others_only, later=True)
        yield self._of_another_model()
        yield self._of_two_lists()
        yield self._after_crashes()

    def _read(self, attack: str, again: Again, *, restart: bool = False, later: bool = False) -> RepeatResult:
        """Return what is read of a round that is answered, and then `again`, after a restart or a later round."""
        server = self._server(attack)
        store = server.clients()
        first = server.sum_of(store, 1, self._everyone)
        if later:
            server.sum_of(store, 2, self._everyone)
        second = again(server, server.clients() if restart or self.folder is None else store)
        return _result(attack, first, second, server.update_of(self._everyone[-1], 1))

    def _of_another_model(self) -> RepeatResult:
        """Return what is read if the victim is sent another model when the round is repeated."""
        attack, victim = "another model after a restart", self._everyone[-1]
        server = self._server(attack)
        first = server.sum_of(server.clients(), 1, self._everyone)
        second = server.sum_of(server.clients(), 1, self._everyone, model_of_last=server.other_model)
        change = _difference(server.update_of(victim, 1), server.update_of(victim, 1, server.other_model))
        return _result(attack, first, second, change)

    def _of_two_lists(self) -> RepeatResult:
        """Return what is read if as many clients as are needed are told one list of survivors, and the rest another."""
        server = self._server(attack := "two lists of survivors")
        store, needed = server.clients(), server.needed(self.cohort)
        first = server.sum_of(AskingStore(store, self._everyone[:needed]), 1, self._everyone)
        second = self._last_is_lost(server, AskingStore(store, self._everyone[needed:]))
        return _result(attack, first, second, server.update_of(self._everyone[-1], 1))

    def _after_crashes(self) -> RepeatResult:
        """Return the best of the attacks after a crash before or after each call; it asks for another cohort then."""
        attack, results, calls, crashes = "another cohort after each crash", list[RepeatResult](), 0, True
        control = RepeatingServer(self.run, None)
        whole = control.sum_of(control.clients(), 1, self._everyone)
        while crashes:
            calls, crashes = calls + 1, False
            for after in (False, True):
                server = self._server(f"{attack} {calls} {after}")
                store = CrashingStore(server.clients(), calls, after)
                try:
                    server.sum_of(store, 1, self._everyone)
                except Crash:
                    crashes = True
                second = self._others_only(server, server.clients())
                first = whole if store.opened else None  # also of a server that is gone with it
                results.append(_result(attack, first, second, server.update_of(self._everyone[-1], 1)))
        return max(results, key=lambda result: result.read)

    def _others_only(self, server: RepeatingServer, store: ClientKeyStore) -> Arrays | None:
        return server.sum_of(store, 1, self._everyone[:-1])

    def _last_is_lost(self, server: RepeatingServer, store: ClientKeyStore) -> Arrays | None:
        return server.sum_of(store, 1, self._everyone, last_is_lost=True)

    def _server(self, attack: str) -> RepeatingServer:
        return RepeatingServer(self.run, None if self.folder is None else self.folder / f"{attack}.jsonl")

    @property
    def _everyone(self) -> list[int]:
        return list(range(self.cohort))


Again = Callable[[RepeatingServer, ClientKeyStore], Arrays | None]


def _difference(left: Arrays, right: Arrays) -> dict[str, Any]:
    return {name: left[name] - right[name] for name in left}


def _result(attack: str, first: Arrays | None, second: Arrays | None, truth: Arrays) -> RepeatResult:
    """Compare the difference of two sums with the truth; nothing is read where clients refused one of them."""
    values = sum(int(np.count_nonzero(each)) for each in truth.values())
    if first is None or second is None:
        return RepeatResult(attack, values, 0)
    found = _difference(first, second)
    read = sum(int(((found[name] == each) & (each != 0)).sum()) for name, each in truth.items())
    return RepeatResult(attack, values, read)
