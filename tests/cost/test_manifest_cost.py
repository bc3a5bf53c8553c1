"""What the formulas say of a stage is what torch counts, keeps and allocates for it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from agora_protocol.codec_names import parse_codec
from agora_protocol.ids import Span
from agora_protocol.manifest import Manifest, preset
from benchmarks.gpu_counts import count_manifest, counts
from benchmarks.training_memory import SETTINGS, measured_peak
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from agora.core.step_schedule import SyncSchedule
from agora.cost.activation_bytes import MicrobatchSize, layer_graph_bytes
from agora.cost.decoder_sizes import decoder_sizes
from agora.cost.manifest_cost import run_cost, trained_parameters
from agora.cost.run_cost import ALL_ACTIVATIONS, Activations
from agora.model import StageModule, family_of
from agora.train.activation_checkpointing import measure_saved_bytes
from agora.train.stage import stage_layout
from agora.train.weight_versions import StageWeights
from agora.tuning.hf_family import HfFamily
from agora.tuning.hf_stage import HfStage
from tests.model.tiny_models import CONFIGS, manifest_of, save
from tests.train.support import moment_bytes
from tests.tuning.test_frozen_layers import tensor_bytes

LAYERS = 9
DECODER = {"hidden_size": 64, "intermediate_size": 160, "head_dim": 16}
KINDS: list[dict[str, Any]] = [
    {},
    {"trained": "lora", "frozen_as": "float32", "lora_rank": 4},
    {"trained": "lora", "frozen_as": "bf16", "lora_rank": 4},
    {"trained": "lora", "frozen_as": "nf4", "lora_rank": 4},
]
KIND_NAMES = ["all", "lora-float32", "lora-bf16", "lora-nf4"]
TARGETS = {"trained": "lora", "frozen_as": "bf16", "lora_rank": 4, "lora_targets": ["q_proj", "v_proj"]}


def hf_manifest(name: str, kind: dict[str, Any], **sections: Any) -> Manifest:
    """A run of three stages that begins with a tiny model of this architecture."""
    config = CONFIGS[name]().to_dict() | ({} if name == "gpt2" else DECODER)
    model = {"family": "hf", "config": json.dumps(config), "weights": [["a.safetensors", "0" * 64]], "context": 32}
    values = {"model": model | kind, "stages": {"count": 3}, "schedule": {"microbatch": 2}}
    return Manifest.from_values(values | sections, "test")


def subspace_manifest(subspace: int, **sections: Any) -> Manifest:
    """A run of three stages of the subspace family."""
    model = {"width": 64, "layers": 3, "feed_forward": 160, "context": 32, "vocabulary": 300, "subspace": subspace}
    return Manifest.from_values({"model": model, "stages": {"count": 3}, "schedule": {"microbatch": 2}} | sections, "t")


def filled_stage(manifest: Manifest, stage: int) -> StageModule:
    """A stage with values, without the files of a base model."""
    family, layers = family_of(manifest.model), manifest.layers_of(stage)
    built = family._allocate_stage(layers, 0)
    with torch.no_grad():
        if isinstance(built, HfStage):
            for name, shape in built.file_shapes().items():
                built.load(name, torch.full(shape, 0.01))
        for _, parameter in built.trained_parameters():
            parameter.fill_(0.01)
    return built


def saved_bytes(manifest: Manifest, stage: StageModule, *, in_16_bits: bool) -> int:
    """What autograd keeps of one microbatch's forward through the stage."""
    tokens = torch.zeros(manifest.schedule.microbatch, manifest.model.context, dtype=torch.int64)
    entry = tokens if stage.is_first else torch.randn(manifest.boundary_shape(), requires_grad=True)
    if in_16_bits:
        stage = StageWeights(stage, torch.device("cpu"), dtype=torch.bfloat16).current.module
    weights = {parameter.untyped_storage().data_ptr() for parameter in stage.parameters()}

    def forward() -> Tensor:
        """Runs the stage."""
        return stage(entry, tokens)

    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=in_16_bits):
        return measure_saved_bytes(forward, weights)[1]


