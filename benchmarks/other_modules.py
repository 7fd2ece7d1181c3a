"""Twenty modules of others, three rounds each, in this process and on two Ray actors of which one is killed.

Classes of torchvision, transformers and peft are built from a configuration, so that nothing is downloaded; images and
texts come with scikit-learn and Python. Each row ends with the same `model_sha256` both times, and an upload has the
bits of what `requires_grad` says and of nothing else. Needs the packages of the extra `dev`.

    python benchmarks/other_modules.py [--only NAME ...] [--csv FILE]
"""

from __future__ import annotations

import argparse
import csv
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from torch import Tensor, nn

ROUNDS, ACTORS = 3, 2
_LENGTH, _TOKENS, _CLASSES = 24, 96, 10


# Factories: each returns a module of this size, called with the batch of its data


@cache
def _torchvision() -> Any:
    """Import torchvision's models, on PyTorch for CPUs too, for which the package index has no build of torchvision.

    Its own operators are then absent; none of these models calls one, and two of them have to be declared.
    """
    if torch.version.cuda is None and not version("torchvision").endswith("+cpu"):
        for name in ("nms", "qnms"):
            _OPERATORS.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    import torchvision.models

    return torchvision.models


_OPERATORS = torch.library.Library("torchvision", "FRAGMENT")


def _transformers() -> Any:
    """Import transformers, which imports torchvision where it is installed."""
    _torchvision()
    import transformers

    return transformers


def _group_norm(channels: int) -> nn.GroupNorm:
    return nn.GroupNorm(4, channels)


def resnet18(norm: str = "group") -> nn.Module:
    layer = _group_norm if norm == "group" else nn.BatchNorm2d
    return _torchvision().resnet18(num_classes=_CLASSES, norm_layer=layer)


def mobilenet() -> nn.Module:
    return _torchvision().mobilenet_v2(num_classes=_CLASSES, width_mult=0.25, norm_layer=_group_norm, dropout=0.2)


def vit() -> nn.Module:
    return _torchvision().VisionTransformer(
        image_size=32, patch_size=8, num_layers=2, num_heads=2, hidden_dim=32, mlp_dim=64, dropout=0.1,
        attention_dropout=0.1, num_classes=_CLASSES,
    )  # fmt: skip


def swin() -> nn.Module:
    return _torchvision().SwinTransformer(
        patch_size=[4, 4], embed_dim=16, depths=[1, 2], num_heads=[2, 2], window_size=[4, 4],
        stochastic_depth_prob=0.3, num_classes=_CLASSES,
    )  # fmt: skip


def convnext() -> nn.Module:
    models = _torchvision()
    blocks = [models.convnext.CNBlockConfig(16, 32, 1), models.convnext.CNBlockConfig(32, None, 2)]
    return models.ConvNeXt(blocks, stochastic_depth_prob=0.2, num_classes=_CLASSES)


def densenet() -> nn.Module:
    return _torchvision().DenseNet(8, (2, 2), 16, num_classes=_CLASSES, drop_rate=0.1)


_SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}


def bert() -> nn.Module:
    library = _transformers()
    config = library.BertConfig(vocab_size=_TOKENS, max_position_embeddings=_LENGTH, num_labels=_CLASSES, **_SMALL)
    return library.BertForSequenceClassification(config)


def distilbert() -> nn.Module:
    library = _transformers()
    config = library.DistilBertConfig(
        vocab_size=_TOKENS, max_position_embeddings=_LENGTH, num_labels=_CLASSES, dim=32, n_layers=1, n_heads=2,
        hidden_dim=64,
    )  # fmt: skip
    return library.DistilBertForSequenceClassification(config)


def gpt2() -> nn.Module:
    library = _transformers()
    config = library.GPT2Config(
        vocab_size=_TOKENS, n_positions=_LENGTH, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
    )
    return library.GPT2LMHeadModel(config)


def llama() -> nn.Module:
    library = _transformers()
    config = library.LlamaConfig(
        vocab_size=_TOKENS, max_position_embeddings=_LENGTH, bos_token_id=0, eos_token_id=0, **_SMALL
    )
    return library.LlamaForCausalLM(config)


def hugging_face_vit() -> nn.Module:
    library = _transformers()
    config = library.ViTConfig(image_size=32, patch_size=8, num_labels=_CLASSES, **_SMALL)
    return library.ViTForImageClassification(config)


