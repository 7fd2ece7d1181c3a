"""Figures 2 to 4 of N. Mehrotra's report: gradient descent on least squares with quantised uplinks and downlinks.

The report specifies a well-conditioned linear regression with condition number 2, and nothing else. Here: d = 100, a
matrix with condition number 2 (so L / mu = 4), gamma = 1 / (4 L), exact measurements, x_0 = 0, consistent with the
thresholds of Table 1. "8 bit" means 2^8 levels. Differs from the report: the curves are root mean squares of many runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from narrowcast.algorithms.channel.fading import SingleUser
from narrowcast.platform.seeds import generator
from narrowcast.platform.tracking.figures import BLACK, BLUE, GREEN, ORANGE, PURPLE, VERMILLION, new_figure
from narrowcast.platform.types import FloatArray
from narrowcast.studies.spec import Results
from narrowcast.studies.tables import Finished, RecordedTable
from narrowcast.studies.verdicts import PaperVerdict
from narrowcast_papers.wireless.quantiser import quantise_vectors, receive_vectors

DIMENSION, CONDITION, RUNS, STEPS, BUDGET = 100, 2.0, 40, 400, 8
_LAST = slice(-100, None)
_COLOURS = (BLUE, VERMILLION, GREEN, PURPLE, ORANGE)
FULL: None = None
"""Full precision, in place of a number of bits."""
LINKS: dict[int, tuple[tuple[int | None, int | None], ...]] = {
    2: ((FULL, FULL), (8, FULL), (16, FULL), (FULL, 8), (FULL, 16)),
    3: ((4, 4), (4, 8), (8, 4), (8, 8)),
    4: ((8, 8), (8, 16), (16, 8), (16, 16)),
}
"""Figure -> (uplink bits, downlink bits) of each curve; figures 3 and 4 have links of 8 bits, figure 2 none."""


@dataclass(frozen=True)
class DescentCurve:
    """Relative distance ||x_k - x*|| / ||x*|| after each step [STEPS + 1], root mean square over the runs."""

    figure: int
    uplink: int | None
    downlink: int | None
    distance: FloatArray

    @property
    def floor(self) -> float:
        """The final error level: root mean square over the last 100 steps."""
        return float(np.sqrt((self.distance[_LAST] ** 2).mean()))

    @property
    def name(self) -> str:
        """The label of the curve in a legend."""
        up, down = ("full" if bits is None else f"{bits} bit" for bits in (self.uplink, self.downlink))
        return f"uplink {up}, downlink {down}"


def compute_figures(seed: int = 0) -> list[DescentCurve]:
    """Return all curves of the three figures, with the same problem and start for each."""
    return [
        DescentCurve(figure, uplink, downlink, descend(figure, uplink, downlink, seed))
        for figure, links in LINKS.items()
        for uplink, downlink in links
    ]


def descend(figure: int, uplink: int | None, downlink: int | None, seed: int) -> FloatArray:
    """Return one curve [STEPS + 1]: eqs. (2) and (3) for a single user, with the channel of eq. (6)."""
    problem = generator(seed, "least squares")
    left, right = (np.linalg.qr(problem.standard_normal((DIMENSION, DIMENSION)))[0] for _ in range(2))
    A = left * np.linspace(1.0, CONDITION, DIMENSION) @ right.T
    optimum = problem.standard_normal(DIMENSION)
    hessian = A.T @ A
    step_size = 1 / (4 * CONDITION**2)
    channel = SingleUser(dimension=DIMENSION, uplink_levels=2.0**BUDGET, downlink_levels=2.0**BUDGET)
    random = generator(seed, "quantisers", figure, 100 * (uplink or 0) + (downlink or 0))

    def send(x: FloatArray, bits: int | None, budget: float) -> FloatArray:
        if bits is None:
            return x
        if figure == 2:
            return quantise_vectors(x, 2**bits, random)
        return receive_vectors(x, 2**bits, budget, random)

    x = np.zeros((RUNS, DIMENSION))
    squares = [np.mean(((x - optimum) ** 2).sum(axis=1))]
    for _ in range(STEPS):
        received = send(x, downlink, channel.downlink_levels)
        x = send(received - step_size * (received - optimum) @ hessian, uplink, channel.uplink_levels)
        squares.append(np.mean(((x - optimum) ** 2).sum(axis=1)))
    return np.sqrt(np.array(squares) / (optimum**2).sum())


def judge_figures(curves: list[DescentCurve]) -> list[PaperVerdict]:
    """Compare the report's statements on its figures with the final error levels of the curves."""
    floor = {(curve.figure, curve.uplink, curve.downlink): curve.floor for curve in curves}

    def decades(worse: tuple[int, int | None, int | None], better: tuple[int, int | None, int | None]) -> float:
        return float(np.log10(floor[worse] / floor[better]))

    gap, expected = decades((2, FULL, 8), (2, FULL, 16)), np.log10(2.0**8)
    uplink, downlink = decades((3, 4, 8), (3, 8, 8)), decades((3, 8, 4), (3, 8, 8))
    over_up, over_down = decades((4, 16, 8), (4, 8, 8)), decades((4, 8, 16), (4, 8, 8))
    under, over = decades((3, 4, 4), (3, 8, 8)), decades((4, 16, 16), (4, 8, 8))
    return [
        PaperVerdict(
            "fig. 2: downlink, 8 above 16 bit",
            f"{expected:.2f} decades",
            f"{gap:.2f}",
            _same(abs(gap - expected) < 0.1),
        ),
        PaperVerdict(
            "fig. 2: uplink, 8 above 16 bit",
            "not stated",
            f"{decades((2, 8, FULL), (2, 16, FULL)):.2f} decades",
            "as on the downlink",
        ),
        *(
            PaperVerdict(
                f"fig. 2: {bits} bit, uplink against downlink",
                "uplink worse",
                f"by {decades((2, bits, FULL), (2, FULL, bits)):.3f} decades",
                _same(floor[2, bits, FULL] > floor[2, FULL, bits]),
            )
            for bits in (8, 16)
        ),
        PaperVerdict("fig. 3: best of four", "8 and 8 bit", _best(curves, 3), _same(_best(curves, 3) == "8 and 8 bit")),
        PaperVerdict(
            "fig. 3: 4 bit on the uplink against the downlink",
            "uplink a lot worse",
            f"{uplink:.2f} against {downlink:.2f} decades lost",
            "the order agrees, the size does not" if downlink < uplink < 2 * downlink else _same(uplink > downlink),
        ),
        PaperVerdict("fig. 4: best of four", "8 and 8 bit", _best(curves, 4), _same(_best(curves, 4) == "8 and 8 bit")),
        PaperVerdict(
            "fig. 4: 16 bit on the uplink against the downlink",
            "uplink worse",
            f"{over_up:.3f} against {over_down:.3f} decades lost",
            _same(over_up > over_down),
        ),
        PaperVerdict(
            "fig. 3 against fig. 4: both links",
            "under-use costs more than over-use",
            f"{under:.2f} against {over:.2f} decades lost",
            _same(under > over),
        ),
    ]


