"""Error, size and time of every codec, on updates of 800 rows with normal and with heavy-tailed values.

vNMSE is the mean squared error over the mean squared value of one update, averaged over keys; bits are those of the
packed bytes, per value; milliseconds are the best of several encodings and decodings, on one thread. Error feedback
and warm starts need many rounds to take effect and are measured in their first round.

    python benchmarks/codecs.py [--columns 8 64] [--keys 10] [--repeats 7] [--json FILE]
"""

from __future__ import annotations

import os

os.environ["OPENBLAS_NUM_THREADS"] = "1"  # before numpy

import argparse
import json
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import TypeAdapter
from rich.console import Console
from rich.table import Table

from narrowcast.algorithms.codecs.chain import Codec, Stages

ROWS = 800
TARGET_MS = {8: 1.0, 64: 5.0}
"""Targets for encoding quantised and entropy-coded updates of 800 rows and so many columns."""
_MAX: dict[str, Any] = {"kind": "quantise", "scale": "max"}
_ROTATED: dict[str, Any] = {"kind": "quantise", "scale": "max", "norms": "row", "rounding": "dithered"}
CODECS: dict[str, list[Any]] = {
    "float32": [],
    "float16": ["cast"],
    "bfloat16": [{"kind": "cast", "dtype": "bfloat16"}],
    "report, k = 7": ["quantise"],
    "report, k = 127": [{"kind": "quantise", "levels": 127}],
    "report, k = 127, coded": [{"kind": "quantise", "levels": 127}, "entropy"],
    "max, k = 1, coded": [{**_MAX, "levels": 1}, "entropy"],
    "max, k = 7": [_MAX],
    "max, k = 7, coded": [_MAX, "entropy"],
    "max, k = 7, dithered, coded": [{**_MAX, "rounding": "dithered"}, "entropy"],
    "max, k = 7, nearest, coded": [{**_MAX, "rounding": "nearest"}, "entropy"],
    "max of row, k = 7, coded": [{**_MAX, "norms": "row", "norm_type": "bfloat16"}, "entropy"],
    "rotated, max, k = 3, coded": ["rotate", {**_ROTATED, "levels": 3}, "entropy"],
    "rotated, max, k = 7, coded": ["rotate", {**_ROTATED, "levels": 7}, "entropy"],
    "DRIVE, 1 bit": ["eden"],
    "DRIVE, least error": [{"kind": "eden", "scale": "min_mse"}],
    "EDEN, 3 levels": [{"kind": "eden", "levels": 3}],
    "EDEN, 2 bits": [{"kind": "eden", "levels": 4}],
    "EDEN, 3 bits": [{"kind": "eden", "levels": 8}],
    "EDEN, 4 bits": [{"kind": "eden", "levels": 16}],
    "EDEN, 4 bits, coded": [{"kind": "eden", "levels": 16}, "entropy"],
    "EDEN, 1/2 bit": [{"kind": "random_k", "fraction": 0.5}, "eden"],
    "EDEN, 1/8 bit": [{"kind": "random_k", "fraction": 0.125}, "eden"],
    "QSGD in blocks of 512, k = 1, coded": [{"kind": "quantise", "levels": 1, "norms": 512}, "entropy"],
    "random 1/16": [{"kind": "random_k", "fraction": 1 / 16}],
    "Top-K 1/16 as released": [{"kind": "top_k", "fraction": 1 / 16, "indices": "int32"}],
    "Top-K 1/16": [{"kind": "top_k", "fraction": 1 / 16}],
    "Top-K 1/16, k = 7, coded": [{"kind": "top_k", "fraction": 1 / 16}, _MAX, "entropy"],
    "SVD 4 as released": [{"kind": "svd", "parts": "usv"}],
    "SVD 4": ["svd"],
    "SVD 4, k = 7, coded": ["svd", {**_MAX, "norms": "column"}, "entropy"],
    "PowerSGD 4": ["error_feedback", "power_sgd"],
    "PowerSGD 4, half": ["error_feedback", "power_sgd", "cast"],
    "basis 4": ["basis"],
    "basis 4, projected": [{"kind": "basis", "scale": "projection"}],
}
INPUTS: dict[str, Callable[[np.random.Generator, tuple[int, int]], np.ndarray]] = {
    "normal": lambda random, shape: random.standard_normal(shape),
    "heavy": lambda random, shape: random.standard_t(2, shape),
}


def main() -> None:
    arguments = _arguments()
    field: TypeAdapter[Any] = TypeAdapter(Stages)
    codecs = {name: Codec(field.validate_python(stages)) for name, stages in CODECS.items()}
    reports = []
    for columns in arguments.columns:
        rows = [
            {"codec": name, **measure(codec, columns, arguments.keys, arguments.repeats)}
            for name, codec in codecs.items()
        ]
        reports.append({"columns": columns, "rows": rows})
        _print(columns, rows)
    figures = {"reports": reports, "machine": platform.platform(), "load_average": os.getloadavg()}
    print(f"{figures['machine']}; load average {os.getloadavg()[0]:.2f}")
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=1))


def measure(codec: Codec, columns: int, keys: int, repeats: int) -> dict[str, float]:
    figures: dict[str, float] = {}
    for name, draw in INPUTS.items():
        update = {"Q": draw(np.random.default_rng(0), (ROWS, columns)).astype(np.float32)}
        energy, errors, bits = float((update["Q"].astype(np.float64) ** 2).sum()), [], []
        for key in range(keys):
            data = codec.encode(update, key).to_bytes()
            lost = codec.decode(data, {"Q": (ROWS, columns)}, key)["Q"].astype(np.float64) - update["Q"]
            errors.append(float((lost**2).sum()) / energy)
            bits.append(8 * len(data) / update["Q"].size)
        figures[f"{name} vNMSE"], figures[f"{name} bits"] = float(np.mean(errors)), float(np.mean(bits))
    seconds: dict[str, list[float]] = {"encode ms": [], "decode ms": []}
    for _ in range(repeats):
        before = time.perf_counter()
        data = codec.encode(update, 0).to_bytes()
        between = time.perf_counter()
        codec.decode(data, {"Q": (ROWS, columns)}, 0)
        seconds["encode ms"].append(between - before)
        seconds["decode ms"].append(time.perf_counter() - between)
    return figures | {name: 1e3 * min(each) for name, each in seconds.items()}


def _print(columns: int, rows: list[dict[str, Any]]) -> None:
    table = Table("codec", *list(rows[0])[1:], title=f"{ROWS} x {columns} values, vNMSE and bits a value")
    for row in rows:
        numbers = [value for name, value in row.items() if name != "codec"]
        table.add_row(row["codec"], *(f"{value:.3g}" if value < 10 else f"{value:.1f}" for value in numbers))
    Console(width=120).print(table)
    coded = [row for row in rows if row["codec"].endswith("coded") and "k =" in row["codec"]]
    slowest = max(coded, key=lambda row: row["encode ms"])
    if columns in TARGET_MS:
        met = "met" if slowest["encode ms"] <= TARGET_MS[columns] else "missed"
        print(f"slowest coded: {slowest['codec']}, {slowest['encode ms']:.2f} ms (wanted {TARGET_MS[columns]}): {met}")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--columns", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--keys", type=int, default=10)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
