"""Computes how many bytes autograd keeps of a microbatch between forward and backward, layer by layer. Pure.

The counts are of the tensors that torch's backward formulas need, checked against what autograd really saves.

| value of a token              | copies kept                                                                          |
|-------------------------------|--------------------------------------------------------------------------------------|
| input of an RMSNorm           | 1; where its weight is trained also the input divided by its root mean square        |
| input of a LayerNorm          | 1                                                                                    |
| input of linear layers        | 1 which they share; in bf16 one for each of hf's whose matrix or LoRA learns         |
| queries, keys, values         | 1 of each; with a mask, keys and values are repeated for every query head            |
| output of attention           | 1, in bf16 one more                                                                  |
| inner values, gated           | 3: gate, activation and up                                                           |
| inner values, GPT-2's GELU    | 4                                                                                    |
| eager attention               | also 2 for each pair of tokens and head                                              |

In bf16, autocast also keeps a bf16 copy of each frozen float32 matrix with the graph. Trained ones are in bf16 already.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from typing import Final

from agora.cost.decoder_sizes import DecoderSizes, LinearSize

FLOAT32_BYTES: Final = 4  # bytes of a float32 value
BF16_BYTES: Final = 2  # bytes of a bf16 value
# Head and loss take this many logits at a time: 512 MB in bf16 with their float32 copy, log-probabilities and gradient.
LOGITS_AT_ONCE: Final = 1 << 25


@dataclass(frozen=True, slots=True)
class MicrobatchSize:
    """The size of a microbatch: `rows` of `context` tokens. has_segments: whether a row holds several sequences."""

    rows: int
    context: int
    has_segments: bool = False

    @property
    def tokens(self) -> int:
        return self.rows * self.context


def layer_graph_bytes(sizes: DecoderSizes, layer: int, batch: MicrobatchSize, *, in_16_bits: bool) -> float:
    """in_16_bits: then autocast's 16-bit copies of the layer's frozen float32 matrices count too."""
    value = BF16_BYTES if in_16_bits else FLOAT32_BYTES
    per_token: float = FLOAT32_BYTES * _norm_values(sizes, layer) + value * (
        _linear_inputs(sizes, in_16_bits) + _inner_values(sizes)
    )
    # With bf16 a GPU has a kernel for rows of several sequences, with windows too; elsewhere lengths decide, which
    # the manifest does not say.
    is_packed = batch.has_segments and in_16_bits and not sizes.is_attention_eager
    has_mask = (layer in sizes.masked_layers or batch.has_segments) and not is_packed
    per_token += value * _attention_values(sizes, has_mask, in_16_bits) + _dropout_bytes(sizes, value)
    per_token += value * sizes.lora_rank * sum(sizes.has_lora(linear) for linear in sizes.linears)
    pairs = 0.0 if is_packed else _attention_pairs(sizes, has_mask, batch, value)
    return batch.tokens * per_token + pairs + _weight_copies(sizes, layer, in_16_bits)


def head_graph_bytes(sizes: DecoderSizes, batch: MicrobatchSize, *, in_16_bits: bool) -> float:
    """Of the final norm and the head, without the loss.

    in_16_bits: then autocast's 16-bit copy of a frozen float32 head counts too.
    """
    value = BF16_BYTES if in_16_bits else FLOAT32_BYTES
    capped = value * sizes.vocabulary if sizes.caps_logits else 0
    head_input = value * sizes.width if sizes.frozen_as is None else 0
    copied = BF16_BYTES * sizes.vocabulary * sizes.width if in_16_bits and sizes.frozen_as == "float32" else 0
    return batch.tokens * (FLOAT32_BYTES * sizes.width * _norm_copies(sizes) + head_input + capped) + copied


def head_chunk_tokens(vocabulary: int) -> int:
    """Returns how many tokens go through head and loss at a time, the same on every machine."""
    return max(1, LOGITS_AT_ONCE // vocabulary)


def loss_peak_bytes(sizes: DecoderSizes, batch: MicrobatchSize, *, in_16_bits: bool) -> float:
    """Logits, log-probabilities and the logits' gradient of one chunk of tokens.

    in_16_bits: then two 16-bit copies of the logits count too. With several chunks also the gradients of head and
    hidden states count, summed over the chunks so far.
    """
    chunk = min(batch.tokens, head_chunk_tokens(sizes.vocabulary))
    logits = chunk * sizes.vocabulary
    peak = logits * (3 * FLOAT32_BYTES + (2 * BF16_BYTES if in_16_bits else 0))
    if chunk == batch.tokens:
        return peak
    head = sizes.vocabulary * sizes.width if sizes.frozen_as is None else 0
    value = BF16_BYTES if in_16_bits else FLOAT32_BYTES
    # A chunk's gradient of the head is added to the float32 sum when only the gradient of its logits is left.
    at_sum = (FLOAT32_BYTES + value) * head + logits * value
    return max(peak + FLOAT32_BYTES * head, at_sum) + batch.tokens * FLOAT32_BYTES * sizes.width


def layer_peak_bytes(sizes: DecoderSizes, batch: MicrobatchSize, *, in_16_bits: bool) -> float:
    """In addition to the graph: gradients of the widest values and of the stream, and the largest frozen matrix
    dequantised.
    """
    value = BF16_BYTES if in_16_bits else FLOAT32_BYTES
    widest = max(2 * sizes.inner_width, 3 * sizes.query_width)
    gradients = batch.tokens * (value * widest + 2 * FLOAT32_BYTES * sizes.width)
    whole = (
        0 if sizes.frozen_as in (None, "float32") else max(linear.inputs * linear.outputs for linear in sizes.linears)
    )
    return gradients + value * whole


def _norm_copies(sizes: DecoderSizes) -> int:
    # A trained RMSNorm also keeps its input divided by its root mean square.
    return 2 if sizes.frozen_as is None and sizes.norm_vectors == 1 else 1


def _norm_values(sizes: DecoderSizes, layer: int) -> int:
    of_heads = sizes.query_width + sizes.key_value_width if sizes.head_norms else 0
    # The first norm of the model keeps no input if the embedding, which makes that input, is frozen.
    needless = sizes.width if layer == 0 and sizes.frozen_as is not None else 0
    return _norm_copies(sizes) * (sizes.norms * sizes.width + of_heads) - needless


def _needs_input(sizes: DecoderSizes, linear: LinearSize) -> bool:
    return sizes.frozen_as is None or sizes.has_lora(linear)


def _linear_inputs(sizes: DecoderSizes, in_16_bits: bool) -> int:
    values = 0
    for kind, group in groupby(sizes.linears, key=lambda linear: linear.input_kind):
        learning = [linear for linear in group if _needs_input(sizes, linear)]
        # In float32 attention keeps the heads' output anyway, unless it is copied before the projection.
        if learning and (kind != "attended" or in_16_bits or sizes.copies_attended):
            has_copies = in_16_bits and kind in ("attention", "feed-forward") and not sizes.casts_inputs_once
            values += learning[0].inputs * (len(learning) if has_copies else 1)
    return values


def _inner_values(sizes: DecoderSizes) -> int:
    return (3 if sizes.is_gated else 4) * sizes.inner_width


def _attention_values(sizes: DecoderSizes, has_mask: bool, in_16_bits: bool) -> float:
    shared = sizes.query_width if sizes.is_attention_eager or has_mask else sizes.key_value_width
    statistics = 0 if sizes.is_attention_eager else sizes.heads * (2 if in_16_bits else 1)
    return 2 * sizes.query_width + 2 * shared + statistics


def _attention_pairs(sizes: DecoderSizes, has_mask: bool, batch: MicrobatchSize, value: int) -> float:
    # A mask is one for each row where rows have segments, otherwise one for all rows.
    pairs = batch.context**2
    if sizes.is_attention_eager:
        return 2.0 * value * batch.rows * sizes.heads * pairs
    if batch.has_segments:
        return float(value * batch.rows * pairs)
    return float(value * pairs) if has_mask else 0.0


def _dropout_bytes(sizes: DecoderSizes, value: int) -> float:
    if not sizes.dropout:
        return 0.0
    # The mask, of one byte, and the output.
    return sum(linear.inputs * (value + 1) for linear in sizes.linears if sizes.has_lora(linear))


def _weight_copies(sizes: DecoderSizes, layer: int, in_16_bits: bool) -> float:
    if not in_16_bits or sizes.frozen_as != "float32":
        return 0.0
    return BF16_BYTES * sum(linear.inputs * linear.outputs_in(is_last=sizes.is_last(layer)) for linear in sizes.linears)
