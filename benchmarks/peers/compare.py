"""Comparison of narrowcast, a plain loop, bare tensor programs, pfl-research, Flower and APPFL on the same work.

All replay one file: the same samples, clients, cohorts, batches and initial parameters. Every system runs once to check
its parameters (equal to those of the plain loop to 1e-4, at a learning rate that keeps rounding errors small) and its
peak memory, then `--repeats` times, alternating with the others, to be timed (its accuracy must be the loop's to 0.02).
Each peer has its own virtual environment under .bench/, made if it is missing. All compute with one thread per process.

    python benchmarks/peers/compare.py [--workloads digits mnist] [--systems NAME ...] [--repeats 5] [--json FILE]
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
from rich.console import Console
from rich.table import Table
from workload import WORKLOADS, Workload, write

HERE = Path(__file__).resolve().parent
VENVS = HERE.parents[1] / ".bench"
TORCH = f"torch=={torch.__version__.split('+')[0]}"
REQUIREMENTS = {
    "pfl": ["pfl==0.6.0", TORCH],
    "flower": ["flwr[simulation]==1.41.0", TORCH],
    "appfl": ["appfl==1.12.0", TORCH],
}
PARITY, ACCURACY = 1e-4, 0.02
"""Largest deviation from the loop: of parameters, relative to each tensor's largest entry, and of accuracy."""
TIMEOUT_SECONDS = 900
GATE_ROUNDS = {"digits": 60, "mnist": 1}
"""Rounds after which parameters are compared."""


@dataclass(frozen=True)
class System:
    """A script, its virtual environment (None: the present one), and the workloads that it supports."""

    script: str
    arguments: tuple[str, ...] = ()
    venv: str | None = None
    workloads: tuple[str, ...] = ("digits", "mnist")
    rounds: int | None = None
    usual: bool = True


SYSTEMS = {
    "narrowcast": System("narrowcast_.py"),
    "narrowcast, 2 Ray actors": System("narrowcast_.py", ("--actors", "2")),
    "bare, bmm by hand": System("bare.py", ("--gradient", "bmm"), workloads=("digits",)),
    "bare, bmm and autograd": System("bare.py", ("--gradient", "autograd"), workloads=("digits",)),
    "bare, torch.func": System("bare.py", ("--gradient", "vmap"), workloads=("digits",)),
    "plain loop": System("loop.py"),
    "pfl": System("pfl_.py", venv="pfl"),
    "pfl, 2 processes": System("pfl_.py", ("--processes", "2"), venv="pfl"),
    "Flower": System("flower_.py", venv="flower"),
    "Flower, polls at 2 ms": System("flower_.py", ("--poll", "0.002"), venv="flower"),
    "APPFL, no gc": System("appfl_.py", ("--memory", "fast"), venv="appfl"),
    "APPFL": System("appfl_.py", venv="appfl", rounds=3, usual=False),
}
TARGETS = (
    ("digits", "bare, bmm by hand", "at most", 1.3),
    ("digits", "bare, torch.func", "at most", 1.3),
    ("digits", "pfl", "at least", 5.0),
    ("digits", "Flower", "at least", 60.0),
    ("mnist", "plain loop", "at least", 1.0),
    ("mnist", "pfl", "at least", 1.3),
)
"""Targets of narrowcast in one process: its time relative to a lower bound, or a peer's time relative to its own."""


def main() -> None:
    arguments = _arguments()
    pythons = {None: sys.executable} | {name: str(VENVS / name / "bin" / "python") for name in REQUIREMENTS}
    chosen = {name: SYSTEMS[name] for name in arguments.systems}
    for venv in {system.venv for system in chosen.values()} - {None}:
        if problem := make_venv(venv):
            print(f"left out, {venv} cannot be installed: {problem}")
            chosen = {name: system for name, system in chosen.items() if system.venv != venv}
    rows = []
    with tempfile.TemporaryDirectory(prefix="narrowcast-bench-") as folder:
        for name in arguments.workloads:
            rows += compare(WORKLOADS[name], chosen, pythons, Path(folder), arguments.repeats)
    result = {
        "rows": rows,
        "targets": verdicts(rows),
        "repeats": arguments.repeats,
        "versions": {
            venv or "narrowcast": versions(pythons[venv])
            for venv in dict.fromkeys([None, *(system.venv for system in chosen.values())])
        },
        "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores",
        "load_average": os.getloadavg(),
    }
    _print(result)
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=2))


