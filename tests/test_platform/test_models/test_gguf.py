"""Models and tokenizers in GGUF files: what was written is read, trained by its adapters and cut into tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from module_zoo import module_zoo
from narrowcast.experiment import load_experiment
from narrowcast.platform.data.text import TextFiles, tokenizer_of
from narrowcast.platform.errors import UserError
from narrowcast.platform.models.transformers_model import read_pretrained
from narrowcast.platform.rounds.loop import LocalBackend
from narrowcast.platform.rounds.state import Run, start

pytestmark = pytest.mark.slow  # transformers is imported
TOKENS = ["<|endoftext|>", "<s>", "</s>", *"abcdefghijklmnopqrstuvwxyz", "Ġ", "Ċ", "ab", "cd"]
HEADS, KEY_HEADS = 4, 2
PARTS = {
    **{"self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v"},
    **{"self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up"},
    **{"mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"},
}


def interleaved(rows: Any, heads: int) -> Any:
    """Return the rows of queries or keys in the order of a GGUF file, whose rotary pairs are neighbours."""
    return rows.reshape(heads, 2, len(rows) // heads // 2, -1).swapaxes(1, 2).reshape(rows.shape)


def in_gguf(name: str, values: Any) -> tuple[str, Any]:
    """Return the name and the values of a tensor of the library's Llama as GGUF files have them."""
    whole = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    if (stem := name.removesuffix(".weight")) in whole:
        return f"{whole[stem]}.weight", values
    _, _, layer, *rest = stem.split(".")
    part = PARTS[".".join(rest)]
    heads = {"attn_q": HEADS, "attn_k": KEY_HEADS}.get(part)
    return f"blk.{layer}.{part}.weight", values if heads is None else interleaved(values, heads)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """A Llama of random weights, and a folder with it in a GGUF file."""
    from gguf import GGUFWriter

    with module_zoo() as zoo:
        library = zoo._transformers()
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "max_position_embeddings": 64}
    shape = {"num_attention_heads": HEADS, "num_key_value_heads": KEY_HEADS, "rms_norm_eps": 1e-5}
    model = library.LlamaForCausalLM(library.LlamaConfig(vocab_size=len(TOKENS), **sizes, **shape)).eval()
    folder = tmp_path_factory.mktemp("tiny")
    writer = GGUFWriter(str(folder / "tiny.gguf"), "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_block_count(2)
    writer.add_feed_forward_length(48)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KEY_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3] * 3 + [1] * (len(TOKENS) - 3))
    writer.add_token_merges(["a b", "c d"])
    for place, name in enumerate(("unk", "bos", "eos")):
        getattr(writer, f"add_{name}_token_id")(place)
    for name, values in model.state_dict().items():
        writer.add_tensor(*in_gguf(name, values.numpy().copy()))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model, folder


def test_a_gguf_file_has_the_scores_of_the_model_that_was_written(
    written: tuple[Any, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    model, folder = written
    read, found = read_pretrained(type(model), folder, {})
    tokens = torch.arange(24).view(2, 12)
    with torch.no_grad():
        assert torch.equal(read(tokens).logits, model(tokens).logits)
    assert not found["missing_keys"]
    assert capsys.readouterr() == ("", "")


def test_two_gguf_files_in_a_folder_are_refused(written: tuple[Any, Path], tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).symlink_to(written[1] / "tiny.gguf")
    with pytest.raises(UserError, match=r"has 2 files \*\.gguf; keep one of them there"):
        read_pretrained(type(written[0]), tmp_path, {})


def test_the_tokens_of_a_gguf_file_cut_text_into_windows(written: tuple[Any, Path], tmp_path: Path) -> None:
    file = written[1] / "tiny.gguf"
    assert tokenizer_of(file).encode("abcd abz\n", add_special_tokens=False).tokens == ["ab", "cd", "Ġ", "ab", "z", "Ċ"]
    (tmp_path / "text.txt").write_text("abcdz" * 40)  # three tokens each
    data = TextFiles(path=tmp_path, tokenizer=file, window=5, stride=3, test_share=0, validation_share=0).load()
    ab, cd, z = (TOKENS.index(token) for token in ("ab", "cd", "z"))
    assert data.n_classes == len(TOKENS)
    assert np.array_equal(data.train.features, np.tile([ab, cd, z, ab, cd], (39, 1)))
    assert np.array_equal(data.train.labels, np.tile([cd, z, ab, cd, z], (39, 1)))


def test_adapters_of_a_gguf_file_learn_its_tokens(written: tuple[Any, Path], tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / f"{name}.txt").write_text("abcdz" * 80)
    base = {"kind": "transformers", "architecture": "LlamaForCausalLM", "path": str(written[1])}
    experiment = load_experiment(
        {
            "name": "tiny",
            "data": {
                **{"kind": "text_files", "path": str(tmp_path), "tokenizer": str(written[1] / "tiny.gguf")},
                **{"window": 6, "stride": 3},
            },
            "model": {
                **{"kind": "adapters", "base": base, "rank": 4, "alpha": 8},
                **{"targets": ["*_proj.weight"], "also_trained": ["lm_head.weight"]},
            },
            "algorithm": "lora",
            "training": {"kind": "adamw", "learning_rate": 0.02, "batch_size": 8, "epochs": 2},
            **{"rounds": 4, "clients_per_round": 2, "backend": "local"},
        }
    )
    run = Run(experiment, experiment.algorithm, experiment.task(experiment.data_source.load()))
    model, data = run.task.model, run.task.data
    before = model.evaluate(model.init_server(data, 0), {}, data, "test")["perplexity"]
    *_, last = LocalBackend().run(run, start(run))
    assert before > 20  # random weights, 33 tokens
    assert last.metrics["test.perplexity"] < 5
