from __future__ import annotations

import signal
import threading
from pathlib import Path

import pytest

from narrowcast.platform.checkpoint import write_atomically
from narrowcast.platform.interruption import uninterrupted


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_waits_for_the_end_of_the_block_and_is_then_heard_once(number: int) -> None:
    heard: list[int] = []
    before = signal.signal(number, lambda number, _: heard.append(number))
    try:
        with uninterrupted():
            signal.raise_signal(number)
            signal.raise_signal(number)
            assert heard == []
        assert heard == [number]
    finally:
        signal.signal(number, before)


def test_a_file_is_written_whole_before_an_interrupt_is_heard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.fsync", lambda _: signal.raise_signal(signal.SIGINT))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job would ignore it
    try:
        with pytest.raises(KeyboardInterrupt):
            write_atomically(tmp_path / "state", b"whole")
    finally:
        signal.signal(signal.SIGINT, before)
    assert [path.name for path in tmp_path.iterdir()] == ["state"]
    assert (tmp_path / "state").read_bytes() == b"whole"


def test_a_thread_writes_without_touching_the_signals(tmp_path: Path) -> None:
    thread = threading.Thread(target=write_atomically, args=(tmp_path / "state", b"whole"))
    thread.start()
    thread.join()
    assert (tmp_path / "state").read_bytes() == b"whole"
