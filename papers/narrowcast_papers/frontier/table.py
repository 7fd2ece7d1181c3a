"""Accuracy against traffic: the best setting of every method in each band of uplink, on test users and test seeds.

Settings are those of the tuning study that were best on validation users. A method competes in a band with a setting
that takes at most the band's bits, so that bits that serve worse need not be spent. Rivals have links without fading or
loss; the channel-adapted methods are on a fading band, which favours the rivals.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import colormaps

from narrowcast.platform.tracking.figures import BLACK, new_figure
from narrowcast.platform.tracking.metrics import metric_label
from narrowcast.runs.significance import CONFIDENCE, compare_paired, holm
from narrowcast.studies.comparison import draw_seed_means
from narrowcast.studies.results import Rows
from narrowcast.studies.tables import StudyTable
from narrowcast.studies.tuning import TEST_SEEDS, finished
from narrowcast.studies.verdicts import PaperVerdict, accuracies, against, mean_and_spread
from narrowcast_papers.frontier.tuning_study import Study, frontier_plan, read_tuning_study, tuning_plan, tuning_results

_FULL, _CODED = "float32", "quantised"
"""The methods that others are compared with: FedMF or FedAvg in float32, and its best entropy-coded setting."""
_USERS = {"hr@10": 6040}
"""Test users whose hits are kept, by metric."""
_MARKERS = "osD^v<>pPX*hd"


@dataclass(frozen=True)
class Setting:
    """A method at the settings of a trial, and its test runs by seed."""

    method: str
    trial: int
    name: str
    runs: tuple[Any, ...]
    accuracies: tuple[float, ...]
    uplink: float
    total: float

    @property
    def mean(self) -> float:
        """The mean accuracy in percent."""
        return float(np.mean(self.accuracies))

    def traffic(self, full: Setting, coded: Setting | None) -> str:
        """Return the uplink by three denominators, and the total of both ways by one.

        They are updates in float32, the changed rows in float32, which `full` sends, and those of `coded`.
        """
        baselines = [("dense", 1.0), ("changed rows", full.uplink), *([(coded.name, coded.uplink)] if coded else [])]
        ratios = ", ".join(f"{uplink / self.uplink:.3g} ({name})" for name, uplink in baselines)
        return f"uplink smaller by {ratios}; total by {1 / self.total:.3g}"


def tested(study: Study, rows: Rows) -> dict[str, dict[int, Setting]]:
    """Return each method's setting by band, those whose test runs are all finished."""
    settings: dict[str, dict[int, Setting]] = {}
    for method, best in study.winners(tuning_results(rows, study)).items():
        for band, trial in best.items():
            if runs := finished(rows, study.test(method, trial), TEST_SEEDS):
                settings.setdefault(method, {})[band] = Setting(
                    method,
                    trial,
                    study.methods[method].name,
                    tuple(runs),
                    accuracies(runs, study.metric),
                    float(np.mean([study.share(run) for run in runs])),
                    float(np.mean([study.share_of_total(run) for run in runs])),
                )
    return settings


def judge_frontier(study: Study, rows: Rows) -> list[PaperVerdict]:
    """Compare every method in each band with float32, and with the best of the band, seed by seed.

    p values of the comparisons with float32 are corrected over all settings, those with the best over the band.
    """
    settings = tested(study, rows)
    if _FULL not in settings:
        return []
    full = next(iter(settings[_FULL].values()))
    said = f"reference; {full.traffic(full, None)}"
    verdicts = [PaperVerdict(full.name, "", mean_and_spread(full.accuracies), said, "", full.accuracies)]
    every = {
        (setting.method, setting.trial): setting.runs
        for best in settings.values()
        for setting in best.values()
        if setting != full
    }
    compared = against(every, full.runs, study.metric, _USERS.get(study.metric, 0))
    coded = settings.get(_CODED, {}).get(study.bands[0])
    for band in study.bands:
        inside = sorted((best[band] for best in settings.values() if band in best), key=lambda setting: -setting.mean)
        for setting, standing in zip(inside, _standings(inside), strict=True):
            difference, said = compared[setting.method, setting.trial]
            verdicts.append(
                PaperVerdict(
                    f"at most 1/{band}: {setting.name}",
                    "",
                    mean_and_spread(setting.accuracies),
                    f"{standing}; to float32: {said}; {setting.traffic(full, coded)}",
                    difference,
                    setting.accuracies,
                )
            )
    return verdicts


