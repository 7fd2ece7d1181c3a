"""The laws of each registry, and those that all registries share: the object is its configuration."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import StringIO
from typing import Annotated, Any

from pydantic import BaseModel, ValidationError, create_model

from narrowcast.laws import (
    aggregator_laws,
    algorithm_cases,
    algorithm_laws,
    attack_laws,
    codec_laws,
    data_laws,
    execution_laws,
    loss_laws,
    model_laws,
    optimisation_laws,
    radio_laws,
    second_process,
    simulation_laws,
    solver_laws,
    topology_laws,
    training_laws,
)
from narrowcast.laws.law import Cases, Verdict, evaluate_laws, only_case, require
from narrowcast.platform.config.files import plugin_folders, validate
from narrowcast.platform.config.kinds import Registry
from narrowcast.platform.config.yaml import read_yaml, write_yaml
from narrowcast.platform.data.dataset import Dataset
from narrowcast.platform.errors import UserError, described
from narrowcast.tuning import sampler_laws


@dataclass(frozen=True)
class RegistryCase:
    """An object of a registry."""

    registry: Registry
    value: Any


def pickling_gives_an_equal_object(case: RegistryCase) -> None:
    """Pickle and unpickle the object, as a backend does to reach its workers."""
    back = pickle.loads(pickle.dumps(case.value))
    require(back == case.value, f"it comes back as {back!r}")
    if case.registry.name != "backend":  # the others are keys of what is kept between calls
        require(hash(back) == hash(case.value), "its hash is another")


def a_yaml_round_trip_gives_an_equal_object(case: RegistryCase) -> None:
    """Write the object to YAML under its kind, and read it again."""
    field: Any = (Annotated[Any, case.registry], ...)
    holder: type[BaseModel] = create_model("Holder", part=field)
    written = StringIO()
    write_yaml(holder(part=case.value).model_dump(mode="json"), written)
    back = validate(holder, read_yaml(written.getvalue(), "YAML"), f"{plugin_folders('')[1]}/YAML")
    require(getattr(back, "part") == case.value, f"it comes back as {getattr(back, 'part')!r}")  # noqa: B009 - made above


def an_unknown_field_is_refused(case: RegistryCase) -> None:
    """Give the class a field that it does not have."""
    try:
        type(case.value).model_validate({**case.value.model_dump(), "no_such_field": 1})
    except ValidationError:
        return
    require(condition=False, reason="no_such_field was taken")


def fields_cannot_be_changed(case: RegistryCase) -> None:
    """Assign a field of the object."""
    try:
        case.value.kind = "other"
    except (UserError, ValidationError, AttributeError, TypeError):
        return
    require(condition=False, reason="kind was assigned")


def the_class_has_a_docstring(case: RegistryCase) -> None:
    """Read the docstring of the class."""
    require(type(case.value).__doc__, "it has no docstring")


CONFIGURATION_LAWS = (
    pickling_gives_an_equal_object,
    a_yaml_round_trip_gives_an_equal_object,
    an_unknown_field_is_refused,
    fields_cannot_be_changed,
    the_class_has_a_docstring,
)


@dataclass(frozen=True)
class LawsOf:
    """The laws of a registry; `cases` returns the cases of an object, and `none` says why an object may have no case.

    `on_data` returns the cases of an object on a data set; None if the object is not tried on data sets.
    """

    cases: Callable[[Any], Cases[Any]]
    laws: Sequence[Callable[[Any], object]]
    none: str = ""
    on_data: Callable[[Any, Any], Cases[Any]] | None = None


def _algorithm_cases(algorithm: Any) -> Cases[algorithm_cases.AlgorithmCase]:
    return algorithm_cases.cases(algorithm_cases.variants(algorithm))


_NO_MODEL = f"its check refuses every small model: {', '.join(algorithm_cases.MODELS)}"
LAWS: Mapping[str, LawsOf] = {
    "algorithm": LawsOf(
        _algorithm_cases,
        (*algorithm_laws.UNCODED, *algorithm_laws.LAWS, *execution_laws.SUM_LAWS),
        _NO_MODEL,
    ),
    "codec": LawsOf(codec_laws.cases, codec_laws.LAWS, "it can stand neither first, nor after a quantiser"),
    "data": LawsOf(data_laws.data_cases, data_laws.DATA_LAWS),
    "partition": LawsOf(
        data_laws.partition_cases, data_laws.PARTITION_LAWS, "it refuses 1200 samples of ten classes for twelve clients"
    ),
    "model": LawsOf(model_laws.cases, model_laws.LAWS, on_data=model_laws.on_data),
    "loss": LawsOf(loss_laws.cases, loss_laws.LOSS_LAWS, on_data=loss_laws.on_data),
    "metric": LawsOf(loss_laws.cases, loss_laws.METRIC_LAWS, on_data=loss_laws.on_data),
    "training": LawsOf(training_laws.cases, training_laws.LAWS, _NO_MODEL),
    "learning_rate_schedule": LawsOf(only_case, optimisation_laws.SCHEDULE_LAWS),
    "server_optimizer": LawsOf(only_case, optimisation_laws.OPTIMIZER_LAWS),
    "aggregator": LawsOf(only_case, aggregator_laws.LAWS),
    "attack": LawsOf(only_case, attack_laws.LAWS),
    "topology": LawsOf(topology_laws.topology_cases, topology_laws.LAWS, "it connects neither 1, 2, 11 nor 16 clients"),
    "fleet": LawsOf(simulation_laws.fleet_cases, simulation_laws.FLEET_LAWS),
    "channel": LawsOf(radio_laws.channel_cases, radio_laws.CHANNEL_LAWS),
    "downlink": LawsOf(only_case, radio_laws.DOWNLINK_LAWS),
    "allocation": LawsOf(radio_laws.allocation_cases, radio_laws.ALLOCATION_LAWS),
    "sampling": LawsOf(simulation_laws.sampling_cases, simulation_laws.SAMPLING_LAWS),
    "availability": LawsOf(simulation_laws.availability_cases, simulation_laws.AVAILABILITY_LAWS),
    "schedule": LawsOf(execution_laws.schedule_cases, execution_laws.SCHEDULE_LAWS),
    "secure": LawsOf(execution_laws.secure_cases, execution_laws.SECURE_LAWS),
    "backend": LawsOf(execution_laws.backend_cases, execution_laws.BACKEND_LAWS),
    "rank_policy": LawsOf(only_case, radio_laws.RANK_POLICY_LAWS),
    "problem": LawsOf(only_case, solver_laws.PROBLEM_LAWS),
    "solver": LawsOf(
        solver_laws.solver_cases,
        solver_laws.SOLVER_LAWS,
        "its check refuses every small problem; give it a class attribute example, a small problem that it takes",
    ),
    "sampler": LawsOf(sampler_laws.sampler_cases, sampler_laws.SAMPLER_LAWS),
    "pruner": LawsOf(only_case, sampler_laws.PRUNER_LAWS),
}


DIGESTS: Mapping[str, second_process.DigestOf] = {
    "algorithm": algorithm_laws.digest_of,
    "codec": codec_laws.digest_of,
    "data": data_laws.digest_of_data,
    "partition": data_laws.digest_of_partition,
    "model": model_laws.digest_of,
    "loss": loss_laws.digest_of,
    "metric": loss_laws.digest_of,
    "training": training_laws.digest_of,
    "server_optimizer": optimisation_laws.digest_of_optimizer,
    "aggregator": aggregator_laws.digest_of,
    "attack": attack_laws.digest_of,
    "topology": topology_laws.digest_of,
    "fleet": simulation_laws.digest_of_fleet,
    "channel": radio_laws.digest_of_channel,
    "allocation": radio_laws.digest_of_allocation,
    "sampling": simulation_laws.digest_of_sampling,
    "availability": simulation_laws.digest_of_availability,
    "schedule": execution_laws.digest_of_schedule,
    "rank_policy": radio_laws.digest_of_ranks,
    "problem": solver_laws.digest_of_problem,
    "solver": solver_laws.digest_of_solver,
}
"""The digest of a case of a registry: of results that no process may change."""


def verdicts(registry: Registry, value: BaseModel, data: Dataset | None = None) -> Iterator[Verdict]:
    """Try every law of a registry on an object of it, on small data sets or on the one that is given."""
    laws = LAWS[registry.name]
    if data is not None and laws.on_data is None:
        kinds = ", ".join(name for name, registry in LAWS.items() if registry.on_data is not None)
        raise UserError(f"--data: the laws of {registry.name} bring their own data; it is for these kinds: {kinds}")
    yield from evaluate_laws(CONFIGURATION_LAWS, {"": RegistryCase(registry, value)})
    try:
        cases = laws.cases(value) if data is None or laws.on_data is None else laws.on_data(value, data)
    except UserError as error:
        yield Verdict("it can be tried", 0, str(error))
        return
    except (Exception, SystemExit) as error:
        yield Verdict("it can be tried", 0, described(error))
        return
    if not cases and laws.none:
        yield Verdict("it can be tried", 0, laws.none)
        return
    if registry.name not in DIGESTS:
        yield from evaluate_laws(laws.laws, cases)
        return
    with second_process.started(DIGESTS[registry.name], cases) as verdict:
        yield from evaluate_laws(laws.laws, cases)
        yield verdict()
