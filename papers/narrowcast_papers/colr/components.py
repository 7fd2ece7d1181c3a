"""Figure 2 of Nguyen et al., WWW 2024 (arXiv:2401.03748): number of principal components of a client's update.

N95 and N99 are the smallest numbers of components that explain 95 % and 99 % of the variance of a client's update of Q
[N, d] in a principal component analysis with all N items as observations, untouched ones included. The paper plots
their mean and standard deviation over the participants of each round without numbers, and its released code does not
contain the analysis. Here every tenth round of FedMF with d = 64 and `leaky` negatives is measured. In addition to the
paper, the mean update of the round is measured, which the server adds to Q and sends.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from narrowcast.algorithms.client.sums import TensorSum
from narrowcast.algorithms.local_training.factorisation import FactorisationSGD, RowCohort
from narrowcast.platform.contracts import Algorithm, Executor, Task
from narrowcast.platform.data.interactions import Interactions
from narrowcast.platform.models.model import ITEM_FACTORS
from narrowcast.platform.rounds.ledger import ChunkResult
from narrowcast.platform.rounds.loop import rounds
from narrowcast.platform.rounds.state import Run
from narrowcast.platform.tracking.figures import BLUE, GREEN, new_figure
from narrowcast.platform.types import Arrays, Chunk
from narrowcast.studies.spec import Results, RunSpec
from narrowcast.studies.verdicts import PaperVerdict, mean_and_spread
from narrowcast_papers.colr.accuracy import DIMENSION, LEAKY

EVERY = 10
SHARES = {"n95": 0.95, "n99": 0.99}
RUN = RunSpec(
    "components-fedmf-64",
    "fedmf-ml1m",
    ("evaluate_every=1000", LEAKY),
    "narrowcast_papers.colr.components:measure_components",
)


def count_components(change: NDArray[np.float32], n_items: int, share: float | Sequence[float]) -> list[int]:
    """Return the smallest numbers of components that explain these shares of the variance.

    Shapes: `change` [m, d] holds the non-zero rows of an update of `n_items` rows.
    """
    exact = change.astype(np.float64)
    mean = exact.sum(axis=0) / n_items
    variances = np.linalg.eigvalsh(exact.T @ exact - n_items * np.outer(mean, mean))[::-1].clip(min=0)
    explained = np.cumsum(variances) / variances.sum() if variances.any() else np.ones(1)
    return [int(np.searchsorted(explained, threshold - 1e-12)) + 1 for threshold in np.atleast_1d(share)]


@dataclass
class ComponentCounter(Executor):
    """A local executor that counts the components of each client's update in every tenth round."""

    algorithm: Algorithm
    task: Task[Interactions, FactorisationSGD]
    counts: dict[int, list[list[int]]] = field(default_factory=dict)
    of_mean: list[list[int]] = field(default_factory=list)

    def train(self, broadcast: Arrays, chunks: Sequence[Chunk]) -> list[ChunkResult]:
        """Train the chunks of a round, and count components if the round is measured."""
        results = [self.algorithm.train(broadcast, chunk, self.task) for chunk in chunks]
        round_index = chunks[0].round_index
        if round_index == 1 or round_index % EVERY == 0:
            self.counts[round_index] = [row for chunk in chunks for row in self._count(broadcast, chunk)]
            mean = TensorSum.of(self.algorithm.fold([result.partial for result in results])).mean(ITEM_FACTORS)
            self.of_mean.append(count_components(mean, len(mean), list(SHARES.values())))
        return results

    def _count(self, broadcast: Arrays, chunk: Chunk) -> list[list[int]]:
        cohort, ones = RowCohort.draw(chunk, self.task), np.ones(len(chunk.clients), dtype=np.float32)
        result = cohort.train_rows(np.asarray(broadcast[ITEM_FACTORS]), ones, keep_changes=True)
        assert result.row_changes is not None, "keep_changes=True returns them"
        shares = list(SHARES.values())
        return [
            count_components(result.row_changes[start:stop], self.task.data.n_items, shares)
            for start, stop in pairwise(cohort.samples.row_starts)
        ]


def measure_components(run: Run) -> Mapping[str, Any]:
    """Return N95 and N99 of each measured round: mean, standard deviation and maximum over the participants."""
    data, training = run.task.data, run.task.training
    assert isinstance(data, Interactions) and isinstance(training, FactorisationSGD)
    task = Task(data, run.task.profiles, run.task.model, training, run.task.seed, run.task.private_seed)
    counter = ComponentCounter(run.algorithm, task)
    for _ in rounds(run, counter):
        pass
    counts = [np.array(row_counts) for row_counts in counter.counts.values()]
    return {
        "round": list(counter.counts),
        **{
            name: {
                "mean": [float(row_counts[:, column].mean()) for row_counts in counts],
                "spread": [float(row_counts[:, column].std()) for row_counts in counts],
                "most": [int(row_counts[:, column].max()) for row_counts in counts],
                "of_mean": [row_counts[column] for row_counts in counter.of_mean],
            }
            for column, name in enumerate(SHARES)
        },
    }


def judge_components(results: Results) -> list[PaperVerdict]:
    """Report the mean components; the paper says that updates stay low-rank, and prints no number."""
    verdicts, seeds = [], results[RUN.label]
    for name, share in SHARES.items():
        of_clients = [float(np.mean(result[name]["mean"])) for result in seeds]
        of_mean = [float(np.mean(result[name]["of_mean"])) for result in seeds]
        most = max(max(result[name]["most"]) for result in seeds)
        what = f"{name.upper()} ({share:.0%} of the variance)"
        low = "agrees" if max(of_clients) < DIMENSION / 2 else "differs"
        verdicts += [
            _row(f"{what} of a client's change, of d = 64", "low-rank", of_clients, f"{low}, at most {most}"),
            _row(f"{what} of the mean change", "not shown", of_mean, "what the downlink has to carry"),
        ]
    return verdicts


def _row(what: str, paper: str, values: list[float], verdict: str) -> PaperVerdict:
    return PaperVerdict(what, paper, mean_and_spread(values), verdict, by_seed=tuple(values))


def plot_components(results: Results, path: Path) -> None:
    """Plot N95 and N99 by round: means over participants and seeds; the band is one standard deviation."""
    figure, (axes,) = new_figure("Figure 2: principal components of an update, FedMF-64 on ml-1m", panels=1)
    seeds = results[RUN.label]
    for name, colour in zip(SHARES, (BLUE, GREEN), strict=True):
        measured, label = seeds[0]["round"], name.upper()
        mean, spread, of_mean = (
            np.mean([result[name][key] for result in seeds], axis=0) for key in ("mean", "spread", "of_mean")
        )
        axes.plot(measured, mean, color=colour, linewidth=1.5, label=f"{label} of a client's update")
        axes.fill_between(measured, mean - spread, mean + spread, color=colour, alpha=0.2, linewidth=0)
        axes.plot(measured, of_mean, "--", color=colour, linewidth=1.2, label=f"{label} of the mean update")
    axes.set_yscale("log", base=2)
    ticks = [2**power for power in range(7)]
    axes.set_yticks(ticks, list(map(str, ticks)))
    axes.set(xlabel="round", ylabel=f"components (of {DIMENSION})", ylim=(0.8, 80))
    figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=9)
    figure.savefig(path, dpi=150)
