"""The best pull of Ditto: runs on point estimation over a grid of lambda, beside the theorem's closed forms.

Source and letters: `theory`. The platform's loss is (v - z)^2, averaged over the coordinates, which has the curvature
2 / coordinates: `algorithm.pull` is that times lambda.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

import narrowcast as nc
from narrowcast.platform.tracking.figures import COLOURS, new_figure
from narrowcast.platform.types import FloatArray
from narrowcast.runs.significance import MeanTest, compare_with_published, mean_interval
from narrowcast.studies.results import Line, Lines
from narrowcast.studies.tables import MeasuredTable, Measurements
from narrowcast.studies.verdicts import PaperVerdict, corrected, describe, mean_and_spread
from narrowcast_papers.ditto.theory import PersonalError, Points

SETTINGS: Mapping[str, tuple[Points, str]] = {
    "sigma 1, n 10, tau 0.2": (Points(samples=10, noise=1, spread=0.2), "mean"),
    "sigma 2, n 4, tau 1": (Points(samples=4, noise=2, spread=1), "mean"),
    "sigma 1, n 20, tau 0.5": (Points(samples=20, noise=1, spread=0.5), "mean"),
    "sigma 1, n 2, tau 2": (Points(samples=2, noise=1, spread=2), "mean"),
    "sigma 2, n 4, tau 1, 10 attackers": (
        Points(samples=4, noise=2, spread=1, attackers=10, attacker_spread=15),
        "mean",
    ),
    "the same attackers, median": (Points(samples=4, noise=2, spread=1, attackers=10, attacker_spread=15), "median"),
}
"""The data by name, and how the server aggregates: the theorem is about the mean."""
FACTORS = (0.0, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0)
"""The grid of lambda, over sigma^2 / n tau^2."""
SEEDS = 10
TOLERANCE, MARGIN = 0.02, 5.0
"""Share by which the mean error of the runs may differ from the expected one, and percent by which the best lambda
may: at a lambda that is 5 % off the error is less than 0.1 % above the least."""
_RATE, _ROUNDS, _STEPS = 0.1, 10, 12


def measure_setting(setting: str, seed: int) -> Iterator[Line]:
    """Yield, by lambda, the error of a run, and how far it is from that of the closed form on the same draws."""
    points, aggregator = SETTINGS[setting]
    error = PersonalError(points.of_seed(seed))
    centres = error.points.draw()[1].mean(axis=1)
    shared: FloatArray = centres.mean(axis=0) if aggregator == "mean" else np.median(centres, axis=0)
    for factor in FACTORS:
        pull = factor * points.noise**2 / points.samples / points.spread**2
        reached = run_ditto(points, aggregator, pull, seed)
        yield {"lambda": pull, "apart": abs(reached / error.drawn(pull, shared) - 1), "error": reached}


def run_ditto(points: Points, aggregator: str, pull: float, seed: int) -> float:
    """Return the mean over clients of the squared error of their own models, after Ditto's last round."""
    settings: dict[str, Any] = {
        "seed": seed,
        "data": points.model_dump(),
        "model": {
            "kind": "torch",
            "factory": "torch.nn:Linear",
            "arguments": {"in_features": 1, "out_features": points.dimensions, "bias": False},
            "dtype": "float64",
        },
        "algorithm": {"kind": "ditto", "pull": 2 / points.dimensions * pull},
        # In units of one coordinate, of which the loss is a mean.
        "training": {
            "learning_rate": _RATE * points.dimensions,
            "batch_size": "all",
            "epochs": _STEPS,
            "execution": "batched",
        },
        "rounds": _ROUNDS,
        "clients_per_round": points.clients,
        "chunk_size": points.clients,
        "evaluate_every": _ROUNDS,
        "evaluate_clients": "test",
        "checkpoint_seconds": 100000,
    }
    if aggregator != "mean":
        settings["algorithm"] = {**settings["algorithm"], "aggregator": aggregator}
    *_, last = nc.rounds("fedavg-digits", settings)
    return last.metrics["test.loss.mean"]


def best_pulls(lines: Lines) -> list[float]:
    """Return the lambda of the least error of each seed.

    The error is quadratic in s = lambda / (1 + lambda): v_k is s w + (1 - s) z_k. The lambda is that of the vertex of
    the parabola through the runs.
    """
    found = []
    for seed in dict.fromkeys(line["seed"] for line in lines):
        of_seed = [(float(line["lambda"]), float(line["error"])) for line in lines if line["seed"] == seed]
        pulls, errors = np.array(of_seed).T
        square, slope, _ = np.polyfit(pulls / (1 + pulls), errors, 2)
        share = -slope / (2 * square)
        found.append(float(share / (1 - share)))
    return found


def _share(pull: float) -> float:
    """Return what v_k has of w."""
    return pull / (1 + pull)


