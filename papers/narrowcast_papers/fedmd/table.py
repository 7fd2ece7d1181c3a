"""FedMD on digits with its controls: what clients gain by each other's outputs, and what by labels and more steps.

Ten clients with networks of four architectures hold about 110 samples each and 200 labelled public ones. The controls
train alone, alone with as many local steps, on the public samples alone, or average the weights of one architecture.

All cells share rates and epochs. The epoch and the rate on the consensus are the best of four settings on validation
samples of another seed; nothing else is tuned.

A round of FedMD has 20 steps on the consensus and about 22 on a client's own samples, four epochs alone about 44.
Clients that do not digest send outputs all the same, which nobody uses.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from narrowcast.studies.comparison import ComparisonVerdicts, FinishedCell, Tested, pair_differences, plot_groups
from narrowcast.studies.verdicts import PaperVerdict, mean_and_spread

PAIRS = (
    ("FedMD", "alone"),
    ("FedMD", "alone, as many steps"),
    ("FedMD", "public samples alone"),
    ("FedMD, without public labels", "alone, without public labels"),
    ("FedMD", "FedAvg, one architecture"),
)
"""Methods that are compared, the reference last."""


def judge_distillation(tested: Tested) -> list[PaperVerdict]:
    """Return the accuracy and the traffic of each cell, and the differences of `PAIRS`, paired by seed."""
    verdicts = [
        PaperVerdict(
            finished.cell.name, "", mean_and_spread(finished.reached()), _traffic(finished), "", finished.reached()
        )
        for finished in tested.values()
    ]
    return verdicts + pair_differences(tested, PAIRS)


def _traffic(finished: FinishedCell) -> str:
    if not finished.cell.name.startswith("Fed"):
        return "nothing that is sent is used"
    up, down = (np.mean([run[column] for run in finished.runs]) / 8e3 for column in ("uplink_bits", "downlink_bits"))
    return f"{up:.0f} kB up and {down:.0f} kB down in all"


LABEL = "mean test accuracy of ten clients (%), 20 seeds"
DIGITS = ComparisonVerdicts(
    judge_distillation, partial(plot_groups, "FedMD on digits, and its controls", LABEL, "upper left")
)
