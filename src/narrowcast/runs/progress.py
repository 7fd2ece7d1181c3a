"""Progress of the runs of one command: a bar on a terminal, lines elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from tqdm import tqdm

from narrowcast.platform.tracking.units import format_bits, format_seconds
from narrowcast.runs.broken_pipe import output_may_end
from narrowcast.runs.prepare import PreparedRun

_PLAIN_LINES = 20  # progress lines of a run that does not write to a terminal


class ProgressDisplay:
    """A bar on a terminal, about 20 lines otherwise."""

    def __init__(self, title: str, done: int, rounds: int) -> None:
        self._rounds = rounds
        self._done = done
        self._bar = tqdm(total=rounds, initial=done, desc=title, unit="round") if sys.stderr.isatty() else None
        self._metrics = ""
        if self._bar is None:
            self._print(f"{title}: {rounds} rounds" + (f", resuming after round {done}" if done else ""))

    @classmethod
    def of(cls, runs: Sequence[PreparedRun]) -> ProgressDisplay:
        """Return the display for runs that are about to start, the rounds of all replicas counted together."""
        title = runs[0].folder.name if len(runs) == 1 else f"{len(runs)} replicas"
        done, rounds = (sum(each.state.round_index for each in runs), sum(each.experiment.rounds for each in runs))
        return cls(title, done, rounds)

    def __enter__(self) -> ProgressDisplay:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            with output_may_end():
                self._bar.close()

    def show(self, row: Mapping[str, Any]) -> None:
        """Show a round, given its row of the journal."""
        self._done += 1
        for name, label in (("test.hr@10", "test HR@10"), ("test.accuracy", "test accuracy")):
            if name in row:
                self._metrics = f"{label} {row[name]:.4f}  "
        facts = (
            f"{self._metrics}loss {row['loss']:.3f}  up {format_bits(row['total_uplink_bits'])}  "
            f"down {format_bits(row['total_downlink_bits'])}  "
            f"simulated {format_seconds(row['simulated_seconds'])}"
        )
        if self._bar is not None:
            with output_may_end():
                self._bar.set_postfix_str(facts, refresh=False)
                self._bar.update()
        elif self._done % max(1, self._rounds // _PLAIN_LINES) == 0 or self._done == self._rounds:
            self._print(f"round {self._done}/{self._rounds}  {facts}")

    def _print(self, line: str) -> None:
        with output_may_end():
            print(line, flush=True)