def _standings(inside: Sequence[Setting]) -> list[str]:
    """Return the standing of each setting of a band, best first."""
    if not inside:
        return []
    tests = [compare_paired(setting.accuracies, inside[0].accuracies) for setting in inside[1:]]
    corrected = holm([test.p_zero for test in tests])
    behind = [
        f"{'behind' if p < 1 - CONFIDENCE else 'not separated from'} the best ({test.interval.mean:+.2f}, p = {p:.2g})"
        for test, p in zip(tests, corrected, strict=True)
    ]
    return ["best mean", *behind]


def plot_frontier(study: Study, rows: Rows, path: Path) -> None:
    """Plot mean and standard deviation over the seeds against the uplink, and against uplink plus downlink."""
    figure, panels = new_figure(f"Accuracy against traffic, {study.name}, mean of {TEST_SEEDS} seeds", panels=2)
    colours = colormaps["tab20"]
    settings = tested(study, rows)
    ends = ("uplink", "total")
    for axes, end in zip(panels, ends, strict=True):
        for index, (method, best) in enumerate(settings.items()):
            shown = sorted(
                {setting.trial: setting for setting in best.values()}.values(),
                key=lambda setting: getattr(setting, end),
            )
            draw_seed_means(
                axes,
                [getattr(setting, end) for setting in shown],
                [setting.accuracies for setting in shown],
                color=BLACK if method == _FULL else colours(index % 20),
                marker=_MARKERS[index % len(_MARKERS)],
                markersize=4,
                capsize=2,
                linewidth=1.2,
                label=study.methods[method].name,
            )
        if _FULL in settings:
            full = next(iter(settings[_FULL].values()))
            axes.axhline(full.mean, color=BLACK, linestyle="--", linewidth=1)
            axes.set_ylim(max(0.0, full.mean - 12), full.mean + 2)
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(lambda value, _: f"1/{1 / value:.0f}")
    panels[0].set(xlabel="uplink, of updates in float32", ylabel=f"{metric_label(f'test.{study.metric}')} (%)")
    panels[1].set(xlabel="uplink and downlink, of both in float32")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize=7, frameon=False)
    figure.savefig(path, dpi=150)


def judge_tuning(study: Study, rows: Rows) -> list[PaperVerdict]:
    """Return the best trial of each method in each band, with its validation metric and its overrides."""
    results = tuning_results(rows, study)
    verdicts = []
    for method, best in study.winners(results).items():
        for trial in dict.fromkeys(best.values()):
            spec = study.trial(method, trial)
            run = results[spec.label][0]
            bands = ", ".join(f"1/{band}" for band, chosen in best.items() if chosen == trial)
            reached = 100 * run["final"].get(f"validation.{study.metric}", 0.0)
            rates = " ".join(
                override for override in spec.overrides if override.startswith(("training", "algorithm.server"))
            )
            what = f"{study.methods[method].name}: {bands}"
            verdicts.append(
                PaperVerdict(what, "", f"{reached:.2f}", f"trial {trial}, 1/{1 / study.share(run):.0f}, {rates}")
            )
    return verdicts


def _tuning(name: str) -> StudyTable:
    def judge(rows: Rows) -> list[PaperVerdict]:
        return judge_tuning(read_tuning_study(name), rows)

    return StudyTable({f"tuning-{name}": tuning_plan(name)}, judge)


def _frontier(name: str) -> StudyTable:
    def judge(rows: Rows) -> list[PaperVerdict]:
        return judge_frontier(read_tuning_study(name), rows)

    def plot(rows: Rows, path: Path) -> None:
        plot_frontier(read_tuning_study(name), rows, path)

    return StudyTable({f"tuning-{name}": tuning_plan(name), f"frontier-{name}": frontier_plan(name)}, judge, plot)


TUNING_ML1M, TUNING_MNIST = _tuning("ml1m"), _tuning("mnist")
ML1M, MNIST = _frontier("ml1m"), _frontier("mnist")
