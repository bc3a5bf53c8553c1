"""The layers of the `subspace` family: a Llama decoder whose residual stream has k numbers for each token.

A sublayer reads x = U c + T[token]: c are the k coordinates, U [d, k] is the run's basis, T its fixed embedding. Its
output projection has k rows and is added to c, so a boundary that carries c (and the token ids) loses nothing. The last
layer is not restricted: it converts c to x once and continues in all d dimensions. If k = d and no embedding is fixed,
x is c and the model is a plain Llama: pre-norm RMSNorm, rotate-half positions, grouped-query attention, SwiGLU, untied
head. Source: Subspace Networks, arXiv 2506.01260, with the constraint built into the weights. Shapes: b sequences, s
positions, d width, k subspace, e head width.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from agora_protocol.manifest_model import SubspaceSection
from torch import Tensor, nn

from agora.model import fixed_tensors
from agora.model.family import RunLayer, StageModule, keep_graph

# Standard deviation of initial weights in layers; those of STREAM_PROJECTIONS are smaller, see initial_std.
WEIGHT_STD = 0.02
EMBEDDING_STD = 0.05  # standard deviation of the initial embedding, chosen by measurement: docs/notes/subspace.md
FIXED_SCALE = 0.0625  # magnitude of every value of the fixed embedding T

# How the names of the parameters end whose outputs are added to the residual stream.
STREAM_PROJECTIONS = ("attention.output.weight", "feed_forward.down.weight")

Expand = Callable[[Tensor], Tensor]  # converts the residual stream [b, s, k] to the input of a sublayer [b, s, d]
EXPAND_NOTHING: Expand = nn.Identity()  # the Expand of layers whose residual stream has the whole width already


def rotary_table(context: int, head_width: int, theta: float) -> Tensor:
    """Returns cosines [0], sines [1] of rotary positions, float32 [2, context, head_width] (arXiv 2104.09864).

    Those of the first half of the channels come again for the second; the first half's sines are negative.
    """
    frequency = theta ** (-torch.arange(0, head_width, 2, dtype=torch.float64) / head_width)
    angle = torch.outer(torch.arange(context, dtype=torch.float64), frequency)
    cosine, sine = angle.cos(), angle.sin()
    return torch.stack((torch.cat((cosine, cosine), dim=1), torch.cat((-sine, sine), dim=1))).float()


def apply_rotary(x: Tensor, table: Tensor) -> Tensor:
    """Returns x [b, heads, s, e] with channels i and i + e/2 rotated by position * frequency i, computed in float32.

    table: what rotary_table returns.
    """
    rotated: Tensor = _Rotation.apply(x, table[:, : x.shape[-2]])  # type: ignore[no-untyped-call]
    return rotated


class _Rotation(torch.autograd.Function):
    # Its gradient is the rotation by the opposite angle: 5 kernels, where autograd's steps backwards take 13.

    @staticmethod
    def forward(x: Tensor, table: Tensor) -> Tensor:
        return _rotate(x, table, 1.0)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(inputs[1])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (table,) = ctx.saved_tensors
        return _rotate(gradient, table, -1.0), None


def _rotate(x: Tensor, table: Tensor, direction: float) -> Tensor:
    cosine, sine = table
    halves_swapped = x.roll(x.shape[-1] // 2, dims=-1)
    # Not addcmul: whether that rounds once or twice depends on how the compiler made its loop.
    turned: Tensor = (x * cosine).add_(halves_swapped * sine, alpha=direction)
    return turned.to(x.dtype)


def cast_once(x: Tensor) -> Tensor:
    """Returns x in autocast's dtype, or as it is without autocast: each product would convert it again."""
    # Of meta tensors only shapes are computed, and autocast knows no such device.
    if x.is_meta or not torch.is_autocast_enabled(x.device.type):
        return x
    return x.to(torch.get_autocast_dtype(x.device.type))


