"""Packed rows attend inside their sequences as a mask would let them, and no tensor of rows by rows is made."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from agora.tuning.hf_stage import attended_pairs
from agora.tuning.packed_attention import MIN_MEAN_LENGTH, PackedSequences, pack, varlen_kernel, within
from tests.model.tiny_models import make_model, manifest_of, save, stages_of

ROW = 60
LENGTHS = ((36, 1, 23), (60,), (16, 44))


def segments_of(lengths: tuple[tuple[int, ...], ...]) -> Tensor:
    return torch.stack([torch.cat([torch.full((n,), number) for number, n in enumerate(row)]) for row in lengths])


def varlen_reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    begins: Tensor,
    same_begins: Tensor,
    longest: int,
    same_longest: int,
    *,
    scale: float | None,
    window_size: tuple[int, int],
    enable_gqa: bool,
) -> Tensor:
    """What torch documents of varlen_attn: token i of a sequence attends to its tokens i - left to i + right."""
    left, right = window_size
    assert same_begins is begins and same_longest == longest and right == 0 and begins.dtype == torch.int32
    attended = []
    for first, end in zip(begins.tolist(), begins.tolist()[1:], strict=False):
        assert end - first <= longest
        ages = torch.arange(end - first)[:, None] - torch.arange(end - first)[None]
        mask = (ages >= 0) & ((ages <= left) if left >= 0 else True)
        inside = [part[first:end].transpose(0, 1)[None] for part in (query, key, value)]
        attended.append(
            F.scaled_dot_product_attention(*inside, attn_mask=mask, scale=scale, enable_gqa=enable_gqa)[0].transpose(
                0, 1
            )
        )
    return torch.cat(attended)


def inputs_of(rows: int, heads: int = 4, shared: int = 2) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(rows, n, ROW, 8, generator=generator).requires_grad_() for n in (heads, shared, shared)]


def masked(query: Tensor, key: Tensor, value: Tensor, window: int | None, scale: float) -> Tensor:
    allowed = attended_pairs(query.transpose(1, 2), window, segments_of(LENGTHS))
    key, value = (part.repeat_interleave(query.shape[1] // key.shape[1], dim=1) for part in (key, value))
    return F.scaled_dot_product_attention(query, key, value, attn_mask=allowed, scale=scale).transpose(1, 2)


@pytest.mark.parametrize(
    ("kernel", "window"), [(None, None), (None, ROW), (varlen_reference, None), (varlen_reference, 7)]
)
@pytest.mark.parametrize("shared", [4, 2])
def test_outputs_and_gradients_are_those_of_the_mask(kernel: Any, window: int | None, shared: int) -> None:
    packed = within(pack(segments_of(LENGTHS), kernel), window)
    assert packed is not None
    given, weights = inputs_of(len(LENGTHS), shared=shared), torch.randn(len(LENGTHS), ROW, 4, 8)
    query, key, value = given
    ours, theirs = packed.attend(query, key, value, 0.3), masked(query, key, value, window, 0.3)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-6)
    for got, expected in zip(
        torch.autograd.grad(ours, given, weights), torch.autograd.grad(theirs, given, weights), strict=True
    ):
        torch.testing.assert_close(got, expected, rtol=0, atol=5e-6)


def test_sequences_never_cross_rows_and_what_is_added_to_their_number_is_empty() -> None:
    packed = pack(segments_of(LENGTHS), varlen_reference)
    assert packed is not None and packed.row == ROW and not packed.lengths
    assert packed.cu_seqlens.tolist() == [0, 36, 37, 60, 120, 136, 180, 180, 180]
    exact = pack(segments_of(((30, 30), (16, 44))), varlen_reference)
    assert exact is not None and exact.cu_seqlens.tolist() == [0, 30, 60, 76, 120]


def test_a_cpu_takes_a_mask_for_many_short_sequences_and_for_sequences_longer_than_a_window() -> None:
    short = (ROW // MIN_MEAN_LENGTH + 1) * (1,)
    assert pack(segments_of(((*short, ROW - len(short)),))) is None
    packed = pack(segments_of(LENGTHS))
    assert packed is not None and packed.lengths == (36, 1, 23, 60, 16, 44)
    assert within(packed, None) is packed and within(packed, 60) is packed and within(packed, 59) is None
    assert within(None, None) is None


def test_the_kernel_is_for_gpus_that_compute_in_16_bits() -> None:
    assert varlen_kernel(torch.device("cpu"), 64) is None
    assert varlen_kernel(torch.device("cuda"), 64) is None, "no autocast"


class Shapes(TorchDispatchMode):
    """Records the shapes of all tensors that are made."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = function(*args, **(kwargs or {}))
        made = results if isinstance(results, tuple | list) else [results]
        self.seen += [tuple(tensor.shape) for tensor in made if isinstance(tensor, Tensor)]
        return results

    def squares(self, size: int) -> int:
        return sum(shape[-2:] == (size, size) for shape in self.seen)


@pytest.mark.parametrize(("name", "caps"), [("llama", False), ("qwen3", False), ("gpt2", False), ("gemma2", True)])
def test_no_tensor_of_rows_by_rows_is_made(name: str, caps: bool, tmp_path: Path) -> None:
    folder = save(make_model(name), tmp_path)
    (stage,) = stages_of(manifest_of(folder, 1), folder)
    segments = segments_of(LENGTHS)
    tokens = torch.randint(6, 200, segments.shape, generator=torch.Generator().manual_seed(2))
    with Shapes() as shapes:
        torch.autograd.grad(stage(tokens, tokens, segments).sum(), list(stage.parameters()), allow_unused=True)
    # Logits that are capped need them all.
    assert bool(shapes.squares(ROW)) is caps


def test_where_sequences_lie_is_found_once_for_all_layers(tmp_path: Path) -> None:
    folder = save(make_model("gemma3"), tmp_path)
    (stage,) = stages_of(manifest_of(folder, 1), folder)
    given: list[Any] = []

    def run_layer(layer: torch.nn.Module, compute: Any, hidden: Tensor) -> Tensor:
        given.append(compute.args[1]["attention_mask"])
        result: Tensor = compute(hidden)
        return result

    segments = segments_of(LENGTHS)
    with torch.no_grad():
        stage.run_layers(torch.randint(6, 200, segments.shape), segments=segments, run_layer=run_layer)
    whole = [mask for mask in given if isinstance(mask, PackedSequences)]
    windowed = [mask for mask in given if isinstance(mask, Tensor)]
    assert len(whole) + len(windowed) == len(given) == 3
    assert len({id(mask) for mask in given}) == len({type(mask) for mask in given})


@pytest.mark.parametrize("window", [None, 7])
def test_torchs_kernel_takes_what_it_is_given(window: int | None) -> None:
    varlen = pytest.importorskip("torch.nn.attention.varlen")
    packed = within(pack(segments_of(LENGTHS), varlen.varlen_attn), window)
    assert packed is not None
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        query, key = torch.empty(3, 4, ROW, 8, device="cuda"), torch.empty(3, 2, ROW, 8, device="cuda")
        moved = replace(packed, cu_seqlens=torch.empty(9, dtype=torch.int32, device="cuda"))
        assert moved.attend(query, key, key, 0.3).shape == (3, ROW, 4, 8)
