"""A GGUF file has the model that was exported: whoever reads it, by other code than wrote it, computes the same."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGUFReader, GGUFWriter
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from agora.core.optional_packages import PackageMissing
from agora.data.tokenizer import byte_tokenizer_json
from agora.state.export_tensors import ExportError, TensorBlocks
from agora.state.gguf_file import SPLITS, write_gguf

SIZES = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "eos_token_id": 0,
}
TEXT = "It's 2026: the peers' 1234 runs\n\n  don't stop, naïve über-text 你好!"
BY_NAME = {name: split for split, name in SPLITS.items()}


def make_model(kind: str, **changes: Any) -> Any:
    torch.manual_seed(3)
    config = AutoConfig.for_model(kind, **{**SIZES, **changes})
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # gains and biases too, so that none could stand for another
            parameter.add_(torch.randn_like(parameter), alpha=0.2)
    return model


def make_tokenizer(split: str) -> Tokenizer:
    made = Tokenizer(models.BPE(ignore_merges=split == "llama-bpe"))
    if split == "gpt-2":
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    else:
        splits = pre_tokenizers.Split(Regex(BY_NAME[split]), "isolated")
        bytewise = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        made.pre_tokenizer = pre_tokenizers.Sequence([splits, bytewise])
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=290, special_tokens=["<end>"], initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator([TEXT] * 5, trainer)
    return made


def write(folder: Path, model: Any, tokenizer: dict[str, Any], dtype: Any = "float32", template: str = "") -> Path:
    def blocks(values: np.ndarray) -> Any:
        return lambda: iter(np.array_split(values, 2))  # as a merge reads them

    tied = model.config.tie_word_embeddings
    tensors = [
        TensorBlocks(name, tuple(values.shape), blocks(values.numpy()), name)
        for name, values in model.state_dict().items()
        if not (tied and name == "lm_head.weight")
    ]
    files = {
        "config.json": model.config.to_json_string().encode(),
        "tokenizer.json": json.dumps(tokenizer).encode(),
        "tokenizer_config.json": json.dumps({"chat_template": template or None}).encode(),
    }
    folder.mkdir(exist_ok=True)
    digest = write_gguf(folder / "model.gguf", tensors, files, "poems", dtype, lambda count: None)
    assert digest.size == (folder / "model.gguf").stat().st_size
    return folder


KINDS = {
    "llama": {"rope_theta": 777.0, "rms_norm_eps": 1e-3},
    "mistral": {"sliding_window": None, "head_dim": 16},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 128},
}


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_transformers_reads_the_same_logits_from_it(kind: str, tmp_path: Path) -> None:
    model = make_model(kind, **KINDS[kind])
    write(tmp_path / "out", model, json.loads(make_tokenizer("gpt-2").to_str()))
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "out", gguf_file="model.gguf").eval()
    tokens = torch.randint(300, (2, 40))
    ours, theirs = model(tokens).logits, read(tokens).logits
    assert ours.std() > 0.5 and float((ours - theirs).abs().max() / ours.abs().max()) < 1e-5


def test_bf16_rounds_matrices_and_leaves_gains_as_they_are(tmp_path: Path) -> None:
    model = make_model("qwen2")
    write(tmp_path / "out", model, byte_tokenizer_json(), "bf16")
    read = {each.name: each for each in GGUFReader(tmp_path / "out" / "model.gguf").tensors}
    state = model.state_dict()
    gains = read["blk.1.attn_norm.weight"]
    assert np.array_equal(gains.data, state["model.layers.1.input_layernorm.weight"].numpy())
    matrix = read["blk.0.ffn_up.weight"].data.view(np.int16).reshape(48, 32)
    rounded = state["model.layers.0.mlp.up_proj.weight"].bfloat16()
    assert torch.equal(torch.tensor(matrix).view(torch.bfloat16), rounded)


@pytest.mark.parametrize("split", ["gpt-2", *BY_NAME])
def test_the_file_has_the_tokenizer_and_the_name_by_which_it_splits(split: str, tmp_path: Path) -> None:
    made = make_tokenizer(split)
    write(tmp_path / "out", make_model("llama"), json.loads(made.to_str()), template="{{ messages }}")
    fields = GGUFReader(tmp_path / "out" / "model.gguf").fields
    value = {name: field.contents() for name, field in fields.items() if name.startswith("tokenizer.")}
    assert value["tokenizer.ggml.pre"] == split and value["tokenizer.chat_template"] == "{{ messages }}"
    tokens = value["tokenizer.ggml.tokens"]
    assert {token: number for number, token in enumerate(tokens[: made.get_vocab_size()])} == made.get_vocab()
    assert len(tokens) == 300 and value["tokenizer.ggml.token_type"][-1] == 5
    assert value["tokenizer.ggml.token_type"][0] == 3 and value["tokenizer.ggml.eos_token_id"] == 0


def test_text_has_the_same_tokens_when_it_is_read_from_the_file(tmp_path: Path) -> None:
    made = make_tokenizer("gpt-2")
    write(tmp_path / "out", make_model("qwen2"), json.loads(made.to_str()))
    read = AutoTokenizer.from_pretrained(tmp_path / "out", gguf_file="model.gguf")
    ids = made.encode(TEXT).ids
    assert read(TEXT, add_special_tokens=False)["input_ids"] == ids and read.decode(ids) == TEXT


def test_of_the_tokenizer_of_bytes_the_only_merge_is_of_two_that_no_text_has(tmp_path: Path) -> None:
    write(tmp_path / "out", make_model("llama"), byte_tokenizer_json())
    fields = GGUFReader(tmp_path / "out" / "model.gguf").fields
    tokens = fields["tokenizer.ggml.tokens"].contents()
    (merge,) = fields["tokenizer.ggml.merges"].contents()
    assert [tokens.index(character) for character in merge.split(" ")] == [0xFE, 0xFF]
    assert tokens[:256] == list(byte_tokenizer_json()["model"]["vocab"])


@pytest.mark.parametrize(
    ("kind", "changes", "expected"),
    [
        ("gemma", {}, "this model is gemma"),
        ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "another scaling of rotary positions"),
        ("llama", {"hidden_act": "gelu"}, "another activation"),
        ("mistral", {"sliding_window": 32}, "attention to a window"),
    ],
)
def test_a_model_that_it_cannot_write_is_refused_with_another_way(
    kind: str, changes: dict[str, Any], expected: str, tmp_path: Path
) -> None:
    with pytest.raises(ExportError, match=f"{expected}.*convert_hf_to_gguf"):
        write(tmp_path / "out", make_model(kind, **changes), byte_tokenizer_json())


def test_a_tokenizer_that_splits_in_another_way_is_refused(tmp_path: Path) -> None:
    for made in (make_tokenizer("gpt-2"), make_tokenizer("qwen2")):
        content = json.loads(made.to_str())
        content["pre_tokenizer"] = {"type": "Whitespace"}
        with pytest.raises(ExportError, match=r"splits text as GPT-2, Llama 3 or Qwen 2 do.*convert_hf"):
            write(tmp_path / "out", make_model("llama"), content)
    content = json.loads(make_tokenizer("qwen2").to_str())
    content["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = r"\w+"
    with pytest.raises(ExportError, match="splits text"):
        write(tmp_path / "out", make_model("llama"), content)


def test_a_file_that_reads_otherwise_than_it_was_written_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_data, written = GGUFWriter.write_tensor_data, []

    def write_wrong(self: GGUFWriter, tensor: np.ndarray, *rest: Any) -> None:
        written.append(tensor.shape)
        write_data(self, tensor if len(written) != 3 else tensor + 1, *rest)

    monkeypatch.setattr(GGUFWriter, "write_tensor_data", write_wrong)
    with pytest.raises(ExportError, match=r"blk\.0\.attn_k\.weight in .* is not what was written"):
        write(tmp_path / "out", make_model("llama"), byte_tokenizer_json())
    assert len(written) > 3


def test_without_the_package_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(PackageMissing, match=r"pip install 'agora-swarm\[gguf\]'"):
        write(tmp_path / "out", make_model("llama"), byte_tokenizer_json())
