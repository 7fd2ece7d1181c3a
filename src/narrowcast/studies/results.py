"""Results of runs as rows of CSV files, one per run: small enough for the repository, appended as runs end.

A row is found again by its label, seed and experiment, so that a file goes on from where it was left, on any machine.
The experiment is the same if its text with the overrides is the same, or else its digest, whatever the order of the
fields and however numbers are written. After a change of fields, which changes digests, `rekey` computes them anew from
the texts. `hits` holds, per test user, whether the held-out item is among the first ten, packed as base64; `curve` the
results after fewer rounds, as JSON. Tuning runs have no test columns.
"""

from __future__ import annotations

import base64
import csv
import json
import os
import shlex
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from narrowcast.platform.errors import UserError
from narrowcast.platform.storage.disk import write_atomically
from narrowcast.platform.tracking.metrics import SUCCESS
from narrowcast.studies.spec import RunSpec, digest_of

METRICS = (
    *("validation.rmse", "test.rmse", "test.mae", "test.nmi"),
    *("validation.hr@10", "validation.accuracy", "test.hr@10", "test.ndcg@10", "test.accuracy"),
    *("validation.accuracy.mean", "validation.accuracy.worst_10_percent"),
    *(f"test.accuracy.{statistic}" for statistic in ("mean", "worst_10_percent", "best_10_percent", "variance")),
    SUCCESS,
)
COUNTS = ("uplink_bits", "downlink_bits")
COLUMNS = (
    *("label", "seed", "rounds", "digest", "experiment", "overrides", *METRICS, *COUNTS),
    *("simulated_seconds", "wall_seconds", "model_sha256", "error", "curve", "hits"),
)
csv.field_size_limit(10_000_000)
Result = dict[str, Any]
_LARGEST_FILE_BYTES = 190_000
"""Of a file of results, which is in the repository."""


@dataclass
class Rows:
    """The results of runs, by `rows[spec, seed]`.

    `by_label` has those of a label and seed with the experiment's text and digest, which may be empty.
    """

    by_label: dict[tuple[str, int], list[tuple[str, str, Result]]] = field(default_factory=dict)

    def __getitem__(self, run: tuple[RunSpec, int]) -> Result:
        if (result := self.get(*run)) is None:
            spec, seed = run
            raise KeyError(f"{spec.label}, seed {seed}")
        return result

    def __setitem__(self, run: tuple[RunSpec, int], result: Result) -> None:
        spec, seed = run
        self.add(spec.label, seed, spec.text, "", result)

    def __contains__(self, run: tuple[RunSpec, int]) -> bool:
        return self.get(*run) is not None

    def __len__(self) -> int:
        return sum(map(len, self.by_label.values()))

    def get(self, spec: RunSpec, seed: int) -> Result | None:
        """Return the result of a run, None if there is none."""
        candidates = self.by_label.get((spec.label, seed), ())
        for text, _, result in candidates:
            if text == spec.text:
                return result
        return next((result for _, digest, result in candidates if digest and digest == spec.digest), None)

    def add(self, label: str, seed: int, text: str, digest: str, result: Result) -> None:
        """Take in a result in place of an earlier one of the same label, seed and text; a digest may be empty."""
        kept = [entry for entry in self.by_label.get((label, seed), ()) if entry[0] != text]
        self.by_label[label, seed] = [*kept, (text, digest, result)]

    def of_stem(self, stem: str) -> Iterator[Result]:
        """Yield the results whose labels begin with the stem."""
        for (label, _), entries in self.by_label.items():
            if label.startswith(stem):
                yield from (result for _, _, result in entries)


def append(path: Path, spec: RunSpec, seed: int, result: Mapping[str, Any]) -> None:
    """Append a run's row to the file and sync it, with the header if the file is new."""
    row = {**result, **result.get("final", {}), "label": spec.label, "seed": seed, "experiment": spec.experiment}
    row |= {"overrides": shlex.join(spec.overrides), "digest": spec.digest}
    if "curve" in result:
        row["curve"] = json.dumps(result["curve"])
    if (hits := result.get("hits")) is not None:
        row["hits"] = base64.b64encode(zlib.compress(np.packbits(hits).tobytes(), 9)).decode()
    append_lines(path, COLUMNS, [row])


