"""The Llama is a Llama, and a cut changes nothing: neither weights nor outputs nor gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from agora_protocol.errors import ManifestError
from agora_protocol.manifest_model import SubspaceSection
from torch import Tensor
from torch.func import functional_call

from agora.model import StageModule, family_of
from agora.model.subspace_stage import apply_rotary, rotary_table
from agora.train.objectives import stage_loss

SEED = 11


def small(**changes: Any) -> SubspaceSection:
    sizes: dict[str, Any] = {
        "width": 32,
        "layers": 4,
        "heads": 4,
        "key_value_heads": 2,
        "feed_forward": 48,
        "context": 24,
        "vocabulary": 50,
        "subspace": 32,
    }
    return SubspaceSection(**(sizes | changes))


def cut(model: SubspaceSection, count: int, seed: int = SEED) -> list[StageModule]:
    size = model.layers // count
    return [family_of(model).build_stage(range(k * size, (k + 1) * size), seed) for k in range(count)]


def run(stages: list[StageModule], tokens: Tensor) -> Tensor:
    hidden = tokens
    for stage in stages:
        hidden = stage(hidden, tokens)
    return hidden


def some_tokens(model: SubspaceSection, b: int = 2, seed: int = 0) -> Tensor:
    return torch.randint(model.vocabulary, (b, model.context), generator=torch.Generator().manual_seed(seed))


def all_weights(stages: list[StageModule]) -> dict[str, Tensor]:
    return {name: p.detach() for stage in stages for name, p in stage.named_parameters()}


@pytest.mark.parametrize("count", [1, 2, 4])
def test_any_cut_starts_from_the_same_weights_and_computes_the_same(count: int) -> None:
    model = small()
    whole, stages = cut(model, 1), cut(model, count)
    expected, found = all_weights(whole), all_weights(stages)
    assert list(found) == list(expected)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    tokens = some_tokens(model)
    torch.testing.assert_close(run(stages, tokens), run(whole, tokens), rtol=1e-6, atol=1e-6)


def test_uneven_cuts_and_building_order_do_not_matter() -> None:
    model = small()
    last = family_of(model).build_stage(range(3, 4), SEED)
    first = family_of(model).build_stage(range(3), SEED)
    whole = all_weights(cut(model, 1))
    assert all(torch.equal(value, whole[name]) for name, value in all_weights([first, last]).items())


def test_another_seed_gives_other_weights() -> None:
    one, other = all_weights(cut(small(), 1)), all_weights(cut(small(), 1, seed=SEED + 1))
    assert all(torch.equal(one[name], other[name]) == ("norm." in name) for name in one)


def test_only_the_ends_hold_embedding_and_head_and_names_are_global() -> None:
    first, middle, *_, last = (set(dict(stage.named_parameters())) for stage in cut(small(), 4))
    assert {"embedding.weight", "layers.0.attention.query.weight"} <= first
    assert {name.split(".")[1] for name in middle} == {"1"}
    assert {"norm.weight", "head.weight", "layers.3.feed_forward.down.weight"} <= last
    assert "embedding.weight" not in last and "head.weight" not in first


def test_the_rotation_table_is_no_parameter_and_no_state() -> None:
    assert not [name for name in cut(small(), 1)[0].state_dict() if "table" in name]


@pytest.mark.parametrize("subspace", [32, 10])
def test_shapes_and_parameter_count_are_known_without_building(subspace: int) -> None:
    model = small(subspace=subspace)
    for stage in cut(model, 2):
        built = {name: tuple(p.shape) for name, p in stage.named_parameters()}
        assert family_of(model).parameter_shapes(stage.layer_range) == built
        assert family_of(model).parameter_count(stage.layer_range) == sum(p.numel() for p in stage.parameters())


def test_initial_deviations_follow_depth() -> None:
    weights = all_weights(cut(small(width=64, subspace=64, feed_forward=128), 1))
    assert weights["layers.0.attention.query.weight"].std() == pytest.approx(0.02, rel=0.05)
    assert weights["layers.0.attention.output.weight"].std() == pytest.approx(0.02 / 2**0.5, rel=0.05)
    assert weights["layers.3.feed_forward.down.weight"].std() == pytest.approx(0.02 / 8**0.5, rel=0.05)
    assert weights["head.weight"].std() == pytest.approx(64**-0.5, rel=0.05)
    assert weights["embedding.weight"].std() == pytest.approx(0.05, rel=0.05)
    assert torch.equal(weights["norm.weight"], torch.ones(64))


def test_no_position_sees_a_later_token() -> None:
    model = small()
    stages = cut(model, 2)
    tokens = some_tokens(model)
    changed = tokens.clone()
    changed[:, 13:] = (changed[:, 13:] + 1) % model.vocabulary
    before, after = run(stages, tokens), run(stages, changed)
    torch.testing.assert_close(before[:, :13], after[:, :13], rtol=0, atol=1e-6)
    assert not torch.allclose(before[:, 13], after[:, 13])


def test_shorter_sequences_than_the_context_are_fine() -> None:
    model = small()
    stages = cut(model, 2)
    tokens = some_tokens(model)
    torch.testing.assert_close(run(stages, tokens[:, :5]), run(stages, tokens)[:, :5], rtol=1e-5, atol=1e-6)


def test_scores_of_rotated_vectors_depend_on_the_distance_only() -> None:
    table = rotary_table(64, 16, 10000.0)
    generator = torch.Generator().manual_seed(0)
    query, key = torch.randn(2, 1, 1, 1, 16, generator=generator)
    turned_query, turned_key = (apply_rotary(x.expand(1, 1, 64, 16), table)[0, 0] for x in (query, key))
    scores = turned_query @ turned_key.T
    for distance in (0, 3, 20):
        diagonal = scores.diagonal(-distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(scores[0, 0], (query * key).sum())
    torch.testing.assert_close(turned_query.norm(dim=-1), query.norm().expand(64))


def test_shared_heads_equal_repeated_ones() -> None:
    grouped, full = small(), small(key_value_heads=4)
    weights = all_weights(cut(grouped, 1))
    for name, value in weights.items():
        if name.endswith(("attention.key.weight", "attention.value.weight")):
            weights[name] = value.view(2, 8, 32).repeat_interleave(2, 0).reshape(32, 32)
    tokens = some_tokens(grouped)
    repeated = functional_call(cut(full, 1)[0], weights, (tokens,))
    torch.testing.assert_close(run(cut(grouped, 1), tokens), repeated, rtol=1e-5, atol=1e-6)


def test_the_loss_is_a_float32_sum_that_skips_ignored_targets() -> None:
    model = small()
    tokens = some_tokens(model)
    targets = tokens.roll(-1, 1).int()
    targets[0, 5:] = -1
    logits_bsv = run(cut(model, 1), tokens)
    loss = stage_loss(logits_bsv.bfloat16(), targets)
    assert loss.dtype == torch.float32 and loss.shape == ()
    log_p = logits_bsv.bfloat16().float().log_softmax(-1)
    expected = -sum(log_p[b, s, targets[b, s]] for b in range(2) for s in range(model.context) if targets[b, s] >= 0)
    torch.testing.assert_close(loss, expected)
    assert stage_loss(logits_bsv, torch.full_like(targets, -1)) == 0


def test_ignored_tokens_can_be_fed() -> None:
    model = small()
    tokens = some_tokens(model)
    tokens[0, 7:] = -1
    assert torch.isfinite(run(cut(model, 2), tokens)).all()


def test_gradients_flow_through_substituted_parameters_across_a_cut() -> None:
    model = small()
    tokens = some_tokens(model)
    targets = tokens.roll(-1, 1)
    whole = cut(model, 1)[0]
    stage_loss(whole(tokens), targets).backward()
    first, last = cut(model, 2)
    copies = [
        {name: p.detach().clone().requires_grad_() for name, p in stage.named_parameters()} for stage in (first, last)
    ]
    boundary = functional_call(first, copies[0], (tokens, tokens))
    entering = boundary.detach().requires_grad_()
    stage_loss(functional_call(last, copies[1], (entering, tokens)), targets).backward()
    boundary.backward(entering.grad)
    assert all(p.grad is None for stage in (first, last) for p in stage.parameters())
    expected = dict(whole.named_parameters())
    for name, copy in (copies[0] | copies[1]).items():
        torch.testing.assert_close(copy.grad, expected[name].grad, rtol=1e-5, atol=1e-6)


def test_autocast_changes_the_arithmetic_and_little_else() -> None:
    model = small()
    tokens = some_tokens(model)
    stage = cut(model, 1)[0]
    exact = stage(tokens)
    with torch.autocast("cpu", torch.bfloat16):
        rough = stage(tokens)
        loss = stage_loss(rough, tokens)
    assert rough.dtype == torch.bfloat16 and loss.dtype == torch.float32
    loss.backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in stage.parameters())
    torch.testing.assert_close(rough.float(), exact, rtol=0.05, atol=0.05)


def test_a_tiny_model_learns_a_sequence_by_heart() -> None:
    model = small(layers=2)
    stage = cut(model, 1)[0]
    tokens = some_tokens(model)
    targets = tokens.roll(-1, 1)
    optimizer = torch.optim.AdamW(stage.parameters(), 1e-2, weight_decay=0.0)
    losses = []
    for _ in range(80):
        optimizer.zero_grad()
        loss = stage_loss(stage(tokens), targets) / targets.numel()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(4.4, abs=0.5), "log of 50 ids, and half the variance of the logits"
    assert losses[-1] < 0.05


def test_an_unknown_family_says_so() -> None:
    with pytest.raises(ManifestError, match="'subspac' is unknown; did you mean 'subspace'"):
        family_of(small().model_copy(update={"family": "subspac"}))
