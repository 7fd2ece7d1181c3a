"""Benchmarks of tuning: hypervolume against random search, rounds saved by pruning, trials per hour, and overhead.

    python benchmarks/tuning.py hypervolume|pruning|throughput|overhead|profile [OUTPUT]

Each figure is measured on real studies, run from the command line.
"""

from __future__ import annotations

import cProfile
import csv
import io
import json
import os
import pstats
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np

from narrowcast.cli.many_runs import tune as tune_command
from narrowcast.experiment import Experiment
from narrowcast.platform.rounds.loop import LocalBackend
from narrowcast.platform.rounds.state import start
from narrowcast.platform.types import FloatArray
from narrowcast.tuning.study import prepare_study, run_study
from narrowcast.tuning.study_file import load_study
from narrowcast.tuning.trials import TrialRecord
from narrowcast.tuning.workers import SharedData

SEEDS = (0, 1, 2)
PLAIN = ("study.holdout.trials=0", "experiment.tracking.system_metrics=false")
MOVIES = ("study.trials=30",)  # of the study of rates
HERE = ("study.trials=6", "study.pruner=none", "study.holdout.trials=0", "study.backend=local", "study.parallel=1")
REALISTIC = ("fedmf-ml1m-rates", "scolr-ml100k-rank-bits")
PARTS = (  # by module and function
    "study.prepare_study", "mlflow_run.check_store", "movielens.load", "study_client.ask", "study_client.report",
    "study_client.tell", "study_folder.write_trial", "study_run.put", "trial_runner.run_of", "study._conclude",
    "study_run.finish",
)  # fmt: skip


def tune(study: str, name: str, output: Path, *settings: str) -> tuple[list[dict[str, Any]], float]:
    """Return the finished trials of a study, run now unless it is there already, and the seconds it took."""
    path, began = output / name / "trials.csv", time.monotonic()
    command = [sys.executable, "-m", "narrowcast", "tune", study, *settings, *PLAIN, "--name", name]
    if not (output / name / "best.yaml").is_file():
        subprocess.run([*command, "--output", str(output)], check=True, stdout=subprocess.DEVNULL)
    with path.open(newline="") as lines:
        rows = [row for row in csv.DictReader(lines) if row["state"] in ("complete", "pruned")]
    return rows, time.monotonic() - began


def hypervolume(points: FloatArray, reference: FloatArray) -> float:
    """Return the area that points [n, 2] dominate beyond a reference point [2]; more is better in both columns."""
    area, height = 0.0, float(reference[1])
    inside = points[(points > reference).all(axis=1)]
    for x, y in inside[np.argsort(-inside[:, 0])]:
        if y > height:
            area += (x - reference[0]) * (y - height)
            height = float(y)
    return area


def spread(values: list[float]) -> str:
    return f"{np.mean(values):.4g} ± {np.std(values, ddof=1):.2g}  ({', '.join(f'{each:.4g}' for each in values)})"


def compare_hypervolume(output: Path) -> None:
    """Compare HR@10 against the decimal logarithm of the uplink, beyond 10 % (a random ranking) and 1 GB."""
    found: dict[str, list[float]] = {"gp": [], "random": []}
    rounds: dict[str, int] = {"gp": 0, "random": 0}
    for seed in SEEDS:
        for sampler, volumes in found.items():
            settings = (f"study.sampler.kind={sampler}", f"study.seed={seed}")
            rows, seconds = tune("scolr-ml100k-rank-bits", f"hv-{sampler}-{seed}", output, *settings)
            points = np.array([[float(row["validation.hr@10"]), -np.log10(float(row["uplink_bits"]))] for row in rows])
            volumes.append(hypervolume(points, np.array([0.1, -np.log10(8e9)])))
            rounds[sampler] += sum(int(row["rounds"]) for row in rows)
            print(f"{sampler} seed {seed}: {len(rows)} trials, {volumes[-1]:.4f}, {seconds:.0f} s", flush=True)
    for sampler, values in found.items():
        print(f"{sampler}: hypervolume {spread(values)}, {rounds[sampler]} rounds")


