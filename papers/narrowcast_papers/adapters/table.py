"""Adapters of a transformer: trained on addresses before 1900, tuned to those of each president since, by nine methods.

The clients are the 22 presidents by party since 1900, of whom 6 take part in each of 12 rounds. Ranks give the methods
about the same uplink: a single factor has twice the rank of two. The learning rate of a method is the best on
validation text of three seeds that are not test seeds: from one rate to the next ones, until neither neighbour is
better.
"""

from __future__ import annotations

import atexit
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from narrowcast.experiment import Experiment, load_experiment
from narrowcast.platform.rounds.loop import LocalExecutor, rounds
from narrowcast.platform.rounds.outcome import Outcome
from narrowcast.platform.rounds.state import Run
from narrowcast.platform.tracking.figures import new_figure
from narrowcast.runs.significance import compare_paired
from narrowcast.studies.results import Line, Lines
from narrowcast.studies.tables import MeasuredTable, Measurements
from narrowcast.studies.tuning import climbed, one_step_away
from narrowcast.studies.verdicts import PaperVerdict, bounds_of, corrected, mean_and_spread

FILE = "lora-sotu.csv"
ROUNDS, BASE_ROUNDS, EVERY = 12, 4, 2
TEST_SEEDS, TUNING_SEEDS = tuple(range(5)), (100, 101, 102)
RATES, FIRST_RATE = (0.003, 0.03 / 10**0.5, 0.03, 0.1, 0.3, 0.3 * 10**0.5, 3.0), 0.1
"""About a factor of the square root of ten apart."""
SIGNIFICANT = 0.05
TRANSFORMER: Mapping[str, Any] = {"kind": "transformer", "width": 64, "heads": 4, "layers": 2}
REFERENCE = "FedIT"
RANKS = {"FedIT": 4, "FlexLoRA": 4, "FLoRA": 4, "FedEx-LoRA": 4, "FFA-LoRA": 8, "RoLoRA": 8}
METHODS: Mapping[str, Mapping[str, Any]] = {
    "FedIT": {"kind": "lora"},
    "FlexLoRA": {"kind": "lora", "combine": "product"},
    "FLoRA": {"kind": "lora", "combine": "stack"},
    "FedEx-LoRA": {"kind": "lora", "combine": "residual"},
    "FFA-LoRA": {"kind": "lora", "share": "b"},
    "RoLoRA": {"kind": "lora", "share": "alternate"},
    "CoLR": {"kind": "colr", "rank": 8},
    "SCoLR": {"kind": "scolr", "rank": 8},
    "FedAvg": {"kind": "fedavg"},
}


def pretraining() -> Experiment:
    """Return the experiment that gives the base: one client with all addresses before 1900."""
    return load_experiment(
        {
            "name": "sotu-base",
            "seed": 0,
            "data": {
                **{"kind": "state-of-the-union", "last_year": 1899, "stride": 512, "validation_share": 0},
                **{"clients": 1, "partition": "iid"},
            },
            "model": TRANSFORMER,
            "algorithm": "fedavg",
            "training": {"kind": "adamw", "learning_rate": 3e-3, "batch_size": 32, "epochs": 1},
            **{"rounds": BASE_ROUNDS, "clients_per_round": 1, "evaluate_every": BASE_ROUNDS, "backend": "local"},
        }
    )


def of_method(method: str, rate: float, seed: int, base: str) -> Experiment:
    """Return the experiment of one method, whose base is the safetensors file `base`."""
    rank = RANKS.get(method)
    adapted = {"kind": "adapters", "base": TRANSFORMER, "weights": base, "rank": rank, "alpha": rank}
    return load_experiment(
        {
            "name": "lora-sotu",
            "seed": seed,
            "data": {"kind": "state-of-the-union", "first_year": 1900, "stride": 3072},
            "model": adapted if rank else TRANSFORMER,
            "start_from": None if rank else base,
            "algorithm": METHODS[method],
            "training": {"kind": "sgd", "learning_rate": rate, "batch_size": 16, "epochs": 1},
            **{"rounds": ROUNDS, "clients_per_round": 6, "evaluate_every": EVERY, "backend": "local"},
        }
    )


def played(experiment: Experiment) -> tuple[Run, list[Outcome]]:
    """Return the run of an experiment, and its rounds."""
    run = Run(experiment, experiment.algorithm, experiment.task(experiment.data_source.load()))
    return run, list(rounds(run, LocalExecutor(run)))


