"""Writes a model as one GGUF file, for llama.cpp and for what is built on it, and reads it back.

| of Hugging Face's folder    | in the file                                                                          |
|-----------------------------|--------------------------------------------------------------------------------------|
| names of tensors            | those of llama.cpp, by the package gguf                                              |
| rows of q and k, type llama | paired as llama.cpp rotates them: it turns neighbours, transformers turns two halves |
| tensors of one dimension    | float32, whatever the others are                                                     |
| tokenizer.json              | its tokens, merges, and the name of its splitting, for byte-level BPE                |
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from agora.core.hub_files import CONFIG_FILE, GENERATION_CONFIG_FILE, TOKENIZER_CONFIG_FILE, TOKENIZER_FILE
from agora.core.optional_packages import import_optional
from agora.state.export_tensors import SOURCE_BYTES, Dtype, ExportError, ReportBytes, TensorBlocks, to_bf16
from agora.state.files import PUBLIC, FileDigest

ARCHITECTURES: Final[Mapping[str, str]] = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
# The regular expressions by which byte-level tokenizers split text before BPE -> llama.cpp's names for them.
_WORDS: Final = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST: Final = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SPLITS: Final[Mapping[str, str]] = {
    _WORDS + r"\p{N}{1,3}" + _REST: "llama-bpe",
    _WORDS + r"\p{N}" + _REST: "qwen2",
}
GPT2: Final = "gpt-2"
ELSEWHERE: Final = "export without --gguf, and try llama.cpp's convert_hf_to_gguf on that folder"
NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5  # llama.cpp's types of tokens
# llama.cpp wants merges. Of a tokenizer without any it gets one of two bytes that no UTF-8 has, as GPT-2 spells them.
NO_MERGES: Final = ("\u00fe \u00ff",)


def check_can_write_gguf() -> None:
    """Raises PackageMissing."""
    import_optional("gguf", "A file for llama.cpp", "gguf")


def write_gguf(
    path: Path,
    tensors: Sequence[TensorBlocks],
    files: Mapping[str, bytes],
    name: str,
    dtype: Dtype,
    report: ReportBytes,
) -> FileDigest:
    """Writes the new file `path`, checks that what can be read from it is what was written, and returns size and hash.

    tensors: a whole model, as Hugging Face names them. files: what such a folder has beside the weights, by name.
    dtype: of matrices. report: called after each tensor with the bytes that it takes as float32. One tensor is in
    memory at a time. Raises OSError and PackageMissing. Raises ExportError for a kind of model or tokenizer that this
    cannot write, and if what is read back differs from what was written.
    """
    gguf = import_optional("gguf", "A file for llama.cpp", "gguf")
    config = json.loads(files[CONFIG_FILE])
    architecture = _architecture(config)
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name(name)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32 if dtype == "float32" else gguf.LlamaFileType.MOSTLY_BF16)
    _add_sizes(writer, config)
    _add_tokenizer(writer, files, int(config["vocab_size"]), config.get("eos_token_id"))
    known = gguf.get_tensor_name_map(gguf.MODEL_ARCH[architecture.upper()], int(config["num_hidden_layers"]))
    names = {tensor.name: known.get_name(tensor.name, try_suffixes=(".weight", ".bias")) for tensor in tensors}
    for tensor in tensors:
        if names[tensor.name] is None:
            raise ExportError(f"The tensor {tensor.name} has no name in llama.cpp; {ELSEWHERE}.")
        is_half = dtype == "bf16" and len(tensor.shape) > 1
        kind = gguf.GGMLQuantizationType.BF16 if is_half else gguf.GGMLQuantizationType.F32
        item = np.dtype("<u2" if is_half else "<f4")
        writer.add_tensor_info(names[tensor.name], tensor.shape, item, item.itemsize * tensor.numel, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    written: dict[str, str] = {}
    for tensor in tensors:
        values = _as_llama_cpp_has_it(tensor, config)
        stored = to_bf16(values).reshape(tensor.shape) if dtype == "bf16" and len(tensor.shape) > 1 else values
        written[names[tensor.name]] = hashlib.sha256(stored.data.cast("B")).hexdigest()
        writer.write_tensor_data(stored)
        report(SOURCE_BYTES * tensor.numel)
    writer.close()
    os.chmod(path, PUBLIC)
    _check_as_written(gguf, path, written)
    return _flushed_digest(path)


def _architecture(config: Mapping[str, Any]) -> str:
    kind = str(config.get("model_type"))
    if kind not in ARCHITECTURES:
        raise ExportError(f"--gguf writes {', '.join(ARCHITECTURES)}, and this model is {kind}; {ELSEWHERE}.")
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    window = config.get("sliding_window") if kind == "mistral" or config.get("use_sliding_window") else None
    for wanted, is_so in {
        "another scaling of rotary positions than none": rope.get("rope_type", "default") != "default",
        "another activation than silu": config.get("hidden_act", "silu") != "silu",
        "attention to a window": window is not None,
    }.items():
        if is_so:
            raise ExportError(f"This model has {wanted}, which --gguf does not write; {ELSEWHERE}.")
    return ARCHITECTURES[kind]


def _head_width(config: Mapping[str, Any]) -> int:
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def _add_sizes(writer: Any, config: Mapping[str, Any]) -> None:
    width, heads = _head_width(config), int(config["num_attention_heads"])
    writer.add_context_length(int(config["max_position_embeddings"]))
    writer.add_embedding_length(int(config["hidden_size"]))
    writer.add_block_count(int(config["num_hidden_layers"]))
    writer.add_feed_forward_length(int(config["intermediate_size"]))
    writer.add_head_count(heads)
    writer.add_head_count_kv(int(config.get("num_key_value_heads") or heads))
    writer.add_key_length(width)
    writer.add_value_length(width)
    writer.add_rope_dimension_count(width)
    rope = config.get("rope_parameters") or {}
    writer.add_rope_freq_base(float(config.get("rope_theta") or rope.get("rope_theta") or 10_000.0))
    writer.add_layer_norm_rms_eps(float(config["rms_norm_eps"]))
    writer.add_vocab_size(int(config["vocab_size"]))


def _add_tokenizer(writer: Any, files: Mapping[str, bytes], vocabulary: int, end: Any) -> None:
    tokenizer, settings = json.loads(files[TOKENIZER_FILE]), json.loads(files[TOKENIZER_CONFIG_FILE])
    end = json.loads(files.get(GENERATION_CONFIG_FILE, b"{}")).get("eos_token_id", end)
    template = files.get("chat_template.jinja", b"").decode() or settings.get("chat_template")
    model = tokenizer["model"]
    split = _split_name(tokenizer)
    # What the embedding has a row for and the tokenizer no token.
    tokens = [f"[PAD{number}]" for number in range(vocabulary)]
    types = [UNUSED] * vocabulary
    for token, number in model["vocab"].items():
        tokens[number], types[number] = token, NORMAL
    for added in tokenizer.get("added_tokens") or ():
        tokens[added["id"]], types[added["id"]] = added["content"], CONTROL if added["special"] else USER_DEFINED
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(split)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(merges or list(NO_MERGES))
    ends = [int(number) for number in (end if isinstance(end, list) else [end]) if number is not None]
    if ends:
        writer.add_eos_token_id(ends[0])
        # Without it llama.cpp takes token 11, as GPT-2's would be.
        writer.add_bos_token_id(ends[0])
    # Training adds no special tokens either.
    writer.add_add_bos_token(False)
    writer.add_add_eos_token(False)
    writer.add_add_space_prefix(False)
    if isinstance(template, str) and template:
        writer.add_chat_template(template)


def _split_name(tokenizer: Mapping[str, Any]) -> str:
    model, before = tokenizer["model"], tokenizer.get("pre_tokenizer") or {}
    steps = before.get("pretokenizers", [before])
    *splits, last = steps
    is_bytewise = model.get("type") == "BPE" and last.get("type") == "ByteLevel" and not last.get("add_prefix_space")
    normalizer = (tokenizer.get("normalizer") or {}).get("type")
    if is_bytewise and normalizer in (None, "NFC"):
        # Without merges every byte is a token, however text is split before.
        if not splits and (last.get("use_regex", True) or not model["merges"]) and not model.get("ignore_merges"):
            return GPT2
        if len(splits) == 1 and not last.get("use_regex", True):
            name = SPLITS.get((splits[0].get("pattern") or {}).get("Regex", ""))
            # llama.cpp ignores merges for whole tokens exactly where it splits so.
            if name is not None and bool(model.get("ignore_merges")) == (name == "llama-bpe"):
                return name
    raise ExportError(f"--gguf writes byte-level BPE that splits text as GPT-2, Llama 3 or Qwen 2 do; {ELSEWHERE}.")


def _as_llama_cpp_has_it(tensor: TensorBlocks, config: Mapping[str, Any]) -> NDArray[np.float32]:
    blocks = [np.ascontiguousarray(block, "<f4").reshape(-1) for block in tensor.read_blocks()]
    values = (blocks[0] if len(blocks) == 1 else np.concatenate(blocks)).reshape(tensor.shape)
    del blocks
    part = tensor.name.rpartition(".")[0].rpartition(".")[2]
    if part not in ("q_proj", "k_proj") or ARCHITECTURES[config["model_type"]] != "llama":
        return values
    half = _head_width(config) // 2
    paired = values.reshape(-1, 2, half, *tensor.shape[1:]).swapaxes(1, 2)
    return np.ascontiguousarray(paired).reshape(tensor.shape)


def _check_as_written(gguf: Any, path: Path, written: Mapping[str, str]) -> None:
    found = {
        each.name: hashlib.sha256(np.ascontiguousarray(each.data).data.cast("B")).hexdigest()
        for each in gguf.GGUFReader(path).tensors
    }
    if wrong := sorted(name for name in written.keys() | found.keys() if written.get(name) != found.get(name)):
        raise ExportError(f"{wrong[0]} in {path} is not what was written; check the disk, and export again.")


def _flushed_digest(path: Path) -> FileDigest:
    with path.open("rb") as file:
        os.fsync(file.fileno())
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return FileDigest(file.tell(), digest)
