"""Accuracy against uplink bits: ranks and levels from the channel beside other ways to spend the bits.

The channel-aware series play on a shared band with Rayleigh fading, whose time is set so that a cohort can send about
so much of its full updates in float32. The rivals have links that neither fade nor fail: each client sends what its
codec makes of its update, through the same entropy coder, and they are compared where they weigh the same. That is more
than the band would give them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from scipy.special import stdtrit

from narrowcast.platform.tracking.run_plots import BLACK, new_figure
from narrowcast.platform.types import FloatArray
from narrowcast.reproduce.run_spec import Results, RunSpec
from narrowcast.reproduce.verdict import Verdict, mean_and_spread

_BAND = "radio={channel: {kind: rayleigh, access: shared}, allocation: %s, upload_seconds: %g}"


@dataclass(frozen=True)
class Series:
    """A way to send at several settings: overrides of all of them, and of each.

    `rates`: the server's learning rate of each setting.
    """

    name: str
    experiment: str
    overrides: tuple[str, ...]
    settings: Mapping[str, tuple[str, ...]]
    rates: Mapping[str, float]
    colour: str

    def run(self, setting: str) -> RunSpec:
        """The run of a setting."""
        label = re.sub("[^a-z0-9.]+", "-", f"{self.experiment} {self.name} {setting}".lower()).strip("-")
        rate = f"algorithm.server_learning_rate={self.rates[setting]:g}"
        return RunSpec(label, self.experiment, (*self.overrides, *self.settings[setting], rate))

    def at_rate(self, setting: str, rate: float) -> RunSpec:
        """The same at another learning rate of the server, judged on validation users."""
        other = replace(self, rates={setting: rate}).run(setting)
        return replace(
            other, label=f"{other.label}-rate-{rate:g}", overrides=(*other.overrides, "data.validation=random")
        )


@dataclass(frozen=True)
class Frontier:
    """Series to be compared; `full_bits` are a round's updates in float32, `aims` percent at 1 / key of them.

    The plot ends at `lowest` percent; what is below stands at its foot, as an arrow.
    """

    title: str
    metric: str
    full_bits: int
    budgets: tuple[int, ...]
    aims: Mapping[int, float]
    reference: RunSpec
    best: Series
    others: tuple[Series, ...]
    lowest: float

    @property
    def runs(self) -> tuple[RunSpec, ...]:
        """All runs."""
        return (self.reference, *(series.run(each) for series in self._series for each in series.settings))

    def judge(self, results: Results) -> list[Verdict]:
        """The channel-aware series at each budget, beside its aim and beside the best rival at the bits it took."""
        full = _accuracies(results[self.reference.label], self.metric)
        verdicts = [Verdict("full updates in float32", "", mean_and_spread(full), "reference", by_seed=tuple(full))]
        for budget in self.budgets:
            run = self.best.run(f"{budget}")
            ours, share = _accuracies(results[run.label], self.metric), self._share(results, run)
            others = [series for series in self.others if not series.name.startswith("SCoLR")]
            rivals = {series.name: self._at(results, series, share) for series in others}
            name = max(rivals, key=lambda each: float(np.mean(rivals[each])))
            aim = self.aims.get(budget)
            verdicts.append(
                Verdict(
                    f"1/{budget}: {self.best.name}, took 1/{1 / share:.0f}",
                    "" if aim is None else f"{aim:.2f}",
                    mean_and_spread(ours),
                    _against(np.array(ours) - rivals[name], f"{name} with {np.mean(rivals[name]):.2f}"),
                    "" if aim is None else f"{np.mean(ours) - aim:+.2f}",
                    tuple(ours),
                )
            )
        for series in self._series:
            for setting in series.settings:
                ours = _accuracies(results[series.run(setting).label], self.metric)
                share = self._share(results, series.run(setting))
                what = f"{series.name}, {setting}"
                verdicts.append(Verdict(what, "", mean_and_spread(ours), f"for 1/{1 / share:.0f}", by_seed=tuple(ours)))
        return verdicts

    def plot(self, results: Results, path: Path) -> None:
        """Mean and standard deviation over the seeds against what was sent."""
        figure, (axes,) = new_figure(self.title, panels=1)
        for series in self._series:
            shares, values = self._points(results, series)
            means, spread = values.mean(axis=1), values.std(axis=1, ddof=min(1, values.shape[1] - 1))
            spread = np.where(means < self.lowest, 0.0, spread)
            wide = 2.4 if series is self.best else 1.4
            axes.errorbar(
                shares, means, spread,
                color=series.colour, marker=".", capsize=2, linewidth=wide, label=series.name,
            )  # fmt: skip
            below = shares[means < self.lowest]
            axes.plot(below, np.full(len(below), self.lowest), "v", color=series.colour, clip_on=False)
        full = float(np.mean(_accuracies(results[self.reference.label], self.metric)))
        axes.axhline(full, color=BLACK, linestyle="--", linewidth=1, label="full updates in float32")
        if self.aims:
            axes.plot([1 / each for each in self.aims], list(self.aims.values()), "k+", label="aims")
        axes.set_xscale("log", base=2)
        ticks = [1 / 4**power for power in range(2, 8)]
        axes.set_xticks(ticks, [f"1/{1 / tick:.0f}" for tick in ticks])
        axes.set_ylim(bottom=self.lowest)
        axes.set(xlabel="uplink, of full updates in float32", ylabel=f"{self.metric} (%)")
        axes.legend(fontsize=8, frameon=False, loc="lower right")
        figure.savefig(path, dpi=150)

    @property
    def _series(self) -> tuple[Series, ...]:
        return (self.best, *self.others)

    def _share(self, results: Results, run: RunSpec) -> float:
        """Return a run's uplink as a fraction of full updates in float32, mean over its seeds."""
        seeds = results[run.label]
        return float(np.mean([seed["uplink_bits"] / (seed["rounds"] * self.full_bits) for seed in seeds]))

    def _points(self, results: Results, series: Series) -> tuple[FloatArray, FloatArray]:
        """What the settings of a series took, ascending [S], and their accuracies [S, seeds]."""
        runs = sorted(map(series.run, series.settings), key=lambda each: self._share(results, each))
        shares = np.array([self._share(results, each) for each in runs])
        return shares, np.array([_accuracies(results[each.label], self.metric) for each in runs])

    def _at(self, results: Results, series: Series, share: float) -> FloatArray:
        """A series' accuracies for so much: on straight lines in the logarithm of the bits; nothing below its least."""
        shares, values = self._points(results, series)
        means = values.mean(axis=1)
        # More bits than are useful need not be sent.
        useful = [int(np.argmax(means[: place + 1])) for place in range(len(means))]
        return np.array([np.interp(np.log(share), np.log(shares), each, left=0.0) for each in values[useful].T])