def compare_pruning(output: Path) -> None:
    """Compare the best value and the rounds with and without the pruner."""
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
    """Measure trials per hour by workers and trials together, and the share of the time spent training."""
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
    trials = _rows(folder)
    training = sum(rows[-1]["wall_seconds"] for rows in trials)
    span = _span(trials)
    return f"{3600 * len(trials) / span:.0f} trials per hour, {training:.1f} s of training within {span:.1f} s"


def _rows(folder: Path) -> list[list[dict[str, Any]]]:
    """Return the evaluations of each trial of a study."""
    paths = sorted(folder.glob("trials/*/rounds.jsonl"))
    return [[json.loads(line) for line in path.read_text().splitlines()] for path in paths]


def _span(trials: Sequence[Sequence[dict[str, Any]]]) -> float:
    """Return the seconds from the start of the first trial to the end of the last."""
    begins = [rows[0]["logged_at_ms"] / 1000 - rows[0]["wall_seconds"] for rows in trials]
    return float(max(rows[-1]["logged_at_ms"] / 1000 for rows in trials) - min(begins))


def compare_overhead(output: Path) -> None:
    """Compare the trials of a study in this process with the same rounds alone, in wall and CPU seconds."""
    for study in REALISTIC:
        folder = output / f"overhead-{study}"
        shutil.rmtree(folder, ignore_errors=True)
        file = load_study(study, [*HERE, "experiment.tracking.system_metrics=false"])
        prepared = prepare_study(file, folder)
        _run(file.build({}).model_copy(update={"rounds": 2, "evaluate_every": 2}), prepared.shared)  # compiles kernels
        whole = _seconds(lambda prepared=prepared: run_study(prepared))
        rows = [TrialRecord.of(trial, file.space) for trial in prepared.client.trials()]
        trials = _span(_rows(folder / file.name))
        experiments = [file.build(row.params) for row in rows]
        bare = _seconds(lambda all=experiments, shared=prepared.shared: [_run(each, shared) for each in all])
        print(
            f"{study}: {len(rows)} trials in {trials:.1f} s, bare {bare[0]:.1f} s; with the plots {whole[0]:.1f} s; "
            f"CPU {whole[1]:.1f} s with the plots, bare {bare[1]:.1f} s; load {os.getloadavg()[0]:.1f}",
            flush=True,
        )


def _seconds(work: Callable[[], Any]) -> tuple[float, float]:
    """Return the wall seconds, and the CPU seconds of all threads."""
    began = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - began[0], time.process_time() - began[1]


def _run(experiment: Experiment, shared: SharedData) -> None:
    """Run the round loop alone, without a study or a store."""
    run = shared.run_of(experiment)
    for _ in LocalBackend().run(run, start(run)):
        pass


def profile(output: Path) -> None:
    """Profile a study with one worker in this process."""
    for study in REALISTIC:
        settings = (*HERE, "experiment.tracking.system_metrics=false")
        folder = output / "profile" / study
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        profiler = cProfile.Profile()
        cpu = time.process_time(), time.thread_time()
        with redirect_stdout(io.StringIO()):
            profiler.runcall(tune_command.main, [study, *settings, "--output", str(folder)], standalone_mode=False)
        threads = (time.process_time() - cpu[0]) - (time.thread_time() - cpu[1])
        seconds = {
            f"{Path(file).stem}.{name}": cumulative
            for (file, _, name), (_, _, _, cumulative, _) in pstats.Stats(profiler).stats.items()  # type: ignore[attr-defined]
            if "narrowcast" in file
        }
        in_trials = seconds["worker_pool.next_message"]
        print(f"{study}: {in_trials:.1f} s in the trials, load {os.getloadavg()[0]:.1f}; besides")
        for part in PARTS:
            print(f"  {part:28} {seconds[part]:6.2f} s")
        print(f"  {'other threads (MLflow), CPU':28} {threads:6.2f} s", flush=True)


if __name__ == "__main__":
    which = {
        "hypervolume": compare_hypervolume,
        "pruning": compare_pruning,
        "throughput": compare_throughput,
        "overhead": compare_overhead,
        "profile": profile,
    }
    which[sys.argv[1]](Path(sys.argv[2] if len(sys.argv) > 2 else "runs/benchmark-tuning"))