class Attention(nn.Module):
    """Causal grouped-query self-attention with rotary positions: x [b, s, d] becomes [b, s, outputs].

    Each key/value head serves heads / key_value_heads query heads.
    """

    def __init__(self, model: SubspaceSection, outputs: int) -> None:
        super().__init__()
        self.heads, self.key_value_heads = model.heads, model.key_value_heads
        self.head_width = model.width // model.heads
        shared = model.key_value_heads * self.head_width
        self.query = nn.Linear(model.width, model.width, bias=False)
        self.key = nn.Linear(model.width, shared, bias=False)
        self.value = nn.Linear(model.width, shared, bias=False)
        self.output = nn.Linear(model.width, outputs, bias=False)

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        x = cast_once(x)
        query = apply_rotary(self._split_heads(self.query(x), self.heads), table)
        key = apply_rotary(self._split_heads(self.key(x), self.key_value_heads), table)
        value = self._split_heads(self.value(x), self.key_value_heads)
        grouped = self.heads != self.key_value_heads
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=grouped)
        output: Tensor = self.output(attended.transpose(1, 2).flatten(2))
        return output

    def _split_heads(self, x: Tensor, heads: int) -> Tensor:
        return x.view(*x.shape[:-1], heads, self.head_width).transpose(1, 2)