Tried = tuple[tuple[Series, str, tuple[float, ...]], ...]
"""Of which series at which setting, which learning rates of the server are tried."""


def judge_rates(tried: Tried, results: Results, metric: str) -> list[Verdict]:
    """What each learning rate gives on validation users, and which is the best of a setting."""
    verdicts = []
    for series, setting, rates in tried:
        values = {rate: _accuracies(results[series.at_rate(setting, rate).label], metric) for rate in rates}
        best = max(values, key=lambda rate: np.mean(values[rate]))
        verdicts += [
            Verdict(
                f"{series.name}, {setting}, rate {rate:g}",
                "",
                mean_and_spread(ours),
                "best of these" if rate == best else "",
                by_seed=tuple(ours),
            )
            for rate, ours in values.items()
        ]
    return verdicts


def band(allocation: str, seconds_for_all: float, budgets: tuple[int, ...]) -> dict[str, tuple[str, ...]]:
    """Settings on a shared band that carries a cohort's full updates in so many seconds, for 1 / budget of them."""
    return {f"{each}": (_BAND % (allocation, seconds_for_all / each),) for each in budgets}


def _against(ahead: FloatArray, rival: str) -> str:
    """Where the differences of the same seeds put us: level where their mean's 95 % interval has zero in it."""
    mean, half = float(np.mean(ahead)), 0.0
    if len(ahead) > 1:
        half = float(stdtrit(len(ahead) - 1, 0.975) * np.std(ahead, ddof=1) / np.sqrt(len(ahead)))
    order = "level with" if abs(mean) <= half else "above" if mean > 0 else "below"
    return f"{order} the next best, {rival}: {mean:+.2f}" + (f" ± {half:.2f}" if len(ahead) > 1 else "")


def _accuracies(runs: object, metric: str) -> list[float]:
    assert isinstance(runs, list)
    return [100 * run["final"][metric] for run in runs]
