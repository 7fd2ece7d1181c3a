"""Steps that are repeated in a thread."""

from __future__ import annotations

import threading

from narrowcast.platform.storage.disk import Disk, disk, use_disk
from narrowcast.platform.storage.host import host_clock


def test_a_step_runs_when_it_is_woken_and_a_last_time_when_it_is_closed() -> None:
    ran, done = [], threading.Event()

    def step() -> None:
        ran.append(len(ran))
        done.set()

    repeated = host_clock().run_periodically(step, 600.0, "test")
    assert done.wait(60)
    done.clear()
    repeated.wake()
    assert done.wait(60)
    assert repeated.close(60.0)
    assert ran == [0, 1, 2]


def test_closing_does_not_wait_for_longer_than_it_may() -> None:
    may_end = threading.Event()
    repeated = host_clock().run_periodically(lambda: may_end.wait() and None, 600.0, "test")
    assert not repeated.close(0.01)
    may_end.set()
    assert repeated.close(60.0)


def test_a_step_writes_to_the_disk_of_the_context_that_starts_it() -> None:
    seen, other = [], Disk()
    with use_disk(other):
        repeated = host_clock().run_periodically(lambda: seen.append(disk()), 600.0, "test")
    assert repeated.close(60.0)
    assert all(each is other for each in seen)
    assert seen
