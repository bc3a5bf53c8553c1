"""Computes what each stage of a run costs from its manifest: operations, memory, bytes between peers. Pure.

Sources: operations of a decoder, arXiv 2005.14165 appendix D and 2205.05198; NF4's bytes, arXiv 2305.14314 section 3.

| what                    | operations for each token and parameter of a matrix                                   |
|-------------------------|---------------------------------------------------------------------------------------|
| forward                 | 2                                                                                     |
| backward, trained       | 4: the gradients of its input and of itself                                           |
| backward, frozen        | 2: the gradient of its input                                                          |
| attention, each token   | 4 x context x heads' width, halved where fused causal attention leaves out later tokens |

The backward pass of attention costs twice its forward pass. Steps of the optimizer and averaging are not counted: they
come once in many microbatches.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from typing import Final

from agora_protocol.codec_names import parse_codec
from agora_protocol.ids import Span
from agora_protocol.limits import SLICE_BLOCK
from agora_protocol.manifest import Manifest
from agora_protocol.manifest_model import HfSection
from agora_protocol.manifest_sections import ALL_STEPS, PREDICTED_FACTOR

from agora.cost.activation_bytes import (
    BF16_BYTES,
    FLOAT32_BYTES,
    MicrobatchSize,
    head_graph_bytes,
    layer_graph_bytes,
    layer_peak_bytes,
    loss_peak_bytes,
)
from agora.cost.decoder_sizes import DecoderSizes, decoder_sizes
from agora.cost.run_cost import Activations, MemoryNeed, RunCost, StageCost, graphs_fraction

# What the trainer does with graphs, by the manifest's schedule.activations; auto is left to each machine.
ACTIVATIONS_OF_SETTING: Final[Mapping[str, Activations]] = {"keep": "keep", "recompute": "layers"}
MIN_IN_FLIGHT: Final = 32  # microbatches that a peer is assumed to hold between forward and backward at least
# Microbatches for each stage of the run that a peer is assumed to hold, if that is more than MIN_IN_FLIGHT.
IN_FLIGHT_PER_STAGE: Final = 4
NF4_BLOCK: Final = 64  # values of a matrix in NF4 that share a scale of one byte
NF4_BLOCKS_OF_SCALE: Final = 256  # scales of an NF4 matrix that share a float32
NF4_TABLE_BYTES: Final = 4 * (16 + 256 + 1)  # bytes of the tables that each NF4 matrix has
MUON_BATCH: Final = 1 << 24  # elements that Muon orthogonalises in one batch, or one matrix if it has more
MUON_COPIES: Final = 5  # copies of a batch's elements that orthogonalising takes temporarily
TOKEN_BYTES: Final = 4
# The device holds for each trained value its float32 weight, its float32 gradient sum, its gradient of one microbatch
# and, where products are in bf16, a copy of the weight; gradient and copy are then in bf16, so that it takes as much.
WEIGHT_BYTES: Final = 3 * FLOAT32_BYTES


def run_cost(
    manifest: Manifest,
    *,
    in_16_bits: bool = False,
    activations: Activations | None = None,
    in_flight: int | None = None,
    can_offload: bool = False,
) -> RunCost:
    """Returns the RunCost of a run: the costs of its stages, and the bytes that peers send each other.

    A boundary that travels forward counts with the token ids that go with it. Raises TypeError for a model family
    without a formula.

    in_16_bits: layers multiply in bf16 or fp16, as on a GPU; otherwise in float32, as on most CPUs.
    activations: how peers keep graphs if the manifest says auto; None: each chooses by its memory. Without effect if
        the manifest says keep or recompute.
    in_flight: microbatches that a peer holds between forward and backward; None: `in_flight_limit`.
    can_offload: optimizer state may be in host memory, as on machines with a GPU; False: all of it is on the device.
    """
    sizes = decoder_sizes(manifest.model)
    codec = parse_codec(manifest.boundary.codec)
    shape = manifest.boundary_shape()
    return RunCost(
        [stage_cost(manifest, sizes, stage, in_16_bits=in_16_bits) for stage in range(manifest.stage_count)],
        forward_bytes=codec.bytes_of(shape, "forward") + TOKEN_BYTES * math.prod(manifest.tokens_shape()),
        backward_bytes=codec.bytes_of(shape, "backward"),
        tokens=manifest.tokens_per_microbatch,
        in_flight=in_flight_limit(manifest) if in_flight is None else in_flight,
        activations=ACTIVATIONS_OF_SETTING.get(manifest.schedule.activations, activations),
        can_offload=can_offload,
        graphs_fraction=graphs_fraction(is_gpu=in_16_bits),
        has_dropout=manifest.model.dropout > 0,
    )


def min_memory(manifest: Manifest, span: Span, *, in_16_bits: bool = False, state_in_host: bool = False) -> MemoryNeed:
    """With one microbatch in flight. Raises TypeError for a model family without a formula."""
    return run_cost(manifest, in_16_bits=in_16_bits, in_flight=1).memory(span, in_host=state_in_host)


def default_in_flight(manifest: Manifest) -> int:
    return max(MIN_IN_FLIGHT, IN_FLIGHT_PER_STAGE * manifest.stage_count, manifest.schedule.max_in_flight)


def in_flight_limit(manifest: Manifest) -> int:
    """Returns how many microbatches a peer holds between forward and backward at most: all that the swarm may have.

    That is the manifest's staleness, or a step of a synchronous run; `default_in_flight` if that is less, or where what
    a step takes is not known.
    """
    usual, schedule = default_in_flight(manifest), manifest.schedule
    if schedule.max_in_flight or manifest.objective.kind == "sft":
        return usual
    of_step = math.ceil(manifest.optimizer.target_tokens / manifest.tokens_per_microbatch)
    if schedule.kind == "synchronous":
        return min(usual, of_step)
    factor = PREDICTED_FACTOR if schedule.predict_weights else 1
    return min(usual, max(1, round(factor * schedule.staleness * of_step)))


def stage_cost(manifest: Manifest, sizes: DecoderSizes, stage: int, *, in_16_bits: bool = False) -> StageCost:
    """in_16_bits: see run_cost."""
    layers = manifest.layers_of(stage)
    batch = MicrobatchSize(manifest.schedule.microbatch, manifest.model.context, manifest.has_marks)
    elements = _pad_to_blocks(trained_parameters(sizes, layers))
    forward, backward = microbatch_flops(sizes, layers, batch)
    graphs = [layer_graph_bytes(sizes, layer, batch, in_16_bits=in_16_bits) for layer in layers]
    of_layer = layer_peak_bytes(sizes, batch, in_16_bits=in_16_bits)
    is_last = layers.stop == sizes.layers
    head = head_graph_bytes(sizes, batch, in_16_bits=in_16_bits) if is_last else 0.0
    loss = loss_peak_bytes(sizes, batch, in_16_bits=in_16_bits) if is_last else 0.0
    gradient = (BF16_BYTES if in_16_bits else FLOAT32_BYTES) * elements  # of one microbatch
    at_loss = loss - gradient  # without gradients of weights, which trained_bytes has and which come later
    kept = sum(graphs) + head
    inputs = batch.tokens * _layer_inputs(sizes, layers) * FLOAT32_BYTES
    at_step = _muon_bytes(manifest, sizes, layers) - gradient  # when no microbatch is worked on
    moments = FLOAT32_BYTES * _optimizer_elements(manifest, sizes, layers, elements)
    in_memory = moments - 2 * (FLOAT32_BYTES - 1) * elements if manifest.optimizer.name == "adamw8bit" else moments
    return StageCost(
        forward_flops=forward,
        backward_flops=backward,
        frozen_bytes=frozen_bytes(sizes, layers, manifest.model.context),
        trained_bytes=(WEIGHT_BYTES + FLOAT32_BYTES * _keeps_reference(manifest)) * elements,
        optimizer_bytes=in_memory,
        kept_bytes=kept,
        peak_bytes=max(of_layer, at_loss, at_step - kept),
        state_bytes=FLOAT32_BYTES * elements + moments,
        head_flops=2.0 * batch.tokens * sizes.vocabulary * sizes.width if is_last else 0.0,
        last_layer_flops=0.0 if is_last else microbatch_flops(sizes, layers[-1:], batch)[0],
        version_bytes=gradient if manifest.schedule.kind == "asynchronous" else 0.0,
        layer_inputs_bytes=inputs,
        first_input_bytes=batch.tokens * _layer_inputs(sizes, layers[:1]) * FLOAT32_BYTES,
        layer_peak_bytes=max(max(graphs) + of_layer, head + at_loss, at_step - inputs),
        trained_values=elements,
    )


def _keeps_reference(manifest: Manifest) -> bool:
    # Where lora begins with an adapter, the model that dpo compares with has that one, and not what it has become.
    model = manifest.model
    return manifest.objective.kind == "dpo" and isinstance(model, HfSection) and bool(model.adapter_hash)


def trained_parameters(sizes: DecoderSizes, layers: range) -> int:
    """Embeddings count if `layers` begin the model, final norm and head if they end it; with frozen weights only
    LoRA's.
    """
    if sizes.frozen_as is not None:
        adapted = [linear for linear in sizes.linears if sizes.has_lora(linear)]
        return len(layers) * sizes.lora_rank * sum(linear.inputs + linear.outputs for linear in adapted)
    return sum(_matrix_parameters(sizes, layers)) + _vector_parameters(sizes, layers)


def frozen_bytes(sizes: DecoderSizes, layers: range, context: int) -> float:
    """In the format that they are kept in. With NF4, embedding and head are in bf16; norms and biases float32."""
    if sizes.frozen_as is None:
        return _fixed_tensor_bytes(sizes, context)
    matrices = [linear.inputs * linear.outputs for linear in sizes.linears]
    value = FLOAT32_BYTES if sizes.frozen_as == "float32" else BF16_BYTES
    of_matrix = _nf4_bytes if sizes.frozen_as == "nf4" else lambda count: value * count
    _, ends = _matrix_parameters(sizes, layers)
    return (
        sum(map(of_matrix, matrices)) * len(layers) + value * ends + FLOAT32_BYTES * _vector_parameters(sizes, layers)
    )


def _ceil_div(count: int, size: int) -> int:
    return -(-count // size)


def _nf4_bytes(count: int) -> int:
    scales = _ceil_div(count, NF4_BLOCK)
    return _ceil_div(count, 2) + scales + FLOAT32_BYTES * _ceil_div(scales, NF4_BLOCKS_OF_SCALE) + NF4_TABLE_BYTES


def _matrix_parameters(sizes: DecoderSizes, layers: range) -> tuple[int, int]:
    inside = sum(
        linear.inputs * linear.outputs_in(is_last=sizes.is_last(layer)) for layer in layers for linear in sizes.linears
    )
    embedding = sizes.vocabulary * sizes.stream + sizes.positions * sizes.width if layers.start == 0 else 0
    return inside, embedding + (sizes.vocabulary * sizes.width if layers.stop == sizes.layers else 0)


def _vector_parameters(sizes: DecoderSizes, layers: range) -> int:
    norm = sizes.norm_vectors * sizes.width
    of_layer = sizes.norms * norm + sum(linear.outputs for linear in sizes.linears if linear.has_bias)
    of_layer += 2 * sizes.head_width if sizes.head_norms else 0
    return len(layers) * of_layer + (norm if layers.stop == sizes.layers else 0)


def _fixed_tensor_bytes(sizes: DecoderSizes, context: int) -> float:
    if not sizes.fixed_vocabulary:
        return 0.0
    basis = FLOAT32_BYTES * sizes.width * sizes.stream if sizes.stream < sizes.width else 0
    return basis + sizes.fixed_vocabulary * _ceil_div(sizes.width, 8) + FLOAT32_BYTES * context * sizes.head_width


def microbatch_flops(sizes: DecoderSizes, layers: range, batch: MicrobatchSize) -> tuple[float, float]:
    """(forward, backward), without recomputed forwards. A backward costs twice its forward, through frozen matrices and
    the basis once.
    """
    inside, _ = _matrix_parameters(sizes, layers)
    head = sizes.vocabulary * sizes.width if layers.stop == sizes.layers else 0
    # Rows of several sequences need less still, how much less the manifest does not say.
    halved = 0 if sizes.is_attention_eager else len(set(layers) - sizes.masked_layers)
    attention = 4.0 * batch.context * sizes.query_width * (len(layers) - halved / 2)
    fixed = 2.0 * _basis_products(sizes, layers) * sizes.width * sizes.stream
    matrices = 2.0 * (inside + head)
    if sizes.frozen_as is None:
        forward, backward = matrices + attention + fixed, 2 * (matrices + attention) + fixed
    else:
        lora = 2.0 * trained_parameters(sizes, layers)
        forward, backward = matrices + attention + lora, matrices + 2 * attention + 2 * lora
    return batch.tokens * forward, batch.tokens * backward


def _basis_products(sizes: DecoderSizes, layers: range) -> int:
    # Coordinates are multiplied by the basis before each sublayer, in the last layer once.
    if sizes.stream == sizes.width:
        return 0
    return sum(1 if sizes.is_last(layer) else 2 for layer in layers)


def _layer_inputs(sizes: DecoderSizes, layers: range) -> int:
    return sum(sizes.width if sizes.is_last(layer) else sizes.stream for layer in layers)


def _optimizer_elements(manifest: Manifest, sizes: DecoderSizes, layers: range, elements: int) -> int:
    section = manifest.optimizer
    square = elements
    if section.name == "muon":  # it keeps no square of the matrices inside layers
        inside = trained_parameters(sizes, layers)
        if sizes.frozen_as is None:
            inside, _ = _matrix_parameters(sizes, layers)
        square = _pad_to_blocks(max(elements - inside, 0))
    average = elements if section.average_decay else 0
    # The outer parameters and their velocity, in runs that may take inner steps.
    outer = 0 if manifest.exact_steps == ALL_STEPS else 2 * elements
    return elements + square + average + outer


def _muon_bytes(manifest: Manifest, sizes: DecoderSizes, layers: range) -> float:
    if manifest.optimizer.name != "muon" or sizes.frozen_as is not None:
        return 0.0  # the other optimizers change weights in place
    of_shape: dict[tuple[int, ...], int] = defaultdict(int)
    for layer in layers:
        for linear in sizes.linears:
            outputs = linear.outputs_in(is_last=sizes.is_last(layer))
            of_shape[tuple(sorted((linear.inputs, outputs)))] += linear.inputs * outputs
    together = max(min(count, max(MUON_BATCH, math.prod(shape))) for shape, count in of_shape.items())
    return float(FLOAT32_BYTES * MUON_COPIES * together)


def _pad_to_blocks(count: int) -> int:
    return _ceil_div(count, SLICE_BLOCK) * SLICE_BLOCK