@lru_cache(maxsize=1)
def base_file() -> str:
    """Return a file with the weights of the base, which this process trains once and removes at its end."""
    run, (*_, last) = played(pretraining())
    assert last.state is not None
    folder = tempfile.mkdtemp(prefix="sotu-base-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    path = Path(folder) / "base.safetensors"
    save_file(
        {name: np.ascontiguousarray(values) for name, values in run.algorithm.final(last.state.server).items()}, path
    )
    return str(path)


def measure(seed: int, method: str, rate: float) -> Iterator[Line]:
    """Yield the perplexities of each round that is evaluated, and the megabytes that clients have sent and received.

    Round 0 is the base, which nobody has trained.
    """
    run, outcomes = played(of_method(method, rate, seed, base_file()))
    if method == "FedAvg":
        algorithm, task = run.algorithm, run.task
        server = algorithm.final(algorithm.init(task))
        of_base = [task.model.evaluate(server, {}, task.data, split)["perplexity"] for split in ("validation", "test")]
        yield {"round": 0, "validation": of_base[0], "test": of_base[1], "up": 0.0, "down": 0.0}
    for outcome in outcomes:
        if outcome.metrics:
            yield {
                "round": outcome.step,
                **{part: outcome.metrics[f"{part}.perplexity"] for part in ("validation", "test")},
                "up": outcome.record.total_uplink_bits / 8e6,
                "down": outcome.record.total_downlink_bits / 8e6,
            }


def searched(lines: Lines, method: str) -> tuple[float | None, list[float]]:
    """Return the rate of the least perplexity on validation text, None before all runs that tell; and all rates."""

    def reached(point: tuple[float, ...]) -> float | None:
        values = [
            float(line["validation"])
            for line in lines
            if line["method"] == method
            and int(line["seed"]) in TUNING_SEEDS
            and int(line["round"]) == ROUNDS
            and np.isclose(float(line["rate"]), point[0])
        ]
        if len(values) < len(TUNING_SEEDS):
            return None
        return -mean if np.isfinite(mean := float(np.mean(values))) else -np.inf

    start: tuple[float, ...] = (FIRST_RATE,)
    best, tried = climbed(start, lambda point: one_step_away(point, (RATES,)), reached)
    return None if best is None else best[0], [rate for (rate,) in tried]


def planned(lines: Lines) -> Iterator[tuple[int, str, float]]:
    """Yield the runs that choose the rate of each method, then those of the test seeds with it."""
    chosen = dict[str, float]()
    for method in METHODS:
        while method not in chosen:
            best, tried = searched(lines, method)
            yield from ((seed, method, rate) for seed in TUNING_SEEDS for rate in tried)
            if best is not None:
                chosen[method] = best
    for seed in TEST_SEEDS:
        yield from ((seed, method, rate) for method, rate in chosen.items())


def by_seed(lines: Lines, method: str, column: str, of_round: int = ROUNDS) -> tuple[float, ...]:
    """Return a column after a round of each test seed, of those that there are."""
    chosen = [
        line
        for line in lines
        if line["method"] == method and int(line["seed"]) in TEST_SEEDS and int(line["round"]) == of_round
    ]
    return tuple(float(line[column]) for line in sorted(chosen, key=lambda line: int(line["seed"])))


def total(lines: Lines, method: str, of_round: int = ROUNDS) -> float:
    """Return the mean megabytes of both directions up to a round."""
    return float(sum(np.mean(by_seed(lines, method, column, of_round)) for column in ("up", "down")))


def judge(lines: Lines) -> list[PaperVerdict]:
    """Compare each method with FedIT, seed by seed."""
    reached = {method: values for method in METHODS if len(values := by_seed(lines, method, "test")) == len(TEST_SEEDS)}
    others = [method for method in reached if method != REFERENCE] if REFERENCE in reached else []
    tests = corrected([compare_paired(reached[method], reached[REFERENCE]) for method in others])
    tested = dict(zip(others, tests, strict=True))
    verdicts = []
    if base := by_seed(lines, "FedAvg", "test", 0):
        verdicts.append(PaperVerdict("the base, untrained", "", mean_and_spread(base, 3), "0 MB", "", base))
    for method, values in reached.items():
        up, down = (np.mean(by_seed(lines, method, column)) for column in ("up", "down"))
        said, difference = f"{up:.3g} MB up, {down:.3g} MB down", ""
        if method in tested:
            test, _, p_zero = tested[method]
            order = "below" if test.interval.mean < 0 else "above"
            said += f"; {order if p_zero < SIGNIFICANT else 'not told from'} {REFERENCE}, p = {p_zero:.2g}"
            difference = f"{test.interval.mean:+.3f} {bounds_of(test, 3)}"
        verdicts.append(PaperVerdict(method, "", mean_and_spread(values, 3), said, difference, values))
    return verdicts


def plot(lines: Lines, path: Path) -> None:
    """Draw the perplexity of each method over the megabytes sent and received, round by round."""
    figure, (axes,) = new_figure("Adapters of a transformer on addresses of presidents", 1)
    marks = range(EVERY, ROUNDS + 1, EVERY)
    for method in METHODS:
        if by_seed(lines, method, "test"):
            curve = [np.mean(by_seed(lines, method, "test", of_round)) for of_round in marks]
            axes.plot([total(lines, method, of_round) for of_round in marks], curve, marker="o", label=method)
    if base := by_seed(lines, "FedAvg", "test", 0):
        axes.axhline(float(np.mean(base)), color="0.6", linestyle="--", label="base")
    axes.set(xlabel="uplink and downlink (MB)", ylabel="perplexity of a byte", xscale="log")
    axes.legend(fontsize=8, frameon=False)
    figure.savefig(path, dpi=100)


ADDRESSES = MeasuredTable(
    (Measurements(FILE, ("seed", "method", "rate"), ("round", "validation", "test", "up", "down"), planned, measure),),
    judge,
    plot,
)
