"""Modules of torchvision, transformers and peft train alike in this process and on two actors, one of them killed."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from narrowcast.cluster.ray_backend import RayBackend
from narrowcast.platform.local_backend import LocalBackend

pytestmark = [
    *(pytest.mark.ray, pytest.mark.slow, pytest.mark.usefixtures("shared_ray")),
    pytest.mark.timeout(900),  # each starts a driver and three hosts that import transformers
]

FILE = Path(__file__).resolve().parents[2] / "benchmarks" / "other_modules.py"
NAMES = [
    *("torchvision MobileNetV2, group norm, dropout", "torchvision ViT, dropout"),
    "torchvision DenseNet, averaged batch norm, dropout",
    *("transformers BERT, dropout, masks", "transformers GPT-2, tied weights, dropout", "transformers ViT"),
    *("peft LoRA on BERT", "peft LoRA on GPT-2", "LSTM, weight norm, dropout", "U-Net, dictionary of outputs"),
    *("frozen body in bfloat16", "torch encoder, positional table, a layer used twice"),
]
MOST_HEADER_BITS = 96  # of a message, and of the client's number of examples, which takes one byte or more


@pytest.fixture(scope="module")
def benchmark() -> Iterator[ModuleType]:
    """The benchmark as a module, from whose file the factories can be imported by name."""
    spec = importlib.util.spec_from_file_location("other_modules", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FILE.parent))
        patch.setitem(sys.modules, "other_modules", module)
        spec.loader.exec_module(module)
        yield module


@pytest.fixture(scope="module")
def data(benchmark: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    for kind, write in benchmark.DATA.items():
        write(folder / f"{kind}.npz")
    return folder


@pytest.mark.filterwarnings("ignore")  # those of the libraries
@pytest.mark.parametrize("name", NAMES)
def test_a_killed_actor_changes_nothing_and_uploads_are_what_trains(
    name: str, benchmark: ModuleType, data: Path
) -> None:
    module = benchmark.MODULES[name]
    experiment = benchmark.experiment_of(module, data)
    alone = benchmark.final_sha256(experiment, LocalBackend(), kill=False)
    assert benchmark.final_sha256(experiment, RayBackend(actors=2), kill=True) == alone
    trained, _ = benchmark.trainable(experiment)
    if "statistics" not in module.model:
        upload_bits = alone[1] / (benchmark.ROUNDS * experiment.clients_per_round)
        assert 32 * trained < upload_bits <= 32 * trained + MOST_HEADER_BITS
