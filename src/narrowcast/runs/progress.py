"""How far the runs of a command are: a bar on a terminal, lines elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from tqdm import tqdm

from narrowcast.platform.tracking.units import format_bits, format_seconds

_PLAIN_LINES = 20  # progress lines of a run that does not write to a terminal


class ProgressDisplay:
    """A bar on a terminal, a line now and then otherwise."""

    def __init__(self, name: str, done: int, rounds: int) -> None:
        self._rounds = rounds
        self._played = done
        self._bar = tqdm(total=rounds, initial=done, desc=name, unit="round") if sys.stderr.isatty() else None
        self._metrics = ""
        if self._bar is None:
            print(f"{name}: {rounds} rounds" + (f", going on after round {done}" if done else ""), flush=True)

    def __enter__(self) -> ProgressDisplay:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def show(self, row: Mapping[str, Any]) -> None:
        """Show a round that was written down."""
        self._played += 1
        for name, label in (("test.hr@10", "HR@10"), ("test.accuracy", "accuracy")):
            if name in row:
                self._metrics = f"{label} {row[name]:.4f}  "
        facts = (
            f"{self._metrics}loss {row['loss']:.3f}  up {format_bits(row['total_uplink_bits'])}  "
            f"simulated {format_seconds(row['simulated_seconds'])}"
        )
        if self._bar is not None:
            self._bar.set_postfix_str(facts, refresh=False)
            self._bar.update()
        elif self._played % max(1, self._rounds // _PLAIN_LINES) == 0 or self._played == self._rounds:
            print(f"round {self._played}/{self._rounds}  {facts}", flush=True)
