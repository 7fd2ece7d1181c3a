"""Samplers: a proposal depends on the study's seed, the draws before it and the trials that had finished."""

from __future__ import annotations

import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from copy import copy
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from optuna import Study, create_study
from optuna.distributions import BaseDistribution
from optuna.exceptions import ExperimentalWarning
from optuna.samplers import BaseSampler, CmaEsSampler, GPSampler, NSGAIISampler, RandomSampler, TPESampler
from optuna.trial import FrozenTrial, TrialState
from pydantic import Field

from narrowcast.platform.compiled import one_thread
from narrowcast.platform.config.catalog import SAMPLERS
from narrowcast.platform.config.files import Section
from narrowcast.platform.seeds import generator
from narrowcast.tuning.space import Space
from narrowcast.tuning.trials import counts_towards_total, is_drawn


class Sampler(ABC):
    """A sampler as `study.sampler` configures it."""

    log_costs: ClassVar[bool] = False
    """True if the sampler models values, not their order, and so is to see costs by their logarithm."""

    if TYPE_CHECKING:

        @property
        def kind(self) -> str:
            """The name that picks it in a study file."""

    @abstractmethod
    def make(self, seed: int, space: Space, objectives: int) -> BaseSampler:
        """Return Optuna's sampler for so many objectives; raise `UserError` if it cannot search the space."""


class TPE(Sampler, Section):
    """Tree-structured Parzen estimator (Bergstra et al., NeurIPS 2011; Watanabe 2023)."""

    kind: Literal["tpe"] = "tpe"
    startup_trials: int = Field(10, ge=1, description="trials drawn at random before the first estimate")

    def make(self, seed: int, space: Space, objectives: int) -> BaseSampler:
        """Return univariate estimators for several objectives, which found larger fronts, else multivariate ones.

        If the space has conditions, a multivariate estimator is fitted to each group of dimensions that occur together.
        """
        if objectives > 1:
            return TPESampler(n_startup_trials=self.startup_trials, multivariate=False, seed=seed)
        grouped = any(dimension.when for dimension in space.dimensions.values())
        return TPESampler(n_startup_trials=self.startup_trials, group=grouped, multivariate=True, seed=seed)


class GP(Sampler, Section):
    """Bayesian optimisation with a Gaussian process, which takes about a second per trial; costs by their logarithm."""

    log_costs: ClassVar[bool] = True
    kind: Literal["gp"] = "gp"
    startup_trials: int = Field(10, ge=1, description="trials drawn at random before the first model is fitted")

    def make(self, seed: int, space: Space, objectives: int) -> BaseSampler:
        """Return the sampler; it draws conditional dimensions at random."""
        del space, objectives
        return GPSampler(n_startup_trials=self.startup_trials, warn_independent_sampling=False, seed=seed)


class NSGA2(Sampler, Section):
    """NSGA-II, a genetic algorithm for several objectives (Deb et al. 2002)."""

    kind: Literal["nsga2"] = "nsga2"
    population: int = Field(20, ge=2, description="trials of a generation")

    def make(self, seed: int, space: Space, objectives: int) -> BaseSampler:
        """Return the sampler; the first population is drawn at random."""
        del space, objectives
        return NSGAIISampler(population_size=self.population, seed=seed)


class CMAES(Sampler, Section):
    """CMA-ES (Hansen 2016), for one objective and numeric dimensions; choices are drawn at random."""

    kind: Literal["cma_es"] = "cma_es"

    def make(self, seed: int, space: Space, objectives: int) -> BaseSampler:
        """Return the sampler, which ignores pruned trials."""
        del space, objectives
        return CmaEsSampler(warn_independent_sampling=False, seed=seed)


class RandomSearch(Sampler, Section):
    """Independent random draws from the space."""

    kind: Literal["random"] = "random"

    def make(self, seed: int, space: Space, objectives: int) -> BaseSampler:
        """Return Optuna's random sampler."""
        del space, objectives
        return RandomSampler(seed=seed)