def _best(curves: list[DescentCurve], figure: int) -> str:
    best = min((curve for curve in curves if curve.figure == figure), key=lambda curve: curve.floor)
    return f"{best.uplink} and {best.downlink} bit"


def _same(agrees: bool) -> str:
    return "agrees" if agrees else "differs"


def plot_figures(curves: list[DescentCurve], folder: Path) -> list[Path]:
    """Draw the three figures as PNG files, and return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    titles = {
        2: "Figure 2: quantised links without errors",
        3: f"Figure 3: links of {BUDGET} bit, used up to their budget",
        4: f"Figure 4: links of {BUDGET} bit, used up to and beyond their budget",
    }
    paths = []
    for figure, title in titles.items():
        drawing, (axes,) = new_figure(title, panels=1)
        for curve, colour in zip([each for each in curves if each.figure == figure], _COLOURS, strict=False):
            exact = curve.uplink is None and curve.downlink is None
            line = axes.plot(curve.distance, color=BLACK if exact else colour, linewidth=1.5, label=curve.name)[0]
            line.set_linestyle(
                "--" if curve.uplink is None and not exact else "-"
            )  # downlink alone, close to the uplink
        axes.set_yscale("log")
        axes.set(xlabel="step", ylabel="distance to the optimum / its norm", xlim=(0, STEPS))
        drawing.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=9)
        paths.append(folder / f"wireless_figure{figure}.png")
        drawing.savefig(paths[-1], dpi=150)
    return paths


def _figures_2_to_4(results: Results, path: Path) -> Finished:
    del results
    curves = compute_figures()
    return judge_figures(curves), plot_figures(curves, path.parent)


FIGURES = RecordedTable(_figures_2_to_4)