class FeedForward(nn.Module):
    """SwiGLU: x [b, s, d] becomes [b, s, outputs]."""

    def __init__(self, model: SubspaceSection, outputs: int) -> None:
        super().__init__()
        self.gate = nn.Linear(model.width, model.feed_forward, bias=False)
        self.up = nn.Linear(model.width, model.feed_forward, bias=False)
        self.down = nn.Linear(model.feed_forward, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = cast_once(x)
        output: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return output


class Layer(nn.Module):
    """One pre-norm decoder layer: attention, then feed-forward, each with a residual connection."""

    def __init__(self, model: SubspaceSection, outputs: int) -> None:
        """outputs: width of the residual stream."""
        super().__init__()
        self.attention_norm = nn.RMSNorm(model.width, model.norm_epsilon)
        self.attention = Attention(model, outputs)
        self.feed_forward_norm = nn.RMSNorm(model.width, model.norm_epsilon)
        self.feed_forward = FeedForward(model, outputs)

    def forward(self, hidden: Tensor, table: Tensor, expand: Expand) -> Tensor:
        hidden = hidden + self.attention(self.attention_norm(expand(hidden)), table)
        return hidden + self.feed_forward(self.feed_forward_norm(expand(hidden)))  # type: ignore[no-any-return]


class Subspace(nn.Module):
    """Expands the residual stream: x = U c + T[token], from coordinates c, the basis U and the fixed embedding T.

    U and the signs of T are buffers that are not saved, and have no values before fill_buffers.
    """

    signs: Tensor  # of T, as bits
    bits: Tensor  # 0 to 7, to unpack `signs`
    basis: Tensor | None  # U; None: the identity

    def __init__(self, model: SubspaceSection) -> None:
        super().__init__()
        self.vocabulary, self.width, self.rank = model.vocabulary, model.width, model.subspace
        empty = torch.empty(self.width, self.rank) if self.rank < self.width else None
        self.register_buffer("basis", empty, persistent=False)
        signs = torch.empty(self.vocabulary, -(-self.width // 8), dtype=torch.uint8)
        self.register_buffer("signs", signs, persistent=False)
        self.register_buffer("bits", torch.empty(8, dtype=torch.uint8), persistent=False)

    def fill_buffers(self, seed: int) -> None:
        """Raises DerivationError if this machine derives other values than the other peers (see check_derivation)."""
        fixed_tensors.check_derivation()
        torch.arange(8, dtype=torch.uint8, out=self.bits)
        self.signs.copy_(torch.from_numpy(fixed_tensors.derive_embedding_signs(seed, self.vocabulary, self.width)))
        if self.basis is not None:
            self.basis.copy_(torch.from_numpy(fixed_tensors.derive_basis(seed, self.width, self.rank)))

    def expand_for(self, tokens: Tensor) -> Expand:
        """Returns the function that turns c [b, s, k] into x = U c + T[tokens], [b, s, d], for these token ids [b, s].

        T[tokens] is computed once, here. A negative id is read as 0.
        """
        packed = self.signs[tokens.clamp(min=0).long()]
        signs = (packed.unsqueeze(-1) >> self.bits & 1).flatten(-2)[..., : self.width]
        rows = torch.where(signs.bool(), FIXED_SCALE, -FIXED_SCALE)
        basis = None if self.basis is None else cast_once(self.basis)

        def expand(coordinates: Tensor) -> Tensor:
            inside = coordinates if basis is None else F.linear(coordinates, basis)
            return inside + rows

        return expand


class SubspaceStage(StageModule):
    """A stage of the family `subspace`: Llama layers whose residual stream has k numbers a token (see the module)."""

    table: Tensor

    def __init__(self, model: SubspaceSection, layer_range: range) -> None:
        is_first, is_last = layer_range.start == 0, layer_range.stop == model.layers
        super().__init__(layer_range, is_first=is_first, is_last=is_last)
        self._model = model
        self._free_layer = str(model.layers - 1)
        rotary = torch.empty(2, model.context, model.width // model.heads)
        self.register_buffer("table", rotary, persistent=False)
        self.space = Subspace(model) if model.is_embedding_fixed else None
        if is_first:
            # _weight is given, so that torch draws nothing: drawing on the meta device imports torch._dynamo, for 2 s
            weight = torch.empty(model.vocabulary, model.subspace)
            self.embedding = nn.Embedding(model.vocabulary, model.subspace, _weight=weight)
        self.layers = nn.ModuleDict({str(index): Layer(model, stream_width(model, index)) for index in layer_range})
        if is_last:
            self.norm = nn.RMSNorm(model.width, model.norm_epsilon)
            self.head = nn.Linear(model.width, model.vocabulary, bias=False)

    def run_layers(
        self,
        hidden: Tensor,
        tokens: Tensor | None = None,
        segments: Tensor | None = None,
        run_layer: RunLayer = keep_graph,
    ) -> Tensor:
        expand = EXPAND_NOTHING
        tokens = hidden if self.is_first else tokens
        if self.space is not None:
            if tokens is None:
                raise ValueError("a stage after the first needs the token ids")
            expand = self.space.expand_for(tokens)
        if self.is_first:
            hidden = self.embedding(hidden.clamp(min=0))
        for name, layer in self.layers.items():
            if name == self._free_layer:
                hidden = expand(hidden)
                expand = EXPAND_NOTHING
            hidden = run_layer(layer, partial(layer, table=self.table, expand=expand), hidden)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.head(self.norm(hidden))
        return logits

    def head_modules(self) -> nn.ModuleList:
        return nn.ModuleList([self.norm, self.head])

    def fill_buffers(self, seed: int) -> None:
        model = self._model
        self.table.copy_(rotary_table(model.context, model.width // model.heads, model.rope_theta))
        if self.space is not None:
            self.space.fill_buffers(seed)

    def initial_std(self, name: str) -> float | None:
        if "norm." in name:
            return None
        if name == "embedding.weight":
            return EMBEDDING_STD
        if name == "head.weight":
            return 1 / math.sqrt(self._model.width)
        if name.endswith(STREAM_PROJECTIONS):
            return WEIGHT_STD / math.sqrt(2 * (int(name.split(".")[1]) + 1))
        return WEIGHT_STD

    def is_hidden_matrix(self, name: str) -> bool:
        return name.startswith("layers.") and "norm." not in name


def stream_width(model: SubspaceSection, layer: int) -> int:
    """Returns the width of a layer's residual stream: model.width in the model's last layer, else model.subspace."""
    return model.width if layer == model.layers - 1 else model.subspace
