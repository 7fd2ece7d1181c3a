"""Figure 6 of Nguyen et al., WWW 2024 (arXiv:2401.03748): HR@10 and NDCG@10 by round on Pinterest, for four methods.

The figure is in the paper's appendix, without numbers and without the ranks. Here every method but FedMF sends a
sixteenth of FedMF's update, the only setting for which the text prints numbers: 81.03 and 48.50 for CoLR of rank 1,
and 84.74 and 51.79 for FedMF with d = 16. HR@10 of SVD and Top-K was read from the plots of Figure 4. Settings of the
released code: 2000 rounds of 550 clients, learning rate 0.25, batches of 64, two epochs, weight decay 1e-4, `leaky`
negatives. As in `colr_accuracy`, Top-K keeps half as many values, because it also sends their indices.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from narrowcast.platform.tracking.figures import BLACK, BLUE, GREEN, METRICS, VERMILLION, new_figure
from narrowcast.studies.spec import Results, RunSpec
from narrowcast.studies.verdicts import PaperVerdict, PublishedMean, judge_family
from narrowcast_papers.colr.accuracy import LEAKY, released_codec

_DIMENSION, _ROUNDS = 16, 2000
_SETTINGS = (
    "data={kind: pinterest, validation: none}",
    f"model.embedding_dim={_DIMENSION}",
    f"rounds={_ROUNDS}",
    "clients_per_round=550",
    "training={learning_rate: 0.25, batch_size: 64, weight_decay: 1e-4, epochs: 2, negatives: 4}",
    LEAKY,
)
_COLOURS = {"FedMF": BLACK, "CoLR": BLUE, "SVD": VERMILLION, "Top-K": GREEN}
_PAPER = {
    "FedMF": {"hr@10": 84.74, "ndcg@10": 51.79},
    "CoLR": {"hr@10": 81.03, "ndcg@10": 48.50},
    "SVD": {"hr@10": 27.5},
    "Top-K": {"hr@10": 75.7},
}


def _run(method: str) -> RunSpec:
    own: tuple[str, ...] = ("algorithm.rank=1",) if method == "CoLR" else ()
    if method in ("SVD", "Top-K"):
        codec = released_codec(method, 1 if method == "SVD" else 0.5, _DIMENSION)
        own = (f"algorithm.codec={codec}", f"algorithm.downlink_codec={codec}")
    experiment = "colr-ml1m" if method == "CoLR" else "fedmf-ml1m"
    label = f"{method.lower().replace('-', '')}-pinterest"
    return RunSpec(label, experiment, (*_SETTINGS, *own), "convergence")


RUNS = {method: _run(method) for method in _COLOURS}


def judge_convergence(results: Results) -> list[PaperVerdict]:
    """Judge the last round of each method by equivalence test against the paper's text and Figure 4."""
    cells = [
        PublishedMean(
            f"{METRICS[metric][0]}, {method}, after the last round",
            paper,
            tuple(100 * result["final"][f"test.{metric}"] for result in results[RUNS[method].label]),
        )
        for method, published in _PAPER.items()
        for metric, paper in published.items()
    ]
    return judge_family(cells)


def plot_convergence(results: Results, path: Path) -> None:
    """Plot HR@10 and NDCG@10 by round: means over the seeds; the band is one standard deviation."""
    figure, panels = new_figure(
        "Figure 6: convergence on pinterest; CoLR, SVD and Top-K at 1/16 of FedMF's payload", panels=2
    )
    for axes, metric in zip(panels, ("hr@10", "ndcg@10"), strict=True):
        for method, run in RUNS.items():
            histories = [result["history"] for result in results[run.label]]
            values = 100 * np.array([history[f"test.{metric}"] for history in histories])
            mean, spread = values.mean(axis=0), values.std(axis=0, ddof=min(1, len(values) - 1))
            rounds, colour = histories[0]["round"], _COLOURS[method]
            axes.plot(rounds, mean, color=colour, linewidth=1.5, label=method)
            axes.fill_between(rounds, mean - spread, mean + spread, color=colour, alpha=0.2, linewidth=0)
            if metric in _PAPER[method]:
                axes.plot(_ROUNDS, _PAPER[method][metric], "o", color=colour, fillstyle="none", markersize=8)
        axes.set(xlabel="round", ylabel=f"test {METRICS[metric][0]} (%)")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(
        handles, labels, title=f"rings: paper, after round {_ROUNDS}", loc="outside lower center", ncols=4,
        fontsize=9, title_fontsize=9, frameon=False,
    )  # fmt: skip
    figure.savefig(path, dpi=150)