def check_stages(manifest: Manifest) -> None:
    """Compares parameters, frozen bytes and graph of every stage with what torch has."""
    family, sizes = family_of(manifest.model), decoder_sizes(manifest.model)
    costs = {in_16_bits: run_cost(manifest, in_16_bits=in_16_bits) for in_16_bits in (False, True)}
    for number in range(manifest.stage_count):
        layers, stage = manifest.layers_of(number), filled_stage(manifest, number)
        assert trained_parameters(sizes, layers) == family.parameter_count(layers)
        if isinstance(family, HfFamily):
            assert costs[False].stages[number].frozen_bytes == pytest.approx(tensor_bytes(stage), rel=0.01)
        for in_16_bits, cost in costs.items():
            measured = saved_bytes(manifest, stage, in_16_bits=in_16_bits)
            assert cost.stages[number].kept_bytes == pytest.approx(measured, rel=0.15), (number, in_16_bits)


@pytest.mark.parametrize("kind", KINDS, ids=KIND_NAMES)
@pytest.mark.parametrize("name", CONFIGS)
def test_parameters_frozen_bytes_and_graphs_are_those_of_real_stages(name: str, kind: dict[str, Any]) -> None:
    check_stages(hf_manifest(name, kind))


def test_lora_on_a_few_linear_layers_keeps_fewer_inputs() -> None:
    check_stages(hf_manifest("llama", TARGETS))


def test_lora_with_dropout_keeps_what_it_dropped() -> None:
    manifest = hf_manifest("llama", {**KINDS[2], "lora_dropout": 0.1})
    stage = filled_stage(manifest, 1).train()
    measured = saved_bytes(manifest, stage, in_16_bits=False)
    assert run_cost(manifest).stages[1].kept_bytes == pytest.approx(measured, rel=0.15)


@pytest.mark.parametrize("subspace", [64, 24])
def test_the_formulas_know_the_subspace_family(subspace: int) -> None:
    check_stages(subspace_manifest(subspace))


@pytest.mark.parametrize("name", CONFIGS)
def test_sizes_that_a_config_leaves_out_are_those_of_transformers(name: str) -> None:
    wanted = ("model_type", "num_hidden_layers", "hidden_size", "vocab_size", "max_position_embeddings")
    gpt2 = ("model_type", "n_layer", "n_embd", "vocab_size", "n_positions")
    whole = CONFIGS[name]().to_dict()
    config = {key: whole[key] for key in (gpt2 if name == "gpt2" else wanted)} | {"pad_token_id": None}
    config |= {"hidden_size": 256} if name != "gpt2" else {"n_embd": 96}
    model = {"family": "hf", "config": json.dumps(config), "weights": [["a.safetensors", "0" * 64]], "context": 32}
    manifest = Manifest.from_values({"model": model, "stages": {"count": 3}}, "test")
    for number in range(3):
        layers = manifest.layers_of(number)
        assert trained_parameters(decoder_sizes(manifest.model), layers) == family_of(manifest.model).parameter_count(
            layers
        )


@pytest.mark.parametrize("optimizer", ["adamw", "adamw8bit", "nadam", "muon"])
@pytest.mark.parametrize("exact_steps", [0, 10**9])
def test_the_state_that_a_newcomer_fetches_has_the_bytes_of_its_layout(optimizer: str, exact_steps: int) -> None:
    manifest = preset("tiny", optimizer={"name": optimizer}, averaging={"exact_steps": exact_steps})
    for number, stage in enumerate(run_cost(manifest).stages):
        layout = stage_layout(manifest, number).at_step(0, SyncSchedule(0, exact_steps, 20))
        assert stage.state_bytes == pytest.approx(layout.nbytes, rel=0.01)