def make_venv(name: str) -> str:
    """Make a peer's environment unless it exists with these requirements; return why that failed, or nothing."""
    folder, wanted = VENVS / name, "\n".join(REQUIREMENTS[name])
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
    workload: Workload, systems: dict[str, System], pythons: dict[str | None, str], folder: Path, repeats: int
) -> list[dict[str, Any]]:
    """Check, measure and time every system on one workload."""
    systems = {name: system for name, system in systems.items() if workload.name in system.workloads}
    file, gate, reference = (folder / f"{workload.name}{part}.npz" for part in ("", "-gate", "-reference"))
    write(workload, file)
    write(replace(workload, learning_rate=workload.gate_learning_rate), gate)
    loop = run(SYSTEMS["plain loop"], pythons[None], file, workload.rounds, reference)
    run(SYSTEMS["plain loop"], pythons[None], gate, GATE_ROUNDS[workload.name], reference)
    rows: dict[str, dict[str, Any]] = {}
    for name, system in systems.items():
        rounds = min(GATE_ROUNDS[workload.name], system.rounds or workload.rounds)
        parameters = folder / "parameters.npz"
        checked = run(system, pythons[system.venv], gate, rounds, parameters, measure_memory=True)
        error = relative_error(reference, parameters, rounds)
        if not error <= PARITY:
            raise SystemExit(f"{workload.name}: {name} is {error:.1e} from the plain loop after {rounds} rounds")
        rows[name] = {
            "workload": workload.name, "system": name, "parity": error, "peak_mib": checked["peak_mib"], "runs": [],
        }  # fmt: skip
        print(f"{workload.name}: {name} is the plain loop's to {error:.0e}, {checked['peak_mib']:.0f} MiB", flush=True)
    for _ in range(repeats):
        for name, system in systems.items():
            rounds = system.rounds or workload.rounds
            timed = run(system, pythons[system.venv], file, rounds, folder / "parameters.npz")
            if rounds == workload.rounds and abs(timed["accuracy"] - loop["accuracy"]) > ACCURACY:
                raise SystemExit(f"{workload.name}: {name} ends at {timed['accuracy']}, the loop at {loop['accuracy']}")
            timed["ms_per_round"] = 1e3 * median(timed["round_seconds"][1 if system.rounds else workload.warm_up : -1])
            rows[name]["runs"].append(timed)
            print(f"{workload.name}: {name} {timed['ms_per_round']:.2f} ms, load {timed['load']:.1f}", flush=True)
    for row in rows.values():
        runs = row["runs"]
        row["ms_per_round"] = median(each["ms_per_round"] for each in runs)
        row["best_ms_per_round"] = min(each["ms_per_round"] for each in runs)
        row["first_round_seconds"] = median(each["round_seconds"][0] for each in runs)
        row["total_seconds"] = median(each["total_seconds"] for each in runs)
        row["accuracy"] = runs[0]["accuracy"]
        row["load"] = median(each["load"] for each in runs)
    return list(rows.values())


def run(
    system: System, python: str, file: Path, rounds: int, parameters: Path, *, measure_memory: bool = False
) -> dict[str, Any]:
    """Run a system once; return its last line with wall time, load and, on request, peak memory."""
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
    began, peak = time.perf_counter(), 0.0
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            [*command, *system.arguments], stdout=output, stderr=subprocess.STDOUT, env=environment, cwd=file.parent
        )
        try:
            while process.poll() is None and time.perf_counter() - began < TIMEOUT_SECONDS:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(0.1 if measure_memory else 5.0)
                peak = max(peak, memory(process.pid)) if measure_memory else 0.0
        finally:
            _end(process)
        total = time.perf_counter() - began
        output.seek(0)
        text = output.read()
    lines = [line for line in text.splitlines() if line.startswith('{"round_seconds"')]
    if process.returncode or not lines:
        raise SystemExit(f"{' '.join(command)} failed ({process.returncode}):\n{text[-3000:]}")
    return {**json.loads(lines[-1]), "total_seconds": total, "load": os.getloadavg()[0], "peak_mib": peak}


def memory(pid: int) -> float:
    """Return the memory of a process and its children in MiB, with shared pages counted once."""
    total = 0
    with suppress(psutil.Error):
        for each in (psutil.Process(pid), *psutil.Process(pid).children(recursive=True)):
            with suppress(psutil.Error):
                total += each.memory_full_info().pss
    return total / 2**20


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


def verdicts(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return each measured target with its ratio."""
    figures = {(row["workload"], row["system"]): row["ms_per_round"] for row in rows}
    found = []
    for workload, peer, bound, wanted in TARGETS:
        own, other = figures.get((workload, "narrowcast")), figures.get((workload, peer))
        if own and other:
            ratio = own / other if bound == "at most" else other / own
            met = ratio <= wanted if bound == "at most" else ratio >= wanted
            row = {"workload": workload, "peer": peer, "bound": bound, "wanted": wanted, "got": ratio, "met": met}
            found.append(row)
    return found


def _end(process: subprocess.Popen[str]) -> None:
    """Kill a system that still runs, with its children."""
    if process.poll() is None:
        for each in psutil.Process(process.pid).children(recursive=True):
            with suppress(psutil.Error):
                each.kill()
        process.kill()
        process.wait()


def _print(result: dict[str, Any]) -> None:
    console = Console(width=130)
    own = {row["workload"]: row["ms_per_round"] for row in result["rows"] if row["system"] == "narrowcast"}
    title = f"Median of {result['repeats']} runs, each the median of its rounds"
    columns = ("ms/round", "best", "x narrowcast", "first s", "total s", "peak MiB", "accuracy", "load")
    table = Table("workload", "system", *columns, title=title)
    for row in result["rows"]:
        base = own.get(row["workload"])
        table.add_row(
            row["workload"], row["system"], f"{row['ms_per_round']:.2f}", f"{row['best_ms_per_round']:.2f}",
            f"{row['ms_per_round'] / base:.2f}" if base else "", f"{row['first_round_seconds']:.2f}",
            f"{row['total_seconds']:.1f}", f"{row['peak_mib']:.0f}", f"{row['accuracy']:.3f}", f"{row['load']:.1f}",
        )  # fmt: skip
    console.print(table)
    targets = Table("workload", "against", "wanted", "got", "", title="Targets of narrowcast in one process")
    for each in result["targets"]:
        targets.add_row(
            each["workload"], each["peer"], f"{each['bound']} {each['wanted']:g} x", f"{each['got']:.2f} x",
            "met" if each["met"] else "missed",
        )  # fmt: skip
    console.print(targets)
    for venv, packages in result["versions"].items():
        print(f"{venv}: {', '.join(f'{name} {version}' for name, version in packages.items())}")
    print(f"{result['machine']}; load average {result['load_average'][0]:.2f}")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", nargs="+", default=list(WORKLOADS), choices=WORKLOADS)
    usual = [name for name, system in SYSTEMS.items() if system.usual]
    parser.add_argument("--systems", nargs="+", default=usual, choices=SYSTEMS, metavar="NAME", help=", ".join(SYSTEMS))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
