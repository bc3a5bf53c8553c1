"""The `subspace` family where the subspace is the whole width: a plain Llama decoder.

Pre-norm RMSNorm with gains, rotary positions in the rotate-half form, grouped-query attention, SwiGLU, untied head.
Weights lie as in Hugging Face's Llama, so that an export only renames them. Knows layers; must not know seeds or peers.
Tensor shapes: b sequences, s positions, d width, h query heads, e head width.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from agora_protocol.errors import ManifestError
from agora_protocol.manifest import ModelSection
from torch import Tensor, nn

from agora.model.stage import Context, Stage, stage_loss

__all__ = ["Context", "SubspaceStage", "rotate", "rotation_table", "stage_loss"]

WEIGHT_STD = 0.02
# Held-out loss of the tiny preset after 40 steps of 16,384 bytes of stdlib text: 2.32 with 0.02, 2.26 with 0.05. A head
# of 0.02 instead of 1 / sqrt(width) was 0.2 behind after 40 steps of 4,096 bytes.
EMBEDDING_STD = 0.05


class Linear(nn.Module):
    """y = x W^T, W [outputs, inputs]; values come from build_stage."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


class Embedding(nn.Module):
    """Token ids [b, s] -> [b, s, d]; negative ids (ignored targets) read row 0."""

    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocabulary, width))

    def forward(self, tokens: Tensor) -> Tensor:
        return F.embedding(tokens.clamp(min=0), self.weight)


class Norm(nn.Module):
    """RMSNorm with a gain per channel."""

    def __init__(self, width: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight, self.epsilon)


def rotation_table(context: int, head_width: int, theta: float) -> Tensor:
    """Cosines and sines of RoPE's angles, float32 [2, context, head_width / 2]. Source: Su et al., arXiv 2104.09864."""
    frequency = theta ** (-torch.arange(0, head_width, 2, dtype=torch.float64) / head_width)
    angle = torch.outer(torch.arange(context, dtype=torch.float64), frequency)
    return torch.stack((angle.cos(), angle.sin())).float()


def rotate(x: Tensor, table: Tensor) -> Tensor:
    """x [b, heads, s, e], channels i and i + e/2 turned by position times frequency i, in the table's float32."""
    cosine, sine = table[:, : x.shape[-2]]
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1).to(x.dtype)


class Attention(nn.Module):
    """Causal self-attention; each key and value head serves heads / key_value_heads query heads."""

    def __init__(self, model: ModelSection) -> None:
        super().__init__()
        self.heads, self.key_value_heads = model.heads, model.key_value_heads
        self.head_width = model.width // model.heads
        shared = model.key_value_heads * self.head_width
        self.query = Linear(model.width, model.width)
        self.key = Linear(model.width, shared)
        self.value = Linear(model.width, shared)
        self.output = Linear(model.width, model.width)

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        query = rotate(self._split(self.query(x), self.heads), table)
        key = rotate(self._split(self.key(x), self.key_value_heads), table)
        value = self._split(self.value(x), self.key_value_heads)
        grouped = self.heads != self.key_value_heads
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=grouped)
        output: Tensor = self.output(mixed.transpose(1, 2).flatten(2))
        return output

    def _split(self, x: Tensor, heads: int) -> Tensor:
        return x.view(*x.shape[:-1], heads, self.head_width).transpose(1, 2)


class FeedForward(nn.Module):
    """SwiGLU: down(silu(gate x) * up x)."""

    def __init__(self, model: ModelSection) -> None:
        super().__init__()
        self.gate = Linear(model.width, model.feed_forward)
        self.up = Linear(model.width, model.feed_forward)
        self.down = Linear(model.feed_forward, model.width)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return output


class Layer(nn.Module):
    """One decoder layer."""

    def __init__(self, model: ModelSection) -> None:
        super().__init__()
        self.attention_norm = Norm(model.width, model.norm_epsilon)
        self.attention = Attention(model)
        self.feed_forward_norm = Norm(model.width, model.norm_epsilon)
        self.feed_forward = FeedForward(model)

    def forward(self, hidden: Tensor, table: Tensor) -> Tensor:
        hidden = hidden + self.attention(self.attention_norm(hidden), table)
        return hidden + self.feed_forward(self.feed_forward_norm(hidden))  # type: ignore[no-any-return]


class SubspaceStage(Stage):
    """See Stage. Raises ManifestError for a subspace smaller than the width, which this version cannot do."""

    table: Tensor

    def __init__(self, model: ModelSection, layer_range: range, is_first: bool, is_last: bool) -> None:
        super().__init__(layer_range, is_first=is_first, is_last=is_last)
        if model.subspace != model.width:
            raise ManifestError(f"model.subspace {model.subspace} differs from model.width; set it to {model.width}.")
        self.width = model.width
        self.register_buffer(
            "table", rotation_table(model.context, model.width // model.heads, model.rope_theta), persistent=False
        )
        if is_first:
            self.embedding = Embedding(model.vocabulary, model.width)
        self.layers = nn.ModuleDict({str(index): Layer(model) for index in layer_range})
        if is_last:
            self.norm = Norm(model.width, model.norm_epsilon)
            self.head = Linear(model.width, model.vocabulary)

    def forward(self, hidden: Tensor, context: Context | None = None) -> Tensor:
        if self.is_first:
            hidden = self.embedding(hidden)
        for layer in self.layers.values():
            hidden = layer(hidden, self.table)
        if self.is_last:
            hidden = self.head(self.norm(hidden))
        return hidden

    def initial_std(self, name: str) -> float | None:
        """0.02, over sqrt(2 (layer + 1)) for projections to the residual stream; embedding and head have their own."""
        if "norm." in name:
            return None
        if name == "embedding.weight":
            return EMBEDDING_STD
        if name == "head.weight":
            return 1 / math.sqrt(self.width)
        if name.endswith(("attention.output.weight", "feed_forward.down.weight")):
            return WEIGHT_STD / math.sqrt(2 * (int(name.split(".")[1]) + 1))
        return WEIGHT_STD
