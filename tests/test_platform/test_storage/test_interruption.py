"""Signals held back and let through, and what a run that is stopped in training has to go on from."""

from __future__ import annotations

import signal
import threading
from pathlib import Path

import pytest
from pydantic import BaseModel, field_serializer
from pydantic_core import PydanticSerializationError

from narrowcast.algorithms.federated.fedavg import FedAvg
from narrowcast.platform.config.files import plain_values
from narrowcast.platform.rounds.evaluation import model_sha256
from narrowcast.platform.rounds.ledger import ChunkResult
from narrowcast.platform.rounds.loop import rounds
from narrowcast.platform.rounds.plan import Buffered, Plan
from narrowcast.platform.rounds.state import Interrupted, Run
from narrowcast.platform.storage.disk import write_atomically
from narrowcast.platform.storage.host import STOPPING, allow_signals, defer_signals, stop_requested
from narrowcast.platform.types import Arrays, Chunk
from small_tasks import Counting, network_task


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_waits_for_the_end_of_the_block_and_is_then_heard_once(number: int) -> None:
    heard: list[int] = []
    before = signal.signal(number, lambda number, _: heard.append(number))
    try:
        with defer_signals():
            signal.raise_signal(number)
            signal.raise_signal(number)
            assert heard == []
        assert heard == [number]
    finally:
        signal.signal(number, before)


class Unwritable(BaseModel):
    """Its field is interrupted by a signal, or fails, while it is written."""

    error: str

    @field_serializer("error")
    def _write(self, error: str) -> str:
        if error:
            raise TypeError(error)
        signal.raise_signal(signal.SIGINT)
        return error


def test_an_interrupt_while_values_are_written_stays_one_and_an_error_stays_another() -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            plain_values(Unwritable(error=""))
        with pytest.raises(PydanticSerializationError, match="TypeError: a fault"):
            plain_values(Unwritable(error="a fault"))
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_signal_waits_until_a_block_delivers_it() -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: heard.append(number))
    try:
        with defer_signals():
            with defer_signals():
                assert not stop_requested()
                signal.raise_signal(signal.SIGINT)
                assert stop_requested()
            assert stop_requested()
            with allow_signals():
                assert heard == [signal.SIGINT]
                assert not stop_requested()
        assert heard == [signal.SIGINT]
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_file_is_written_whole_before_an_interrupt_is_heard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.fsync", lambda _: signal.raise_signal(signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        write_atomically(tmp_path / "state", b"whole")
    assert [path.name for path in tmp_path.iterdir()] == ["state"]
    assert (tmp_path / "state").read_bytes() == b"whole"


def test_a_thread_writes_without_touching_the_signals(tmp_path: Path) -> None:
    thread = threading.Thread(target=write_atomically, args=(tmp_path / "state", b"whole"))
    thread.start()
    thread.join()
    assert (tmp_path / "state").read_bytes() == b"whole"


def test_what_is_held_back_is_heard_where_it_may_be_and_held_back_again_after_it() -> None:
    reached = []
    with pytest.raises(KeyboardInterrupt), defer_signals():
        with allow_signals():
            reached.append("nothing came")
        signal.raise_signal(signal.SIGINT)
        reached.append("held back")
        with defer_signals(), allow_signals():
            reached.append("never")
    with defer_signals():
        with pytest.raises(KeyboardInterrupt), allow_signals():
            signal.raise_signal(signal.SIGINT)
        reached.append("heard once")
    assert reached == ["nothing came", "held back", "heard once"]


def test_a_stop_that_was_lost_is_heard_in_the_next_round() -> None:
    STOPPING.set()
    try:
        with pytest.raises(KeyboardInterrupt), allow_signals():
            raise AssertionError("the round went on")
    finally:
        STOPPING.clear()


class Stopped(Counting):
    """Is stopped in the midst of its fourth call."""

    def train(self, broadcast: Arrays, chunks: list[Chunk]) -> list[ChunkResult]:
        results = super().train(broadcast, chunks)
        if len(self.calls) == 4:
            signal.raise_signal(signal.SIGINT)
        return results


@pytest.mark.parametrize("schedule", [{}, {"schedule": Buffered(concurrency=5, buffer_size=3)}])
def test_a_run_stopped_in_a_round_goes_on_from_the_round_before(schedule: dict[str, Buffered]) -> None:
    plan, algorithm, task = (
        Plan(rounds=6, clients_per_round=4, checkpoint_seconds=600, **schedule),
        FedAvg(),
        network_task(),
    )
    played = []
    with pytest.raises(Interrupted) as stop, defer_signals():
        stopped = rounds(Run(plan, algorithm, task), Stopped(algorithm, task))
        played.extend(outcome.record for outcome in stopped)
    (state,) = stop.value.states
    assert state.round_index == len(played) > 0
    straight = list(rounds(Run(plan, algorithm, task), Counting(algorithm, task)))
    resumed = list(rounds(Run(plan, algorithm, task), Counting(algorithm, task), state))
    assert [*played, *(outcome.record for outcome in resumed)] == [outcome.record for outcome in straight]
    ends = [outcomes[-1].state for outcomes in (resumed, straight)]
    assert all(end is not None for end in ends)
    assert len({model_sha256(algorithm, end) for end in ends if end is not None}) == 1
