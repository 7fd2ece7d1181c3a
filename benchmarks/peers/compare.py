"""Comparison of narrowcast, a plain loop, bare tensor programs, pfl-research, Flower and APPFL on the same work.

All replay one file: the same samples, clients, cohorts, batches and initial parameters. Every system runs `--repeats`
times, alternating with the others. Its parameters have to be those of the plain loop to 1e-4: after each run, or, for a
workload whose rounding errors grow too fast, after one more run at a lower learning rate, where the loop in float64 may
stand for the loop in float32, and then its accuracy has to be the loop's to 0.02. Systems are compared with equal
numbers of processes that train, each with one thread. Each run is appended to `--csv` when it ends; a repeated command
runs what is missing there, so that a comparison may be made in parts of `--minutes`. Each peer has its own virtual
environment under `--venvs`, made if it is missing.

    python benchmarks/peers/compare.py [--csv benchmarks/results/peers.csv] [--write docs/benchmarks.md]
                                       [--workloads digits mnist] [--systems NAME ...] [--repeats 5] [--minutes 12]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import psutil
import torch
from speed_table import TimedRun, append_run, read_runs, replace_tables, table
from workload import WORKLOADS, Workload, write

HERE = Path(__file__).resolve().parent
TORCH = f"torch=={torch.__version__.split('+')[0]}"
REQUIREMENTS = {
    "pfl": ["pfl==0.6.0", TORCH],
    "flower": ["flwr[simulation]==1.41.0", TORCH],
    "appfl": ["appfl==1.12.0", TORCH],
}
PARITY, ACCURACY = 1e-4, 0.02
"""Largest deviation from the loop: of parameters, relative to each tensor's largest entry, and of accuracy."""
TIMEOUT_SECONDS = 900
GATE_ROUNDS = 1
"""Rounds at the lower learning rate."""
IDLE_SECONDS = 0.3
"""Time before each run in which the load of other work is measured."""


@dataclass(frozen=True)
class System:
    """A script, its virtual environment (None: the present one), the processes that train, and what connects them.

    `rounds`: fewer than the workload's where a round takes so long that the median needs no more.
    """

    name: str
    script: str
    arguments: tuple[str, ...] = ()
    venv: str | None = None
    workers: int = 1
    on: str = ""
    workloads: tuple[str, ...] = ("digits", "mnist")
    rounds: int | None = None

    @property
    def key(self) -> tuple[str, int]:
        """What identifies the system in the table."""
        return self.name, self.workers


ONLY_DIGITS = ("digits",)
SYSTEMS = (
    System("narrowcast", "narrowcast_.py"),
    System("bare program, gradients by hand", "bare.py", ("--gradient", "bmm"), workloads=ONLY_DIGITS),
    System("bare program, autograd", "bare.py", ("--gradient", "autograd"), workloads=ONLY_DIGITS),
    System("bare program, torch.func", "bare.py", ("--gradient", "vmap"), workloads=ONLY_DIGITS),
    System("plain loop over clients", "loop.py"),
    System("pfl 0.6.0", "pfl_.py", venv="pfl"),
    System("APPFL 1.12, simulation, no gc", "appfl_.py", ("--memory", "fast"), "appfl", workloads=ONLY_DIGITS),
    System("narrowcast", "narrowcast_.py", ("--actors", "2"), workers=2, on="Ray"),
    System("pfl 0.6.0", "pfl_.py", ("--processes", "2"), "pfl", workers=2, on="torchrun"),
    System("Flower 1.41", "flower_.py", (), "flower", 2, "Ray", ONLY_DIGITS, 20),
    System("Flower 1.41, polls at 2 ms", "flower_.py", ("--poll", "0.002"), "flower", 2, "Ray", rounds=20),
)
TARGETS = (("digits", "bare program, gradients by hand", 2.5), ("mnist", "plain loop over clients", 1.0))
"""How many times as long as another program a round of narrowcast in one process may take."""


