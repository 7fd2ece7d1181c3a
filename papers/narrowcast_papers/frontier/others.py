"""The best methods of the frontiers on other data, at the settings chosen on ML-1M and MNIST."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from narrowcast.studies.queue import Planned
from narrowcast.studies.results import Rows
from narrowcast.studies.tables import StudyTable
from narrowcast.studies.tuning import finished
from narrowcast.studies.verdicts import PaperVerdict, Runs, compared_with_first
from narrowcast_papers.frontier.tuning_study import Study, read_tuning_study, tuning_plan, tuning_results

OTHER_SEEDS = 3
_OTHER_BANDS = {"ml1m": (256, 2048), "mnist": (64, 256)}
"""Of each study, those whose winners run on other data; methods are ranked in the last."""
_BEST_METHODS = 4
_OTHER_DATA = {
    "ml-100k": ("ml1m", ("data={kind: ml-100k, validation: none}", "training.batch_size=64")),
    "ml-latest-small": ("ml1m", ("data={kind: ml-latest-small, validation: none}", "training.batch_size=64")),
    "cifar10-jpeg-12k": (
        "mnist",
        (
            "data={kind: image_folder, path: cifar10-jpeg-12k, clients: 100, partition: {kind: dirichlet, alpha: 0.5}}",
            "rounds=100",
            "evaluate_every=100",
        ),
    ),
}


def best_methods(study: Study, rows: Rows) -> list[str]:
    """Return float32 and the methods with the best validation metric in the last of `_OTHER_BANDS`."""
    results = tuning_results(rows, study)
    winners, band = study.winners(results), _OTHER_BANDS[study.name][-1]
    if len(winners) < len(study.methods):
        return []
    metric = f"validation.{study.metric}"
    reached = {
        method: results[study.trial(method, best[band]).label][0]["final"][metric]
        for method, best in winners.items()
        if band in best
    }
    return ["float32", *sorted(reached, key=lambda each: -reached[each])[:_BEST_METHODS]]


def others(rows: Rows) -> Iterator[Planned]:
    """Yield the runs of float32 and the best methods on other data, at the settings chosen on ML-1M and MNIST.

    The control of a setting is float32 with the same rates and decays, those of the trial of the same number.
    """
    for seed in range(OTHER_SEEDS):
        for data, (name, overrides) in _OTHER_DATA.items():
            study = read_tuning_study(name)
            winners = study.winners(tuning_results(rows, study))
            methods, trials = best_methods(study, rows), list[tuple[str, int]]()
            for method in methods:
                bands = [band for band in _OTHER_BANDS[name] if band in winners[method]] or list(winners[method])
                trials += [(method, winners[method][band]) for band in bands]
            controls = [(methods[0], trial) for _, trial in trials]
            for method, trial in dict.fromkeys([*trials, *controls]):
                spec = study.test(method, trial)
                spec = replace(spec, label=f"{data}-{spec.label}", overrides=(*spec.overrides, *overrides))
                yield Planned("frontier-others", spec, seed)


def judge_others(rows: Rows) -> list[PaperVerdict]:
    """Compare the methods of each data set with float32, seed by seed."""
    groups: dict[str, dict[str, Runs]] = {}
    for planned in others(rows):
        data = planned.spec.label.partition("-frontier-")[0]
        if found := finished(rows, planned.spec, OTHER_SEEDS):
            groups.setdefault(data, {})[planned.spec.label] = found
    return [
        verdict
        for data, runs in groups.items()
        for verdict in compared_with_first(runs, "hr@10" if data.startswith("ml-") else "accuracy")
    ]


OTHERS = StudyTable(
    {"tuning-ml1m": tuning_plan("ml1m"), "tuning-mnist": tuning_plan("mnist"), "frontier-others": others}, judge_others
)
