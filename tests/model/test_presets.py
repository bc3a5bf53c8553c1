"""Every preset's stages are built with their dimensions and step once, on the meta device, which computes no values."""

from __future__ import annotations

import pytest
import torch
from agora_protocol.manifest import Manifest, preset
from agora_protocol.presets import PRESETS
from torch.nn.functional import cross_entropy

from agora.model import StageModule, family_of
from agora.train.optimizer import StageOptimizer
from agora.train.stage import stage_layout

PARAMETERS = {"tiny": 0.68e6, "small": 19.9e6, "150m": 149e6, "1b": 988e6, "8b": 7.96e9}
LARGE = ("150m", "1b", "8b")
META = torch.device("meta")


def stages_of(manifest: Manifest) -> list[StageModule]:
    """All stages, on the meta device."""
    with META:
        return [family_of(manifest.model).make_meta_stage(manifest.layers_of(n)) for n in range(manifest.stage_count)]


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_has_the_parameters_that_its_name_says(name: str) -> None:
    counted = sum(p.numel() for stage in stages_of(preset(name)) for _, p in stage.trained_parameters())
    assert counted == pytest.approx(PARAMETERS[name], rel=0.03)


@pytest.mark.parametrize("name", PRESETS)
def test_every_stage_of_a_preset_goes_forward_and_backward_and_steps(name: str) -> None:
    manifest = preset(name)
    rows = torch.zeros(manifest.tokens_shape(), dtype=torch.int64, device=META)
    tokens, targets = rows[..., :-1], rows[..., 1:]
    stages = stages_of(manifest)
    inner = {tuple(tuple(p.shape) for p in stage.parameters()) for stage in stages[1:-1]}
    assert len(inner) <= 1, "all inner stages are alike, so one of them stands for all"
    for number in sorted({0, 1, len(stages) - 1}):
        stage, entering = stages[number], tokens
        if number:
            entering = torch.zeros(manifest.boundary_shape(), device=META, requires_grad=True)
        leaving = stage(entering, tokens)
        if stage.is_last:
            assert leaving.shape == (*tokens.shape, manifest.model.vocabulary)
            leaving = cross_entropy(leaving.flatten(0, -2), targets.flatten())
        else:
            assert leaving.shape == manifest.boundary_shape()
        leaving.backward(torch.zeros_like(leaving))
        assert number == 0 or entering.grad is not None
        step(manifest, number, stage)


def step(manifest: Manifest, number: int, stage: StageModule) -> None:
    """Takes an optimizer step along the gradients of a stage whose backward was done."""
    layout = stage_layout(manifest, number)
    gradients = {name: p.grad for name, p in stage.trained_parameters()}
    assert {slot.name: slot.shape for slot in layout.slots} == {n: tuple(g.shape) for n, g in gradients.items()}
    weights, gradient = torch.zeros(layout.numel, device=META), torch.zeros(layout.numel, device=META)
    optimizer = StageOptimizer(manifest.optimizer, manifest.stage_count, layout, weights)
    assert optimizer.update(weights, gradient, 0) > 0 and optimizer.updates == 1


@pytest.mark.parametrize("name", LARGE)
def test_the_large_presets_are_cut_at_every_layer_and_keep_every_stage_busy(name: str) -> None:
    manifest = preset(name)
    assert [len(manifest.layers_of(n)) for n in range(manifest.stage_count)] == [1] * manifest.model.layers
    microbatches = manifest.optimizer.target_tokens / manifest.tokens_per_microbatch
    assert microbatches.is_integer() and microbatches * manifest.schedule.staleness >= manifest.stage_count
    tokens = manifest.optimizer.target_tokens * manifest.optimizer.total_steps
    assert tokens >= 20 * PARAMETERS[name], "Chinchilla's rule (arXiv 2203.15556)"