def _lora(base: nn.Module, targets: list[str], **settings: Any) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(base, LoraConfig(r=4, lora_dropout=0.1, target_modules=targets, **settings))


def lora_bert() -> nn.Module:
    return _lora(bert(), ["query", "value"], modules_to_save=["classifier"])


def lora_gpt2() -> nn.Module:
    return _lora(gpt2(), ["c_attn"], fan_in_fan_out=True)


class WeightNormLSTM(nn.Module):
    """An LSTM over tokens whose output layer has weight norm, with dropout between its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(_TOKENS, 16)
        self.lstm = nn.LSTM(16, 32, num_layers=2, dropout=0.2, batch_first=True)
        self.scores = nn.utils.parametrizations.weight_norm(nn.Linear(32, _CLASSES))

    def forward(self, tokens: Tensor) -> Tensor:
        outputs, _ = self.lstm(self.embedding(tokens))
        return self.scores(outputs[:, -1])


class UNet(nn.Module):
    """Two levels down and up with skip connections; returns a dictionary of classes and of the restored image."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = self._block(3, 8), self._block(8, 16)
        self.middle, self.up = self._block(16, 16), nn.ConvTranspose2d(16, 8, 2, stride=2)
        self.last, self.image, self.classes = self._block(16, 8), nn.Conv2d(8, 3, 1), nn.Conv2d(8, _CLASSES, 1)

    @staticmethod
    def _block(before: int, after: int) -> nn.Module:
        return nn.Sequential(nn.Conv2d(before, after, 3, padding=1), nn.GroupNorm(4, after), nn.ReLU())

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        first = self.first(images)
        middle = self.middle(self.second(nn.functional.max_pool2d(first, 2)))
        last = self.last(torch.cat([first, self.up(middle)], dim=1))
        return {"image": self.image(last), "logits": self.classes(last).mean(dim=(2, 3))}


class TwoHeads(nn.Module):
    """Returns a dictionary of two heads, of which one is trained on."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.LazyLinear(32), nn.Tanh())
        self.heads = nn.ModuleDict({"digit": nn.Linear(32, _CLASSES), "parity": nn.Linear(32, 2)})

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        features = self.body(images)
        return {name: head(features) for name, head in self.heads.items()}


class FrozenBody(nn.Module):
    """A convolutional body that stays as it was drawn, in bfloat16, and a head that trains."""

    def __init__(self) -> None:
        super().__init__()
        body = nn.Sequential(nn.Conv2d(3, 8, 5, stride=4), nn.ReLU(), nn.Flatten())
        self.body = body.to(torch.bfloat16).requires_grad_(False)
        self.head = nn.Linear(8 * 7 * 7, _CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.body(images.to(torch.bfloat16)).to(self.head.weight.dtype))


class TransformerEncoder(nn.Module):
    """torch's own encoder with a positional table as a buffer and weights that two layers share."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(_TOKENS, 32)
        angles = torch.arange(_LENGTH)[:, None] / 100 ** (torch.arange(32)[None] / 32)
        self.register_buffer("positions", torch.where(torch.arange(32) % 2 == 0, angles.sin(), angles.cos()))
        self.layer = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.1, batch_first=True)
        self.scores = nn.Linear(32, _CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens) + self.positions
        return self.scores(self.layer(self.layer(hidden)).mean(dim=1))


def spectral_norm() -> nn.Module:
    convolution = nn.utils.parametrizations.spectral_norm(nn.Conv2d(3, 8, 5, stride=4))
    return nn.Sequential(convolution, nn.ELU(), nn.Flatten(), nn.LazyLinear(_CLASSES))


def compiled() -> nn.Module:
    layers = nn.Sequential(nn.Conv2d(3, 8, 5, stride=4), nn.SiLU(), nn.AlphaDropout(0.1), nn.Flatten())
    return torch.compile(nn.Sequential(layers, nn.Linear(8 * 7 * 7, _CLASSES)))  # type: ignore[return-value]


# Data: scikit-learn's digits as colour images, and the topics of Python's help as windows of bytes


def write_images(file: Path) -> None:
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = np.kron(digits.images, np.ones((4, 4)))[:, None].repeat(3, axis=1)
    x, y = (images * 255 / 16).astype(np.uint8), digits.target
    np.savez(file, x_train=x[:1200], y_train=y[:1200], x_test=x[1200:1500], y_test=y[1200:1500])


