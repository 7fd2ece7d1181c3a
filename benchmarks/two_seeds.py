"""What private negatives cost: bits of a row upload, and accuracy of the packaged experiments, each with its control.

`bits` runs CoLR at rank 4 with touched rows in float32, quantised and entropy-coded, with and without
`training.shared_negatives`. `accuracy` runs packaged experiments with the one seed that version 0.1 had (`one seed`),
with a private seed alone (`private`), and as they are (`now`); `shared` adds `training.shared_negatives` to what they
are. Every run has `data.seed` 0, whatever its seed. It ends with a row in the CSV file, and is not repeated once it is
there.

    python benchmarks/two_seeds.py bits benchmarks/results/shared_negatives.csv [--rounds 60]
    python benchmarks/two_seeds.py accuracy benchmarks/results/two_seeds.csv [--experiments colr-ml1m ...] [--seeds 3]
    python benchmarks/two_seeds.py summary benchmarks/results/two_seeds.csv
"""

from __future__ import annotations

import argparse
import csv
import os
import tempfile
from collections.abc import Mapping
from itertools import product
from math import sqrt
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from scipy.stats import t

import narrowcast as nc

QUANTISED = {"kind": "quantise", "levels": 10, "norms": "column", "rounding": "dithered", "norm_type": "bfloat16"}
CODECS: Mapping[str, list[Any]] = {"float32": [], "quantised": [QUANTISED], "entropy-coded": [QUANTISED, "entropy"]}
METRICS = ("test.hr@10", "test.ndcg@10", "test.accuracy")
AS_PLAIN = {"colr-ckks-ml1m": 24, "scolr-masked-ml1m": 16}
"""Bits of experiments under masks or ciphertexts, which give the model of `plain` with as many; it takes less time."""
EXPERIMENTS = (
    *("fedmf-ml1m", "colr-ml1m", "scolr-ml1m", "scolr-channel-ml1m", "scolr-ml100k", "fedavg-digits"),
    *("scolr-masked-ml1m", "scolr-mnist", "colr-ckks-ml1m"),
)


def measure_bits(path: Path, rounds: int) -> None:
    """Write the mean upload of each data set, codec and kind of negatives."""
    done = {(row["data"], row["upload"], row["shared_negatives"]) for row in read(path)}
    for data, (upload, stages), shared in product(("ml-100k", "ml-1m"), CODECS.items(), (False, True)):
        if (data, upload, str(shared)) in done or (shared and not stages):
            continue  # float32 uploads have a bit for each row, which no side information shortens
        source = {"kind": data, "layout": "ncf", "validation": "none"} if data == "ml-1m" else data
        algorithm = {"kind": "colr", "rank": 4, "rows": "touched", "codec": stages}
        settings = {"data": source, "algorithm": algorithm, "clients_per_round": 60, "rounds": rounds}
        result = run("colr-ml1m", {**settings, "evaluate_every": rounds, "training.shared_negatives": shared})
        sent = result.clients["uplink_bits"]
        row = {"data": data, "upload": upload, "shared_negatives": shared, "rounds": rounds, "uploads": len(sent)}
        add(path, {**row, "bits_per_upload": round(float(sent.mean()), 1)})


def conditions(experiment: str, seed: int) -> dict[str, dict[str, Any]]:
    """Return the overrides of each condition."""
    leaky = {"training.train_negatives": "leaky"} if experiment.endswith("ml1m") else {}
    shared = {"training.shared_negatives": True} if experiment == "scolr-channel-ml1m" else {}
    found = {"one seed": {"client_seed": seed, **leaky, **shared}, "now": {}}
    if leaky:
        found["private"] = leaky
    if shared:
        found["shared"] = shared
    return found


