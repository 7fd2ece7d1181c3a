"""Personal models under attack: honest clients beside training alone, which no attacker reaches, and by method.

The claim is that of Li, Hu, Beirami and Smith, Ditto, ICML 2021 (arXiv:2012.04221), section 4.2, whose attacks are
random labels, random updates and model replacement. Methods have the values that are best without an attack. Without
one, attackers wait until after the last round, so that the clients that are measured are the same.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from narrowcast.platform.tracking.figures import COLOURS, new_figure
from narrowcast.runs.significance import compare_paired
from narrowcast.studies.comparison import ComparisonVerdicts, Tested
from narrowcast.studies.verdicts import PaperVerdict, bounds_of, corrected, mean_and_spread

ALONE, TUNED, NONE = "training alone", "FedAvg, fine-tuned at its own rate", "none"
SIGNIFICANT = 0.05
Reached = dict[tuple[str, str], tuple[float, ...]]
"""The mean accuracy of honest clients in percent, by seed, of a method and an attack."""


def reached_by(tested: Tested) -> Reached:
    """Return what every finished cell has come to."""
    return {(method, attack): finished.reached() for (method, attack), finished in tested.items()}


def judge(tested: Tested) -> list[PaperVerdict]:
    """Compare each method with training alone, and with fine-tuned FedAvg under the same attack, seed by seed.

    p values are corrected over all comparisons of a kind.
    """
    reached = reached_by(tested)
    said: dict[tuple[str, str], list[str]] = {cell: [] for cell in reached}
    differences = dict[tuple[str, str], str]()
    for control in (ALONE, TUNED):
        pairs = {
            cell: reached[control, NONE if control == ALONE else cell[1]] for cell in reached if cell[0] != control
        }
        if control == TUNED:
            pairs = {cell: values for cell, values in pairs.items() if cell[0] != ALONE}
        tests = [compare_paired(reached[cell], values) for cell, values in pairs.items()]
        for cell, (test, _, p_zero) in zip(pairs, corrected(tests), strict=True):
            order = "below" if test.interval.mean < 0 else "above"
            said[cell].append(f"{order if p_zero < SIGNIFICANT else 'not told from'} {control}, p = {p_zero:.2g}")
            if control == ALONE:
                differences[cell] = f"{test.interval.mean:+.1f} {bounds_of(test, 1)}"
    return [
        PaperVerdict(
            f"{method}, {attack}",
            "",
            mean_and_spread(values, 1),
            "; ".join(said[method, attack]) or "reference",
            differences.get((method, attack), ""),
            values,
        )
        for (method, attack), values in reached.items()
    ]


def plot(tested: Tested, path: Path) -> None:
    """Plot the mean accuracy of honest clients by attack, a line for each method."""
    figure, (axes,) = new_figure("Honest clients under attack, Fashion-MNIST, a fifth of 40 clients attacks", panels=1)
    reached = reached_by(tested)
    attacks = list(dict.fromkeys(attack for _, attack in reached))
    for colour, method in zip(COLOURS, dict.fromkeys(method for method, _ in reached), strict=False):
        found = [attack for attack in attacks if (method, attack) in reached]
        means = [np.mean(reached[method, attack]) for attack in found]
        if method == ALONE:
            axes.axhline(float(means[0]), color=colour, linestyle=":", label=method)
            continue
        spread = [np.std(reached[method, attack], ddof=1) for attack in found]
        places = [attacks.index(attack) for attack in found]
        axes.errorbar(places, means, yerr=spread, color=colour, marker="o", capsize=3, label=method)
    axes.set_xticks(range(len(attacks)), attacks)
    axes.set(ylabel="mean test accuracy of honest clients (%)")
    axes.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=100)


ATTACKED = ComparisonVerdicts(judge, plot)