def read_rows(paths: Iterable[Path]) -> Rows:
    """Return the results in all CSV files of these folders, as `result.json` has them; a line that was cut is left."""
    rows = Rows()
    for path in sorted(file for folder in paths for file in folder.glob("*.csv")):
        with path.open(newline="") as file:
            reader = csv.DictReader(file)
            if reader.fieldnames is None or "overrides" not in reader.fieldnames:
                continue
            for row in reader:
                if row["hits"] is not None:  # all columns are there
                    text = f"{row['experiment']} {row['overrides']}"
                    rows.add(row["label"], int(row["seed"]), text, row.get("digest", ""), _result(row))
    return rows


def _result(row: Mapping[str, str]) -> dict[str, Any]:
    result: dict[str, Any] = {"final": {name: float(row[name]) for name in METRICS if row.get(name)}}
    result |= {name: int(row[name]) for name in ("rounds", *COUNTS) if row[name]}
    result |= {name: float(row[name]) for name in ("simulated_seconds", "wall_seconds") if row[name]}
    if row.get("curve"):
        result["curve"] = json.loads(row["curve"])
    return result | {name: row[name] for name in ("model_sha256", "error", "hits") if row[name]}


def merge(path: Path, target: Path) -> None:
    """Append the rows of a file, if it is there, to the file of this name in `target`, those that it lacks.

    Rows go on in NAME-2.csv and so on, each with its header, if a file has other columns or would grow above
    `_LARGEST_FILE_BYTES`.
    """
    if not path.exists():
        return
    header, *rows = path.read_text().splitlines()
    parts = [target / path.name]
    while (following := target / f"{path.stem}-{len(parts) + 1}.csv").exists():
        parts.append(following)
    known = {line for part in parts if part.exists() for line in part.read_text().splitlines()}
    text = parts[-1].read_text() if parts[-1].exists() else f"{header}\n"
    for row in rows:
        if row in known:
            continue
        if not text.startswith(f"{header}\n") or len(text) + len(row) >= _LARGEST_FILE_BYTES:
            parts[-1].write_text(text)
            parts.append(target / f"{path.stem}-{len(parts) + 1}.csv")
            text = f"{header}\n"
        text += f"{row}\n"
    parts[-1].write_text(text)


def rekey(path: Path) -> list[str]:
    """Write the column of digests of a file anew; return the labels of rows whose experiment is no longer valid.

    Such rows keep their text and an empty digest.
    """
    with path.open(newline="") as file:
        columns, *lines = csv.reader(file)
    rows = [dict(zip(columns, line, strict=True)) for line in lines if len(line) == len(columns)]
    orphans = []
    for row in rows:
        try:
            row["digest"] = digest_of(row["experiment"], tuple(shlex.split(row["overrides"])))
        except UserError:
            row["digest"] = ""
            orphans.append(row["label"])
    if "digest" not in columns:
        columns.insert(columns.index("experiment"), "digest")
    text = StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_atomically(path, text.getvalue().encode())
    return orphans


def unpacked_hits(result: Mapping[str, Any], users: int) -> NDArray[np.bool_]:
    """Return whether each of the test users has a hit."""
    packed = np.frombuffer(zlib.decompress(base64.b64decode(result["hits"])), dtype=np.uint8)
    return np.unpackbits(packed, count=users).astype(bool)


Line = Mapping[str, Any]
Lines = list[Line]
"""A line is a mapping from column to text."""


def read_lines(*paths: Path) -> Lines:
    """Return the lines of these files one after the other; a file that does not exist has none."""
    lines: Lines = []
    for path in paths:
        if path.exists():
            with path.open(newline="") as file:
                lines += csv.DictReader(file)
    return lines


def as_text(value: Any, digits: int = 6) -> str:
    """Return a value as a line has it; a float has so many significant digits."""
    return f"{value:.{digits}g}" if isinstance(value, float) else "" if value is None else str(value)


def append_lines(path: Path, columns: Sequence[str], lines: Sequence[Line]) -> None:
    """Append lines and sync them, with the header if the file is new; one that has other columns keeps them."""
    with path.open("a+", newline="") as file:
        file.seek(0)
        text = file.read()
        if text and not text.endswith("\n"):  # the last append was cut
            file.write("\n")
        own = next(csv.reader(text.splitlines()), columns)
        writer = csv.DictWriter(file, own, extrasaction="ignore", lineterminator="\n")
        if not text:
            writer.writeheader()
        writer.writerows(lines)
        file.flush()
        os.fsync(file.fileno())