def measure_accuracy(path: Path, experiments: list[str], seeds: int, rounds: int | None, only: list[str]) -> None:
    """Write the last metrics and the bits of each run."""
    done = {(row["experiment"], row["condition"], row["seed"]) for row in read(path)}
    for experiment, seed in product(experiments, range(seeds)):
        common: dict[str, Any] = {"seed": seed, "evaluate_every": 1000}
        if experiment in AS_PLAIN:
            common["secure"] = {"kind": "plain", "bits": AS_PLAIN[experiment]}
        if rounds is not None:
            common["rounds"] = rounds
        for condition, overrides in conditions(experiment, seed).items():
            if (experiment, condition, str(seed)) in done or condition not in only:
                continue
            result = run(experiment, {**common, **overrides})
            row: dict[str, Any] = {"experiment": experiment, "condition": condition, "seed": seed}
            row |= {"rounds": result.file.rounds, "uplink_bits": result.file.uplink_bits}
            row |= {metric: result.final.get(metric, "") for metric in METRICS}
            add(path, {**row, "model_sha256": result.file.model_sha256, "load": f"{os.getloadavg()[0]:.1f}"})


def run(experiment: str, overrides: dict[str, Any]) -> Any:
    """Run in this process, in a folder that is removed."""
    with tempfile.TemporaryDirectory() as folder:
        common = {"backend": "local", "tracking.system_metrics": False}
        data = {"data.seed": 0}  # as in the rows that are there: all seeds have one partition and one validation split
        result = nc.run(experiment, {**common, **overrides, **data}, output=folder, progress=False)
        assert len(result.clients)  # read while the folder is there
        return result


def summarise(path: Path) -> None:
    """Print the mean and standard deviation of each condition, and the difference to `one seed`, seed by seed."""
    rows = read(path)
    for experiment in dict.fromkeys(row["experiment"] for row in rows):
        own = [row for row in rows if row["experiment"] == experiment]
        for metric in (metric for metric in METRICS if own[0][metric]):
            values = {
                condition: {row["seed"]: 100 * float(row[metric]) for row in own if row["condition"] == condition}
                for condition in dict.fromkeys(row["condition"] for row in own)
            }
            for condition, of_seed in values.items():
                known = list(of_seed.values())
                line = (
                    f"{experiment}  {metric}  {condition}: {mean(known):.2f} ± {spread(known):.2f} (n = {len(known)})"
                )
                pairs = [of_seed[seed] - values["one seed"][seed] for seed in of_seed if seed in values["one seed"]]
                if condition != "one seed" and len(pairs) > 1:
                    half = float(t.ppf(0.975, len(pairs) - 1)) * stdev(pairs) / sqrt(len(pairs))
                    line += f", difference {mean(pairs):+.2f} ± {half:.2f} (95 % interval)"
                print(line)


def spread(values: list[float]) -> float:
    """Return the standard deviation (n - 1), NaN of a single value."""
    return stdev(values) if len(values) > 1 else float("nan")


def read(path: Path) -> list[dict[str, str]]:
    """Return the rows of a CSV file; none if it is not there yet."""
    if not path.is_file():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def add(path: Path, row: Mapping[str, Any]) -> None:
    """Append a row, below the names of its columns if it is the first."""
    path.parent.mkdir(parents=True, exist_ok=True)
    first = not path.is_file()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, list(row), lineterminator="\n")
        if first:
            writer.writeheader()
        writer.writerow(row)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("bits", "accuracy", "summary"))
    parser.add_argument("file", type=Path)
    parser.add_argument("--experiments", nargs="+", default=list(EXPERIMENTS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--conditions", nargs="+", default=["one seed", "private", "now", "shared"])
    arguments = parser.parse_args()
    if arguments.what == "bits":
        measure_bits(arguments.file, arguments.rounds or 60)
    elif arguments.what == "accuracy":
        measure_accuracy(arguments.file, arguments.experiments, arguments.seeds, arguments.rounds, arguments.conditions)
    else:
        summarise(arguments.file)


if __name__ == "__main__":
    main()