def errors_by_pull(lines: Lines) -> dict[float, list[float]]:
    """Return the errors of all seeds by lambda."""
    by_pull: dict[float, list[float]] = {}
    for line in lines:
        by_pull.setdefault(float(line["lambda"]), []).append(float(line["error"]))
    return by_pull


def judge_pulls(lines: Lines) -> list[PaperVerdict]:
    """Compare the best lambda, the error and the personal models of every setting with their closed forms.

    p values are corrected over the settings by Holm's method.
    """
    of_setting = {name: [line for line in lines if line["setting"] == name] for name in SETTINGS}
    best = {name: best_pulls(found) for name, found in of_setting.items()}
    judged = [name for name, (_, aggregator) in SETTINGS.items() if aggregator == "mean" and len(best[name]) > 1]
    tests = [_percent_off(best[name], PersonalError(SETTINGS[name][0]).best_pull) for name in judged]
    verdicts = []
    for name, (test, p_level, p_zero) in zip(judged, corrected(tests), strict=True):
        closed, by_pull = PersonalError(SETTINGS[name][0]), errors_by_pull(of_setting[name])
        said = describe(test, p_level, p_zero, len(best[name]))
        verdicts += [
            PaperVerdict(
                f"{name}: best lambda",
                f"{closed.best_pull:.4g}",
                _interval(best[name]),
                f"{said}; {_models(of_setting[name])}",
                f"{test.interval.mean:+.1f} % ({test.interval.low:+.1f} to {test.interval.high:+.1f})",
                tuple(best[name]),
            ),
            _judge_errors(name, closed, by_pull),
        ]
    others = [name for name in SETTINGS if name not in judged and len(best[name]) > 1]
    return verdicts + [
        PaperVerdict(
            f"{name}: best lambda", "", _interval(best[name]), _models(of_setting[name]), "", tuple(best[name])
        )
        for name in others
    ]


def _percent_off(pulls: list[float], closed: float) -> MeanTest:
    return compare_with_published([100 * (pull / closed - 1) for pull in pulls], 0.0, margin=MARGIN)


def _interval(pulls: list[float]) -> str:
    interval = mean_interval(pulls)
    return f"{interval.mean:.4g} ({interval.low:.4g} to {interval.high:.4g})"


def _models(lines: Lines) -> str:
    return f"errors are those of the closed form's models to {max(float(line['apart']) for line in lines):.0e}"


def _judge_errors(name: str, closed: PersonalError, by_pull: Mapping[float, list[float]]) -> PaperVerdict:
    """Compare the mean error at each lambda with the expected one, and show the one that is furthest from it."""
    off = {pull: float(np.mean(errors)) / closed.expected(pull) - 1 for pull, errors in by_pull.items()}
    furthest = max(off, key=lambda pull: abs(off[pull]))
    within = f"within {TOLERANCE:.0%} at all {len(off)} lambdas"
    return PaperVerdict(
        f"{name}: error at lambda {furthest:g}",
        f"{closed.expected(furthest):.4g}",
        mean_and_spread(by_pull[furthest], 4),
        within if abs(off[furthest]) <= TOLERANCE else f"off by more than {TOLERANCE:.0%}",
        f"{100 * off[furthest]:+.2f} %, the largest of {len(off)}",
        tuple(by_pull[furthest]),
    )


def plot_pulls(lines: Lines, path: Path) -> None:
    """Plot the error over that of the best lambda, closed forms as lines and the means of the runs as dots."""
    figure, (axes,) = new_figure("Error of Ditto's own models by the pull towards the global one", panels=1)
    for colour, (setting, (points, aggregator)) in zip(COLOURS, SETTINGS.items(), strict=False):
        errors = errors_by_pull([line for line in lines if line["setting"] == setting])
        if aggregator != "mean" or not errors:
            continue
        closed = PersonalError(points)
        least = closed.expected(closed.best_pull)
        shares = np.linspace(0, _share(max(errors)), 200)
        curve = [closed.expected(share / (1 - share)) / least for share in shares]
        means = [np.mean(each) / least for each in errors.values()]
        axes.plot(shares, curve, color=colour, linewidth=1.2)
        axes.plot([_share(pull) for pull in errors], means, "o", color=colour, label=setting)
        axes.axvline(_share(closed.best_pull), color=colour, linestyle=":", linewidth=1)
    axes.set(xlabel="lambda / (1 + lambda); dotted: the theorem's best", ylabel="squared error over the least")
    axes.set(ylim=(0.95, 2))
    axes.legend(fontsize=8, frameon=False)
    figure.savefig(path, dpi=120)


PULLS = MeasuredTable(
    (
        Measurements(
            "ditto-lambda.csv",
            ("setting", "seed"),
            ("lambda", "apart", "error"),
            lambda _: product(SETTINGS, range(SEEDS)),
            measure_setting,
            digits=8,
        ),
    ),
    judge_pulls,
    plot_pulls,
)
