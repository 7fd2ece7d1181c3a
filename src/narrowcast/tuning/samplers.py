"""Who proposes the next trial. A proposal follows from the study's seed, the trial's number and what had finished."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from copy import copy
from typing import Annotated, Any, ClassVar, Literal, Protocol

from optuna import Study, create_study
from optuna.distributions import BaseDistribution
from optuna.exceptions import ExperimentalWarning
from optuna.samplers import BaseSampler, CmaEsSampler, GPSampler, NSGAIISampler, RandomSampler, TPESampler
from optuna.trial import FrozenTrial, TrialState
from pydantic import BaseModel, ConfigDict, Field

from narrowcast.platform.kinds import Registry
from narrowcast.platform.seeds import generator
from narrowcast.tuning.space import Space
from narrowcast.tuning.trial_attributes import counts


class Sampler(Protocol):
    """A sampler as a study file names it."""

    of_values: ClassVar[bool]
    """Whether it models values, not their order, and is to see costs by their logarithm."""

    @property
    def kind(self) -> str:
        """Its name."""
        ...

    def make(self, seed: int, space: Space, objectives: int) -> BaseSampler:
        """Optuna's, with a seed of its own; raises `UserError` where the space is not for it."""
        ...


class _Settings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    of_values: ClassVar[bool] = False


class TPE(_Settings):
    """Tree-structured Parzen estimator (Bergstra et al., NeurIPS 2011; Watanabe 2023)."""

    kind: Literal["tpe"] = "tpe"
    startup_trials: int = Field(10, ge=1, description="drawn at random before the first estimate")

    def make(self, seed: int, space: Space, objectives: int) -> BaseSampler:
        """Of several objectives an estimator for each dimension, which found larger fronts, as Optuna's own default is.

        Of one, an estimator for each set of dimensions that are there together.
        """
        if objectives > 1:
            return TPESampler(n_startup_trials=self.startup_trials, multivariate=False, seed=seed)
        grouped = any(dimension.when for dimension in space.dimensions.values())
        return TPESampler(n_startup_trials=self.startup_trials, group=grouped, multivariate=True, seed=seed)


class GP(_Settings):
    """Bayesian optimisation with a Gaussian process, of costs by their logarithm: a second a trial, for few trials."""

    of_values: ClassVar[bool] = True
    kind: Literal["gp"] = "gp"
    startup_trials: int = Field(10, ge=1)

    def make(self, seed: int, space: Space, objectives: int) -> BaseSampler:
        """Conditional dimensions are drawn at random."""
        del space, objectives
        return GPSampler(n_startup_trials=self.startup_trials, warn_independent_sampling=False, seed=seed)


class NSGA2(_Settings):
    """The genetic algorithm for several objectives (Deb et al. 2002)."""

    kind: Literal["nsga2"] = "nsga2"
    population: int = Field(20, ge=2)

    def make(self, seed: int, space: Space, objectives: int) -> BaseSampler:
        """Children are bred once a population is complete."""
        del space, objectives
        return NSGAIISampler(population_size=self.population, seed=seed)


class CMAES(_Settings):
    """Covariance matrix adaptation, for one objective and numbers; choices are drawn at random (Hansen 2016)."""

    kind: Literal["cma_es"] = "cma_es"

    def make(self, seed: int, space: Space, objectives: int) -> BaseSampler:
        """One that leaves out trials that were pruned."""
        del space, objectives
        return CmaEsSampler(warn_independent_sampling=False, seed=seed)


class Random(_Settings):
    """Every trial for itself."""

    kind: Literal["random"] = "random"

    def make(self, seed: int, space: Space, objectives: int) -> BaseSampler:
        """Independent draws."""
        del space, objectives
        return RandomSampler(seed=seed)


class Grid(_Settings):
    """Every combination of the space once, in order."""

    kind: Literal["grid"] = "grid"

    def make(self, seed: int, space: Space, objectives: int) -> BaseSampler:
        """The walk through all combinations."""
        del seed, objectives
        return _Walk(space.grid())


SAMPLERS = Registry(
    "sampler", Sampler, {"tpe": TPE, "gp": GP, "nsga2": NSGA2, "cma_es": CMAES, "random": Random, "grid": Grid}, "tpe"
)
AnySampler = Annotated[Sampler, SAMPLERS]


class _Walk(BaseSampler):
    """Gives the n-th trial that counts the n-th combination, whoever asks for it; a retry brings its own."""

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
        place = sum(counts(each) for each in study.get_trials(deepcopy=False) if each.number < trial.number)
        # One trial too many may be asked for by several processes at once; it is given back.
        return self._combinations[place % len(self._combinations)][param_name]


class Keyed(BaseSampler):
    """Makes a sampler anew for each trial, seeded by its number.

    A study that is taken up again, or that several processes work on, neither repeats draws nor depends on how far
    some process's generator had come.
    """

    def __init__(self, settings: Sampler, seed: int, space: Space, costs: Sequence[bool]) -> None:
        """`costs`: which of the objectives spread over orders of magnitude."""
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
        self._sampler = self._make(trial.number)
        self._view = _in_decades(study, self._costs) if self._settings.of_values and any(self._costs) else None
        self._sampler.before_trial(study, trial)

    def _seen(self, study: Study, trial: FrozenTrial) -> tuple[Study, FrozenTrial]:
        return (self._view, self._view.get_trials(deepcopy=False)[trial.number]) if self._view else (study, trial)

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        """As the sampler does."""
        return self._sampler.infer_relative_search_space(*self._seen(study, trial))

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """As the sampler does."""
        from narrowcast.platform.threads import one_thread  # and so torch, which `submit` can do without

        with one_thread():
            return self._sampler.sample_relative(*self._seen(study, trial), search_space)

    def sample_independent(
        self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        """As the sampler does."""
        return self._sampler.sample_independent(*self._seen(study, trial), param_name, param_distribution)

    def after_trial(self, study: Study, trial: FrozenTrial, state: TrialState, values: Sequence[float] | None) -> None:
        """As the sampler does."""
        self._sampler.after_trial(study, trial, state, values)


def _in_decades(study: Study, costs: Sequence[bool]) -> Study:
    """The same trials in memory, with costs by their decimal logarithm: what an estimate of them can be fitted to."""
    view = create_study(directions=study.directions)
    for trial in study.get_trials(deepcopy=False):
        seen = copy(trial)
        if trial.state == TrialState.COMPLETE:
            seen.values = [
                math.log10(max(value, 1.0)) if cost else value for value, cost in zip(trial.values, costs, strict=True)
            ]
        view.add_trial(seen)
    return view
