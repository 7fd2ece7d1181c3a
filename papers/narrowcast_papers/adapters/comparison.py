"""Methods that tune a transformer, trained on addresses before 1900, to those of each president since.

The clients are the 22 presidents by party since 1900, of whom 6 take part in each round. The learning rate of a
method is the best on validation text of three seeds that are not test seeds: from one rate to the next ones, until
neither neighbour is better.
"""

from __future__ import annotations

import atexit
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
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
from narrowcast.studies.tuning import Choice, climbed, one_step_away, tuning_verdict
from narrowcast.studies.verdicts import PaperVerdict, bounds_of, corrected, mean_and_spread

ROUNDS, BASE_ROUNDS, EVERY = 12, 4, 2
TEST_SEEDS, TUNING_SEEDS = tuple(range(5)), (100, 101, 102)
SIGNIFICANT = 0.05
TRANSFORMER: Mapping[str, Any] = {"kind": "transformer", "width": 64, "heads": 4, "layers": 2}


@dataclass(frozen=True)
class Method:
    """A method, the rank of its adapters, None if it trains the whole model, and further fields of its run.

    Its search for a learning rate begins at `first_rate`, or where those of the comparison begin. `adapters` has
    further fields of the model.
    """

    algorithm: Mapping[str, Any]
    rank: int | None = None
    fields: Mapping[str, Any] = field(default_factory=dict)
    first_rate: float | None = None
    adapters: Mapping[str, Any] = field(default_factory=dict)
    rounds: int = ROUNDS


