"""The studies of hundreds of runs: which runs each needs next, given the results that there are."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any, Protocol, TypeVar

from narrowcast.reproduce import (
    decay,
    fedma_bias,
    fedma_digits,
    fedma_networks,
    fedmavg_central,
    fedmavg_clustering,
    fedmavg_items,
    fedmd_digits,
    fedprox_synthetic,
    headline,
    headline_secure,
    heterofl_mnist,
    qffl_fairness,
    scaffold_similarity,
    sfmf_excerpt,
    total_traffic,
)
from narrowcast.reproduce.channel_ablation import ML1M, MNIST, Ablation, Cell, Codec
from narrowcast.reproduce.headline import Contest, ContestCell, Rates
from narrowcast.reproduce.method_comparison import NARROW_LINKS, SERVER_OPTIMIZERS, TRIES
from narrowcast.reproduce.results_csv import Rows
from narrowcast.reproduce.run_spec import RunSpec
from narrowcast.reproduce.total_traffic import Traffic
from narrowcast.reproduce.tuning_rule import mean_result
from narrowcast.reproduce.tuning_study import Study, read_tuning_study

TEST_SEEDS = 5
OTHER_SEEDS = 3
_OTHER_BANDS = {"ml1m": (256, 2048), "mnist": (64, 256)}
"""Of each study, those whose winners run on other data; methods are ranked in the last."""
_BEST_METHODS = 4


@dataclass(frozen=True)
class Planned:
    """One run of a study; without `test` its test metrics are not looked at.

    `per_user`: keep the hits of each test user, a kilobyte a run, which a bootstrap over users needs.
    """

    study: str
    spec: RunSpec
    seed: int
    test: bool = True
    per_user: bool = True


Plan = Callable[[Rows], Iterator[Planned]]
RateT_contra = TypeVar("RateT_contra", contravariant=True)
KeyT = TypeVar("KeyT")


class TunedCell(Protocol[RateT_contra]):
    """A cell of a table, whose rates are chosen on validation users."""

    def tuning(self, rate: RateT_contra, /) -> RunSpec:
        """Return the run on validation users at a rate."""
        ...

    def test(self, tried: Sequence[Mapping[str, Any]], /) -> RunSpec:
        """Return the run on test users at the best rate, from the results in the order of the rates."""
        ...


def finished(rows: Rows, spec: RunSpec, seeds: int = 1) -> list[Mapping[str, Any]]:
    """Return the results of a run's seeds, empty unless all of them are finished."""
    found = [rows.get(spec, seed) for seed in spec.seeds(seeds)]
    return [each for each in found if each is not None] if all(found) else []


def _first_finished(rows: Rows, spec: RunSpec, seeds: int) -> list[Mapping[str, Any]]:
    """Return the results of a run's seeds, in order up to the first that is not finished."""
    return [rows[run] for run in takewhile(rows.__contains__, ((spec, seed) for seed in spec.seeds(seeds)))]


def tuning_results(rows: Rows, study: Study) -> dict[str, list[Mapping[str, Any]]]:
    """Return the results of a study's trials by label."""
    return {spec.label: found for spec in study.trials if (found := finished(rows, spec))}


def _tuning(name: str) -> Plan:
    def plan(rows: Rows) -> Iterator[Planned]:
        del rows
        study = read_tuning_study(name)
        for spec in study.trials:
            yield Planned(f"tuning-{name}", spec, spec.first_seed, test=False)

    return plan


def _frontier(name: str) -> Plan:
    def plan(rows: Rows) -> Iterator[Planned]:
        study = read_tuning_study(name)
        winners = study.winners(tuning_results(rows, study))
        chosen = [(method, trial) for method, best in winners.items() for trial in dict.fromkeys(best.values())]
        for seed in range(TEST_SEEDS):
            for method, trial in chosen:
                yield Planned(f"frontier-{name}", study.test(method, trial), seed)

    return plan


def tried(
    rows: Rows, cell: TunedCell[RateT_contra], rates: Sequence[RateT_contra], tuning_seeds: int = 1
) -> list[Mapping[str, Any]]:
    """Return the results of a cell at each of the rates, means over the seeds; empty unless all runs are finished."""
    found = [finished(rows, cell.tuning(rate), tuning_seeds) for rate in rates]
    return [mean_result(each) for each in found] if all(found) else []


def chosen(
    rows: Rows, cell: TunedCell[RateT_contra], rates: Sequence[RateT_contra], tuning_seeds: int = 1
) -> RunSpec | None:
    """Return the test run of a cell at the best of the rates tried; None until all of these runs are finished."""
    results = tried(rows, cell, rates, tuning_seeds)
    return cell.test(results) if results else None


def tested(
    rows: Rows, cells: Mapping[KeyT, TunedCell[RateT_contra]], rates: Sequence[RateT_contra], seeds: int
) -> dict[KeyT, Sequence[Mapping[str, Any]]]:
    """Return the test results of the cells at their best rates, of those whose seeds are all finished."""
    specs = {key: chosen(rows, cell, rates) for key, cell in cells.items()}
    results = {key: finished(rows, spec, seeds) for key, spec in specs.items() if spec is not None}
    return {key: found for key, found in results.items() if found}


