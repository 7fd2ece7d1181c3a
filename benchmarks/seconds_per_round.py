"""Seconds per round of packaged experiments: in this process, and on Ray with one and with two actors.

Each repeat runs the same rounds from the same seed on a fresh backend, the backends in turn; the first rounds of each
are not counted, the median over repeats and its range are printed as a Markdown table, and all backends must end with
the same model. Every process has one thread.

    python benchmarks/seconds_per_round.py [--experiments fedmf-ml1m ...] [--rounds 60] [--repeats 5] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
from pathlib import Path
from statistics import median

from narrowcast.cluster.backend import RayBackend
from narrowcast.experiment import Experiment, load_experiment
from narrowcast.platform.rounds.evaluation import model_sha256
from narrowcast.platform.rounds.loop import Backend, LocalBackend
from narrowcast.platform.rounds.state import Run, start

WARM_UP_ROUNDS = 5


def main() -> None:
    arguments = _arguments()
    overrides = [f"rounds={WARM_UP_ROUNDS + arguments.rounds}", "evaluate_every=1000000", "checkpoint_seconds=1000000"]
    rows = []
    for name in arguments.experiments:
        experiment = load_experiment(name, overrides)
        runtimes: dict[str, Backend] = {
            "local": LocalBackend(),
            "ray, 1 actor": RayBackend(actors=1),
            "ray, 2 actors": RayBackend(actors=2),
        }
        repeats = [
            {kind: seconds_per_round(experiment, backend) for kind, backend in runtimes.items()}
            for _ in range(arguments.repeats)
        ]
        hashes = {digest for repeat in repeats for _, digest in repeat.values()}
        if len(hashes) != 1:
            raise SystemExit(f"{name}: the runtimes disagree on the model, {len(hashes)} different ones")
        figures = {kind: [repeat[kind][0] for repeat in repeats] for kind in runtimes}
        rows.append({"experiment": name, "model_sha256": hashes.pop(), "seconds_per_round": figures})
    report = {
        "rows": rows,
        "rounds": arguments.rounds,
        "repeats": arguments.repeats,
        "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores",
        "load_average": os.getloadavg(),
    }
    _print(report)
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=2))


def seconds_per_round(experiment: Experiment, backend: Backend) -> tuple[float, str]:
    """Return the median round after the warm-up, and the hash of the final model."""
    task = experiment.task(experiment.data_source.load())
    run = Run(experiment, experiment.algorithm, task)
    outcomes = list(backend.run(run, start(run)))
    state = outcomes[-1].state
    assert state is not None, "the last round has a checkpoint"
    counted = [outcome.wall_seconds for outcome in outcomes[WARM_UP_ROUNDS:-1]]  # the last round is evaluated
    return median(counted), model_sha256(experiment.algorithm, state)


def _print(report: dict) -> None:
    print("| experiment | backend | ms per round, median | fastest to slowest run | relative to one process |")
    print("| --- | --- | --- | --- | --- |")
    for row in report["rows"]:
        own = median(row["seconds_per_round"]["local"])
        for kind, seconds in row["seconds_per_round"].items():
            middle, spread = 1e3 * median(seconds), f"{1e3 * min(seconds):.1f} to {1e3 * max(seconds):.1f}"
            print(f"| `{row['experiment']}` | {kind} | {middle:.1f} | {spread} | {middle / own / 1e3:.2f} |")
    load = f"load average {report['load_average'][0]:.2f}"
    print(f"{report['machine']}; {report['repeats']} runs of each; {load}; same models everywhere")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experiments", nargs="+", default=["fedmf-ml1m", "colr-ml1m", "scolr-ml1m", "scolr-ml100k"])
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
