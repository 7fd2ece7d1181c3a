"""Results of runs as rows of CSV files, one per run: small enough for the repository, appended as runs end.

A row is found again by its label, seed, rounds and overrides, so that a file goes on from where it was left, on any
machine. `hits` holds, per test user, whether the held-out item is among the first ten, packed as base64; `curve` the
results after fewer rounds, as JSON. Tuning runs have no test columns.
"""

from __future__ import annotations

import base64
import csv
import json
import os
import shlex
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from narrowcast.reproduce.run_spec import RunSpec

METRICS = (
    *("validation.rmse", "test.rmse", "test.mae", "test.nmi"),
    *("validation.hr@10", "validation.accuracy", "test.hr@10", "test.ndcg@10", "test.accuracy"),
    *("validation.accuracy.mean", "validation.accuracy.worst_10_percent"),
    *(f"test.accuracy.{each}" for each in ("mean", "worst_10_percent", "best_10_percent", "variance")),
)
COUNTS = ("uplink_bits", "downlink_bits")
COLUMNS = (
    *("label", "seed", "rounds", "experiment", "overrides", *METRICS, *COUNTS),
    *("simulated_seconds", "wall_seconds", "model_sha256", "error", "curve", "hits"),
)
Key = tuple[str, int, str]
"""Label, seed, and the experiment with its overrides."""
Rows = dict[Key, dict[str, Any]]
csv.field_size_limit(10_000_000)


def key_of(spec: RunSpec, seed: int) -> Key:
    """Return where the result of a run is found."""
    return spec.label, seed, shlex.join([spec.experiment, *spec.overrides])


def append(path: Path, spec: RunSpec, seed: int, result: Mapping[str, Any]) -> None:
    """Append a run's row to the file and sync it, with the header if the file is new."""
    row = {**result, **result.get("final", {}), "label": spec.label, "seed": seed, "experiment": spec.experiment}
    row["overrides"] = shlex.join(spec.overrides)
    if "curve" in result:
        row["curve"] = json.dumps(result["curve"])
    if (hits := result.get("hits")) is not None:
        row["hits"] = base64.b64encode(zlib.compress(np.packbits(hits).tobytes(), 9)).decode()
    with path.open("a+", newline="") as file:
        file.seek(0)
        text = file.read()
        if text and not text.endswith("\n"):  # the last append was cut
            file.write("\n")
        # A file that was begun by another version keeps its columns.
        columns = next(csv.reader(text.splitlines()), COLUMNS)
        writer = csv.DictWriter(file, columns, extrasaction="ignore", lineterminator="\n")
        if not text:
            writer.writeheader()
        writer.writerow(row)
        file.flush()
        os.fsync(file.fileno())


def read_rows(paths: Iterable[Path]) -> Rows:
    """Return the results in all CSV files of these folders, as `result.json` has them; a line that was cut is left."""
    rows: Rows = {}
    for path in sorted(file for folder in paths for file in folder.glob("*.csv")):
        with path.open(newline="") as file:
            reader = csv.DictReader(file)
            if reader.fieldnames is None or "overrides" not in reader.fieldnames:
                continue
            for row in reader:
                if row["hits"] is not None:  # all columns are there
                    rows[row["label"], int(row["seed"]), f"{row['experiment']} {row['overrides']}"] = _result(row)
    return rows


def _result(row: Mapping[str, str]) -> dict[str, Any]:
    result: dict[str, Any] = {"final": {name: float(row[name]) for name in METRICS if row.get(name)}}
    result |= {name: int(row[name]) for name in ("rounds", *COUNTS) if row[name]}
    result |= {name: float(row[name]) for name in ("simulated_seconds", "wall_seconds") if row[name]}
    if row.get("curve"):
        result["curve"] = json.loads(row["curve"])
    return result | {name: row[name] for name in ("model_sha256", "error", "hits") if row[name]}


def unpacked_hits(result: Mapping[str, Any], users: int) -> NDArray[np.bool_]:
    """Return whether each of the test users has a hit."""
    packed = np.frombuffer(zlib.decompress(base64.b64decode(result["hits"])), dtype=np.uint8)
    return np.unpackbits(packed, count=users).astype(bool)
