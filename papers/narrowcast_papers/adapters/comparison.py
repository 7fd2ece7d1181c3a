"""Methods that tune one base on the samples of clients, each at the learning rate that is best for it.

That rate is the best on validation samples of three seeds that are not test seeds: from one rate to the next ones,
until neither neighbour is better.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import numpy as np

from narrowcast.experiment import Experiment, load_experiment
from narrowcast.platform.data.dataset import Dataset, DataSource
from narrowcast.platform.models.model import Split
from narrowcast.platform.rounds.loop import LocalExecutor, rounds
from narrowcast.platform.rounds.outcome import Outcome
from narrowcast.platform.rounds.state import Run
from narrowcast.platform.tracking.figures import log_axis, new_figure
from narrowcast.runs.significance import compare_paired
from narrowcast.studies.results import Line, Lines
from narrowcast.studies.tables import MeasuredTable, Measurements
from narrowcast.studies.tuning import Choice, climbed_on, tuning_verdict
from narrowcast.studies.verdicts import PaperVerdict, bounds_of, corrected, mean_and_spread

TEST_SEEDS, TUNING_SEEDS = tuple(range(5)), (100, 101, 102)
SPLITS: tuple[Split, Split] = ("validation", "test")
SIGNIFICANT = 0.05


@dataclass(frozen=True)
class Setting:
    """Samples of clients and the base that is tuned, rounds of a run, and the metric by which methods are compared.

    `adapted` has further fields of a model with adapters, `measured` of any model. A metric that ends in `.mean` is the
    mean over clients, each on samples of its own. If the base is `pretrained`, the function returns the
    safetensors file of its weights, and round 0 is what they are before anybody has trained. `prepared` makes the
    model's inputs of the samples. Seeds of runs draw the data anew if they are `drawn`.
    """

    data: Mapping[str, Any]
    base: Mapping[str, Any]
    rounds: int
    every: int
    clients_per_round: int
    batch_size: int
    metric: str
    label: str
    better: Literal[1, -1]
    digits: int
    scale: float = 1.0
    adapted: Mapping[str, Any] = field(default_factory=dict)
    measured: Mapping[str, Any] = field(default_factory=dict)
    pretrained: Callable[[], str] | None = None
    prepared: Callable[[Dataset], Dataset] | None = None
    drawn: bool = False


@dataclass(frozen=True)
class Method:
    """A method, the rank of its adapters, None if it trains the whole model, and further fields of its run.

    Its search for a learning rate begins at `first_rate`, or where those of the comparison begin. `adapters` and
    `data` have further fields of the model and of the data; `rounds` are those of the setting unless given.
    """

    algorithm: Mapping[str, Any]
    rank: int | None = None
    fields: Mapping[str, Any] = field(default_factory=dict)
    first_rate: float | None = None
    adapters: Mapping[str, Any] = field(default_factory=dict)
    data: Mapping[str, Any] = field(default_factory=dict)
    rounds: int | None = None


@dataclass(frozen=True)
class Comparison:
    """Methods that tune the base, each at its own learning rate of `rates`, beside one of them.

    With a `target`, the seconds that a method needs to reach this value of the metric are compared too.
    """

    setting: Setting
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

    def experiment(self, method: str, rate: float, seed: int, base: str | None) -> Experiment:
        """Return the experiment of one method, whose base has the weights of the file `base`, or its own.

        Runs that choose rates are evaluated at their end alone.
        """
        variant, setting = self.methods[method], self.setting
        weights = {"weights": base} if base else {}
        adapted = {"kind": "adapters", "base": setting.base, **weights, "rank": variant.rank, "alpha": variant.rank}
        rounds = self.rounds(method)
        return load_experiment(
            {
                "name": Path(self.file).stem,
                "seed": seed,
                "data": {**setting.data, **variant.data, **({"seed": seed} if setting.drawn else {})},
                "model": {
                    **({**adapted, **setting.adapted, **variant.adapters} if variant.rank else setting.base),
                    **setting.measured,
                },
                "start_from": None if variant.rank else base,
                "algorithm": variant.algorithm,
                "training": {**self.training, "learning_rate": rate, "batch_size": setting.batch_size, "epochs": 1},
                **{"rounds": rounds, "clients_per_round": setting.clients_per_round, "backend": "local"},
                "evaluate_every": rounds if seed in TUNING_SEEDS else setting.every,
                **self.fields,
                **variant.fields,
            }
        )

    def rounds(self, method: str) -> int:
        """Return the number of rounds of a method."""
        return self.methods[method].rounds or self.setting.rounds

    def measure(self, seed: int, method: str, rate: float) -> Iterator[Line]:
        """Yield the metric after each round that is evaluated, and the megabytes that clients have sent and received.

        Round 0 of a test run is a pretrained base, which nobody has trained.
        """
        setting = self.setting
        base = setting.pretrained() if setting.pretrained else None
        run, outcomes = played(self.experiment(method, rate, seed, base), setting.prepared)
        if base and seed in TEST_SEEDS:
            start = {"round": 0, **self._values(*_untrained(run, setting.metric)), "up": 0.0, "down": 0.0}
            yield {**start, **({"seconds": 0.0} if self.target else {})}
        for outcome in outcomes:
            if outcome.metrics:
                yield {
                    "round": outcome.step,
                    **self._values(*(outcome.metrics[f"{part}.{setting.metric}"] for part in SPLITS)),
                    "up": outcome.record.total_uplink_bits / 8e6,
                    "down": outcome.record.total_downlink_bits / 8e6,
                    **({"seconds": outcome.record.simulated_seconds} if self.target else {}),
                }

    def _values(self, validation: float, test: float) -> dict[str, float]:
        return {"validation": validation * self.setting.scale, "test": test * self.setting.scale}

    def searched(self, lines: Lines, method: str) -> tuple[float | None, list[float]]:
        """Return the rate of the best metric on validation samples, None before all runs that tell; and all rates."""
        ends = [line for line in lines if line["method"] == method and int(line["round"]) == self.rounds(method)]
        start = (self.methods[method].first_rate or self.first_rate,)
        best, tried = climbed_on(ends, start, {"rate": self.rates}, "validation", TUNING_SEEDS, self.setting.better)
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
        verdicts, digits = list[PaperVerdict](), self.setting.digits
        if base := self.of_base(lines):
            said = "0 MB" if len(set(base)) == 1 else "runs of several bases, from machines that round otherwise"
            verdicts.append(PaperVerdict("the base, untrained", "", mean_and_spread(base, digits), said, "", base))
        for method, values in reached.items():
            up, down = (np.mean(self.last(lines, method, column)) for column in ("up", "down"))
            said, difference = f"{up:.3g} MB up, {down:.3g} MB down", ""
            if self.target:
                said += f"; {self.target} after {_seconds(self.needed(lines, method))}"
            if method in tested:
                test, _, p_zero = tested[method]
                order = "below" if test.interval.mean < 0 else "above"
                said += f"; {order if p_zero < SIGNIFICANT else 'not told from'} {self.reference}, p = {p_zero:.2g}"
                difference = f"{test.interval.mean:+.{digits}f} {bounds_of(test, digits)}"
            verdicts.append(PaperVerdict(method, "", mean_and_spread(values, digits), said, difference, values))
        return [*verdicts, tuning_verdict(list(self.choices(lines)))]

    def choices(self, lines: Lines) -> Iterator[Choice]:
        """Yield the learning rate of each method whose search has ended."""
        for method in self.methods:
            best, tried = self.searched(lines, method)
            if best is not None:
                yield Choice(method, "learning rate", best, tuple(tried), len(TUNING_SEEDS))

    def last(self, lines: Lines, method: str, column: str) -> tuple[float, ...]:
        """Return a column after a method's last round of each test seed, of those that there are."""
        return by_seed(lines, method, column, self.rounds(method))

    def of_base(self, lines: Lines) -> tuple[float, ...]:
        """Return the metric of a pretrained base, of each run of a test seed that has it."""
        return tuple(base for method in self.methods for base in by_seed(lines, method, "test", 0))

    def needed(self, lines: Lines, method: str) -> list[float]:
        """Return the seconds after which each test seed is at the target or better, inf where none of its rounds is."""
        assert self.target is not None, "the caller has seen to it"
        least = self.setting.better * self.target
        seconds = dict.fromkeys(TEST_SEEDS, np.inf)
        for line in lines:
            seed = int(line["seed"])
            if line["method"] == method and seed in seconds and self.setting.better * float(line["test"]) >= least:
                seconds[seed] = min(seconds[seed], float(line["seconds"]))
        return list(seconds.values())

    def plot(self, lines: Lines, path: Path) -> None:
        """Draw the metric of each method over the megabytes, or over the seconds if there is a target."""
        figure, (axes,) = new_figure(self.title, 1)
        spent, all_costs = ("seconds",) if self.target else ("up", "down"), list[float]()
        for place, method in enumerate(self.methods):
            if reached := self.last(lines, method, "test"):
                marks = range(self.setting.every, self.rounds(method) + 1, self.setting.every)
                curve = [np.mean(by_seed(lines, method, "test", of_round)) for of_round in marks]
                turn, colour = divmod(place, 10)
                costs = [total(lines, method, of_round, spent) for of_round in marks]
                if not any(costs):
                    axes.axhline(float(np.mean(reached)), color=f"C{colour}", linestyle=":", label=method)
                    continue
                (drawn,) = axes.plot(costs, curve, f"C{colour}", linestyle=("-", ":")[turn], marker="os"[turn])
                drawn.set(markersize=4, label=method)
                all_costs += costs
        if base := self.of_base(lines):
            axes.axhline(float(np.mean(base)), color="0.6", linestyle="--", label="base")
        axes.set(xlabel="simulated seconds" if self.target else "uplink and downlink (MB)", ylabel=self.setting.label)
        log_axis(axes, np.array(all_costs))
        axes.legend(fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
        figure.savefig(path, dpi=100, bbox_inches="tight")


def _seconds(needed: list[float]) -> str:
    there = [seconds for seconds in needed if np.isfinite(seconds)]
    return f"{np.median(needed):.0f} s ({len(there)} of {len(needed)} seeds)" if there else "no round"


def played(experiment: Experiment, prepared: Callable[[Dataset], Dataset] | None = None) -> tuple[Run, list[Outcome]]:
    """Return the run of an experiment on its data, perhaps as they are `prepared`, and its rounds."""
    run = Run(experiment, experiment.algorithm, experiment.task(_loaded(experiment.data_source, prepared)))
    return run, list(rounds(run, LocalExecutor(run)))


def _untrained(run: Run, metric: str) -> list[float]:
    """Return a metric on validation and test samples before anybody has trained."""
    model, data = run.task.model, run.task.data
    server = run.algorithm.final(run.algorithm.init(run.task))
    if (of_clients := metric.removesuffix(".mean")) == metric:
        return [model.evaluate(server, {}, data, split)[metric] for split in SPLITS]
    everyone, for_all = np.arange(data.n_clients), {name: values[None] for name, values in server.items()}
    measured = [model.measure_clients(for_all, {}, data, split, everyone)[of_clients] for split in SPLITS]
    return [float(np.nanmean(values)) for values in measured]


@lru_cache(maxsize=8)
def _loaded(source: DataSource, prepared: Callable[[Dataset], Dataset] | None) -> Dataset:
    return prepared(source.load()) if prepared else source.load()


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
