"""Base of the neural networks: seeded initialisation, the loss that clients minimise, and held-out metrics."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Annotated, Any, ClassVar, Literal, Self

import numpy as np
import torch
from pydantic import Field, PrivateAttr
from torch import Tensor, nn

from narrowcast.platform.config.catalog import LOSSES, METRICS
from narrowcast.platform.config.files import Section
from narrowcast.platform.config.kinds import kind_of
from narrowcast.platform.data.dataset import Dataset
from narrowcast.platform.data.samples import Features, Labelled, Samples, each_input, rows_of_inputs
from narrowcast.platform.data.samples import described as shapes
from narrowcast.platform.errors import UserError, described
from narrowcast.platform.models.forward_pass import (
    OWN_LAYERS,
    ForwardPass,
    Statistics,
    averaged_names,
    count_of,
    forward_pass,
    mean_row,
    own_names,
    refusal,
    unpacked,
)
from narrowcast.platform.models.measures import (
    DEFAULT_METRICS,
    Loss,
    Metric,
    SampleMeasure,
    default_loss,
    default_metrics,
)
from narrowcast.platform.models.model import Model, Split
from narrowcast.platform.models.module_call import Inputs, call_module, check_tensor, keep_half_types, select_output
from narrowcast.platform.models.modules import (
    arrays_of,
    build_module,
    copy_of,
    differing,
    fixed_of,
    fixed_sha256,
    seeded_draws,
    shapes_alone,
    shapes_of,
    state_of,
    trained_of,
    with_values,
)
from narrowcast.platform.rounds.client_contracts import ClientSplit
from narrowcast.platform.rounds.ledger import METRIC_NAME
from narrowcast.platform.seeds import isolated
from narrowcast.platform.types import Arrays, FloatArray, IntArray

_MOST_PARAMETERS = 2**30
_EVALUATION_WORD = 0x510E_527F_ADE6_82D1
"""The seed of the generators before a batch of an evaluation, if the module draws from them."""
_SAMPLES_AT_ONCE, _OUTPUTS_AT_ONCE = 1000, 2**26
"""Of an evaluation; as many outputs, of a model of many tokens, are 256 MB in float32."""


class NeuralNetwork(Model, Section):
    """A torch module that maps features [n, ...] to outputs [n, ...], trained by a loss of outputs and targets.

    A subclass builds the module in `module`; its last layer has `n_outputs(data)` units. Parameters with
    `requires_grad` are global: clients train and send them, a tensor under several names once. Frozen parameters and
    buffers are those that the seed gives in every process, and are never sent. A subclass may have a field `output`,
    see `select_output`.
    Inputs are as `as_input` gives them: images [n, channels, height, width] from 0 to 1, other features [n, features],
    both in `dtype`, text [n, length] as int64 tokens; or several of them by name. Outputs are scores [n, classes] for
    classes, scores [n, length, tokens] for tokens, and predictions [n, k] for numbers.
    """

    loss: Annotated[Loss, LOSSES] | None = Field(
        None, description="minimised by clients; null: cross_entropy for classes and tokens, squared_error for numbers"
    )
    metrics: tuple[Annotated[Metric, METRICS], ...] | None = Field(
        None,
        description="of held-out samples, besides the loss; null: accuracy for classes, accuracy and perplexity for "
        "tokens, rmse, mae and r2 for numbers",
    )
    dtype: Literal["float32", "float64", "bfloat16", "float16"] = Field(
        "float32",
        description="type of the parameters and of all that is computed and sent; a value takes 4 or 8 bytes. bfloat16 "
        "and float16: the module alone computes in them, and what trains is held and sent in float32",
    )
    statistics: Statistics = Field(
        "refuse",
        description="what training moves besides the parameters, such as means and variances of batch norm; local: "
        "clients keep them and the parameters of their layers (FedBN); average: they are part of the global model",
    )

    all_trained: ClassVar[bool] = False
    """True if the module has trained parameters alone, and can be built on the device "meta"."""
    _seed: int = PrivateAttr(0)
    _fixed_sha256: str | None = PrivateAttr(None)

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        super().__pydantic_init_subclass__(**kwargs)
        if "module" in vars(cls) and "all_trained" not in vars(cls):
            cls.all_trained = False  # another module than that of the class which is extended

    def __hash__(self) -> int:
        return hash(type(self))  # in every round; equality tells the models of a class apart

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self.__dict__ == other.__dict__  # of any seed

    def of_seed(self, seed: int) -> Self:
        """Return the model whose frozen parameters and buffers are drawn from this seed, as those of a run are."""
        if seed == self._seed:
            return self
        seeded = self.model_copy()
        seeded._seed, seeded._fixed_sha256 = seed, None
        return seeded

    def fixed_sha256(self, data: Samples) -> str | None:
        """Return the sha256 of the frozen parameters and buffers; None if there are none."""
        return None if self.all_trained else _with_fixed_values(self, data, self._seed)[1]

    def fixed_names(self, data: Samples) -> frozenset[str]:
        """Return the names of the frozen parameters and buffers."""
        return frozenset() if self.all_trained else frozenset(fixed_of(skeleton(self, data)))

    def pinned(self, sha256: str | None) -> Self:
        """Return the model that refuses, in whatever process, other frozen parameters and buffers than these."""
        if self._fixed_sha256 == sha256:
            return self
        pinned = self.model_copy()
        pinned._fixed_sha256 = sha256
        return pinned

    def module(self, data: Samples) -> nn.Module:
        """Return the untrained module for this data set."""
        raise NotImplementedError

    @property
    def held_dtype(self) -> Literal["float32", "float64"]:
        """The type in which samples and what trains are held and sent: `dtype`, or float32 if that is a half type."""
        return "float64" if self.dtype == "float64" else "float32"

    @property
    def torch_dtype(self) -> torch.dtype:
        """`held_dtype` for torch."""
        return torch.float64 if self.held_dtype == "float64" else torch.float32

    @property
    def moved_statistics(self) -> Statistics:
        """The field `statistics`."""
        return self.statistics

    @property
    def output_part(self) -> str | int | None:
        """The part of what the module returns that is its scores, see `select_output`: the field `output`, if any."""
        part: str | int | None = vars(self).get("output")
        return part

    @property
    def named(self) -> str:
        """The field that says which module this is, for errors."""
        return f"model.kind = {kind_of(self)}"

    def typed_module(self, data: Samples) -> nn.Module:
        """Return the untrained module of this model's seed, in `dtype`; raise `UserError` if it cannot be built."""
        return self._drawn(data, self._seed)

    def _drawn(self, data: Samples, seed: int) -> nn.Module:
        with seeded_draws(seed):
            return build_module(lambda: self.module(data), self.dtype, lambda: self._few(data.train), self.named)

    def _few(self, samples: Labelled) -> Inputs:
        """Return two samples as the module takes them, perhaps one twice."""
        return as_inputs(samples.take(np.arange(2) % len(samples)).features, self.torch_dtype)

    def loaded(self, parameters: Arrays, data: Samples) -> nn.Module:
        """Return the module with these values of what is trained, and perhaps of what is not, in evaluation mode."""
        values = {name: torch.from_numpy(np.array(array)) for name, array in parameters.items()}
        return with_values(copy_of(skeleton(self, data), own=values), values).eval()

    def global_names(self, data: Samples) -> tuple[str, ...]:
        """Return the names of the global parameters: what is trained, less own layers, and averaged statistics."""
        module, moved = skeleton(self, data), self.trial(data).statistics
        if self.statistics == "average":
            return (*trained_of(module), *averaged_names(module, moved))
        own = own_names(module, moved) if self.statistics == "local" else ()
        return tuple(name for name in trained_of(module) if name not in own)

    def own_layers(self, data: Samples) -> Arrays:
        """Return what each client keeps as it is before round 1; empty unless statistics are local."""
        if self.statistics != "local":
            return {}
        module = skeleton(self, data)
        return arrays_of(module, own_names(module, self.trial(data).statistics))

    def own_layers_of(self, rows: FloatArray, data: Samples) -> Arrays:
        """Return the layers [C, ...] that clients with these rows of `OWN_LAYERS` [C, values] have."""
        initial = self.own_layers(data)
        return {name: values + initial[name] for name, values in unpacked(rows, initial).items()}

    def state(self, parameters: Arrays, data: Samples) -> Arrays:
        """Return the `state_dict` of the module with these values; these if they are another's.

        They are those of what is trained, and perhaps of tensors that are not.
        """
        if self.all_trained:
            return parameters
        shapes = {name: array.shape for name, array in arrays_of(skeleton(self, data), self.global_names(data)).items()}
        if not shapes.items() <= {name: array.shape for name, array in parameters.items()}.items():
            return parameters
        return state_of(self.loaded(parameters, data))

    def loss_on(self, data: Samples) -> Loss:
        """Return the loss that clients minimise on this data set."""
        return default_loss(data.targets) if self.loss is None else self.loss

    def metrics_on(self, data: Samples) -> tuple[Metric, ...]:
        """Return the metrics of an evaluation on this data set."""
        return default_metrics(data.targets) if self.metrics is None else self.metrics

    def n_outputs(self, data: Samples) -> int:
        """Return the number of outputs of the last layer, which the loss decides."""
        return self.loss_on(data).n_outputs(data)

    @property
    def lower_is_better(self) -> frozenset[str]:
        """The names of the metrics that are better when lower."""
        return frozenset(("loss", *(metric.name for metric in self._named_metrics if metric.lower_is_better)))

    @property
    def shares(self) -> frozenset[str]:
        """The names of the metrics that lie between 0 and 1."""
        return frozenset(metric.name for metric in self._named_metrics if metric.is_share)

    @property
    def _named_metrics(self) -> tuple[Metric, ...]:
        return DEFAULT_METRICS if self.metrics is None else self.metrics

    def check(self, data: Dataset) -> None:
        """Raise `UserError` unless module, loss and metrics fit the data, and the module keeps no other state."""
        if not isinstance(data, Samples):
            raise UserError(
                f"model.kind = {kind_of(self)} needs samples with targets, but {data.name} has none; use another model"
            )
        self._check_size(data)
        module, loss, metrics = self._trial(data), self.loss_on(data), self.metrics_on(data)
        asked: tuple[SampleMeasure, ...] = (loss, *metrics)
        for measure in asked:
            measure.check(data)
        if len(names := [metric.name for metric in metrics]) > len({"loss", *names}) - 1:
            raise UserError(
                f"model.metrics = {', '.join(names)}: each name may occur once, and loss is reported anyway"
            )
        for name in names:
            if re.fullmatch(METRIC_NAME, name) is None:
                raise UserError(
                    f"model.metrics: \"{name}\" should have only letters, digits, '_', '-', '@', ':' and spaces"
                )
        part = data.test if len(data.test) else data.train
        samples = part.take(np.arange(min(len(part), 2)))
        units = self.n_outputs(data)
        wanted = (samples.labels.shape[1], units) if data.targets == "tokens" else (units,)
        expected = f"{'predictions' if data.targets == 'numbers' else 'scores'} [n, {', '.join(map(str, wanted))}]"
        if data.targets == "tokens":
            expected += ", or scores of more tokens"
        try:
            trial = self.trial(data)
            with torch.no_grad():
                outputs = check_tensor(
                    module, call_module(module.eval(), as_inputs(samples.features, self.torch_dtype))
                )
        except UserError as error:
            raise UserError(f"{self.named}: {error}") from error
        except (Exception, SystemExit) as error:
            raise UserError(
                f"{self.named} does not take the features of {data.name}, {shapes(data.train.features)} "
                f"({described(error)}); the module must map it to {expected}"
            ) from error
        knows_more = data.targets == "tokens" and outputs.shape[-1] > units  # a tokeniser's that the data do not have
        if outputs.shape[1:] != ((*wanted[:-1], outputs.shape[-1]) if knows_more else wanted):
            raise UserError(f"{self.named} returns {list(outputs.shape)}, expected {expected}")
        self._check_trial(module, trial)
        _try_out(loss, metrics, outputs, as_target(torch.from_numpy(samples.labels), self.torch_dtype))

    def _trial(self, data: Samples) -> nn.Module:
        """Return a module for a first call; raise `UserError` unless every build gives the same one."""
        if self.all_trained:
            return self.typed_module(data)
        module = copy_of(skeleton(self, data))
        if not trained_of(module):
            raise UserError(f"{self.named} has no parameter with requires_grad, so that there is nothing to train")
        if other := differing(module, self.typed_module(data)):
            raise UserError(
                f"{self.named} has other values of {other} in every build from one seed; draw them by torch's "
                "generator, or read them from a file"
            )
        return module

    def trial(self, data: Samples) -> ForwardPass:
        """Return what the module's forward passes change and draw from."""
        return ForwardPass() if self.all_trained else _tried(self, data, self._seed)

    def evaluation_draws(self, data: Samples) -> AbstractContextManager[None]:
        """Let a module that draws in evaluation mode draw the same in every process."""
        return isolated(_EVALUATION_WORD) if self.trial(data).evaluation_draws else nullcontext()

    def _check_trial(self, module: nn.Module, trial: ForwardPass) -> None:
        """Raise `UserError` for what a training step changes besides the trained parameters, and for hidden draws."""
        if not trial.repeats:
            raise UserError(
                f"{self.named}: two forward passes from one state of the generators of torch, NumPy and Python have "
                "different outputs; draw by torch's functions without a generator, and keep no other state"
            )
        if trial.statistics and self.statistics == "refuse":
            raise refusal(self.named, module, trial.statistics)
        if self.statistics != "refuse" and not averaged_names(module, trial.statistics):
            raise UserError(
                f"{self.named}: training moves nothing besides the parameters, and model.statistics = "
                f"{self.statistics}; leave that out"
            )

    def _check_size(self, data: Samples) -> None:
        if self.all_trained:
            with shapes_alone():  # without memory
                module = self.module(data)
        else:
            module = skeleton(self, data)
        count = sum(tensor.numel() for tensor in trained_of(module).values())
        if count > _MOST_PARAMETERS:
            raise UserError(
                f"this model has {count:,} parameters, {self.torch_dtype.itemsize * count / 1e9:.0f} GB, a copy for "
                "each client in training; "
                f"at most {_MOST_PARAMETERS:,}: make its layers smaller"
            )

    def init_server(self, data: Samples, seed: int) -> Arrays:
        """Return the module's own initialisation of what is trained, drawn from the seed and converted to `dtype`."""
        if seed == self._seed and not self.all_trained:
            return arrays_of(skeleton(self, data), self.global_names(data))
        return arrays_of(self._drawn(data, seed), None if self.all_trained else self.global_names(data))

    def init_clients(self, data: Samples, seed: int) -> Arrays:
        """Return what clients keep of layers with local statistics, as what these have moved by: zeros."""
        del seed
        if not (initial := self.own_layers(data)):
            return {}
        zero = np.zeros((), dtype=self.held_dtype)
        return {OWN_LAYERS: np.broadcast_to(zero, (data.n_clients, count_of(initial)))}

    def evaluate(self, server: Arrays, clients: Arrays, data: Samples, split: Split) -> Mapping[str, float]:
        """Return the loss and the metrics on the server's samples; empty if there are none.

        Layers that clients keep are the mean of those of the clients that have taken part.
        """
        samples = data.test if split == "test" else data.validation
        if not len(samples):
            return {}
        if OWN_LAYERS in clients:
            mean = self.own_layers_of(mean_row(clients[OWN_LAYERS]), data)
            server = {**server, **{name: values[0] for name, values in mean.items()}}
        sums: dict[str, Tensor] = {}
        for values in self._values(server, data, samples):
            for name, of_samples in values.items():
                total = of_samples.sum(0).reshape(-1)
                sums[name] = sums[name] + total if name in sums else total
        return self._of_means({name: total.numpy() / len(samples) for name, total in sums.items()}, data)

    @property
    def client_parameters(self) -> frozenset[str]:
        """The arrays of the clients' state that `measure_clients` takes: the layers that they keep."""
        return frozenset([OWN_LAYERS]) if self.statistics == "local" else frozenset()

    def measure_clients(
        self, parameters: Arrays, state: Arrays, data: Samples, split: ClientSplit, clients: IntArray
    ) -> Mapping[str, FloatArray]:
        """Return the loss and the metrics of each client on its own samples of a split, [C]; NaN without samples."""
        samples = getattr(data, split)
        rows, counts = data.of_clients(split).rows(clients)
        if OWN_LAYERS in state:
            parameters = {**parameters, **self.own_layers_of(state[OWN_LAYERS], data)}
        together = all(len(values) == 1 for values in parameters.values()) and not self.trial(data).evaluation_draws
        groups = [(0, rows)] if together else list(enumerate(np.split(rows, np.cumsum(counts)[:-1])))
        values = [
            {name: of_samples.numpy().reshape(len(of_samples), -1) for name, of_samples in batch.items()}
            for index, its_rows in groups
            for batch in self._values(
                {name: of[index if len(of) > 1 else 0] for name, of in parameters.items()}, data, samples, its_rows
            )
        ]
        names = [*(metric.name for metric in self.metrics_on(data)), "loss"]
        measured = {name: np.full(len(clients), np.nan) for name in names}
        with_samples = np.flatnonzero(counts)
        if not len(with_samples):
            return measured
        starts = (np.cumsum(counts) - counts)[with_samples]
        sums = {name: np.add.reduceat(np.concatenate([entry[name] for entry in values]), starts) for name in names}
        for index, client in enumerate(with_samples.tolist()):
            means = {name: total[index] / counts[client] for name, total in sums.items()}
            for name, value in self._of_means(means, data).items():
                measured[name][client] = value
        return measured

    def _values(
        self, parameters: Arrays, data: Samples, samples: Labelled, rows: IntArray | None = None
    ) -> Iterator[dict[str, Tensor]]:
        """Yield the values of the metrics and the loss of each sample, [n] or [n, m] float64, a batch at a time."""
        module, dtype = self._of_widths(parameters, data).loaded(parameters, data), self.torch_dtype
        loss, metrics = self.loss_on(data), self.metrics_on(data)
        parts: list[tuple[str, SampleMeasure]] = [*((metric.name, metric) for metric in metrics), ("loss", loss)]
        positions = samples.labels.shape[1] if data.targets == "tokens" else 1
        at_once = min(max(_OUTPUTS_AT_ONCE // (positions * data.n_outputs), 1), _SAMPLES_AT_ONCE)
        for start in range(0, len(samples) if rows is None else len(rows), at_once):
            part: slice | IntArray = slice(start, start + at_once)
            part = part if rows is None else rows[part]
            with torch.no_grad(), self.evaluation_draws(data):
                outputs = call_module(module, as_inputs(rows_of_inputs(samples.features, part), dtype))
                targets = as_target(torch.from_numpy(np.array(samples.labels[part])), dtype)
                values = {name: measure.per_sample(outputs, targets).to(torch.float64) for name, measure in parts}
            for name, of_samples in values.items():
                if len(of_samples) != len(targets):
                    raise UserError(
                        f"{name} of the model returns {len(of_samples)} values for {len(targets)} samples, expected "
                        "one for each; compute it without a mean over the samples"
                    )
            yield values

    def _of_widths(self, parameters: Arrays, data: Samples) -> NeuralNetwork:
        """Return the network that has these parameters, whose layers may be wider or narrower than this one's."""
        shapes = shapes_of(skeleton(self, data))
        same = all(parameters[name].shape == shapes[name] for name in shapes if name in parameters)
        if same or self.hidden_units(data) is None:
            return self
        return self.resized(self.matched_units(data).counts_in(parameters))

    def _of_means(self, means: Mapping[str, FloatArray], data: Samples) -> dict[str, float]:
        return {
            **{metric.name: float(metric.of_means(means[metric.name])) for metric in self.metrics_on(data)},
            "loss": float(means["loss"][0]),
        }


def _try_out(loss: Loss, metrics: Sequence[Metric], outputs: Tensor, targets: Tensor) -> None:
    """Raise `UserError` unless loss and metrics take these outputs and targets of some samples."""
    n, outputs = len(targets), outputs.detach().requires_grad_()
    parts: list[tuple[str, str, SampleMeasure]] = [
        *(("metrics", "metric", metric) for metric in metrics),
        ("loss", "loss", loss),
    ]
    for section, noun, measure in parts:
        name, kind = f"model.{section}", kind_of(measure)
        try:
            values: Any = measure.per_sample(outputs, targets)
        except (Exception, SystemExit) as error:
            raise UserError(
                f"{name}: {kind} does not take outputs {list(outputs.shape)} and targets {list(targets.shape)} of "
                f"{n} samples ({described(error)}); use another {noun}, or fix it"
            ) from error
        shapes = (1,) if section == "loss" else (1, 2)
        if not isinstance(values, Tensor) or values.ndim not in shapes or len(values) != n:
            got = f"a tensor {list(values.shape)}" if isinstance(values, Tensor) else type(values).__name__
            raise UserError(
                f"{name}: {kind} returns {got}, expected a tensor of one value for each of {n} samples, [{n}]"
            )
        if section == "loss" and not values.requires_grad:
            raise UserError(f"{name}: {kind} has no gradient; compute it from the outputs by torch's operations")
        if isinstance(measure, Metric):
            _try_means(measure, values.detach().to(torch.float64).mean(0).reshape(-1).numpy())


def _try_means(metric: Metric, means: FloatArray) -> None:
    """Raise `UserError` unless the metric is a number; of few samples it may be undefined."""
    try:
        float(metric.of_means(means))
    except ArithmeticError:
        return
    except (TypeError, ValueError, IndexError) as error:
        raise UserError(
            f"model.metrics: of_means of {metric.name} does not return a number for {len(means)} means "
            f"({described(error)}); fix it"
        ) from error


def skeleton(model: NeuralNetwork, data: Samples) -> nn.Module:
    """Return the module in training mode, from which calls make copies with values of their own; never called itself.

    Raise `UserError` if its frozen parameters and buffers are not those of the process that the run began in.
    """
    if model.all_trained:
        return _without_values(model, data)
    module, fixed_sha256 = _with_fixed_values(model, data, model._seed)
    if model._fixed_sha256 not in (None, fixed_sha256):
        raise UserError(
            f"{model.named} has other frozen parameters or buffers than where the run began; draw them by torch's "
            "generator, or read them from a file that is the same everywhere"
        )
    return module


@lru_cache(maxsize=2)
def _without_values(model: NeuralNetwork, data: Samples) -> nn.Module:
    with shapes_alone():
        module = model.module(data).to(getattr(torch, model.dtype))
    keep_half_types(module)
    return module.to_empty(device="cpu").train()


@lru_cache(maxsize=2)
def _tried(model: NeuralNetwork, data: Samples, seed: int) -> ForwardPass:
    return forward_pass(skeleton(model.of_seed(seed), data), model._few(data.train))


@lru_cache(maxsize=2)
def _with_fixed_values(model: NeuralNetwork, data: Samples, seed: int) -> tuple[nn.Module, str | None]:
    module = select_output(model.of_seed(seed).typed_module(data), model.output_part)
    return module.train(), fixed_sha256(module)


def as_inputs(features: Features, dtype: torch.dtype) -> Inputs:
    """Return copies of features as a module of this type takes them, by name if they have names."""
    return each_input(lambda values: as_input(torch.from_numpy(np.array(values)), dtype), features)


def as_input(features: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return features as a module of this type takes them: uint8 scaled to 0 to 1, tokens and masks unchanged."""
    return features.to(dtype) / 255 if features.dtype == torch.uint8 else as_target(features, dtype)


def as_target(targets: Tensor, dtype: torch.dtype) -> Tensor:
    """Return numbers in the type of the outputs, and classes or tokens unchanged."""
    return targets.to(dtype) if targets.is_floating_point() else targets