def main() -> None:
    arguments = _arguments()
    end = time.monotonic() + 60 * arguments.minutes
    pythons = {None: sys.executable} | {name: str(arguments.venvs / name / "bin" / "python") for name in REQUIREMENTS}
    chosen = [system for system in SYSTEMS if system.name in arguments.systems]
    for venv in {system.venv for system in chosen if system.venv}:
        if problem := make_venv(venv, arguments.venvs):
            print(f"left out, {venv} cannot be installed: {problem}")
            chosen = [system for system in chosen if system.venv != venv]
    for name in arguments.workloads:
        with tempfile.TemporaryDirectory(prefix="narrowcast-bench-") as folder:
            compare(WORKLOADS[name], chosen, pythons, Path(folder), arguments.csv, arguments.repeats, end)
    runs = read_runs(arguments.csv)
    tables = {name: table(runs, name) for name in arguments.workloads}
    for name, written in tables.items():
        print(f"\n{name}\n\n{written}")
    for workload, other, most in TARGETS:
        times = {
            name: [run.ms for run in runs if (run.workload, run.workers, run.system) == (workload, 1, name)]
            for name in ("narrowcast", other)
        }
        if workload in arguments.workloads and all(times.values()):
            ratio = median(times["narrowcast"]) / median(times[other])
            met = "met" if ratio <= most else "missed"
            print(f"{workload}: {ratio:.2f} times the {other} (wanted at most {most:g}): {met}")
    for venv in dict.fromkeys([None, *(system.venv for system in chosen)]):
        found = ", ".join(f"{name} {version}" for name, version in versions(pythons[venv]).items())
        print(f"{venv or 'narrowcast'}: {found}")
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores")
    if arguments.write:
        replace_tables(arguments.write, tables)


def make_venv(name: str, venvs: Path) -> str:
    """Make a peer's environment unless it exists with these requirements; return why that failed, or nothing."""
    folder, wanted = venvs / name, "\n".join(REQUIREMENTS[name])
    mark = folder / "requirements.txt"
    if mark.is_file() and mark.read_text() == wanted:
        return ""
    print(f"installing {', '.join(REQUIREMENTS[name])} in {folder}")
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
    install = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", *REQUIREMENTS[name]]
    done = subprocess.run(install, capture_output=True, text=True, check=False)
    if done.returncode:
        return done.stderr.strip().splitlines()[-1]
    mark.write_text(wanted)
    return ""


def compare(
    workload: Workload,
    systems: list[System],
    pythons: dict[str | None, str],
    folder: Path,
    results: Path,
    repeats: int,
    end: float,
) -> None:
    """Time every system on one workload, and check it; append each run to `results`; begin none after `end`."""
    done = {(run.system, run.workers, run.repeat) for run in read_runs(results) if run.workload == workload.name}
    systems = [
        system
        for system in systems
        if workload.name in system.workloads and any((*system.key, repeat) not in done for repeat in range(repeats))
    ]
    if not systems:
        return
    file, gate, parameters = (folder / f"{name}.npz" for name in ("workload", "gate", "parameters"))
    write(workload, file)
    loop = next(system for system in SYSTEMS if system.script == "loop.py")
    exact_loop = replace(loop, arguments=("--precision", "float64"))
    references = [folder / "reference.npz"]
    whole = run(loop, pythons[None], file, workload.rounds, references[0])
    deviations: dict[tuple[str, int], float] = {}

    def check(system: System, rounds: int) -> None:
        deviations[system.key] = deviation = min(relative_error(each, parameters, rounds) for each in references)
        if not deviation <= PARITY:
            raise SystemExit(f"{workload.name}: {system.name} is {deviation:.1e} from the plain loop")

    gated = workload.gate_learning_rate != workload.learning_rate
    if gated:
        write(replace(workload, learning_rate=workload.gate_learning_rate), gate)
        references.append(folder / "exact.npz")
        for each, path in zip((loop, exact_loop), references, strict=True):
            run(each, pythons[None], gate, GATE_ROUNDS, path)
    for repeat in range(repeats):
        for system in systems:
            if (*system.key, repeat) in done:
                continue
            if time.monotonic() > end:
                print(f"{workload.name}: out of time; repeat the command for the rest")
                return
            if gated and system.key not in deviations:
                run(system, pythons[system.venv], gate, GATE_ROUNDS, parameters)
                check(system, GATE_ROUNDS)
            busy = psutil.cpu_percent(interval=IDLE_SECONDS) / 100 * (os.cpu_count() or 1)
            n_rounds = min(system.rounds or workload.rounds, workload.rounds)
            timed = run(system, pythons[system.venv], file, n_rounds, parameters)
            if not gated:
                check(system, n_rounds)
            if n_rounds == workload.rounds and abs(timed["accuracy"] - whole["accuracy"]) > ACCURACY:
                raise SystemExit(
                    f"{workload.name}: {system.name} ends at {timed['accuracy']}, the loop at {whole['accuracy']}"
                )
            counted = slice(workload.warm_up if n_rounds == workload.rounds else 3, -1)
            row = TimedRun(
                workload=workload.name, system=system.name, workers=system.workers, on=system.on, repeat=repeat,
                ms=1e3 * median(timed["round_seconds"][counted]),
                cpu_ms=1e3 * median(timed["cpu_seconds"][counted]) if system.workers == 1 else 0.0,
                busy_cores=busy, accuracy=timed["accuracy"], deviation=deviations[system.key],
            )  # fmt: skip
            append_run(results, row)
            print(f"{workload.name}: {system.name}, {system.workers}: {row.ms:.2f} ms, busy {busy:.1f}", flush=True)


