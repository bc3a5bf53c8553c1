"""The optimizer benchmark's parts: a stage of the presets' shape, and a row that adds up."""

from __future__ import annotations

import pytest
import torch
from benchmarks.optimizer import StageSize, measure_stage, stage_size


@pytest.mark.parametrize("width", [64, 128, 512, 1024, 4096])
def test_every_width_gives_a_manifest_of_the_presets_shape(width: int) -> None:
    size = stage_size(width)
    manifest = size.manifest("muon")
    assert manifest.optimizer.target_tokens == size.step_tokens
    assert manifest.tokens_per_microbatch == size.microbatch_tokens
    assert manifest.boundary_shape()[2] == 7 * width // 16 and len(manifest.layers_of(1)) == 2


def test_a_row_adds_up() -> None:
    row = measure_stage(StageSize(32, 16, 640, 64), torch.device("cpu"), 2)
    share, compute_ms = float(row["muon_share_%"] or 0), 1e3 * float(row["compute_s"] or 0)
    assert share == pytest.approx(100 * float(row["muon_ms"] or 0) / compute_ms)
    assert float(row["orthogonalising_ms"] or 0) > 0 and float(row["adamw_ms"] or 0) > 0
