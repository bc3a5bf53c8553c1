"""Logits equal those of a Llama written a second time, as plainly as possible: loops over heads and positions.

Shares no code with agora.model. Conventions are those of Hugging Face's LlamaForCausalLM, weights under its names.
"""

from __future__ import annotations

import pytest
import torch
from agora_protocol.manifest_model import SubspaceSection
from torch import Tensor

from agora.model import family_of

RENAMED = {
    "attention_norm": "input_layernorm",
    "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
    "attention.output": "self_attn.o_proj",
    "feed_forward_norm": "post_attention_layernorm",
    "feed_forward.gate": "mlp.gate_proj",
    "feed_forward.up": "mlp.up_proj",
    "feed_forward.down": "mlp.down_proj",
}


def hugging_face_name(name: str) -> str:
    if name == "head.weight":
        return "lm_head.weight"
    if name == "embedding.weight":
        return "model.embed_tokens.weight"
    if name == "norm.weight":
        return "model.norm.weight"
    layers, index, rest = name.split(".", 2)
    return f"model.{layers}.{index}.{RENAMED[rest.removesuffix('.weight')]}.weight"


def logits(weights: dict[str, Tensor], model: SubspaceSection, tokens: list[int]) -> Tensor:
    """[s, vocabulary] for one sequence, in float64."""
    w = {name: value.double() for name, value in weights.items()}
    x = torch.stack([w["model.embed_tokens.weight"][token] for token in tokens])
    for index in range(model.layers):
        part = {
            n.removeprefix(f"model.layers.{index}."): v for n, v in w.items() if n.startswith(f"model.layers.{index}.")
        }
        x = x + attention(norm(x, part["input_layernorm.weight"], model), part, model)
        h = norm(x, part["post_attention_layernorm.weight"], model)
        gate = h @ part["mlp.gate_proj.weight"].T
        x = x + (gate * torch.sigmoid(gate) * (h @ part["mlp.up_proj.weight"].T)) @ part["mlp.down_proj.weight"].T
    return norm(x, w["model.norm.weight"], model) @ w["lm_head.weight"].T


def norm(x: Tensor, gain: Tensor, model: SubspaceSection) -> Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + model.norm_epsilon) * gain


def attention(x: Tensor, part: dict[str, Tensor], model: SubspaceSection) -> Tensor:
    e = model.width // model.heads
    q, k, v = (x @ part[f"self_attn.{name}_proj.weight"].T for name in "qkv")
    outputs = []
    for head in range(model.heads):
        shared = head // (model.heads // model.key_value_heads)
        head_q, head_k = (
            torch.stack([turned(row, position, model.rope_theta) for position, row in enumerate(rows)])
            for rows in (q[:, head * e : (head + 1) * e], k[:, shared * e : (shared + 1) * e])
        )
        head_v = v[:, shared * e : (shared + 1) * e]
        rows = [torch.softmax(head_k[: i + 1] @ head_q[i] / e**0.5, 0) @ head_v[: i + 1] for i in range(len(x))]
        outputs.append(torch.stack(rows))
    return torch.cat(outputs, -1) @ part["self_attn.o_proj.weight"].T


def turned(row: Tensor, position: int, theta: float) -> Tensor:
    """One head's vector [e] at one position, pairs (i, i + e/2) rotated by position * theta^(-2i/e)."""
    half = len(row) // 2
    result = row.clone()
    for i in range(half):
        angle = torch.tensor(position * theta ** (-2 * i / len(row)), dtype=torch.float64)
        result[i] = row[i] * angle.cos() - row[i + half] * angle.sin()
        result[i + half] = row[i + half] * angle.cos() + row[i] * angle.sin()
    return result


@pytest.mark.parametrize("key_value_heads", [4, 2, 1])
def test_logits_equal_those_of_an_independent_llama(key_value_heads: int) -> None:
    model = SubspaceSection(
        width=32,
        subspace=32,
        layers=2,
        heads=4,
        key_value_heads=key_value_heads,
        feed_forward=48,
        context=9,
        vocabulary=50,
        rope_theta=500.0,
    )
    stages = [family_of(model).build_stage(range(k, k + 1), 3) for k in range(2)]
    weights = {}
    with torch.no_grad():
        for name, p in ((name, p) for stage in stages for name, p in stage.named_parameters()):
            p.mul_(3).add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())), alpha=0.05)
            weights[hugging_face_name(name)] = p.detach()
        tokens = torch.randint(50, (1, 9), generator=torch.Generator().manual_seed(0))
        computed = stages[1].double()(stages[0].double()(tokens))[0]
    torch.testing.assert_close(computed, logits(weights, model, tokens[0].tolist()), rtol=1e-5, atol=1e-5)
