"""What tuning buys: hypervolume against random search, rounds saved by pruning, trials per hour, and its own cost.

    python benchmarks/tuning.py hypervolume|pruning|throughput [OUTPUT]

Each figure is of real studies, run by the command line as a user would.
"""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from narrowcast.tuning.summary import hypervolume

SEEDS = (0, 1, 2)
SHORT = ("experiment.rounds=40", "experiment.clients_per_round=20")  # of the study of ranks and bits
PLAIN = ("study.retest.trials=0", "experiment.tracking.system_metrics=false")
MOVIES = ("study.trials=30",)  # of the study of rates


def tune(study: str, name: str, output: Path, *settings: str) -> tuple[list[dict[str, Any]], float]:
    """The finished trials of a study, played now unless they are there already, and the seconds it took."""
    path, began = output / name / "trials.csv", time.monotonic()
    command = [sys.executable, "-m", "narrowcast", "tune", study, *settings, *PLAIN, "--name", name]
    if not (output / name / "best.yaml").is_file():
        subprocess.run([*command, "--output", str(output)], check=True, stdout=subprocess.DEVNULL)
    with path.open(newline="") as lines:
        rows = [row for row in csv.DictReader(lines) if row["state"] in ("complete", "pruned")]
    return rows, time.monotonic() - began


def spread(values: list[float]) -> str:
    return f"{np.mean(values):.4g} ± {np.std(values, ddof=1):.2g}  ({', '.join(f'{each:.4g}' for each in values)})"


def compare_hypervolume(output: Path) -> None:
    """HR@10 against the decimal logarithm of the uplink, beyond 10 % (a random ranking) and 1 GB."""
    found: dict[str, list[float]] = {"tpe": [], "random": []}
    rounds: dict[str, int] = {"tpe": 0, "random": 0}
    for seed in SEEDS:
        for sampler, volumes in found.items():
            settings = (f"study.sampler.kind={sampler}", f"study.seed={seed}", *SHORT)
            rows, seconds = tune("scolr-ml100k-rank-bits", f"hv-{sampler}-{seed}", output, *settings)
            points = np.array([[float(row["validation.hr@10"]), -np.log10(float(row["uplink_bits"]))] for row in rows])
            volumes.append(hypervolume(points, np.array([0.1, -np.log10(8e9)])))
            rounds[sampler] += sum(int(row["rounds"]) for row in rows)
            print(f"{sampler} seed {seed}: {len(rows)} trials, {volumes[-1]:.4f}, {seconds:.0f} s", flush=True)
    for sampler, values in found.items():
        print(f"{sampler}: hypervolume {spread(values)}, {rounds[sampler]} rounds")


def compare_pruning(output: Path) -> None:
    """The same trials' sampler, with and without the pruner: best value reached, and rounds played for it."""
    for seed in SEEDS:
        lines = []
        for name, settings in (("pruned", ()), ("unpruned", ("study.pruner=none",))):
            rows, seconds = tune("fedmf-ml1m-rates", f"{name}-{seed}", output, f"study.seed={seed}", *MOVIES, *settings)
            complete = [float(row["validation.hr@10"]) for row in rows if row["state"] == "complete"]
            rounds = sum(int(row["rounds"]) for row in rows)
            lines.append((max(complete), rounds))
            print(f"{name} seed {seed}: best {100 * max(complete):.2f} %, {rounds} rounds, {seconds:.0f} s", flush=True)
        (best, rounds), (whole, all_rounds) = lines
        print(f"seed {seed}: {100 * (best - whole):+.2f} points at {rounds / all_rounds:.2f} of the rounds", flush=True)


def compare_throughput(output: Path) -> None:
    """Trials per hour by workers and trials together, and the share of the time that is not training."""
    settings = ("study.trials=16", "study.sampler=random", "study.pruner=none", "experiment.evaluate_every=20")
    for parallel, together in ((1, 1), (2, 1), (1, 8), (2, 8)):
        name = f"digits-{parallel}x{together}"
        chosen = (f"study.parallel={parallel}", f"study.trials_together={together}", *settings)
        tune(str(_digits(output)), name, output, *chosen)
        print(f"{name}: {_rate(output / name)}, load {os.getloadavg()[0]:.1f}", flush=True)


def _digits(output: Path) -> Path:
    output.mkdir(parents=True, exist_ok=True)
    path = output / "digits.yaml"
    path.write_text(
        "experiment: fedavg-digits\nstudy: {objectives: {validation.accuracy: maximize}}\nspace:\n"
        "  training.learning_rate: {kind: float, low: 0.01, high: 1, log: true}\n"
    )
    return path


def _rate(folder: Path) -> str:
    stamps, training = [], 0.0
    for trial in folder.glob("trials/*/rounds.jsonl"):
        rows = [json.loads(line) for line in trial.read_text().splitlines()]
        training += rows[-1]["wall_seconds"]
        stamps.append((rows[0]["logged_at_ms"] / 1000 - rows[0]["wall_seconds"], rows[-1]["logged_at_ms"] / 1000))
    span = max(end for _, end in stamps) - min(begin for begin, _ in stamps)
    return f"{3600 * len(stamps) / span:.0f} trials per hour, {training:.1f} s of training within {span:.1f} s"


if __name__ == "__main__":
    which = {"hypervolume": compare_hypervolume, "pruning": compare_pruning, "throughput": compare_throughput}
    which[sys.argv[1]](Path(sys.argv[2] if len(sys.argv) > 2 else "runs/benchmark-tuning"))
