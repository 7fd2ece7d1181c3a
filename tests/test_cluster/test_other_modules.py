"""Modules of torchvision, transformers and peft train alike here, on a GPU, and on two actors, one of them killed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from module_zoo import module_zoo
from narrowcast.cluster.backend import RayBackend
from narrowcast.platform.data.samples import Labelled, Samples
from narrowcast.platform.errors import UserError
from narrowcast.platform.models.module_call import call_module, select_output
from narrowcast.platform.models.neural_network import as_inputs
from narrowcast.platform.rounds.loop import LocalBackend
from narrowcast.platform.rounds.state import Run, RunState, start
from narrowcast.platform.types import FloatArray
from narrowcast_papers.adapters.minilm import FOLDER, UpperLayers, below
from sampling import sampled

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),  # each run on Ray starts a driver and three hosts that import transformers
    pytest.mark.filterwarnings("ignore"),  # those of the libraries
]

NAMES = [
    *("torchvision MobileNetV2, group norm, dropout", "torchvision ViT, dropout"),
    "torchvision DenseNet, averaged batch norm, dropout",
    *("transformers BERT, dropout, masks", "transformers GPT-2, tied weights, dropout", "transformers ViT"),
    *("peft LoRA on BERT", "peft LoRA on GPT-2", "LSTM, weight norm, dropout", "U-Net, dictionary of outputs"),
    *("frozen body in bfloat16", "torch encoder, positional table, a layer used twice"),
]
OF_EACH_KIND = {
    *("peft LoRA on BERT", "transformers GPT-2, tied weights, dropout", "frozen body in bfloat16"),
    "torchvision DenseNet, averaged batch norm, dropout",
    *("LSTM, weight norm, dropout", "U-Net, dictionary of outputs"),
}
"""Modules that CI kills an actor of; `make thorough` has the others."""
ON_A_GPU = [
    *NAMES,
    *("torchvision ResNet-18, group norm", "torchvision ResNet-18, averaged batch norm"),
    *("torchvision Swin, stochastic depth", "torchvision ConvNeXt, stochastic depth"),
    "transformers DistilBERT, dropout, masks",
    *("transformers Llama, rotary buffers", "lazy layer, dictionary of outputs", "spectral norm", "torch.compile"),
]
TOLERANCE = 1e-4
"""What rounding may make of a round, relative to the change of the model."""
MOST_HEADER_BITS = 96  # of a message, and of the client's number of examples, which takes one byte or more


@pytest.fixture(scope="module")
def zoo() -> Iterator[ModuleType]:
    with module_zoo() as module:
        yield module


@pytest.fixture(scope="module")
def data(zoo: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    for kind, write in zoo.DATA.items():
        write(folder / f"{kind}.npz")
    return folder


def moved(experiment: Any, run: Run, state: RunState) -> FloatArray:
    """Return the change of all values in a run's one round from this state."""
    first = {name: values.copy() for name, values in experiment.algorithm.final(state.server).items()}
    (outcome,) = LocalBackend().run(run, state)
    last = experiment.algorithm.final(outcome.state.server)
    return np.concatenate([np.ravel(last[name] - values) for name, values in first.items()])


ADAPTED: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "BertForSequenceClassification": (
        "texts",
        {
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "intermediate_size": 64,
            "vocab_size": 96,
        },
        {"targets": ["*.query.weight", "*.value.weight"], "also_trained": ["classifier.*"]},
    ),
    "GPT2LMHeadModel": (
        "next_tokens",
        {"n_embd": 32, "n_layer": 2, "n_head": 2, "bos_token_id": 0, "eos_token_id": 0},
        {
            "rank": 40,
            "alpha": 20.0,
        },  # weights tied to the embedding, transposed layers, ranks that a layer's width limits
    ),
}


