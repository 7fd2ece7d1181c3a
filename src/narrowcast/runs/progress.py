"""Progress of the runs of one command: a bar for each run on a terminal, lines elsewhere."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tqdm import tqdm

from narrowcast.platform.tracking.metric_direction import Declared
from narrowcast.platform.tracking.metric_labels import format_metric, metric_label, primary_metric, shares_of
from narrowcast.platform.tracking.units import format_bits, format_seconds
from narrowcast.runs.broken_pipe import output_may_end
from narrowcast.runs.prepare import PreparedRun

_PLAIN_LINES, _FEWEST_LINES = 20, 3  # of all runs together that do not write to a terminal, and of one run at least


@dataclass
class _RunProgress:
    rounds: int
    bar: tqdm[Any] | None
    shares: Declared
    metric: tuple[str, float, int] | None = None  # the last evaluation: name, value, round

    def facts(self, row: Mapping[str, Any]) -> str:
        """Return the state of a run after a round, with the age of its metric if it is not of this round."""
        measured = {name: value for name, value in row.items() if value is not None}
        name = primary_metric(measured)
        if name is not None:
            self.metric = (name, measured[name], row["round"])
        facts = [
            f"loss {row['loss']:.3f}",
            f"up {format_bits(row['total_uplink_bits'])}",
            f"down {format_bits(row['total_downlink_bits'])}",
            f"simulated {format_seconds(row['simulated_seconds'])}",
        ]
        if self.metric is not None:
            name, value, at_round = self.metric
            age = "" if at_round == row["round"] else f" (round {at_round})"
            facts.insert(0, f"{metric_label(name)} {format_metric(name, value, self.shares)}{age}")
        return "  ".join(facts)


class ProgressDisplay:
    """A bar for each run on a terminal, about 20 lines in all otherwise."""

    def __init__(self, runs: Mapping[str, tuple[int, int]], shares: Declared = None) -> None:
        """Show runs, given the rounds done and the rounds in all of each by its name; `shares` as models declare."""
        width = max(map(len, runs))
        self._prefix = {name: f"{name:<{width}}  " if len(runs) > 1 else "" for name in runs}
        self._lines = max(_FEWEST_LINES, _PLAIN_LINES // len(runs))
        on_terminal = sys.stderr.isatty()
        self._runs = {
            name: _RunProgress(
                rounds,
                tqdm(total=rounds, initial=done, desc=f"{name:<{width}}", unit="round", position=place, leave=True)
                if on_terminal
                else None,
                shares,
            )
            for place, (name, (done, rounds)) in enumerate(runs.items())
        }
        for name, (done, rounds) in runs.items():
            if not on_terminal:
                self._print(f"{name}: {rounds} rounds" + (f", resuming after round {done}" if done else ""))

    @classmethod
    def of(cls, runs: Sequence[PreparedRun]) -> ProgressDisplay:
        """Return the display for runs that are about to start."""
        rounds = {each.folder.name: (each.state.round_index, each.experiment.rounds) for each in runs}
        return cls(rounds, shares_of(runs[0].experiment.model))

    def __enter__(self) -> ProgressDisplay:
        return self

    def __exit__(self, *_: object) -> None:
        for each in self._runs.values():
            if each.bar is not None:
                with output_may_end():
                    each.bar.close()

    def show(self, row: Mapping[str, Any]) -> None:
        """Show a round, given its row of the journal and the name of its `run`."""
        name, index = row["run"], row["round"]
        run = self._runs[name]
        facts = run.facts(row)
        if run.bar is not None:
            with output_may_end():
                run.bar.set_postfix_str(facts, refresh=False)
                run.bar.update()
        elif index % math.ceil(run.rounds / self._lines) == 0 or index == run.rounds:
            self._print(f"{self._prefix[name]}round {index}/{run.rounds}  {facts}")

    def _print(self, line: str) -> None:
        with output_may_end():
            print(line, flush=True)