@pytest.mark.parametrize("way", ALL_ACTIVATIONS)
@pytest.mark.parametrize("kind", ["full", "muon", "lora", "nf4"])
def test_the_peak_of_a_training_span_is_within_15_percent(kind: str, way: Activations, tmp_path: Path) -> None:
    frozen, folder = {"lora": "bf16", "nf4": "nf4"}.get(kind), None
    sections = {
        "boundary": {"codec": "bf16"},  # a boundary and its gradient, as many bytes as the float32 entry that is kept
        "schedule": {"microbatch": 2 if frozen is None else 4, "activations": SETTINGS[way]},
        "optimizer": {"name": "muon" if kind == "muon" else "adamw", "target_tokens": 256},
    }
    if frozen is None:
        model = {"width": 128, "layers": LAYERS, "feed_forward": 352, "context": 128, "vocabulary": 2048}
        manifest = Manifest.from_values({"model": model, "stages": {"count": 3}} | sections, "test")
    else:
        sizes = {"vocab_size": 263, "hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": LAYERS}
        config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)
        folder = save(LlamaForCausalLM(config), tmp_path / "base")
        manifest = manifest_of(folder, 3, model={"trained": "lora", "frozen_as": frozen, "context": 64}, **sections)
    for span, in_flight in ((Span(1, 1), 3), (Span(2, 2), 1)):
        cost = run_cost(manifest, in_flight=in_flight, activations=way)
        measured = measured_peak(manifest, span, in_flight, folder, way=way)
        assert cost.memory(span).device == pytest.approx(measured, rel=0.15), span


def test_boundaries_cost_what_the_codec_sends_and_the_tokens_go_forward() -> None:
    manifest = subspace_manifest(24, boundary={"codec": "int6/int3"})
    cost, codec = run_cost(manifest), parse_codec("int6/int3")
    assert cost.backward_bytes == codec.bytes_of(manifest.boundary_shape(), "backward")
    assert cost.forward_bytes == codec.bytes_of(manifest.boundary_shape(), "forward") + 4 * 2 * 33


def test_a_frozen_model_costs_a_third_less_work_than_a_trained_one() -> None:
    trained, frozen = (run_cost(hf_manifest("llama", kind)).stages[1] for kind in (KINDS[0], KINDS[2]))
    assert trained.backward_flops == pytest.approx(2 * trained.forward_flops)
    assert frozen.backward_flops < 0.75 * trained.backward_flops


@pytest.mark.parametrize("layers", [1, 2])
def test_a_forward_is_repeated_in_as_many_products_as_the_trainer_computes(layers: int) -> None:
    keep, repeated = (counts(count_manifest(layers, "bf16", way))[0] for way in ("keep", "recompute"))
    products = repeated.total(lambda job: job.products) - keep.total(lambda job: job.products)
    cost = run_cost(count_manifest(layers, "bf16", "recompute"))
    span, forward = Span(1, 1), cost.stages[1].forward_flops
    flops = cost.flops(span, "layers") - cost.flops(span, "keep")
    assert products / keep.forward.products == pytest.approx(flops / forward) == (2 * layers - 1) / layers


def test_nobody_is_taken_to_keep_the_inputs_of_layers_with_dropout() -> None:
    with_dropout, without = (hf_manifest("llama", {**KINDS[2], "lora_dropout": dropout}) for dropout in (0.1, 0.0))
    assert "inputs" not in run_cost(with_dropout).activation_choices
    assert run_cost(without).activation_choices == ALL_ACTIVATIONS


@pytest.mark.parametrize("name", CONFIGS)
def test_rows_of_several_sequences_keep_no_mask_where_products_are_in_bf16(name: str) -> None:
    manifest = hf_manifest(name, KINDS[2])
    sizes = decoder_sizes(manifest.model)
    packed, whole = (MicrobatchSize(2, 32, has_segments) for has_segments in (True, False))
    graphs = {
        (batch.has_segments, in_16_bits): layer_graph_bytes(sizes, 1, batch, in_16_bits=in_16_bits)
        for batch in (packed, whole)
        for in_16_bits in (False, True)
    }
    assert graphs[True, False] >= graphs[False, False]
    if sizes.is_attention_eager:
        assert graphs[True, True] >= graphs[False, True]
    else:
        assert graphs[True, True] <= graphs[False, True]


def test_the_head_makes_the_last_stage_dearer() -> None:
    stages = run_cost(subspace_manifest(64)).stages
    assert stages[2].forward_flops == stages[1].forward_flops + 2 * 64 * 300 * 64


def test_moments_in_eight_bits_take_the_bytes_that_the_optimizer_says() -> None:
    manifest = preset("tiny", optimizer={"name": "adamw8bit"})
    for stage, cost in enumerate(run_cost(manifest).stages):
        expected = moment_bytes(manifest.optimizer, stage_layout(manifest, stage))
        assert cost.optimizer_bytes == pytest.approx(expected, rel=0.01)