def test_the_upper_layers_of_minilm_from_what_the_lower_ones_give_are_the_whole_model(
    zoo: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = zoo._transformers()
    sizes = {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64, "vocab_size": 96}
    whole = library.BertModel(library.BertConfig(**sizes, num_hidden_layers=6), add_pooling_layer=False).eval()
    whole.save_pretrained(tmp_path / FOLDER)
    monkeypatch.setenv("NARROWCAST_DATA", str(tmp_path))
    random = np.random.default_rng(0)
    mask = (np.arange(12) < random.integers(3, 13, size=80)[:, np.newaxis]).astype(np.int64)
    inputs = {"input_ids": random.integers(0, 96, (80, 12)), "attention_mask": mask}
    texts = Labelled(inputs, random.integers(0, 2, size=80))
    lifted = below(Samples("texts", "", 2, texts, texts.take(np.arange(5)), texts, np.arange(80), np.array([0, 80])))
    assert isinstance(lifted, Samples)
    upper = UpperLayers(2).eval()
    with torch.no_grad():
        scores = call_module(upper, as_inputs(lifted.train.features, torch.float32))
        vectors = whole(**{name: torch.from_numpy(values) for name, values in inputs.items()}).last_hidden_state
    means = np.array([rows[: count.sum()].mean(axis=0) for rows, count in zip(vectors.numpy(), mask, strict=True)])
    scaled = (means - means.mean(axis=1, keepdims=True)) / np.sqrt(means.var(axis=1, keepdims=True) + 1e-5)
    wanted = scaled @ upper.classifier.weight.detach().numpy().T + upper.classifier.bias.detach().numpy()
    assert np.abs(scores.numpy() - wanted).max() < 1e-5
    assert len(lifted.validation) == 5


@pytest.mark.parametrize("architecture", ADAPTED)
def test_adapters_of_a_model_of_transformers_are_those_of_peft(
    architecture: str, zoo: ModuleType, data: Path, tmp_path: Path
) -> None:
    zoo._transformers()
    from peft import PeftModel

    texts, config, fields = ADAPTED[architecture]
    base = {"kind": "transformers", "architecture": architecture, "config": config}
    experiment = zoo.experiment_of(zoo.Module("", texts, {"kind": "adapters", "base": base, **fields}), data)
    samples, model = experiment.data_source.load(), experiment.model
    *_, last = LocalBackend().run(run := Run(experiment, experiment.algorithm, experiment.task(samples)), start(run))
    learnt = experiment.algorithm.final(last.state.server)
    assert all(np.abs(values).max() > 0 for values in learnt.values())
    folder = model.write_peft(learnt, samples, tmp_path / "adapter")
    inputs = as_inputs(samples.test.features, torch.float32)

    def outputs(module: torch.nn.Module) -> Any:
        with torch.no_grad():
            return call_module(select_output(module.eval(), "logits"), inputs)

    ours = outputs(model.loaded(learnt, samples))
    theirs = PeftModel.from_pretrained(model.base.typed_module(samples), str(folder))
    assert (outputs(theirs) - ours).abs().max() <= 1e-6 * ours.abs().max()
    theirs.save_pretrained(tmp_path / "saved")
    again = type(model)(**{**model.model_dump(), "adapter": str(tmp_path / "saved")})
    again.check(samples)
    assert all(np.array_equal(values, learnt[name]) for name, values in again.init_server(samples, 0).items())
    merged = {name: torch.from_numpy(values) for name, values in model.merged(learnt, samples).items()}
    whole = model.base.typed_module(samples)
    whole.load_state_dict(merged)
    assert (outputs(whole) - ours).abs().max() <= 1e-5 * ours.abs().max()
    if architecture == "GPT2LMHeadModel":
        with pytest.raises(UserError, match=r"c_attn.weight of Conv1D is held transposed, and no product is added"):
            model.adapted_weights(samples)


@pytest.mark.cuda
@pytest.mark.parametrize("name", ON_A_GPU)
def test_modules_train_on_a_gpu_as_on_a_cpu(name: str, zoo: ModuleType, data: Path) -> None:
    """The control is a CPU that begins with values changed in their last digits, since deep modules amplify them.

    A GPU draws other masks than a CPU, so that a module with dropout is compared with a second run there.
    """
    sgd = {"kind": "sgd", "learning_rate": 1e-3}  # Adam's first steps are signs, of which rounding decides some

    def change(device: str, rounding: float = 0.0) -> FloatArray:
        experiment = zoo.experiment_of(zoo.MODULES[name], data, device=device, **sgd)
        experiment = experiment.model_copy(update={"rounds": 1, "evaluate_every": 1})
        run = Run(experiment, experiment.algorithm, experiment.task(experiment.data_source.load()))
        state, random = start(run), np.random.default_rng(0)
        model = experiment.algorithm.final(state.server)
        for tensor in model:
            model[tensor][...] *= 1 + rounding * random.standard_normal(model[tensor].shape).astype(np.float32)
        return moved(experiment, run, state)

    experiment = zoo.experiment_of(zoo.MODULES[name], data)
    on_cpu, on_gpu = change("cpu"), change("cuda")
    size = np.linalg.norm(on_cpu)
    control = np.linalg.norm(change("cpu", 1e-7) - on_cpu) / size
    draws = experiment.model.trial(experiment.data_source.load()).draws
    difference = np.linalg.norm(on_gpu - (change("cuda") if draws else on_cpu)) / size
    assert difference <= max(10 * control, 2**-8 if "bfloat16" in name else TOLERANCE)
    assert control < 0.1


@pytest.mark.ray
@pytest.mark.usefixtures("shared_ray")
@pytest.mark.parametrize("name", sampled(NAMES, OF_EACH_KIND))
def test_a_killed_actor_changes_nothing_and_uploads_are_what_trains(name: str, zoo: ModuleType, data: Path) -> None:
    module = zoo.MODULES[name]
    experiment = zoo.experiment_of(module, data)
    alone = zoo.final_sha256(experiment, LocalBackend(), kill=False)
    assert zoo.final_sha256(experiment, RayBackend(actors=2), kill=True) == alone
    trained, _ = zoo.trainable(experiment)
    if "statistics" not in module.model:
        upload_bits = alone[1] / (zoo.ROUNDS * experiment.clients_per_round)
        assert 32 * trained < upload_bits <= 32 * trained + MOST_HEADER_BITS
