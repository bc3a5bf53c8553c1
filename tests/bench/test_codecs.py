"""The codec benchmark's parts: what crosses is kept, a crossing is obeyed, errors are what they are called."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from agora_protocol.ids import MicrobatchId
from agora_protocol.manifest import Manifest
from benchmarks.codec_samples import Stages, boundary_samples
from benchmarks.codecs import _error_of_mean, _relative, crossing
from torch import Tensor

from agora.codec import BoundaryCodec

MODEL = {"width": 32, "layers": 3, "heads": 4, "key_value_heads": 2, "feed_forward": 48, "context": 16, "subspace": 16}


@pytest.fixture
def manifest(tmp_path: Path) -> Manifest:
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog\n" * 400, encoding="ascii")
    values = {
        "model": MODEL,
        "stages": {"count": 3},
        "schedule": {"microbatch": 2},
        "optimizer": {"target_tokens": 32, "total_steps": 50},
        "data": {"corpus": [str(text)], "heldout": 0.1},
    }
    return Manifest.from_values(values, "test")


def test_the_last_boundaries_and_their_gradients_are_kept(manifest: Manifest, tmp_path: Path) -> None:
    found = boundary_samples(manifest, 4, 2, tmp_path)
    for kept in (found.forward, found.backward):
        assert [tuple(tensor.shape) for tensor in kept] == [(2, 16, 16)] * 4, "two steps of two boundaries"
        assert all(bool(tensor.isfinite().all()) and bool(tensor.any()) for tensor in kept)


def test_boundaries_cross_by_the_codec(manifest: Manifest, tmp_path: Path) -> None:
    losses = {}
    for name in ("float32", "int8", "int2"):
        stages = Stages(manifest, tmp_path, crossing(BoundaryCodec(name)))
        for step in range(8):
            stages.learn(step)
        losses[name] = stages.loss()
    assert losses["float32"] != losses["int8"] == pytest.approx(losses["float32"], rel=0.02)
    assert losses["int2"] != losses["int8"]


def test_of_a_column_sparse_boundary_the_strongest_columns_cross_and_their_gradients() -> None:
    cross = crossing(BoundaryCodec("top2:float32"))
    tensor, name = torch.tensor([[[1.0, -5.0, 0.0, 4.0], [1.0, 0.0, 2.0, 4.0]]]), MicrobatchId(bytes(16))
    assert cross(tensor, "forward", name, 1).tolist() == [[[0.0, -5.0, 0.0, 4.0], [0.0, 0.0, 0.0, 4.0]]]
    assert cross(torch.ones(1, 2, 4), "backward", name, 1).tolist() == [[[0.0, 1.0, 0.0, 1.0]] * 2]


def test_a_mean_of_draws_forgets_noise_but_no_bias() -> None:
    tensor, generator = torch.randn(4, 8, 64), torch.Generator().manual_seed(1)

    def noisy(number: int) -> Tensor:
        return tensor + 0.1 * torch.randn(tensor.shape, generator=generator)

    def biased(number: int) -> Tensor:
        return 1.1 * tensor

    assert _error_of_mean(noisy, tensor) < 0.2 * _relative(noisy(0), tensor)
    assert _error_of_mean(biased, tensor) == pytest.approx(_relative(biased(0), tensor), rel=1e-3)
