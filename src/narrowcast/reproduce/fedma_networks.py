"""FedMA beside FedAvg and FedProx by bytes and by rounds: a LeNet, a VGG-9 and an LSTM, and the local epochs.

FedMA's pass has a round for each layer, so that the rivals have as many rounds: `passes` times the layers of the model.
They start from one model, as they are used, and FedMA from models that clients draw themselves, and from one as well.

Each method has the same client rates on validation samples, in runs of one pass with a seed that is no test seed. Of
MNIST nine tenths of the training images are for validation, so that matched averaging has few images per client.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from narrowcast.reproduce.run_spec import RunSpec

TEST_SEEDS = 5
TUNING_SEED = 100
RATES = (0.01, 0.03, 0.1)
METHODS: Mapping[str, str] = {
    "FedAvg": "kind: fedavg",
    "FedProx": "kind: fedprox, mu: 0.001",
    "FedMA": "kind: fedma",
    "FedMA, one start": "kind: fedma, initial: same",
}
_DIRICHLET = "partition: {kind: dirichlet, alpha: 0.5, min_examples: 10, capped: false}"


@dataclass(frozen=True)
class Setting:
    """Data, model and clients; `layers` are those with weights, which FedMA matches one a round."""

    name: str
    title: str
    data: str
    model: str
    clients: int
    layers: int
    passes: tuple[int, ...] = (1, 2, 3)
    epochs: int = 5
    methods: tuple[str, ...] = tuple(METHODS)

    @property
    def cells(self) -> tuple[NetworkCell, ...]:
        """Every method after every number of passes."""
        return tuple(NetworkCell(self, method, passes) for passes in self.passes for method in self.methods)


@dataclass(frozen=True)
class NetworkCell:
    """A method of `METHODS` after some passes."""

    setting: Setting
    method: str
    passes: int

    def tuning(self, rate: float) -> RunSpec:
        """Return the run of one pass on validation samples at a rate, which cells of all passes share."""
        return self._spec(rate, 1, "-tuning")

    def test(self, tried: Sequence[Mapping[str, Any]]) -> RunSpec:
        """Return the run on test samples at the best rate, from the results in the order of the rates."""
        reached = [result["final"].get("validation.accuracy", 0.0) for result in tried]
        return self._spec(RATES[reached.index(max(reached))], self.passes, f"-passes-{self.passes}")

    def _spec(self, rate: float, passes: int, part: str) -> RunSpec:
        setting = self.setting
        rounds, label = passes * setting.layers, f"{setting.name}-{list(METHODS).index(self.method)}{part}"
        return RunSpec(
            f"{label}-rate-{rate:g}",
            "fedavg-digits",
            (
                f"data={{{setting.data}, clients: {setting.clients}}}",
                f"model={{{setting.model}}}",
                f"algorithm={{{METHODS[self.method]}}}",
                f"training={{learning_rate: {rate:g}, momentum: 0.9, batch_size: 32, epochs: {setting.epochs}}}",
                *(f"clients_per_round={setting.clients}", f"chunk_size={setting.clients}"),
                *(f"rounds={rounds}", f"evaluate_every={rounds}", "checkpoint_seconds=100000"),
            ),
            first_seed=0 if part.startswith("-passes") else TUNING_SEED,
            data_seed=True,
        )


_MNIST = f"kind: mnist, validation_share: 0.9, {_DIRICHLET}"
_LENET = "kind: cnn, channels: [8, 16], hidden: 64"
EPOCHS = (1, 5, 20)
STUDIES: Mapping[str, tuple[Setting, ...]] = {
    "fedma-mnist": (
        Setting("fedma-mnist-5", "MNIST, 5 clients", _MNIST, _LENET, clients=5, layers=4),
        Setting("fedma-mnist-10", "MNIST, 10 clients", _MNIST, _LENET, clients=10, layers=4),
    ),
    "fedma-cifar": (
        Setting(
            "fedma-cifar",
            "CIFAR-10, a copy of 12,000 JPEG images, 16 clients",
            f"kind: image_folder, path: cifar10-jpeg-12k, {_DIRICHLET}",
            "kind: vgg9, channels: [8, 16, 32, 32, 64, 64], hidden: [64, 64]",
            clients=16,
            layers=9,
            passes=(1, 2),
        ),
    ),
    "fedma-shakespeare": (
        Setting(
            "fedma-shakespeare",
            "Shakespeare, 8 roles",
            "kind: shakespeare, min_examples: 1000",
            "kind: char_lstm, hidden: 64, layers: 1",
            clients=8,
            layers=3,
        ),
    ),
    "fedma-epochs": tuple(
        Setting(
            f"fedma-epochs-{epochs}",
            f"MNIST, 5 clients, {epochs} local epochs",
            _MNIST,
            _LENET,
            clients=5,
            layers=4,
            passes=(1,),
            epochs=epochs,
            methods=("FedAvg", "FedMA"),
        )
        for epochs in EPOCHS
    ),
}
