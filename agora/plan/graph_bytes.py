"""Computes how many bytes autograd keeps of a microbatch between forward and backward, layer by layer. Pure.

The counts are of the tensors that torch's backward formulas need, checked against what autograd really saves. Knows:
sizes of decoders. Must not know: torch, manifests, machines.

| value of a token              | copies kept                                                                          |
|-------------------------------|--------------------------------------------------------------------------------------|
| input of an RMSNorm           | 1; where its weight is trained also the input divided by its root mean square        |
| input of a LayerNorm          | 1                                                                                    |
| input of linear layers        | 1 in float32, which they share; in bf16 one for each, where its matrix or LoRA learns|
| queries, keys, values         | 1 of each; with a mask, keys and values are repeated for every query head            |
| output of attention           | 1, in bf16 one more                                                                  |
| inner values, gated           | 3: gate, activation and up                                                           |
| inner values, GPT-2's GELU    | 4                                                                                    |
| eager attention               | also 2 for each pair of tokens and head                                              |

In bf16, autocast also keeps a bf16 copy of each float32 matrix with the graph.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from typing import Final

from agora.plan.decoder_sizes import DecoderSizes, LinearSize

FLOAT: Final = 4
"""Bytes of a float32 value."""
HALF: Final = 2
"""Bytes of a bf16 value."""


@dataclass(frozen=True, slots=True)
class MicrobatchSize:
    """The size of a microbatch: `rows` of `context` tokens. has_segments: whether a row holds several sequences."""

    rows: int
    context: int
    has_segments: bool = False

    @property
    def tokens(self) -> int:
        """Number of tokens of the microbatch."""
        return self.rows * self.context


def layer_graph_bytes(sizes: DecoderSizes, layer: int, batch: MicrobatchSize, *, in_bf16: bool) -> float:
    """Returns the bytes that the graph of decoder layer number `layer` keeps of a microbatch.

    in_bf16: whether products are computed in bf16, as on a GPU.
    """
    value = HALF if in_bf16 else FLOAT
    per_token: float = FLOAT * _norm_values(sizes, layer) + value * (
        _linear_inputs(sizes, in_bf16) + _inner_values(sizes)
    )
    has_mask = layer in sizes.masked_layers or batch.has_segments
    per_token += value * _attention_values(sizes, has_mask, in_bf16) + _dropout_bytes(sizes, value)
    per_token += value * sizes.lora_rank * sum(sizes.has_lora(linear) for linear in sizes.linears)
    pairs = _attention_pairs(sizes, has_mask, batch, value)
    return batch.tokens * per_token + pairs + _weight_copies(sizes, layer, in_bf16)


def head_graph_bytes(sizes: DecoderSizes, batch: MicrobatchSize, *, in_bf16: bool) -> float:
    """Returns the bytes that the graphs of the final norm and the head keep of a microbatch, without the loss."""
    value = HALF if in_bf16 else FLOAT
    capped = value * sizes.vocabulary if sizes.caps_logits else 0
    head_input = value * sizes.width if sizes.frozen_as is None else 0
    copied = HALF * sizes.vocabulary * sizes.width if in_bf16 and sizes.frozen_as in (None, "float32") else 0
    return batch.tokens * (FLOAT * sizes.width * _norm_copies(sizes) + head_input + capped) + copied


def loss_peak_bytes(sizes: DecoderSizes, batch: MicrobatchSize, *, in_bf16: bool) -> float:
    """Returns the bytes that logits, log-probabilities and the logits' gradient take while the loss is computed."""
    copies = 3 * FLOAT + (2 * HALF if in_bf16 else 0)
    return batch.tokens * sizes.vocabulary * copies


