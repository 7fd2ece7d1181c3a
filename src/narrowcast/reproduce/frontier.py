"""Accuracy against uplink bits: channel-adapted ranks and levels compared with other compression methods.

The channel-aware series run on a shared band with Rayleigh fading, whose upload time is set so that a cohort can send
about a given fraction of its full updates in float32. The rivals have links without fading or loss: each client sends
its encoded update through the same entropy coder, and methods are compared at equal bits. This favours the rivals.
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
from narrowcast.reproduce.verdict import PaperVerdict, mean_and_spread

_BAND = "radio={channel: {kind: rayleigh, access: shared}, allocation: %s, upload_seconds: %g}"


@dataclass(frozen=True)
class Series:
    """A compression method at several settings: common overrides, and those of each setting.

    `rates`: the server's learning rate for each setting.
    """

    name: str
    experiment: str
    overrides: tuple[str, ...]
    settings: Mapping[str, tuple[str, ...]]
    rates: Mapping[str, float]
    colour: str

    def run(self, setting: str) -> RunSpec:
        """Return the run of a setting."""
        label = re.sub("[^a-z0-9.]+", "-", f"{self.experiment} {self.name} {setting}".lower()).strip("-")
        rate = f"algorithm.server_learning_rate={self.rates[setting]:g}"
        return RunSpec(label, self.experiment, (*self.overrides, *self.settings[setting], rate))

    def at_rate(self, setting: str, rate: float) -> RunSpec:
        """Return the run at another learning rate of the server, evaluated on validation users."""
        other = replace(self, rates={setting: rate}).run(setting)
        return replace(
            other, label=f"{other.label}-rate-{rate:g}", overrides=(*other.overrides, "data.validation=random")
        )


@dataclass(frozen=True)
class Frontier:
    """Series to compare.

    `full_bits`: bits of a round's updates in float32. `aims`: target accuracy in percent at 1 / key of those bits. The
    plot ends at `lowest` percent; points below are drawn as arrows at its bottom.
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
        """All runs of the study."""
        return (self.reference, *(series.run(each) for series in self._series for each in series.settings))

    def judge(self, results: Results) -> list[PaperVerdict]:
        """Compare the channel-aware series at each budget with its aim, and with the best rival at equal bits."""
        full = _accuracies(results[self.reference.label], self.metric)
        verdicts = [
            PaperVerdict("full updates in float32", "", mean_and_spread(full), "reference", by_seed=tuple(full))
        ]
        for budget in self.budgets:
            run = self.best.run(f"{budget}")
            ours, share = _accuracies(results[run.label], self.metric), self._share(results, run)
            others = [series for series in self.others if not series.name.startswith(("SCoLR", "Adaptive"))]
            rivals = {series.name: self._at(results, series, share) for series in others}
            name = max(rivals, key=lambda each: float(np.mean(rivals[each])))
            aim = self.aims.get(budget)
            verdicts.append(
                PaperVerdict(
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
                verdicts.append(
                    PaperVerdict(what, "", mean_and_spread(ours), f"for 1/{1 / share:.0f}", by_seed=tuple(ours))
                )
        return verdicts

    def plot(self, results: Results, path: Path) -> None:
        """Plot mean and standard deviation over the seeds against the fraction of bits sent."""
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
        """Return the bit fractions of a series' settings, ascending [S], and their accuracies [S, seeds]."""
        runs = sorted(map(series.run, series.settings), key=lambda each: self._share(results, each))
        shares = np.array([self._share(results, each) for each in runs])
        return shares, np.array([_accuracies(results[each.label], self.metric) for each in runs])

    def _at(self, results: Results, series: Series, share: float) -> FloatArray:
        """Return a series' accuracy per seed at a bit fraction, interpolated in log bits; zero below its lowest."""
        shares, values = self._points(results, series)
        means = values.mean(axis=1)
        # A method need not spend bits that do not help it.
        useful = [int(np.argmax(means[: place + 1])) for place in range(len(means))]
        return np.array([np.interp(np.log(share), np.log(shares), each, left=0.0) for each in values[useful].T])


Tried = tuple[tuple[Series, str, tuple[float, ...]], ...]
"""Series, setting, and the learning rates of the server to try."""


def judge_rates(tried: Tried, results: Results, metric: str) -> list[PaperVerdict]:
    """Report the validation accuracy of each learning rate, and mark the best of each setting."""
    verdicts = []
    for series, setting, rates in tried:
        values = {rate: _accuracies(results[series.at_rate(setting, rate).label], metric) for rate in rates}
        best = max(values, key=lambda rate: np.mean(values[rate]))
        verdicts += [
            PaperVerdict(
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
    """Return settings for 1 / budget of the bits, on a shared band that carries full updates in `seconds_for_all`."""
    return {f"{each}": (_BAND % (allocation, seconds_for_all / each),) for each in budgets}


def _against(ahead: FloatArray, rival: str) -> str:
    """Return the order by paired differences: level if the 95 % interval of their mean contains zero."""
    mean, half = float(np.mean(ahead)), 0.0
    if len(ahead) > 1:
        half = float(stdtrit(len(ahead) - 1, 0.975) * np.std(ahead, ddof=1) / np.sqrt(len(ahead)))
    order = "level with" if abs(mean) <= half else "above" if mean > 0 else "below"
    return f"{order} the next best, {rival}: {mean:+.2f}" + (f" ± {half:.2f}" if len(ahead) > 1 else "")


def _accuracies(runs: object, metric: str) -> list[float]:
    assert isinstance(runs, list)
    return [100 * run["final"][metric] for run in runs]