class GridSearch(Sampler, Section):
    """Every combination of the space once, in order."""

    kind: Literal["grid"] = "grid"

    def make(self, seed: int, space: Space, objectives: int) -> BaseSampler:
        """Return the sampler of all combinations."""
        del seed, objectives
        return _GridSampler(space.grid())


AnySampler = Annotated[Sampler, SAMPLERS]


class _GridSampler(BaseSampler):
    """Give the n-th trial that counts the n-th combination, in whichever process; a retry has fixed parameters."""

    def __init__(self, combinations: Sequence[Mapping[str, Any]]) -> None:
        self._combinations = combinations

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        del study, trial
        return {}

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        del study, trial, search_space
        return {}

    def sample_independent(
        self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        del param_distribution
        drawn = sum(
            counts_towards_total(earlier)
            for earlier in study.get_trials(deepcopy=False)
            if earlier.number < trial.number
        )
        # Processes that ask at the same moment may create one trial too many; `StudyClient.ask` voids it.
        return self._combinations[drawn % len(self._combinations)][param_name]


class PerTrialSeededSampler(BaseSampler):
    """Make the sampler anew for each trial, seeded by the study's seed and the number of draws before the trial.

    So neither a resumed study nor several processes on one study repeat draws, and no draw depends on the state of a
    process's generator. A trial that was lost has its draw, and its retry, whatever its number, takes none: a study
    that lost trials searches where one that lost none does, as far as its sampler asks for no results. Objectives in
    `costs` span orders of magnitude.
    """

    def __init__(self, settings: Sampler, seed: int, space: Space, costs: Sequence[bool]) -> None:
        self._settings, self._seed, self._space, self._costs = settings, seed, space, costs
        self._sampler = self._make(0)
        self._view: Study | None = None

    def _make(self, number: int) -> BaseSampler:
        seed = int(generator(self._seed, "sampler", number).integers(2**31))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ExperimentalWarning)
            return self._settings.make(seed, self._space, len(self._costs))

    def before_trial(self, study: Study, trial: FrozenTrial) -> None:
        """Make this trial's sampler, and its view of the study."""
        before = (earlier for earlier in study.get_trials(deepcopy=False) if earlier.number < trial.number)
        self._sampler = self._make(sum(map(is_drawn, before)))
        log_costs = self._settings.log_costs and any(self._costs)
        self._view = _with_log_costs(study, self._costs) if log_costs else None
        self._sampler.before_trial(study, trial)

    def _seen(self, study: Study, trial: FrozenTrial) -> tuple[Study, FrozenTrial]:
        return (self._view, self._view.get_trials(deepcopy=False)[trial.number]) if self._view else (study, trial)

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        """Return the dimensions that the trial's sampler draws jointly."""
        return self._sampler.infer_relative_search_space(*self._seen(study, trial))

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """Draw jointly with the trial's sampler, on one thread."""
        with one_thread():
            return self._sampler.sample_relative(*self._seen(study, trial), search_space)

    def sample_independent(
        self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        """Draw one dimension with the trial's sampler."""
        return self._sampler.sample_independent(*self._seen(study, trial), param_name, param_distribution)

    def after_trial(self, study: Study, trial: FrozenTrial, state: TrialState, values: Sequence[float] | None) -> None:
        """Let the last trial's sampler process the end of a trial."""
        self._sampler.after_trial(study, trial, state, values)


def _with_log_costs(study: Study, costs: Sequence[bool]) -> Study:
    """Return a copy of the study in memory whose costs are decimal logarithms; a cost of 0 counts as the least one."""
    view = create_study(directions=study.directions)
    trials = study.get_trials(deepcopy=False)
    complete = [trial.values for trial in trials if trial.state == TrialState.COMPLETE]
    least = [min([1.0, *(value for value in column if value > 0)]) for column in zip(*complete, strict=True)]
    for trial in trials:
        seen = copy(trial)
        if trial.state == TrialState.COMPLETE:
            seen.values = [
                math.log10(max(value, floor)) if cost else value
                for value, cost, floor in zip(trial.values, costs, least, strict=True)
            ]
        view.add_trial(seen)
    return view
