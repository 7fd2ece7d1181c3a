"""Base of the neural networks: seeded initialisation, the loss that clients minimise, and held-out metrics."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Annotated, Any, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn

from narrowcast.platform.client_contracts import ClientSplit
from narrowcast.platform.contracts import Dataset, Split
from narrowcast.platform.data.samples import Labelled, Samples
from narrowcast.platform.errors import UserError
from narrowcast.platform.models.hidden_units import HasHiddenUnits, network_of_counts, units_to_match
from narrowcast.platform.models.losses import LOSSES, Loss, default_loss
from narrowcast.platform.models.metrics import DEFAULT_METRICS, METRICS, Metric, default_metrics
from narrowcast.platform.models.module_call import call_module
from narrowcast.platform.models.sample_measures import SampleMeasure
from narrowcast.platform.section import Section
from narrowcast.platform.seeds import generator
from narrowcast.platform.types import Arrays, FloatArray, IntArray

_MOST_PARAMETERS = 2**30
_SAMPLES_AT_ONCE = 1000
_METRIC_NAME = r"[\w@: -]+"  # a dot separates the split from the name, and MLflow takes no other characters


class NeuralNetwork(Section):
    """A torch module that maps features [n, ...] to outputs [n, ...], trained by a loss of outputs and targets.

    All parameters are global. A subclass builds the module in `module`; its last layer has `n_outputs(data)` units.
    Inputs are as `as_input` gives them: images [n, channels, height, width] from 0 to 1, other features [n, features],
    both in `dtype`, text [n, length] as int64 tokens. Outputs are scores [n, classes] for classes, scores
    [n, length, tokens] for tokens, and predictions [n, k] for numbers.
    """

    loss: Annotated[Loss, LOSSES] | None = Field(
        None, description="minimised by clients; null: cross_entropy for classes and tokens, squared_error for numbers"
    )
    metrics: tuple[Annotated[Metric, METRICS], ...] | None = Field(
        None,
        description="of held-out samples, besides the loss; null: accuracy for classes, accuracy and perplexity for "
        "tokens, rmse, mae and r2 for numbers",
    )
    dtype: Literal["float32", "float64"] = Field(
        "float32",
        description="type of the parameters and of all that is computed and sent; a value takes 4 or 8 bytes",
    )

    def __hash__(self) -> int:
        return hash(type(self))  # in every round; equality tells the models of a class apart

    def module(self, data: Samples) -> nn.Module:
        """Return the untrained module for this data set."""
        raise NotImplementedError

    @property
    def torch_dtype(self) -> torch.dtype:
        """`dtype` for torch."""
        return torch.float64 if self.dtype == "float64" else torch.float32

    def typed_module(self, data: Samples) -> nn.Module:
        """Return the untrained module, its parameters converted to `dtype`."""
        return self.module(data).to(self.torch_dtype)

    def loaded(self, parameters: Arrays, data: Samples) -> nn.Module:
        """Return the module with these parameters, in evaluation mode."""
        module = self.typed_module(data)
        module.load_state_dict({name: torch.from_numpy(np.array(values)) for name, values in parameters.items()})
        return module.eval()

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
        kind = getattr(self, "kind", "this model")
        if not isinstance(data, Samples):
            raise UserError(
                f"model.kind = {kind} needs samples with targets, but {data.name} has none; use another model"
            )
        if type(self).__module__.startswith("narrowcast."):  # modules of others may refuse the meta device
            self._check_size(data)
        module, loss, metrics = self.module(data), self.loss_on(data), self.metrics_on(data)
        if other := {each.dtype for each in module.parameters()} - {torch.float32, self.torch_dtype}:
            has = str(other.pop()).removeprefix("torch.")
            advice = "set model.dtype = float64" if has == "float64" else "build it in float32"
            raise UserError(f"model.kind = {kind} has parameters of {has}, and model.dtype = {self.dtype}; {advice}")
        module.to(self.torch_dtype)
        if buffers := [name for name, _ in module.named_buffers()]:
            raise UserError(
                f"model.kind = {kind} has state besides its parameters ({', '.join(buffers[:3])}), which clients "
                "would have to share; replace batch norm by group norm or layer norm"
            )
        asked: tuple[SampleMeasure, ...] = (loss, *metrics)
        for each in asked:
            each.check(data)
        if len(names := [metric.name for metric in metrics]) > len({"loss", *names}) - 1:
            raise UserError(
                f"model.metrics = {', '.join(names)}: each name may occur once, and loss is reported anyway"
            )
        for name in names:
            if re.fullmatch(_METRIC_NAME, name) is None:
                raise UserError(
                    f"model.metrics: \"{name}\" should have only letters, digits, '_', '-', '@', ':' and spaces"
                )
        part = data.test if len(data.test) else data.train
        some = part.take(np.arange(min(len(part), 2)))
        units = self.n_outputs(data)
        wanted = (some.labels.shape[1], units) if data.targets == "tokens" else (units,)
        expected = f"{'predictions' if data.targets == 'numbers' else 'scores'} [n, {', '.join(map(str, wanted))}]"
        try:
            with torch.no_grad():
                outputs = call_module(module, as_input(torch.from_numpy(some.features), self.torch_dtype))
        except (RuntimeError, IndexError, TypeError) as error:
            shape = ", ".join(["n", *map(str, data.train.features.shape[1:])])
            raise UserError(
                f"model.kind = {kind} does not take the features of {data.name}, a tensor [{shape}] "
                f"({_first_line(error)}); the module must map it to {expected}"
            ) from error
        if outputs.shape[1:] != wanted:
            raise UserError(f"model.kind = {kind} returns {list(outputs.shape)}, expected {expected}")
        _try_out(loss, metrics, outputs, as_target(torch.from_numpy(some.labels), self.torch_dtype))

    def _check_size(self, data: Samples) -> None:
        with torch.device("meta"):  # shapes alone, without memory
            count = sum(each.numel() for each in self.module(data).parameters())
        if count > _MOST_PARAMETERS:
            raise UserError(
                f"this model has {count:,} parameters, {self.torch_dtype.itemsize * count / 1e9:.0f} GB, a copy for "
                "each client in training; "
                f"at most {_MOST_PARAMETERS:,}: make its layers smaller"
            )

    def init_server(self, data: Samples, seed: int) -> Arrays:
        """Return the module's own initialisation, drawn from the seed and then converted to `dtype`."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(int(generator(seed, "model").integers(2**63)))
            module = self.typed_module(data)
        return {name: values.detach().numpy().copy() for name, values in module.named_parameters()}

    def init_clients(self, data: Samples, seed: int) -> Arrays:
        """Return no arrays: no parameter is private."""
        del data, seed
        return {}

    def evaluate(self, server: Arrays, clients: Arrays, data: Samples, split: Split) -> Mapping[str, float]:
        """Return the loss and the metrics on the server's samples; empty if there are none."""
        del clients
        samples = data.test if split == "test" else data.validation
        if not len(samples):
            return {}
        sums: dict[str, Tensor] = {}
        for values in self._values(server, data, samples):
            for name, each in values.items():
                total = each.sum(0).reshape(-1)
                sums[name] = sums[name] + total if name in sums else total
        return self._of_means({name: total.numpy() / len(samples) for name, total in sums.items()}, data)

    @property
    def client_parameters(self) -> frozenset[str]:
        """The arrays of the clients' state that `measure_clients` takes: none."""
        return frozenset()

    def measure_clients(
        self, parameters: Arrays, state: Arrays, data: Samples, split: ClientSplit, clients: IntArray
    ) -> Mapping[str, FloatArray]:
        """Return the loss and the metrics of each client on its own samples of a split, [C]; NaN without samples."""
        del state
        samples = getattr(data, split)
        rows, counts = data.of_clients(split).rows(clients)
        each = [(0, rows)] if all(len(values) == 1 for values in parameters.values()) else []
        each = each or list(enumerate(np.split(rows, np.cumsum(counts)[:-1])))
        values = [
            {name: of_samples.numpy().reshape(len(of_samples), -1) for name, of_samples in batch.items()}
            for place, its_rows in each
            for batch in self._values({name: of[place] for name, of in parameters.items()}, data, samples, its_rows)
        ]
        names = [*(metric.name for metric in self.metrics_on(data)), "loss"]
        measured = {name: np.full(len(clients), np.nan) for name in names}
        some = np.flatnonzero(counts)
        if not len(some):
            return measured
        starts = (np.cumsum(counts) - counts)[some]
        sums = {name: np.add.reduceat(np.concatenate([each[name] for each in values]), starts) for name in names}
        for place, client in enumerate(some.tolist()):
            means = {name: total[place] / counts[client] for name, total in sums.items()}
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
        for start in range(0, len(samples) if rows is None else len(rows), _SAMPLES_AT_ONCE):
            part: slice | IntArray = slice(start, start + _SAMPLES_AT_ONCE)
            part = part if rows is None else rows[part]
            with torch.no_grad():
                outputs = call_module(module, as_input(torch.from_numpy(np.array(samples.features[part])), dtype))
                targets = as_target(torch.from_numpy(np.array(samples.labels[part])), dtype)
                values = {name: each.per_sample(outputs, targets).to(torch.float64) for name, each in parts}
            yield values

    def _of_widths(self, parameters: Arrays, data: Samples) -> NeuralNetwork:
        """Return the network that has these parameters, whose layers may be wider or narrower than this one's."""
        shapes = {name: tuple(values.shape) for name, values in skeleton(self, data).named_parameters()}
        if not isinstance(self, HasHiddenUnits) or all(parameters[name].shape == shapes[name] for name in shapes):
            return self
        fitting: NeuralNetwork = network_of_counts(self, units_to_match(self, data).counts_in(parameters))
        return fitting

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
    for section, noun, each in parts:
        name, kind = f"model.{section}", getattr(each, "kind", type(each).__name__)
        try:
            values: Any = each.per_sample(outputs, targets)
        except Exception as error:
            raise UserError(
                f"{name}: {kind} does not take outputs {list(outputs.shape)} and targets {list(targets.shape)} of "
                f"{n} samples ({_first_line(error)}); use another {noun}, or mend it"
            ) from error
        shapes = (1,) if section == "loss" else (1, 2)
        if not isinstance(values, Tensor) or values.ndim not in shapes or len(values) != n:
            got = f"a tensor {list(values.shape)}" if isinstance(values, Tensor) else type(values).__name__
            raise UserError(
                f"{name}: {kind} returns {got}, expected a tensor of one value for each of {n} samples, [{n}]"
            )
        if section == "loss" and not values.requires_grad:
            raise UserError(f"{name}: {kind} has no gradient; compute it from the outputs by torch's operations")
        if isinstance(each, Metric):
            _try_means(each, values.detach().to(torch.float64).mean(0).reshape(-1).numpy())


def _try_means(metric: Metric, means: FloatArray) -> None:
    """Raise `UserError` unless the metric is a number; of few samples it may be undefined."""
    try:
        float(metric.of_means(means))
    except ArithmeticError:
        return
    except (TypeError, ValueError, IndexError) as error:
        raise UserError(
            f"model.metrics: of_means of {metric.name} returns no number of {len(means)} means "
            f"({_first_line(error)}); mend it"
        ) from error


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


@lru_cache(maxsize=2)
def skeleton(model: NeuralNetwork, data: Samples) -> nn.Module:
    """Return the module in training mode and without values, for calls that supply their own."""
    with torch.device("meta"):
        return model.typed_module(data).train()


def as_input(features: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return features as a module of this type takes them: uint8 scaled to 0 to 1, tokens unchanged."""
    return features.to(dtype) / 255 if features.dtype == torch.uint8 else as_target(features, dtype)


def as_target(targets: Tensor, dtype: torch.dtype) -> Tensor:
    """Return numbers in the type of the outputs, and classes or tokens unchanged."""
    return targets.to(dtype) if targets.is_floating_point() else targets
