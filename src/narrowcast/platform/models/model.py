"""The contract of models, and their kinds."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Self

from narrowcast.platform.rounds.client_contracts import ClientSplit
from narrowcast.platform.types import Arrays, FloatArray, IntArray

Split = Literal["validation", "test"]
ITEM_FACTORS, USER_FACTORS = "item_factors", "user_factors"
"""Names of the parameters of matrix factorisation, which algorithms and messages know."""


class Model(ABC):
    """The model to train: a frozen pydantic model whose fields are its hyper-parameters.

    A subclass has a `kind` and overrides what is abstract. The other members are optional: each stands here with what
    it returns for a model that does not offer it.
    """

    if TYPE_CHECKING:

        @property
        def kind(self) -> str:
            """The model's name in the catalog."""

    @property
    def lower_is_better(self) -> Collection[str] | None:
        """The names of the metrics that are better when lower; None, the default: their words tell."""
        return None

    @property
    def shares(self) -> Collection[str] | None:
        """The names of the metrics that lie between 0 and 1; None, the default: their words tell."""
        return None

    @property
    def held_dtype(self) -> str:
        """The type in which what trains is held and sent: by default that of a field `dtype`, or float32."""
        return str(vars(self).get("dtype", "float32"))

    @property
    def moved_statistics(self) -> Literal["refuse", "local", "average"]:
        """The treatment of what training moves besides the parameters; "refuse", the default, if it moves nothing."""
        return "refuse"

    def of_seed(self, seed: int) -> Self:
        """Return the model for runs of this seed; by default it is the same for all."""
        del seed
        return self

    @property
    def has_module(self) -> bool:
        """True if the model is a torch module: a subclass has `module`."""
        return type(self).module is not Model.module

    def module(self, data: Any) -> Any:
        """Return the untrained torch module for this `Dataset`, for users."""
        raise NotImplementedError(f"{type(self).__name__} has no module")

    def typed_module(self, data: Any) -> Any:
        """Return the untrained torch module in the type of the model; by default `module` as it is."""
        return self.module(data)

    @abstractmethod
    def check(self, data: Any) -> None:
        """Raise `UserError` if the model cannot be trained on this `Dataset`."""

    @abstractmethod
    def init_server(self, data: Any, seed: int) -> Arrays:
        """Return the global parameters before round 1."""

    @abstractmethod
    def init_clients(self, data: Any, seed: int) -> Arrays:
        """Return the private parameters of all clients before round 1, [U, ...] each, drawn from the private seed."""

    @abstractmethod
    def evaluate(self, server: Arrays, clients: Arrays, data: Any, split: Split) -> Mapping[str, float]:
        """Return metrics over all clients on one held-out split; empty if the split is."""

    # Evaluation of clients

    @property
    def measures_clients(self) -> bool:
        """True if the model can be evaluated on the samples of each client, as `evaluate_clients` asks."""
        return type(self).measure_clients is not Model.measure_clients

    @property
    def client_parameters(self) -> Collection[str] | None:
        """The names of the private parameters that `measure_clients` takes; None, the default, without that method."""
        return None

    def measure_clients(
        self, parameters: Arrays, state: Arrays, data: Any, split: ClientSplit, clients: IntArray
    ) -> Mapping[str, FloatArray]:
        """Return metrics of C clients, each on its own samples of a split, [C]; NaN for a client without samples.

        Shapes: parameters [1, ...], one global model for all, or [C, ...]; state [C, ...], the private parameters;
        clients [C] ascending. The metrics are those of `evaluate`.
        """
        raise NotImplementedError(f"{type(self).__name__} has no measure_clients")

    # Hidden units, of which slices are taken and matched

    def hidden_units(self, data: Any) -> Any:
        """Return the `HiddenUnits` of the network for this data set; None, the default, if it declares none."""
        del data

    def narrowed(self, counts: Sequence[int]) -> Self:
        """Return the network with so many units in each hidden layer, equal to this one if the counts are its own."""
        raise NotImplementedError(f"{type(self).__name__} has no narrowed, which goes with hidden_units")

    def matched_units(self, data: Any) -> Any:
        """Return the `HiddenUnits` of which more can be matched across clients; by default those of `hidden_units`.

        Raise `UserError` if there are layers whose units cannot differ in number.
        """
        return self.hidden_units(data)

    def resized(self, counts: Sequence[int]) -> Self:
        """Return the network with so many units in each of the layers of `matched_units`."""
        return self.narrowed(counts)

    def multiplications(self, data: Any, counts: Sequence[int]) -> int | None:
        """Return those of a forward pass with so many units; None, the default: the operations of torch are counted."""
        del data, counts
        return None

    # Parameters and buffers that are not trained

    def fixed_names(self, data: Any) -> Collection[str]:
        """Return their names; by default there are none."""
        del data
        return frozenset()

    def fixed_sha256(self, data: Any) -> str | None:
        """Return the sha256 of their values; None, the default, if there are none."""
        del data
        return None

    def pinned(self, sha256: str | None) -> Self:
        """Return the model that refuses other values than those of this `fixed_sha256`; by default itself."""
        del sha256
        return self

    def state(self, parameters: Arrays, data: Any) -> Arrays:
        """Return the parameters with those that are not trained; by default there are no others."""
        del data
        return parameters

    # Metrics to compare with

    def baselines(self, data: Any) -> Mapping[str, Mapping[str, float]]:
        """Return the metrics of predictions without training, by name; none by default.

        Such as `{"popularity": {"test.hr@10": 0.45}}`.
        """
        del data
        return {}
