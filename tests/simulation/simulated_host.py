"""A machine whose every accident is drawn from one seed: power, signals, clocks; and the log of what happened."""

from __future__ import annotations

import random
import signal
from collections.abc import Callable
from dataclasses import dataclass, field


class PowerCutError(BaseException):
    """The machine is off; nothing that runs afterwards, in `finally` or `except`, has an effect."""


class KilledError(BaseException):
    """The process is gone by SIGKILL; what it wrote is with the operating system, which goes on."""


@dataclass
class SimulatedHost:
    """The seed, the log, and whether the process runs."""

    seed: int
    log: list[str] = field(default_factory=list)
    death: type[BaseException] | None = None
    on_death: list[Callable[[type[BaseException]], None]] = field(default_factory=list)

    def chances(self, purpose: str) -> random.Random:
        """Random numbers of their own for each purpose, so that one accident does not move the others."""
        return random.Random(f"{self.seed} {purpose}")

    def tell(self, event: str) -> None:
        self.log.append(event)

    def die(self, death: type[BaseException], where: str) -> None:
        self.tell(f"{death.__name__.removesuffix('Error')} {where}")
        self.death = death
        for act in self.on_death:
            act(death)
        raise death

    def check_alive(self) -> None:
        if self.death is not None:
            raise self.death

    def start_process(self) -> None:
        self.death = None

    def interrupt(self) -> None:
        """Ask the process to stop, as Ctrl-C does; the command line gives SIGTERM the same handler."""
        signal.raise_signal(signal.SIGINT)


@dataclass
class SimulatedTime:
    """Clocks that move when they are read, and background steps that run at moments drawn from the seed."""

    host: SimulatedHost
    jump_chance: float = 0.01
    now: float = 100.0
    offset: float = 1_700_000_000.0

    def __post_init__(self) -> None:
        self._chances = self.host.chances("time")
        self._steps: list[_SimulatedStep] = []

    def wall(self) -> float:
        self._move()
        if self._chances.random() < self.jump_chance:
            jump = self._chances.choice((-3600.0, 3600.0))
            self.host.tell(f"the wall clock jumps by {jump:+.0f} s")
            self.offset += jump
        return self.offset + self.now

    def monotonic(self) -> float:
        self._move()
        return self.now

    def _move(self) -> None:
        self.now += self._chances.choice((0.01, 0.1, 1.0, 3.0))

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        for step in list(self._steps):
            step.run_if_due()

    def run_periodically(self, step: Callable[[], None], seconds: float, name: str) -> _SimulatedStep:
        repeated = _SimulatedStep(self, step, seconds, self._chances)
        self._steps.append(repeated)
        return repeated

    def restart(self) -> None:
        """The steps of a process end with it."""
        self._steps.clear()


class _SimulatedStep:
    """A step that runs in the thread that wakes it, sometimes at once and sometimes later."""

    def __init__(self, time: SimulatedTime, step: Callable[[], None], seconds: float, chances: random.Random) -> None:
        self._time, self._step, self._seconds, self._chances = time, step, seconds, chances
        self._ran_at = time.now

    def run_if_due(self) -> None:
        if self._time.now - self._ran_at >= self._seconds:
            self._run()

    def _run(self) -> None:
        self._ran_at = self._time.now
        self._step()

    def wake(self) -> None:
        if self._chances.random() < 0.6:
            self._run()
        else:
            self.run_if_due()

    def close(self, wait_seconds: float) -> bool:
        self._time._steps.remove(self)
        self._run()
        return True