def run(system: System, python: str, file: Path, rounds: int, parameters: Path) -> dict[str, Any]:
    """Run a system once and return what its last line says."""
    command = [python, str(HERE / system.script), str(file), "--rounds", str(rounds), "--parameters", str(parameters)]
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_HOME": str(file.parent / "flwr"),
    }
    environment.pop("RAY_ADDRESS", None)
    if system.venv:
        environment.pop("PYTHONPATH", None)
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            [*command, *system.arguments], stdout=output, stderr=subprocess.STDOUT, env=environment, cwd=file.parent
        )
        try:
            with suppress(subprocess.TimeoutExpired):
                process.wait(TIMEOUT_SECONDS)
        finally:
            _end(process)
        output.seek(0)
        text = output.read()
    lines = [line for line in text.splitlines() if line.startswith('{"round_seconds"')]
    if process.returncode or not lines:
        raise SystemExit(f"{' '.join(command)} failed ({process.returncode}):\n{text[-3000:]}")
    return dict(json.loads(lines[-1]))


def relative_error(reference: Path, parameters: Path, rounds: int) -> float:
    """Return the largest deviation of any tensor from the loop's, relative to that tensor's largest entry."""
    wanted, got = np.load(reference), np.load(parameters)
    pairs = [(wanted[f"{rounds - 1}/{name.partition('/')[2]}"], got[name]) for name in got.files if name[:2] == "0/"]
    if len(got.files) > len(pairs):  # the loop itself keeps every round
        pairs = [(wanted[name], got[name]) for name in got.files]
    return max(float(np.abs(a - b).max() / np.abs(a).max()) for a, b in pairs)


def versions(python: str) -> dict[str, str]:
    """Return the versions of the compared packages in an environment."""
    listed = subprocess.run([python, "-m", "pip", "list", "--format", "json"], capture_output=True, check=True).stdout
    named = {"appfl", "flwr", "numpy", "pfl", "ray", "torch"}
    return {package["name"]: package["version"] for package in json.loads(listed) if package["name"] in named}


def _end(process: subprocess.Popen[str]) -> None:
    """Kill a system that still runs, with its children."""
    if process.poll() is None:
        for each in psutil.Process(process.pid).children(recursive=True):
            with suppress(psutil.Error):
                each.kill()
        process.kill()
        process.wait()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = list(dict.fromkeys(system.name for system in SYSTEMS))
    parser.add_argument("--workloads", nargs="+", default=list(WORKLOADS), choices=WORKLOADS)
    parser.add_argument("--systems", nargs="+", default=names, choices=names, metavar="NAME", help=", ".join(names))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--minutes", type=float, default=60.0, help="begin no run after this time")
    parser.add_argument("--csv", type=Path, default=HERE.parent / "results" / "peers.csv", help="results, resumed")
    parser.add_argument("--write", type=Path, help="Markdown page whose tables are replaced")
    parser.add_argument("--venvs", type=Path, default=HERE.parents[1] / ".bench", help="folder of the peers' packages")
    return parser.parse_args()


if __name__ == "__main__":
    main()