@dataclass(frozen=True)
class Comparison:
    """Methods that tune the base, each at its own learning rate of `rates`, beside one of them.

    With a `target`, the seconds that a method needs to come down to this perplexity are compared too.
    """

    title: str
    file: str
    methods: Mapping[str, Method]
    reference: str
    training: Mapping[str, Any]
    rates: tuple[float, ...]
    first_rate: float
    fields: Mapping[str, Any] = field(default_factory=dict)
    target: float | None = None

    @property
    def table(self) -> MeasuredTable:
        """The table of the comparison."""
        values = ("round", "validation", "test", "up", "down", *(("seconds",) if self.target else ()))
        measured = Measurements(self.file, ("seed", "method", "rate"), values, self.planned, self.measure)
        return MeasuredTable((measured,), self.judge, self.plot)

    def experiment(self, method: str, rate: float, seed: int, base: str) -> Experiment:
        """Return the experiment of one method, whose base is the safetensors file `base`."""
        its = self.methods[method]
        adapted = {"kind": "adapters", "base": TRANSFORMER, "weights": base, "rank": its.rank, "alpha": its.rank}
        adapted |= its.adapters
        return load_experiment(
            {
                "name": Path(self.file).stem,
                "seed": seed,
                "data": {"kind": "state-of-the-union", "first_year": 1900, "stride": 3072},
                "model": adapted if its.rank else TRANSFORMER,
                "start_from": None if its.rank else base,
                "algorithm": its.algorithm,
                "training": {**self.training, "learning_rate": rate, "batch_size": 16, "epochs": 1},
                **{"rounds": its.rounds, "clients_per_round": 6, "evaluate_every": EVERY, "backend": "local"},
                **self.fields,
                **its.fields,
            }
        )

    def measure(self, seed: int, method: str, rate: float) -> Iterator[Line]:
        """Yield perplexities of each round that is evaluated, and the megabytes that clients have sent and received.

        Round 0 is the base, which nobody has trained.
        """
        run, outcomes = played(self.experiment(method, rate, seed, base_file()))
        algorithm, task = run.algorithm, run.task
        server = algorithm.final(algorithm.init(task))
        of_base = [task.model.evaluate(server, {}, task.data, split)["perplexity"] for split in ("validation", "test")]
        start = {"round": 0, "validation": of_base[0], "test": of_base[1], "up": 0.0, "down": 0.0}
        yield {**start, **({"seconds": 0.0} if self.target else {})}
        for outcome in outcomes:
            if outcome.metrics:
                yield {
                    "round": outcome.step,
                    **{part: outcome.metrics[f"{part}.perplexity"] for part in ("validation", "test")},
                    "up": outcome.record.total_uplink_bits / 8e6,
                    "down": outcome.record.total_downlink_bits / 8e6,
                    **({"seconds": outcome.record.simulated_seconds} if self.target else {}),
                }

    def searched(self, lines: Lines, method: str) -> tuple[float | None, list[float]]:
        """Return the rate of the least perplexity on validation text, None before all runs that tell; and all rates."""

        def reached(point: tuple[float, ...]) -> float | None:
            values = [
                float(line["validation"])
                for line in lines
                if line["method"] == method
                and int(line["seed"]) in TUNING_SEEDS
                and int(line["round"]) == self.methods[method].rounds
                and np.isclose(float(line["rate"]), point[0])
            ]
            if len(values) < len(TUNING_SEEDS):
                return None
            return -mean if np.isfinite(mean := float(np.mean(values))) else -np.inf

        start: tuple[float, ...] = (self.methods[method].first_rate or self.first_rate,)
        best, tried = climbed(start, lambda point: one_step_away(point, (self.rates,)), reached)
        return None if best is None else best[0], [rate for (rate,) in tried]

    def planned(self, lines: Lines) -> Iterator[tuple[int, str, float]]:
        """Yield the runs that choose the rate of each method, then those of the test seeds with it."""
        chosen = dict[str, float]()
        for method in self.methods:
            while method not in chosen:
                best, tried = self.searched(lines, method)
                yield from ((seed, method, rate) for seed in TUNING_SEEDS for rate in tried)
                if best is not None:
                    chosen[method] = best
        for seed in TEST_SEEDS:
            yield from ((seed, method, rate) for method, rate in chosen.items())

    def judge(self, lines: Lines) -> list[PaperVerdict]:
        """Compare each method with the reference, seed by seed."""
        reached = {
            method: values
            for method in self.methods
            if len(values := self.last(lines, method, "test")) == len(TEST_SEEDS)
        }
        others = [method for method in reached if method != self.reference] if self.reference in reached else []
        tests = corrected([compare_paired(reached[method], reached[self.reference]) for method in others])
        tested = dict(zip(others, tests, strict=True))
        verdicts = []
        if base := self.of_base(lines):
            said = "0 MB" if len(set(base)) == 1 else "runs of several bases, from machines that round otherwise"
            verdicts.append(PaperVerdict("the base, untrained", "", mean_and_spread(base, 3), said, "", base))
        for method, values in reached.items():
            up, down = (np.mean(self.last(lines, method, column)) for column in ("up", "down"))
            said, difference = f"{up:.3g} MB up, {down:.3g} MB down", ""
            if self.target:
                said += f"; {self.target} after {_seconds(self.needed(lines, method))}"
            if method in tested:
                test, _, p_zero = tested[method]
                order = "below" if test.interval.mean < 0 else "above"
                said += f"; {order if p_zero < SIGNIFICANT else 'not told from'} {self.reference}, p = {p_zero:.2g}"
                difference = f"{test.interval.mean:+.3f} {bounds_of(test, 3)}"
            verdicts.append(PaperVerdict(method, "", mean_and_spread(values, 3), said, difference, values))
        return [*verdicts, tuning_verdict(list(self.choices(lines)))]

    def choices(self, lines: Lines) -> Iterator[Choice]:
        """Yield the learning rate of each method whose search has ended."""
        for method in self.methods:
            best, tried = self.searched(lines, method)
            if best is not None:
                yield Choice(method, "learning rate", best, tuple(tried), len(TUNING_SEEDS))

    def last(self, lines: Lines, method: str, column: str) -> tuple[float, ...]:
        """Return a column after a method's last round of each test seed, of those that there are."""
        return by_seed(lines, method, column, self.methods[method].rounds)

    def of_base(self, lines: Lines) -> tuple[float, ...]:
        """Return the perplexity of the base, of each run of a test seed that has it."""
        return tuple(base for method in self.methods for base in by_seed(lines, method, "test", 0))

    def needed(self, lines: Lines, method: str) -> list[float]:
        """Return the seconds after which each test seed is at the target or below, inf where none of its rounds is."""
        assert self.target is not None, "the caller has seen to it"
        seconds = dict.fromkeys(TEST_SEEDS, np.inf)
        for line in lines:
            if line["method"] == method and int(line["seed"]) in seconds and float(line["test"]) <= self.target:
                seed = int(line["seed"])
                seconds[seed] = min(seconds[seed], float(line["seconds"]))
        return list(seconds.values())

    def plot(self, lines: Lines, path: Path) -> None:
        """Draw the perplexity of each method over the megabytes, or over the seconds if there is a target."""
        figure, (axes,) = new_figure(self.title, 1)
        spent = ("seconds",) if self.target else ("up", "down")
        for place, method in enumerate(self.methods):
            if self.last(lines, method, "test"):
                marks = range(EVERY, self.methods[method].rounds + 1, EVERY)
                curve = [np.mean(by_seed(lines, method, "test", of_round)) for of_round in marks]
                turn, colour = divmod(place, 10)
                costs = [total(lines, method, of_round, spent) for of_round in marks]
                (drawn,) = axes.plot(costs, curve, f"C{colour}", linestyle=("-", ":")[turn], marker="os"[turn])
                drawn.set(markersize=4, label=method)
        if base := self.of_base(lines):
            axes.axhline(float(np.mean(base)), color="0.6", linestyle="--", label="base")
        label = "simulated seconds" if self.target else "uplink and downlink (MB)"
        axes.set(xlabel=label, ylabel="perplexity of a byte", xscale="log")
        axes.legend(fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
        figure.savefig(path, dpi=100, bbox_inches="tight")


def _seconds(needed: list[float]) -> str:
    there = [seconds for seconds in needed if np.isfinite(seconds)]
    return f"{np.median(needed):.0f} s ({len(there)} of {len(needed)} seeds)" if there else "no round"


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


def by_seed(lines: Lines, method: str, column: str, of_round: int) -> tuple[float, ...]:
    """Return a column after a round of each test seed, of those that there are."""
    chosen = [
        line
        for line in lines
        if line["method"] == method and int(line["seed"]) in TEST_SEEDS and int(line["round"]) == of_round
    ]
    return tuple(float(line[column]) for line in sorted(chosen, key=lambda line: int(line["seed"])))


def total(lines: Lines, method: str, of_round: int, columns: tuple[str, ...] = ("up", "down")) -> float:
    """Return the mean of the sum of some columns up to a round: the megabytes of both directions."""
    return float(sum(np.mean(by_seed(lines, method, column, of_round)) for column in columns))
