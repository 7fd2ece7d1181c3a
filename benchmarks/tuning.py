"""What tuning buys: hypervolume against random search, rounds saved by pruning, trials per hour, and its own cost.

    python benchmarks/tuning.py hypervolume|pruning|throughput|overhead|profile [OUTPUT]

Each figure is of real studies, run by the command line as a user would.
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
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np

from narrowcast.cli.tune import tune as tune_command
from narrowcast.experiment import Experiment
from narrowcast.platform.contracts import Dataset
from narrowcast.platform.local_backend import LocalExecutor
from narrowcast.platform.rounds import rounds
from narrowcast.platform.run import Run
from narrowcast.tuning import dispatch as sweep
from narrowcast.tuning.study_file import load_study
from narrowcast.tuning.summary import TrialRow, hypervolume, trial_row

SEEDS = (0, 1, 2)
PLAIN = ("study.retest.trials=0", "experiment.tracking.system_metrics=false")
MOVIES = ("study.trials=30",)  # of the study of rates
HERE = ("study.trials=6", "study.pruner=none", "study.retest.trials=0", "study.backend=local", "study.parallel=1")
REALISTIC = ("fedmf-ml1m-rates", "scolr-ml100k-rank-bits")
PARTS = (  # by module and function
    "sweep.prepare_study", "mlflow_run.check_store", "movielens.load", "study.ask", "study.report", "study.tell",
    "trial_folder.write_trial", "study_run.put", "trial_player._replica", "sweep.conclude", "study_run.finish",
)  # fmt: skip


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
    trials = _rows(folder)
    training = sum(rows[-1]["wall_seconds"] for rows in trials)
    span = _span(trials)
    return f"{3600 * len(trials) / span:.0f} trials per hour, {training:.1f} s of training within {span:.1f} s"


def _rows(folder: Path) -> list[list[dict[str, Any]]]:
    """The evaluations of each trial of a study."""
    paths = sorted(folder.glob("trials/*/rounds.jsonl"))
    return [[json.loads(line) for line in path.read_text().splitlines()] for path in paths]


def _span(trials: Sequence[Sequence[dict[str, Any]]]) -> float:
    """Seconds from where the first trial begins to train to where the last one ends."""
    begins = [rows[0]["logged_at_ms"] / 1000 - rows[0]["wall_seconds"] for rows in trials]
    return float(max(rows[-1]["logged_at_ms"] / 1000 for rows in trials) - min(begins))


def compare_overhead(output: Path) -> None:
    """Trials of a study of one worker in this process, and the same played bare: seconds on the wall and of CPU."""
    for study in REALISTIC:
        folder = output / f"overhead-{study}"
        shutil.rmtree(folder, ignore_errors=True)
        file = load_study(study, [*HERE, "experiment.tracking.system_metrics=false"])
        prepared = sweep.prepare_study(file, folder)
        data = prepared.shared.data
        _play(file.build({}).model_copy(update={"rounds": 2, "evaluate_every": 2}), data)  # which compiles kernels
        whole = _seconds(lambda prepared=prepared: sweep.run_study(prepared, Unseen()))
        rows = [trial_row(trial, file.space) for trial in prepared.ledger.trials()]
        trials = _span(_rows(folder / file.name))
        bare = _seconds(lambda rows=rows, file=file, data=data: [_play(file.build(row.drawn), data) for row in rows])
        print(
            f"{study}: {len(rows)} trials in {trials:.1f} s, bare {bare[0]:.1f} s; with the plots {whole[0]:.1f} s; "
            f"CPU {whole[1]:.1f} s with the plots, bare {bare[1]:.1f} s; load {os.getloadavg()[0]:.1f}",
            flush=True,
        )


class Unseen:
    """Nobody looks on."""

    def begun(self, number: int, values: Mapping[str, Any], rounds: int) -> None: ...

    def evaluated(self, number: int, row: Mapping[str, Any]) -> None: ...

    def ended(self, row: TrialRow) -> None: ...

    def say(self, line: str) -> None: ...


def _seconds(work: Callable[[], Any]) -> tuple[float, float]:
    """On the wall, and of CPU in all threads."""
    began = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - began[0], time.process_time() - began[1]


def _play(experiment: Experiment, data: Dataset) -> None:
    """The round loop, and nothing of a study or of a store."""
    plain, task = experiment.model_copy(update={"checkpoint_every": experiment.rounds}), experiment.task(data)
    run = Run(plain, plain.algorithm, task)
    for _ in rounds(run, LocalExecutor(run)):
        pass


def profile(output: Path) -> None:
    """Where the time of a study goes that is not training: one worker, in this process, under cProfile."""
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
        print(f"{study}: {seconds['steps.next']:.1f} s in the trials, load {os.getloadavg()[0]:.1f}; beside them")
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