def tested_so_far(
    rows: Rows, cells: Sequence[TunedCell[RateT_contra]], rates: Sequence[RateT_contra], seeds: int
) -> list[Sequence[Mapping[str, Any]]]:
    """Return the test results of each cell, in order: of the same first seeds for all cells that have two or more."""
    found = list[list[Mapping[str, Any]]]()
    for cell in cells:
        spec = chosen(rows, cell, rates)
        found.append([] if spec is None else _first_finished(rows, spec, seeds))
    shared = min((len(each) for each in found if len(each) > 1), default=0)
    return [each[:shared] if len(each) > 1 else [] for each in found]


def _cells(
    name: str,
    cells: Sequence[TunedCell[RateT_contra]],
    rates: Sequence[RateT_contra],
    seeds: int,
    tuning_seeds: int = 1,
) -> Plan:
    def plan(rows: Rows) -> Iterator[Planned]:
        for rate in rates:
            for cell in cells:
                spec = cell.tuning(rate)
                for seed in spec.seeds(tuning_seeds):
                    yield Planned(name, spec, seed, test=False)
        best = [chosen(rows, cell, rates, tuning_seeds) for cell in cells]
        for seed in range(seeds):
            for spec in filter(None, best):
                yield Planned(name, spec, seed)

    return plan


def _in_turn(plans: Sequence[Plan]) -> Plan:
    """Return the plan that has all runs of a plan before those of the next one."""
    return lambda rows: (planned for plan in plans for planned in plan(rows))


def _total(traffic: Traffic) -> Plan:
    return _cells(traffic.name, list(traffic.cells.values()), traffic.rates, TEST_SEEDS)


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


def channel_results(rows: Rows, ablation: Ablation) -> dict[Cell, list[Mapping[str, Any]]]:
    """Return the results of each cell's seeds, in order up to the first that is not finished."""
    winners = _channel_winners(rows, ablation)
    found = dict[Cell, list[Mapping[str, Any]]]()
    for cell in ablation.cells:
        if name := winners.get((cell.scenario.name, cell.codec)):
            found[cell] = _first_finished(rows, ablation.run(cell, name), TEST_SEEDS)
    return found


def _channel_winners(rows: Rows, ablation: Ablation) -> dict[tuple[str, Codec], str]:
    """Return the best of the tries of each scenario and codec, those whose tries are all finished."""
    metric = f"validation.{ablation.metric}"
    winners = dict[tuple[str, Codec], str]()
    for scenario in ablation.scenarios:
        for codec, tries in ablation.tries.items():
            found = {name: finished(rows, ablation.trial(scenario, codec, name)) for name in tries}
            if all(found.values()):
                reached = {name: results[0]["final"].get(metric, 0.0) for name, results in found.items()}
                winners[scenario.name, codec] = max(reached, key=lambda name: reached[name])
    return winners


def _channel(ablation: Ablation) -> Plan:
    def plan(rows: Rows) -> Iterator[Planned]:
        for scenario in ablation.scenarios:
            for codec, tries in ablation.tries.items():
                if any((cell.scenario, cell.codec) == (scenario, codec) for cell in ablation.cells):
                    for name in tries:
                        spec = ablation.trial(scenario, codec, name)
                        yield Planned(ablation.name, spec, spec.first_seed, test=False)
        winners = _channel_winners(rows, ablation)
        for seed in range(TEST_SEEDS):
            for cell in ablation.cells:
                if best := winners.get((cell.scenario.name, cell.codec)):
                    yield Planned(ablation.name, ablation.run(cell, best), seed, per_user=False)

    return plan


def _untuned(name: str, runs: Sequence[RunSpec], seeds: int) -> Plan:
    def plan(rows: Rows) -> Iterator[Planned]:
        del rows
        for place in range(seeds):
            for run in runs:
                yield Planned(name, run, run.first_seed + place)

    return plan


def searched(rows: Rows, cell: ContestCell) -> tuple[Rates | None, list[Rates]]:
    """Return the best rates of a cell, None while its search is not finished; and all that it tried or tries next.

    The search goes to the best neighbour, by the mean over the tuning seeds, until none is better.
    """
    centre, tried = headline.START, list[Rates]()
    while True:
        around = [centre, *headline.neighbours(centre)]
        tried += [rates for rates in around if rates not in tried]
        runs = [finished(rows, cell.tuning(rates), headline.TUNING_SEEDS) for rates in around]
        if not all(runs):
            return None, tried
        reached = [sum(run["final"].get("validation.hr@10", 0.0) for run in each) for each in runs]
        if (best := around[reached.index(max(reached))]) == centre:
            return centre, tried
        centre = best


