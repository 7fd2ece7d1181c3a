"""Figure 2 of Nguyen et al., WWW 2024 (arXiv:2401.03748): how many principal components a client's update has.

N95 and N99 are the least numbers of components that explain 95 % and 99 % of the variance of a client's change of Q
[N, d] by principal component analysis, with the N items as observations, those that the client did not touch too. The
paper plots their mean and standard deviation over the participants of each round, without numbers, and its released
code has no part of it. Here every tenth round of FedMF with d = 64 is measured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from narrowcast.algorithms.local_training.cohort import train_cohort_rows
from narrowcast.algorithms.local_training.streams import draw_samples
from narrowcast.platform.contracts import Algorithm, Task
from narrowcast.platform.models.matrix_factorisation import ITEM_FACTORS
from narrowcast.platform.rounds import Plan, rounds, start
from narrowcast.platform.tracking.plots import BLUE, GREEN, new_figure
from narrowcast.platform.types import Arrays, Chunk, ChunkResult
from narrowcast.reproduce.verdict import Verdict, mean_and_spread
from narrowcast.reproduce.wanted import Results, Wanted

EVERY = 10
SHARES = {"n95": 0.95, "n99": 0.99}
WANTED = Wanted("components-fedmf-64", "fedmf-ml1m", ("evaluate_every=1000",), "components")


def count_components(change: NDArray[np.float32], n_items: int, share: float | Sequence[float]) -> list[int]:
    """The least numbers of components with these shares of the variance; `change` [m, d] is all rows but zeros."""
    exact = change.astype(np.float64)
    mean = exact.sum(axis=0) / n_items
    variances = np.linalg.eigvalsh(exact.T @ exact - n_items * np.outer(mean, mean))[::-1].clip(min=0)
    explained = np.cumsum(variances) / variances.sum() if variances.any() else np.ones(1)
    return [int(np.searchsorted(explained, each - 1e-12)) + 1 for each in np.atleast_1d(share)]


@dataclass
class Watched:
    """Trains chunks in this process and counts the components of what each client learnt in every tenth round."""

    algorithm: Algorithm
    task: Task
    counts: dict[int, list[list[int]]] = field(default_factory=dict)

    def train(self, broadcast: Arrays, chunks: Sequence[Chunk]) -> list[ChunkResult]:
        """As an executor does."""
        for chunk in chunks:
            if chunk.round_index == 1 or chunk.round_index % EVERY == 0:
                self.counts.setdefault(chunk.round_index, []).extend(self._count(broadcast, chunk))
        return [self.algorithm.train(broadcast, chunk, self.task) for chunk in chunks]

    def _count(self, broadcast: Arrays, chunk: Chunk) -> list[list[int]]:
        task, ones = self.task, np.ones(len(chunk.clients), dtype=np.float32)
        samples = draw_samples(task.data, chunk.clients, task.training, task.seed, chunk.round_index)
        result = train_cohort_rows(np.asarray(broadcast[ITEM_FACTORS]), chunk, task, samples, ones, keep_changes=True)
        assert result.row_changes is not None, "they were to be kept"
        shares = list(SHARES.values())
        return [
            count_components(result.row_changes[start:stop], task.data.n_items, shares)
            for start, stop in zip(samples.row_starts, samples.row_starts[1:], strict=False)
        ]


def measure_components(plan: Plan, algorithm: Algorithm, task: Task) -> Mapping[str, Any]:
    """Mean and standard deviation over the participants of each measured round."""
    watched = Watched(algorithm, task)
    for _ in rounds(plan, algorithm, task, watched, start(algorithm, task)):
        pass
    counts = [np.array(each) for each in watched.counts.values()]
    return {
        "round": list(watched.counts),
        **{
            name: {
                "mean": [float(each[:, place].mean()) for each in counts],
                "spread": [float(each[:, place].std()) for each in counts],
                "most": [int(each[:, place].max()) for each in counts],
            }
            for place, name in enumerate(SHARES)
        },
    }


def judge_components(results: Results) -> list[Verdict]:
    """The paper's text says that updates stay low-rank, and gives no number."""
    verdicts = []
    seeds = results[WANTED.label]
    for name, share in SHARES.items():
        means = [float(np.mean(result[name]["mean"])) for result in seeds]
        first = float(np.mean([result[name]["mean"][0] for result in seeds]))
        last = float(np.mean([result[name]["mean"][-1] for result in seeds]))
        most = max(max(result[name]["most"]) for result in seeds)
        verdicts += [
            Verdict(
                f"{name.upper()}, mean over rounds and participants, of d = 64",
                "low-rank",
                mean_and_spread(means),
                "agrees" if max(means) < 32 else "differs",
                by_seed=tuple(means),
            ),
            Verdict(
                f"{name.upper()}, first and last round; most of any client",
                "",
                f"{first:.1f}, {last:.1f}; {most}",
                f"of {share:.0%} variance",
            ),
        ]
    return verdicts


def plot_components(results: Results, path: Path) -> None:
    """N95 and N99 by round: mean over participants and seeds, a band of one standard deviation over participants."""
    figure, (axes,) = new_figure("Figure 2: principal components of the clients' updates, FedMF-64 on ml-1m", panels=1)
    seeds = results[WANTED.label]
    for name, colour in zip(SHARES, (BLUE, GREEN), strict=True):
        mean, spread = (np.mean([result[name][key] for result in seeds], axis=0) for key in ("mean", "spread"))
        axes.plot(seeds[0]["round"], mean, color=colour, linewidth=1.5, label=f"{name.upper()}")
        axes.fill_between(seeds[0]["round"], mean - spread, mean + spread, color=colour, alpha=0.2, linewidth=0)
    axes.set(xlabel="round", ylabel="components (of 64)", ylim=(0, None))
    figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=9)
    figure.savefig(path, dpi=150)
