"""Several sequences in one row: each computes what it computes alone, in every architecture and however it is cut."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from agora.tuning.hf_stage import as_additive, attended_pairs, token_positions
from tests.model.tiny_models import CONFIGS, CONTEXT, logits_of, make_model, manifest_of, save, some_tokens, stages_of

SEGMENTS = torch.tensor([[0] * 9 + [1] * 1 + [2] * 14, [3] * 17 + [4] * 7])
"""Numbers of sequences; longer ones than every window of CONFIGS, shorter ones, and one of a single token."""


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_packed_row_has_the_logits_of_each_sequence_alone(name: str, count: int, tmp_path: Path) -> None:
    whole, tokens = make_model(name), some_tokens()
    stages = stages_of(manifest_of(save(whole, tmp_path / "base"), count), tmp_path / "base")
    with torch.no_grad():
        packed = logits_of(stages, tokens, SEGMENTS)
        assert not torch.allclose(packed, logits_of(stages, tokens), atol=1e-2), "the segments change nothing"
        for row in range(2):
            for number in SEGMENTS[row].unique():
                inside = SEGMENTS[row] == number
                alone = whole(tokens[row, inside][None]).logits[0]
                torch.testing.assert_close(packed[row, inside], alone, rtol=0, atol=1e-5 * float(alone.abs().max()))


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2"])
def test_segments_of_one_sequence_for_each_row_change_nothing(name: str, tmp_path: Path) -> None:
    stages, tokens = stages_of(manifest_of(save(make_model(name), tmp_path / "base")), tmp_path / "base"), some_tokens()
    with torch.no_grad():
        expected = logits_of(stages, tokens)
        single = logits_of(stages, tokens, torch.full((2, CONTEXT), 5, dtype=torch.int32))
    torch.testing.assert_close(single, expected, rtol=0, atol=1e-5)


def test_no_gradient_crosses_from_one_sequence_to_another(tmp_path: Path) -> None:
    folder = save(make_model("mistral"), tmp_path / "base")
    first, second = stages_of(manifest_of(folder), folder)
    tokens = some_tokens()
    boundary = first(tokens, tokens, SEGMENTS).detach().requires_grad_()
    second(boundary, tokens, SEGMENTS)[0, 9].sum().backward()
    assert boundary.grad is not None
    assert boundary.grad[0, 9].abs().sum() > 0
    boundary.grad[0, 9] = 0
    assert boundary.grad.abs().sum() == 0


def test_positions_count_from_0_in_each_sequence() -> None:
    hidden = torch.zeros(2, 6, 4)
    segments = torch.tensor([[0, 0, 1, 1, 1, 4], [2, 2, 2, 2, 2, 2]], dtype=torch.int16)
    assert token_positions(hidden, segments).tolist() == [[0, 1, 0, 1, 2, 0], [0, 1, 2, 3, 4, 5]]
    assert token_positions(hidden, None).tolist() == [[0, 1, 2, 3, 4, 5]]


def test_a_token_attends_inside_its_sequence_and_window() -> None:
    hidden, segments = torch.zeros(1, 5, 4), torch.tensor([[0, 0, 0, 1, 1]])
    rows = attended_pairs(hidden, 2, segments)[0, 0].int().tolist()
    assert rows == [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [0, 1, 1, 0, 0], [0, 0, 0, 1, 0], [0, 0, 0, 1, 1]]
    additive = as_additive(attended_pairs(hidden, None, None), torch.float32)[0, 0]
    assert torch.equal(additive == 0, torch.ones(5, 5).tril().bool())
    assert additive.min() == torch.finfo(torch.float32).min
