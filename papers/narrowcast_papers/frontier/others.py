"""The best methods of the frontiers on other data, at the settings chosen on ML-1M and MNIST."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from narrowcast.studies.execution import Planned
from narrowcast.studies.results import Rows
from narrowcast.studies.spec import RunSpec
from narrowcast.studies.tables import StudyTable
from narrowcast.studies.tuning import finished
from narrowcast.studies.verdicts import PaperVerdict, compared_with_first
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


def other_runs(rows: Rows) -> dict[str, list[RunSpec]]:
    """Return the runs of float32 and the best methods by data set, at the settings chosen on ML-1M and MNIST.

    The control of a setting is float32 with the same rates and decays, those of the trial of the same number.
    """
    found = {}
    for data, (name, overrides) in _OTHER_DATA.items():
        study = read_tuning_study(name)
        winners = study.winners(tuning_results(rows, study))
        methods, trials = best_methods(study, rows), list[tuple[str, int]]()
        for method in methods:
            bands = [band for band in _OTHER_BANDS[name] if band in winners[method]] or list(winners[method])
            trials += [(method, winners[method][band]) for band in bands]
        controls = [(methods[0], trial) for _, trial in trials]
        specs = [study.test(method, trial) for method, trial in dict.fromkeys([*trials, *controls])]
        found[data] = [
            replace(spec, label=f"{data}-{spec.label}", overrides=(*spec.overrides, *overrides)) for spec in specs
        ]
    return found


def others(rows: Rows) -> Iterator[Planned]:
    """Yield the runs on other data, seed by seed."""
    specs = [spec for of_data in other_runs(rows).values() for spec in of_data]
    for seed in range(OTHER_SEEDS):
        for spec in specs:
            yield Planned("frontier-others", spec, seed)


def judge_others(rows: Rows) -> list[PaperVerdict]:
    """Compare the methods of each data set with float32, seed by seed."""
    verdicts = list[PaperVerdict]()
    for data, specs in other_runs(rows).items():
        runs = {spec.label: found for spec in specs if (found := finished(rows, spec, OTHER_SEEDS))}
        verdicts += compared_with_first(runs, "hr@10" if data.startswith("ml-") else "accuracy")
    return verdicts


OTHERS = StudyTable(
    {"tuning-ml1m": tuning_plan("ml1m"), "tuning-mnist": tuning_plan("mnist"), "frontier-others": others}, judge_others
)