def _windows() -> np.ndarray:
    from pydoc_data.topics import topics

    text = " ".join(topics[name] for name in sorted(topics))[: 700 * (_LENGTH + 1)].encode("ascii", "replace")
    codes = np.clip(np.frombuffer(text, np.uint8).astype(np.int64) - 32, 0, _TOKENS - 1)
    return codes[: 700 * (_LENGTH + 1)].reshape(700, _LENGTH + 1)


def write_texts(file: Path) -> None:
    """Windows of characters with the number of blanks in them as class; a mask leaves out some last characters."""
    tokens = _windows()[:, :_LENGTH]
    classes = np.minimum((tokens == 0).sum(axis=1), _CLASSES - 1)
    classes[:_CLASSES] = np.arange(_CLASSES)
    lengths = np.random.default_rng(0).integers(_LENGTH // 2, _LENGTH + 1, len(tokens))
    mask = (np.arange(_LENGTH) < lengths[:, None]).astype(np.int64)
    splits = {"train": slice(0, 500), "test": slice(500, None)}
    arrays = {
        f"x_{split}.{name}": values[part]
        for split, part in splits.items()
        for name, values in {"input_ids": tokens, "attention_mask": mask}.items()
    }
    np.savez(file, **arrays, **{f"y_{split}": classes[part] for split, part in splits.items()})


def write_tokens(file: Path) -> None:
    """The same windows as one array, with their classes."""
    tokens = _windows()[:, :_LENGTH]
    classes = np.minimum((tokens == 0).sum(axis=1), _CLASSES - 1)
    classes[:_CLASSES] = np.arange(_CLASSES)
    np.savez(file, x_train=tokens[:500], y_train=classes[:500], x_test=tokens[500:], y_test=classes[500:])


def write_next_tokens(file: Path) -> None:
    windows = _windows()
    x, y = windows[:, :-1], windows[:, 1:]
    np.savez(file, x_train=x[:500], y_train=y[:500], x_test=x[500:], y_test=y[500:])


DATA: Mapping[str, Callable[[Path], None]] = {
    "images": write_images,
    "texts": write_texts,
    "tokens": write_tokens,
    "next_tokens": write_next_tokens,
}


@dataclass(frozen=True)
class Module:
    """A factory of this file, the data that its module takes, and further fields of the model and of the training."""

    factory: str
    data: str
    model: Mapping[str, Any] = field(default_factory=dict)
    training: Mapping[str, Any] = field(default_factory=dict)
    arguments: Mapping[str, Any] = field(default_factory=dict)


_ADAM = {"kind": "adamw", "learning_rate": 1e-3}
MODULES: Mapping[str, Module] = {
    "torchvision ResNet-18, group norm": Module("resnet18", "images"),
    "torchvision ResNet-18, local batch norm": Module(
        "resnet18", "images", {"statistics": "local"}, arguments={"norm": "batch"}
    ),
    "torchvision ResNet-18, averaged batch norm": Module(
        "resnet18", "images", {"statistics": "average"}, arguments={"norm": "batch"}
    ),
    "torchvision MobileNetV2, group norm, dropout": Module("mobilenet", "images"),
    "torchvision ViT, dropout": Module("vit", "images", training=_ADAM),
    "torchvision Swin, stochastic depth": Module("swin", "images", training=_ADAM),
    "torchvision ConvNeXt, stochastic depth": Module("convnext", "images", training=_ADAM),
    "torchvision DenseNet, averaged batch norm, dropout": Module("densenet", "images", {"statistics": "average"}),
    "transformers BERT, dropout, masks": Module("bert", "texts", {"output": "logits"}, _ADAM),
    "transformers DistilBERT, dropout, masks": Module("distilbert", "texts", {"output": "logits"}, _ADAM),
    "transformers GPT-2, tied weights, dropout": Module("gpt2", "next_tokens", {"output": "logits"}, _ADAM),
    "transformers Llama, rotary buffers": Module("llama", "next_tokens", {"output": "logits"}, _ADAM),
    "transformers ViT": Module("hugging_face_vit", "images", {"output": "logits"}, _ADAM),
    "peft LoRA on BERT": Module("lora_bert", "texts", {"output": "logits"}, _ADAM),
    "peft LoRA on GPT-2": Module("lora_gpt2", "next_tokens", {"output": "logits"}, _ADAM),
    "LSTM, weight norm, dropout": Module("WeightNormLSTM", "tokens"),
    "U-Net, dictionary of outputs": Module("UNet", "images", {"output": "logits"}),
    "lazy layer, dictionary of outputs": Module("TwoHeads", "images", {"output": "digit"}),
    "frozen body in bfloat16": Module("FrozenBody", "images"),
    "torch encoder, positional table, a layer used twice": Module("TransformerEncoder", "tokens", training=_ADAM),
    "spectral norm": Module("spectral_norm", "images", {"statistics": "average"}),
    "torch.compile": Module("compiled", "images"),
}


def experiment_of(module: Module, folder: Path, **training: Any) -> Any:
    """Return the experiment of a module on data in this folder, with further fields of its training."""
    from narrowcast.experiment import Experiment

    factory = {"factory": f"other_modules:{module.factory}", "arguments": dict(module.arguments)}
    model = {"kind": "torch", **factory} if module.factory else {}
    return Experiment(
        rounds=ROUNDS, clients_per_round=4, chunk_size=2, evaluate_every=ROUNDS, checkpoint_every=1,
        data={
            "kind": "npz", "path": str(folder / f"{module.data}.npz"), "clients": 20, "tokens": "tokens" in module.data,
        },
        model={**model, **module.model},
        algorithm="fedavg",
        training={"kind": "sgd", "learning_rate": 0.05, "batch_size": 8, **module.training, **training},
    )  # fmt: skip


def final_sha256(experiment: Any, backend: Any, *, kill: bool) -> tuple[str, int]:
    """Run to the end, with one host killed after the first round if asked; return the sha256 and the uplink bits."""
    from narrowcast.platform.rounds.evaluation import model_sha256
    from narrowcast.platform.rounds.state import Run, start

    task = experiment.task(experiment.data_source.load())
    run, bits, state = Run(experiment, experiment.algorithm, task), 0, None
    for outcome in backend.run(run, start(run)):
        state, bits = outcome.state, outcome.record.total_uplink_bits
        if kill and outcome.record.round == 1:
            _kill_a_host()
    assert state is not None, "the last round has a checkpoint"
    return model_sha256(experiment.algorithm, state), bits


def _kill_a_host() -> None:
    for process in psutil.Process().children(recursive=True):
        if "ray::ClientHost" in " ".join(process.cmdline()):
            process.kill()
            return
    raise SystemExit("no host to kill")


def trainable(experiment: Any) -> tuple[int, int]:
    """Return the numbers of values that train and of all values, tied ones once, as torch counts them."""
    data = experiment.data_source.load()
    module = experiment.model.module(data)
    if any(torch.nn.parameter.is_lazy(each) for each in module.parameters()):
        module(torch.from_numpy(data.train.features[:2] / 255).float())
    sizes = [(each.numel(), each.requires_grad) for each in module.parameters()]
    return sum(size for size, trains in sizes if trains), sum(size for size, _ in sizes)


def main() -> None:
    """Print and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=list(MODULES), metavar="NAME")
    parser.add_argument("--csv", type=Path)
    arguments = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).parent))  # the factories are imported from this file by name
    from narrowcast.cluster.backend import RayBackend
    from narrowcast.platform.rounds.loop import LocalBackend

    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for kind, write in DATA.items():
            write(folder / f"{kind}.npz")
        for title in arguments.only:
            began, experiment = time.perf_counter(), experiment_of(MODULES[title], folder)
            trained, values = trainable(experiment)
            alone = final_sha256(experiment, LocalBackend(), kill=False)
            hosted = final_sha256(experiment, RayBackend(actors=ACTORS), kill=True)
            rows.append(
                {
                    "module": title,
                    "trained_values": trained,
                    "values": values,
                    "uplink_bits": alone[1],
                    "bits_per_upload": alone[1] // (ROUNDS * experiment.clients_per_round),
                    "model_sha256": alone[0][:12],
                    "same_on_two_actors_one_killed": hosted == alone,
                    "seconds": round(time.perf_counter() - began, 1),
                    "load": round(os.getloadavg()[0], 1),
                }
            )
            print("  ".join(map(str, rows[-1].values())), flush=True)
    if arguments.csv:
        with arguments.csv.open("w", newline="") as file:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            writer.writerows(rows)
    if bad := [row["module"] for row in rows if not row["same_on_two_actors_one_killed"]]:
        raise SystemExit(f"another model on two actors: {', '.join(bad)}")


if __name__ == "__main__":
    main()