def _contest(contest: Contest) -> Plan:
    def plan(rows: Rows) -> Iterator[Planned]:
        yield Planned(contest.name, contest.baseline, 0)
        for cell in contest.cells:
            best, tried = searched(rows, cell)
            for spec in map(cell.tuning, tried):
                for seed in spec.seeds(headline.TUNING_SEEDS):
                    yield Planned(contest.name, spec, seed, test=False)
            tests = [] if best is None else [cell.test(best, condition) for condition in contest.conditions]
            for spec in tests:
                for seed in range(headline.TEST_SEEDS):
                    yield Planned(contest.name, spec, seed, per_user=False)

    return plan


def _summed(rows: Rows) -> Iterator[Planned]:
    for name, upload in headline_secure.UPLOADS.items():
        rates, _ = searched(rows, upload.tuned)
        for spec, seed in headline_secure.runs_of(name, rates) if rates is not None else ():
            yield Planned(headline_secure.STUDY, spec, seed, per_user=False)


def _sfmf(rows: Rows) -> Iterator[Planned]:
    del rows
    for setting in sfmf_excerpt.SETTINGS:
        yield Planned(sfmf_excerpt.STUDY, setting.run, 0)


STUDIES: Mapping[str, Plan] = {
    "tuning-ml1m": _tuning("ml1m"),
    "decay-ml1m": _cells("decay-ml1m", decay.cells(1000), decay.RATES[1000], TEST_SEEDS),
    "total-ml1m": _total(total_traffic.ML1M),
    "total-ml1m-3000": _total(total_traffic.ML1M_3000),
    "frontier-ml1m": _frontier("ml1m"),
    "tuning-mnist": _tuning("mnist"),
    "frontier-mnist": _frontier("mnist"),
    "total-mnist": _total(total_traffic.MNIST),
    "decay-ml1m-3000": _cells("decay-ml1m-3000", decay.cells(3000), decay.RATES[3000], TEST_SEEDS),
    "frontier-others": others,
    ML1M.name: _channel(ML1M),
    MNIST.name: _channel(MNIST),
    "fedprox-synthetic": _in_turn(
        [
            _cells(
                "fedprox-synthetic",
                cells,
                fedprox_synthetic.TRIES,
                fedprox_synthetic.TEST_SEEDS,
                fedprox_synthetic.TUNING_SEEDS,
            )
            for cells in fedprox_synthetic.cells_by_data().values()
        ]
    ),
    **{each.name: _cells(each.name, each.cells, TRIES, TEST_SEEDS) for each in (NARROW_LINKS, SERVER_OPTIMIZERS)},
    **{
        f"qffl-{data}": _cells(f"qffl-{data}", cells, range(len(cells[0].grid)), qffl_fairness.TEST_SEEDS)
        for data, cells in ((each, qffl_fairness.cells(each)) for each in qffl_fairness.METHODS)
    },
    "scaffold-similarity": _cells(
        "scaffold-similarity",
        scaffold_similarity.cells(),
        scaffold_similarity.RATES,
        scaffold_similarity.TEST_SEEDS,
        scaffold_similarity.TUNING_SEEDS,
    ),
    heterofl_mnist.STUDY: _cells(
        heterofl_mnist.STUDY, heterofl_mnist.CELLS, heterofl_mnist.TRIES, heterofl_mnist.TEST_SEEDS
    ),
    fedmavg_items.STUDY: _in_turn(
        [
            _untuned(fedmavg_items.STUDY, [cell.run for cell in fedmavg_central.BASELINES], fedmavg_items.TEST_SEEDS),
            *(
                _cells(fedmavg_items.STUDY, (cell,), cell.values, fedmavg_items.TEST_SEEDS)
                for cell in fedmavg_central.CENTRAL
            ),
            _cells(fedmavg_items.STUDY, fedmavg_items.CELLS, fedmavg_items.DECAYS, fedmavg_items.TEST_SEEDS),
        ]
    ),
    fedmavg_clustering.STUDY: _untuned(
        fedmavg_clustering.STUDY, [cell.run for cell in fedmavg_clustering.CELLS], fedmavg_clustering.SEEDS
    ),
    fedma_digits.STUDY: _untuned(fedma_digits.STUDY, [cell.run for cell in fedma_digits.CELLS], fedma_digits.SEEDS),
    **{
        name: _in_turn([_cells(name, each.cells, each.rates, fedma_networks.TEST_SEEDS) for each in settings])
        for name, settings in fedma_networks.STUDIES.items()
    },
    fedma_bias.STUDY: _cells(fedma_bias.STUDY, fedma_bias.CELLS, fedma_bias.RATES, fedma_bias.TEST_SEEDS),
    fedmd_digits.STUDY: _untuned(fedmd_digits.STUDY, [cell.run for cell in fedmd_digits.CELLS], fedmd_digits.SEEDS),
    sfmf_excerpt.STUDY: _sfmf,
    headline.OPEN.name: _contest(headline.OPEN),
    headline_secure.STUDY: _summed,
}
