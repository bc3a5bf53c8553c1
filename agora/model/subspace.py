"""The `subspace` family: a Llama decoder whose residual stream is k numbers for each token, and the token's id.

Pre-norm RMSNorm with gains, rotary positions in the rotate-half form, grouped-query attention, SwiGLU, untied head.
What enters a sublayer is x = U c + T[token]: c are the k coordinates, U [d, k] is the run's basis and T its fixed
embedding. What leaves it is added to c, by output projections of k rows. So c loses nothing where the model is cut.
The last layer is free: it turns c into x once, and goes on in all of d. Where k = d and nothing is fixed, x is c, and
the model is a plain Llama. Source: Subspace Networks, arXiv 2506.01260, with the constraint built into the weights.
Weights lie as in Hugging Face's Llama. Knows layers; must not know how a seed becomes values, nor peers.
Tensor shapes: b sequences, s positions, d width, k subspace, h query heads, e head width.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from agora_protocol.manifest import ModelSection
from torch import Tensor, nn

from agora.model import fixed
from agora.model.stage import Context, Stage, stage_loss

__all__ = ["Context", "SubspaceStage", "rotate", "rotation_table", "stage_loss"]

WEIGHT_STD = 0.02
# Held-out loss of the tiny preset after 40 steps of 16,384 bytes of stdlib text: 2.32 with 0.02, 2.26 with 0.05. A head
# of 0.02 instead of 1 / sqrt(width) was 0.2 behind after 40 steps of 4,096 bytes.
EMBEDDING_STD = 0.05
FIXED_SCALE = 0.0625

INTO_THE_STREAM = ("attention.output.weight", "feed_forward.down.weight")

Full = Callable[[Tensor], Tensor]
"""From what the residual stream holds, [b, s, k], to what a sublayer reads, [b, s, d]."""


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

    def __init__(self, model: ModelSection, outputs: int) -> None:
        super().__init__()
        self.heads, self.key_value_heads = model.heads, model.key_value_heads
        self.head_width = model.width // model.heads
        shared = model.key_value_heads * self.head_width
        self.query = Linear(model.width, model.width)
        self.key = Linear(model.width, shared)
        self.value = Linear(model.width, shared)
        self.output = Linear(model.width, outputs)

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

    def __init__(self, model: ModelSection, outputs: int) -> None:
        super().__init__()
        self.gate = Linear(model.width, model.feed_forward)
        self.up = Linear(model.width, model.feed_forward)
        self.down = Linear(model.feed_forward, outputs)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return output


class Layer(nn.Module):
    """One decoder layer, whose sublayers read `width` numbers and write `outputs`."""

    def __init__(self, model: ModelSection, outputs: int) -> None:
        super().__init__()
        self.attention_norm = Norm(model.width, model.norm_epsilon)
        self.attention = Attention(model, outputs)
        self.feed_forward_norm = Norm(model.width, model.norm_epsilon)
        self.feed_forward = FeedForward(model, outputs)

    def forward(self, hidden: Tensor, table: Tensor, full: Full) -> Tensor:
        hidden = hidden + self.attention(self.attention_norm(full(hidden)), table)
        return hidden + self.feed_forward(self.feed_forward_norm(full(hidden)))  # type: ignore[no-any-return]


class Space(nn.Module):
    """The run's subspace: x = U c + T[token]. No parameters and no state; `derive` fills it."""

    signs: Tensor
    bits: Tensor
    basis: Tensor | None

    def __init__(self, model: ModelSection) -> None:
        super().__init__()
        self.vocabulary, self.width, self.rank = model.vocabulary, model.width, model.subspace
        empty = torch.empty(self.width, self.rank) if self.rank < self.width else None
        self.register_buffer("basis", empty, persistent=False)
        signs = torch.empty(self.vocabulary, -(-self.width // 8), dtype=torch.uint8)
        self.register_buffer("signs", signs, persistent=False)
        self.register_buffer("bits", torch.arange(8, dtype=torch.uint8), persistent=False)

    def derive(self, seed: int) -> None:
        """What the seed fixes. Raises DerivationError."""
        fixed.check_derivation()
        self.signs.copy_(torch.from_numpy(fixed.embedding_signs(seed, self.vocabulary, self.width)))
        if self.basis is not None:
            self.basis.copy_(torch.from_numpy(fixed.basis(seed, self.width, self.rank)))

    def at(self, tokens: Tensor) -> Full:
        """The way from c to x for these tokens [b, s]; negative ids read row 0."""
        rows = self.fixed_rows(tokens)

        def full(coordinates: Tensor) -> Tensor:
            inside = coordinates if self.basis is None else F.linear(coordinates, self.basis)
            return inside + rows

        return full

    def fixed_rows(self, tokens: Tensor) -> Tensor:
        """T[tokens], [..., d]: FIXED_SCALE or -FIXED_SCALE everywhere, in the dtype of the rest."""
        packed = self.signs[tokens.clamp(min=0).long()]
        signs = (packed.unsqueeze(-1) >> self.bits & 1).flatten(-2)[..., : self.width]
        return torch.where(signs.bool(), FIXED_SCALE, -FIXED_SCALE)


def as_it_is(hidden: Tensor) -> Tensor:
    """The way from the residual stream to a sublayer where both are the same."""
    return hidden


class SubspaceStage(Stage):
    """See Stage."""

    table: Tensor

    def __init__(self, model: ModelSection, layer_range: range, is_first: bool, is_last: bool) -> None:
        super().__init__(layer_range, is_first=is_first, is_last=is_last)
        self.width = model.width
        self.free_layer = str(model.layers - 1)
        self.register_buffer(
            "table", rotation_table(model.context, model.width // model.heads, model.rope_theta), persistent=False
        )
        self.space = Space(model) if model.embedding_is_fixed else None
        if is_first:
            self.embedding = Embedding(model.vocabulary, model.subspace)
        self.layers = nn.ModuleDict({str(index): Layer(model, outputs_of(model, index)) for index in layer_range})
        if is_last:
            self.norm = Norm(model.width, model.norm_epsilon)
            self.head = Linear(model.width, model.vocabulary)

    def forward(self, hidden: Tensor, context: Context | None = None) -> Tensor:
        full: Full = as_it_is
        if self.space is not None:
            full = self.space.at(self._tokens(hidden, context))
        if self.is_first:
            hidden = self.embedding(hidden)
        for name, layer in self.layers.items():
            if name == self.free_layer:
                hidden, full = full(hidden), as_it_is
            hidden = layer(hidden, self.table, full)
        if self.is_last:
            hidden = self.head(self.norm(hidden))
        return hidden

    def derive(self, seed: int) -> None:
        if self.space is not None:
            self.space.derive(seed)

    def initial_std(self, name: str) -> float | None:
        """0.02, over sqrt(2 (layer + 1)) for projections to the residual stream; embedding and head have their own."""
        if "norm." in name:
            return None
        if name == "embedding.weight":
            return EMBEDDING_STD
        if name == "head.weight":
            return 1 / math.sqrt(self.width)
        if name.endswith(INTO_THE_STREAM):
            return WEIGHT_STD / math.sqrt(2 * (int(name.split(".")[1]) + 1))
        return WEIGHT_STD

    def _tokens(self, hidden: Tensor, context: Context | None) -> Tensor:
        if self.is_first:
            return hidden
        if context is None:
            raise ValueError("a stage after the first needs the token ids")
        return context.tokens


def outputs_of(model: ModelSection, layer: int) -> int:
    """How many numbers the sublayers of this layer add for each token: k, or d in the last layer."""
    return model.width if layer == model.layers - 1 else model.subspace
