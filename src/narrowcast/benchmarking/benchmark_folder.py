"""The folder of a benchmark: its file, the runs of its instances, and how each ended."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from narrowcast.benchmarking.benchmark_file import Benchmark, Instance
from narrowcast.platform.atomic_files import write_atomically
from narrowcast.platform.config import write_yaml
from narrowcast.platform.disk import disk, make_folders, remove_tree
from narrowcast.platform.errors import UserError
from narrowcast.platform.redaction import redact_values
from narrowcast.platform.tracking.journal import locked
from narrowcast.runs.run_folder import CONFIG, RESULT

FILE, ENDS, TABLE = "benchmark.yaml", "instances.jsonl", "instances.csv"


@dataclass(frozen=True)
class BenchmarkFolder:
    """The folder OUTPUT/NAME, which is the output folder of all runs of the benchmark too.

    `instances.jsonl` has a line when an instance begins, with the digest of its settings, and one when it ends.
    """

    path: Path

    def create(self) -> None:
        """Create the folder; raise `UserError` if it is that of a run."""
        if (self.path / CONFIG).is_file():
            raise UserError(f"{self.path} is a run's folder; give the benchmark another name (name=...)")
        make_folders(self.path)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other processes from running this benchmark; raise `UserError` if one does."""
        with locked(self.path, ENDS):
            yield

    def write(self, benchmark: Benchmark) -> None:
        """Write the benchmark's file after overrides."""
        text = io.StringIO()
        write_yaml(redact_values(benchmark.values), text)
        write_atomically(self.path / FILE, text.getvalue().encode())

    def note(self, instance: Instance, state: str, reason: str = "") -> None:
        """Append a line; a benchmark that is resumed relies on it."""
        line = {"instance": instance.name, "state": state, "reason": reason, "digest": instance.digest()}
        path = self.path / ENDS
        cut = _last_byte(path) not in (b"", b"\n")  # a full disk may have cut the last line
        disk().append(path, b"\n" * cut + json.dumps(line).encode() + b"\n")
        disk().sync(path)

    def states(self) -> dict[str, Mapping[str, str]]:
        """Return the last line of each instance; a line that is cut or damaged counts as none."""
        found: dict[str, Mapping[str, str]] = {}
        path = self.path / ENDS
        for line in path.read_bytes().split(b"\n") if path.is_file() else ():
            try:
                entry = json.loads(line)
                words = {name: entry[name] for name in ("instance", "state", "reason", "digest")}
            except (ValueError, KeyError, TypeError, RecursionError):
                continue
            if all(isinstance(word, str) for word in words.values()):
                found[words["instance"]] = words
        return found

    def is_finished(self, instance: Instance) -> bool:
        """Return whether the instance has a result."""
        return (self.path / instance.name / RESULT).is_file()

    def left(self, instances: Iterable[Instance], *, retry: bool) -> list[Instance]:
        """Return the instances that have not ended; with `retry` those that failed or were skipped too, to begin anew.

        Raise `UserError` for one that was run with other settings.
        """
        states, left = self.states(), []
        for each in instances:
            entry = states.get(each.name)
            if entry is not None and entry["digest"] != each.digest():
                raise UserError(
                    f"{self.path / each.name} was begun with other settings of its problem, its solver or the end of a "
                    "solve; give the benchmark another name (name=...), or remove this folder's runs"
                )
            state = "waiting" if entry is None else entry["state"]
            failed = state in ("failed", "skipped")
            if failed and retry and (self.path / each.name).is_dir():
                remove_tree(self.path / each.name)
            if (failed and not retry) or (state == "finished" and self.is_finished(each)):
                continue
            left.append(each)
        return left


def _last_byte(path: Path) -> bytes:
    """Return the last byte of a file; nothing of one that is empty or not there."""
    if not path.is_file() or not path.stat().st_size:
        return b""
    with path.open("rb") as stream:
        stream.seek(-1, os.SEEK_END)
        return stream.read()