def layer_peak_bytes(sizes: DecoderSizes, batch: MicrobatchSize, *, in_bf16: bool) -> float:
    """Returns the most bytes that the backward of a layer takes for a moment beyond its graph.

    These are the gradients of the widest values and, where matrices are kept in fewer bits, one matrix in full.
    """
    value = HALF if in_bf16 else FLOAT
    widest = max(2 * sizes.inner_width, 3 * sizes.query_width)
    gradients = batch.tokens * (value * widest + 2 * FLOAT * sizes.width)
    whole = (
        0 if sizes.frozen_as in (None, "float32") else max(linear.inputs * linear.outputs for linear in sizes.linears)
    )
    return gradients + value * whole


def _norm_copies(sizes: DecoderSizes) -> int:
    """Returns how many copies of a norm's input its graph keeps."""
    return 2 if sizes.frozen_as is None and sizes.norm_vectors == 1 else 1


def _norm_values(sizes: DecoderSizes, layer: int) -> int:
    """Returns how many float32 values of a token a layer's norms keep; a norm of a frozen embedding keeps none."""
    of_heads = sizes.query_width + sizes.key_value_width if sizes.head_norms else 0
    needless = sizes.width if layer == 0 and sizes.frozen_as is not None else 0
    return _norm_copies(sizes) * (sizes.norms * sizes.width + of_heads) - needless


def _needs_input(sizes: DecoderSizes, linear: LinearSize) -> bool:
    """Returns whether the backward needs a linear layer's input: its matrix is trained, or it has LoRA."""
    return sizes.frozen_as is None or sizes.has_lora(linear)


def _linear_inputs(sizes: DecoderSizes, in_bf16: bool) -> int:
    """Returns how many values of a token the linear layers keep as inputs, without those kept as attention's output."""
    values = 0
    for reads, group in groupby(sizes.linears, key=lambda linear: linear.reads):
        learning = [linear for linear in group if _needs_input(sizes, linear)]
        if learning and (reads != "attended" or in_bf16 or sizes.copies_attended):
            values += learning[0].inputs * (len(learning) if in_bf16 and reads in ("attention", "feed-forward") else 1)
    return values


def _inner_values(sizes: DecoderSizes) -> int:
    """Returns how many inner values of a token the activation function and the gate keep."""
    return (3 if sizes.is_gated else 4) * sizes.inner_width


def _attention_values(sizes: DecoderSizes, has_mask: bool, in_bf16: bool) -> float:
    """Returns how many values of a token attention keeps: queries, keys, values, output and sums over the heads."""
    shared = sizes.query_width if sizes.attends_to_all or has_mask else sizes.key_value_width
    return 2 * sizes.query_width + 2 * shared + (0 if sizes.attends_to_all else sizes.heads * (2 if in_bf16 else 1))


def _attention_pairs(sizes: DecoderSizes, has_mask: bool, batch: MicrobatchSize, value: int) -> float:
    """Returns the bytes that attention keeps for pairs of tokens: eager attention's scores and softmax, or a mask."""
    pairs = batch.context**2
    if sizes.attends_to_all:
        return 2.0 * value * batch.rows * sizes.heads * pairs
    if batch.has_segments:
        return float(value * batch.rows * pairs)
    return float(value * pairs) if has_mask else 0.0


def _dropout_bytes(sizes: DecoderSizes, value: int) -> float:
    """Returns the bytes that LoRA's dropout keeps for each token: its mask and its output. 0 without dropout."""
    if not sizes.dropout:
        return 0.0
    return sum(linear.inputs * (value + 1) for linear in sizes.linears if sizes.has_lora(linear))


def _weight_copies(sizes: DecoderSizes, layer: int, in_bf16: bool) -> float:
    """Returns the bytes of a layer's bf16 copies of float32 matrices, which autocast leaves with the graph.

    0 unless `in_bf16`. LoRA's matrices always count, the layer's own only if they are kept as float32.
    """
    if not in_bf16:
        return 0.0
    matrices = sum(linear.inputs * linear.outputs_in(is_last=sizes.is_last(layer)) for linear in sizes.linears)
    lora = sizes.lora_rank * sum(lin.inputs + lin.outputs for lin in sizes.linears if sizes.has_lora(lin))
    return HALF * ((matrices if sizes.frozen_as in (None, "float32") else 0) + lora)
