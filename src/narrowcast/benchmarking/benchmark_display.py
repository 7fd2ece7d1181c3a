"""Progress of a benchmark: a line for each instance that ends, and on a terminal those that run below."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rich.console import Console
from rich.status import Status

from narrowcast.benchmarking.benchmark_file import Instance
from narrowcast.benchmarking.instance_runner import InstanceEnd
from narrowcast.platform.tracking.metric_labels import format_metric, metric_label, primary_metric
from narrowcast.platform.tracking.units import format_short_seconds
from narrowcast.runs.terminal_output import output_may_end


class BenchmarkDisplay:
    """An `Observer` that prints."""

    def __init__(self, instances: Sequence[Instance], left: Sequence[Instance], console: Console) -> None:
        self._all, self._ended = len(instances), len(instances) - len(left)
        self._console, self._running = console, list[str]()
        self._status: Status | None = console.status("starting workers") if sys.stdout.isatty() and left else None

    def __enter__(self) -> BenchmarkDisplay:
        if self._status:
            self._status.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._status:
            with output_may_end():
                self._status.stop()

    def __call__(self, instance: Instance, end: InstanceEnd | None) -> None:
        """Show an instance that begins, with None, or that ends."""
        if end is None:
            self._running.append(instance.name)
        else:
            self._running.remove(instance.name)
            self._ended += 1
            with output_may_end():
                line = f"[{self._ended}/{self._all}] {instance.name}  {_facts(end)}"
                self._console.print(line, highlight=False, soft_wrap=True)
        if self._status:
            self._status.update(f"{self._ended} of {self._all} ended, running: {', '.join(self._running)}")


def _facts(end: InstanceEnd) -> str:
    """Return how an instance ended in a few words."""
    if end.state != "finished":
        return f"{end.state}: {end.reason}"
    result, final = end.result, end.result["final"]
    names = [*(each["metric"] for each in result["targets"]), primary_metric(final), *final]
    shown = [
        f"{metric_label(name)} {format_metric(name, final[name], result['shares'])}" for name in names if name in final
    ]
    seconds = format_short_seconds(result["solver_seconds"])
    return "  ".join([*shown[:1], f"{result['iterations']} iterations (ended by {result['stopped_by']})", seconds])
