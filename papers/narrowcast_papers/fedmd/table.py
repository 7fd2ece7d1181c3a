"""FedMD on digits with its controls: what clients gain by each other's outputs, and what by labels and more steps.

Ten clients with networks of four architectures hold about 110 samples each and 200 labelled public ones. The controls
train alone, alone with as many local steps, on the public samples alone, or average the weights of one architecture.

All cells share rates and epochs. The epoch and the rate on the consensus are the best of four settings on validation
samples of another seed; nothing else is tuned.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from narrowcast.platform.tracking.figures import new_figure
from narrowcast.studies.comparison import draw_groups
from narrowcast.studies.results import Rows
from narrowcast.studies.spec import RunSpec, slug
from narrowcast.studies.tables import StudyTable
from narrowcast.studies.tuning import finished, untuned_plan
from narrowcast.studies.verdicts import PaperVerdict, Runs, accuracies, mean_and_spread, paired_differences

STUDY = "fedmd-digits"
FIRST_SEED, SEEDS = 11, 20
"""Five seeds from 0 on found no gain where classes differ, which twenty others do not confirm."""
ROUNDS = 10
PARTITIONS: Mapping[str, tuple[str, str]] = {
    "iid": ("iid", "classes alike"),
    "skewed": ("{kind: dirichlet, alpha: 0.5, min_examples: 10}", "Dirichlet(0.5) classes"),
}
"""The partition, and what it is called in the table."""
NETWORKS = "[{kind: mlp, hidden: [32]}, {kind: mlp, hidden: [64, 32]}, {kind: mlp, hidden: [128]}, {kind: softmax}]"
FIRST = "public_epochs: 20, private_epochs: 20"
UNLABELLED = "public_epochs: 0, private_epochs: 20"


@dataclass(frozen=True)
class Setting:
    """The fields of the algorithm, the rounds and the local epochs of each."""

    algorithm: str
    rounds: int = ROUNDS
    epochs: int = 2


def _fedmd(fields: str, rounds: int = ROUNDS, epochs: int = 2) -> Setting:
    return Setting(f"{{kind: fedmd, models: {NETWORKS}, {fields}}}", rounds, epochs)


METHODS: Mapping[str, Setting] = {
    "public samples alone": _fedmd("public_epochs: 20, private_epochs: 0", 1),
    "first round alone": _fedmd(FIRST, 1),
    "alone": _fedmd(f"{FIRST}, digest_epochs: 0"),
    "alone, as many steps": _fedmd(f"{FIRST}, digest_epochs: 0", epochs=4),
    "FedMD": _fedmd(FIRST),
    "alone, without public labels": _fedmd(f"{UNLABELLED}, digest_epochs: 0"),
    "FedMD, without public labels": _fedmd(UNLABELLED),
    "FedAvg, one architecture": Setting("fedavg", epochs=4),
}
"""A round of FedMD has 20 steps on the consensus and about 22 on a client's own samples, four epochs alone about 44.

Clients that do not digest send outputs all the same, which nobody uses."""
PAIRS = (
    ("FedMD", "alone"),
    ("FedMD", "alone, as many steps"),
    ("FedMD", "public samples alone"),
    ("FedMD, without public labels", "alone, without public labels"),
    ("FedMD", "FedAvg, one architecture"),
)
"""Methods that are compared, the reference last."""


@dataclass(frozen=True)
class DistilledCell:
    """A method of `METHODS` on a partition of `PARTITIONS`."""

    method: str
    partition: str

    @property
    def name(self) -> str:
        """The cell in words."""
        return f"{self.method}, {PARTITIONS[self.partition][1]}"

    @property
    def exchanges(self) -> bool:
        """Return whether clients use what others send."""
        return self.method.startswith("Fed")

    @property
    def run(self) -> RunSpec:
        """The run of this cell."""
        method = METHODS[self.method]
        return RunSpec(
            f"{STUDY}-{self.partition}-{slug(self.method)}",
            "fedavg-digits",
            (
                f"data={{kind: digits, clients: 10, public: {{samples: 200}}, "
                f"partition: {PARTITIONS[self.partition][0]}}}",
                "model={kind: mlp, hidden: [64, 32]}",
                f"algorithm={method.algorithm}",
                f"training={{learning_rate: 0.1, batch_size: 10, epochs: {method.epochs}}}",
                *("clients_per_round=10", "chunk_size=10", "checkpoint_seconds=100000"),
                *(f"rounds={method.rounds}", f"evaluate_every={method.rounds}", "evaluate_clients=[test]"),
            ),
            first_seed=FIRST_SEED,
            data_seed=True,
            memory_gib=0.3,
        )


CELLS = tuple(DistilledCell(method, partition) for partition in PARTITIONS for method in METHODS)


MEASURED = "accuracy.mean"


def distilled_runs(rows: Rows) -> dict[DistilledCell, Runs]:
    """Return the runs of the cells that are all finished."""
    found = {cell: finished(rows, cell.run, SEEDS) for cell in CELLS}
    return {cell: runs for cell, runs in found.items() if runs}


def judge_distillation(rows: Rows) -> list[PaperVerdict]:
    """Return the accuracy and the traffic of each cell, and the differences of `PAIRS`, paired by seed."""
    runs = distilled_runs(rows)
    ours = {cell: accuracies(each, MEASURED) for cell, each in runs.items()}
    verdicts = [
        PaperVerdict(cell.name, "", mean_and_spread(values), _traffic(cell, runs[cell]), "", values)
        for cell, values in ours.items()
    ]
    return verdicts + paired_differences(
        [
            (f"{one} less {other}, {words}", ours[first], ours[second])
            for partition, (_, words) in PARTITIONS.items()
            for one, other in PAIRS
            if (first := DistilledCell(one, partition)) in ours and (second := DistilledCell(other, partition)) in ours
        ]
    )


def _traffic(cell: DistilledCell, runs: Runs) -> str:
    if not cell.exchanges:
        return "nothing that is sent is used"
    up, down = (np.mean([run[column] for run in runs]) / 8e3 for column in ("uplink_bits", "downlink_bits"))
    return f"{up:.0f} kB up and {down:.0f} kB down in all"


def plot_distillation(rows: Rows, path: Path) -> None:
    """Plot the clients' mean accuracy of each method on both partitions."""
    runs = distilled_runs(rows)
    figure, (axes,) = new_figure("FedMD on digits, and its controls", panels=1)
    groups = {
        PARTITIONS[partition][1]: {
            cell.method: accuracies(each, MEASURED) for cell, each in runs.items() if cell.partition == partition
        }
        for partition in PARTITIONS
    }
    draw_groups(axes, list(METHODS), groups)
    axes.set(xlabel=f"mean test accuracy of ten clients (%), {SEEDS} seeds")
    axes.legend(frameon=False, loc="upper left")
    figure.savefig(path, dpi=100)


DIGITS = StudyTable(
    {STUDY: untuned_plan(STUDY, [cell.run for cell in CELLS], SEEDS)}, judge_distillation, plot_distillation
)
