"""Tiny models of every architecture that transformers makes and saves, and the manifests that name their files."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from agora_protocol.manifest import Manifest
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

from agora.model import StageModule, family_of

CONTEXT = 24
VOCABULARY = 263
PAD = 5
LLAMA_3_POSITIONS = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
DECODER: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": PAD,
}
WINDOWED = {"head_dim": 16, "sliding_window": 6, "query_pre_attn_scalar": 16}
CONFIGS: dict[str, Callable[..., PreTrainedConfig]] = {
    "llama": lambda **more: LlamaConfig(**DECODER, **more),
    "llama-biased": lambda **more: LlamaConfig(
        **DECODER, attention_bias=True, mlp_bias=True, rope_parameters=LLAMA_3_POSITIONS, **more
    ),
    "mistral": lambda **more: MistralConfig(**DECODER, sliding_window=7, head_dim=16, **more),
    "qwen2": lambda **more: Qwen2Config(
        **DECODER, use_sliding_window=True, sliding_window=5, max_window_layers=1, **more
    ),
    "qwen3": lambda **more: Qwen3Config(**DECODER, head_dim=16, **more),
    "gemma": lambda **more: GemmaConfig(**DECODER, head_dim=16, **more),
    "gemma2": lambda **more: Gemma2Config(**DECODER, **WINDOWED, **more),
    "gemma3": lambda **more: Gemma3TextConfig(
        **DECODER, **WINDOWED, layer_types=["sliding_attention", "full_attention", "sliding_attention"], **more
    ),
    "gpt2": lambda **more: GPT2Config(
        vocab_size=VOCABULARY, n_embd=32, n_layer=3, n_head=4, n_positions=64, bos_token_id=1, eos_token_id=1, **more
    ),
}
"""Windows are shorter than CONTEXT where an architecture has some, so that a missing one would show."""


@torch.no_grad()
def make_model(name: str, **more: Any) -> PreTrainedModel:
    """A random model in float32, norms and biases included, so that no tensor could stand for another."""
    with torch.random.fork_rng():
        torch.manual_seed(7)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(CONFIGS[name](**more)).eval()
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape), alpha=0.05)
    return model


def save(model: PreTrainedModel, folder: Path, shard: str = "5GB") -> Path:
    """Writes the model as transformers does. shard: the most that a weights file holds."""
    model.save_pretrained(folder, max_shard_size=shard)
    return folder


def hashes(folder: Path) -> list[list[str]]:
    """Name and SHA-256 of each weights file."""
    return [[path.name, hashlib.sha256(path.read_bytes()).hexdigest()] for path in sorted(folder.glob("*.safetensors"))]


def manifest_of(folder: Path, stages: int = 2, **sections: Any) -> Manifest:
    """A run that begins with the model in `folder`: steps of three microbatches, float32 boundaries."""
    config = (folder / "config.json").read_text()
    values: dict[str, Any] = {
        "model": {"family": "hf", "config": config, "weights": hashes(folder), "context": CONTEXT},
        "stages": {"count": stages},
        "boundary": {"codec": "float32"},
        "schedule": {"microbatch": 2, "activations": "recompute"},
        "optimizer": {"target_tokens": 3 * 2 * CONTEXT, "warmup_steps": 0, "learning_rate": 1e-2, "weight_decay": 0.0},
    }
    for name, section in sections.items():
        values[name] = {**values.get(name, {}), **section}
    return Manifest.from_values(values, "test")


def stages_of(manifest: Manifest, folder: Path) -> list[StageModule]:
    """Every stage of the run with its initial weights."""
    family = family_of(manifest.model)
    return [family.build_stage(manifest.layers_of(k), manifest.seed, folder) for k in range(manifest.stage_count)]


def logits_of(stages: list[StageModule], tokens: torch.Tensor, segments: torch.Tensor | None = None) -> torch.Tensor:
    """The logits of the stages in turn."""
    hidden = tokens
    for stage in stages:
        hidden = stage(hidden, tokens, segments)
    return hidden


def some_tokens(batch: int = 2) -> torch.Tensor:
    """Token ids [b, CONTEXT], the padding token among them."""
    ids = torch.randint(VOCABULARY, (batch, CONTEXT), generator=torch.Generator().manual_seed(1))
    ids[:, 3] = PAD
    return ids
