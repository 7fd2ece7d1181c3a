"""Comparisons: cells with equal tuning, a resumable queue of runs, results in CSV files, statistics and verdicts.

```python
from narrowcast.studies import compare_paired, holm

test = compare_paired([64.1, 64.5, 63.9], [63.2, 63.8, 63.1], margin=0.3)
test.interval.low, test.p_zero, test.p_level
```

Names stay here when their modules move. Each is imported when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from narrowcast.runs.significance import (
        CONFIDENCE,
        MARGIN,
        MeanInterval,
        MeanTest,
        bootstrap_over_users,
        compare_paired,
        compare_with_published,
        holm,
        mean_interval,
        paired_interval,
    )
    from narrowcast.studies.comparison import ComparisonVerdicts, FinishedCell, draw_groups, draw_seed_means
    from narrowcast.studies.execution import Plan, Planned, Queue
    from narrowcast.studies.results import Rows, append_lines, read_lines, read_rows, rekey
    from narrowcast.studies.spec import Comparison, Results, RunSpec, best_place, slug
    from narrowcast.studies.tables import MeasuredTable, Measurements, RecordedTable, StudyTable
    from narrowcast.studies.tuning import (
        Choice,
        cells_plan,
        finished,
        in_turn,
        searched,
        tested,
        tried,
        tuning_verdict,
        untuned_plan,
    )
    from narrowcast.studies.verdicts import PaperVerdict, PublishedMean, judge_family, judge_mean, mean_and_spread


__all__ = [
    "CONFIDENCE",
    "MARGIN",
    "Choice",
    "Comparison",
    "ComparisonVerdicts",
    "FinishedCell",
    "MeanInterval",
    "MeanTest",
    "MeasuredTable",
    "Measurements",
    "PaperVerdict",
    "Plan",
    "Planned",
    "PublishedMean",
    "Queue",
    "RecordedTable",
    "Results",
    "Rows",
    "RunSpec",
    "StudyTable",
    "append_lines",
    "best_place",
    "bootstrap_over_users",
    "cells_plan",
    "compare_paired",
    "compare_with_published",
    "draw_groups",
    "draw_seed_means",
    "finished",
    "holm",
    "in_turn",
    "judge_family",
    "judge_mean",
    "mean_and_spread",
    "mean_interval",
    "paired_interval",
    "read_lines",
    "read_rows",
    "rekey",
    "searched",
    "slug",
    "tested",
    "tried",
    "tuning_verdict",
    "untuned_plan",
]
_MODULES = {
    "studies.comparison": ("ComparisonVerdicts", "FinishedCell", "draw_groups", "draw_seed_means"),
    "studies.execution": ("Plan", "Planned", "Queue"),
    "studies.results": ("Rows", "append_lines", "read_lines", "read_rows", "rekey"),
    "studies.spec": ("Comparison", "Results", "RunSpec", "best_place", "slug"),
    "runs.significance": (
        *("CONFIDENCE", "MARGIN", "MeanInterval", "MeanTest", "bootstrap_over_users", "compare_paired"),
        *("compare_with_published", "holm", "mean_interval", "paired_interval"),
    ),
    "studies.tables": ("MeasuredTable", "Measurements", "RecordedTable", "StudyTable"),
    "studies.tuning": (
        *(
            "Choice",
            "cells_plan",
            "finished",
            "in_turn",
            "searched",
            "tested",
            "tried",
            "tuning_verdict",
            "untuned_plan",
        ),
    ),
    "studies.verdicts": ("PaperVerdict", "PublishedMean", "judge_family", "judge_mean", "mean_and_spread"),
}
_HOMES = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'narrowcast.studies' has no attribute '{name}'; it has {', '.join(__all__)}")
    return getattr(import_module(f"narrowcast.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
