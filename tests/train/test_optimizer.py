"""The learning rate's shape, and the optimizer over flat weights against torch's own on separate tensors."""

from __future__ import annotations

import math

import pytest
import torch
from agora_protocol.manifest_sections import OptimizerSection
from torch import nn

from agora.state.layout import ALIGNMENT
from agora.train.gradients import GradientSum
from agora.train.optimizer import StageOptimizer, learning_rate, with_moments
from agora.train.weight_versions import StageWeights
from tests.oracle import plain_learning_rate

CPU = torch.device("cpu")


def section(**values: object) -> OptimizerSection:
    return OptimizerSection(**{"warmup_steps": 0, "clip": 0.0, **values})


class Small(nn.Module):
    """Matrices and vectors in mixed order and odd sizes, a frozen weight, a buffer, a shared weight."""

    table: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.gain = nn.Parameter(torch.randn(7))
        self.matrix = nn.Parameter(torch.randn(5, 7))
        self.frozen = nn.Parameter(torch.randn(7, 7), requires_grad=False)
        self.bias = nn.Parameter(torch.randn(5))
        self.shared = self.matrix
        self.register_buffer("table", torch.randn(7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.gain * self.table) @ self.frozen @ self.matrix.T + self.bias + x @ self.shared.T


def test_warm_up_is_linear_and_decay_a_cosine_down_to_a_floor() -> None:
    rates = [
        learning_rate(step, section(learning_rate=1.0, warmup_steps=4, total_steps=12, minimum_ratio=0.1))
        for step in range(20)
    ]
    assert rates[:5] == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0])
    assert rates[8] == pytest.approx(0.55)  # half-way between warm-up and end
    assert all(later < earlier for earlier, later in zip(rates[4:12], rates[5:13]))
    assert rates[12:] == pytest.approx([0.1] * 8)


@pytest.mark.parametrize("warmup", [0, 1, 7, 30])
@pytest.mark.parametrize("total", [1, 7, 20])
def test_any_schedule_is_the_oracles_and_never_leaves_its_bounds(warmup: int, total: int) -> None:
    optimizer = section(learning_rate=3e-3, warmup_steps=warmup, total_steps=total, minimum_ratio=0.2)
    for step in range(50):
        rate = learning_rate(step, optimizer)
        assert rate == pytest.approx(plain_learning_rate(optimizer, step))
        assert 0 < rate <= 3e-3


@pytest.mark.parametrize("name", ["adamw", "nadam"])
@pytest.mark.parametrize("clip", [0.0, 0.5])
def test_flat_steps_are_those_of_torch_on_separate_tensors(name: str, clip: float) -> None:
    plain, weights = Small(), StageWeights(Small(), CPU)
    options = section(name=name, clip=clip, weight_decay=0.3)
    optimizer, total = (
        StageOptimizer(options, 4, weights.layout, weights.current.flat),
        GradientSum(weights.layout, CPU),
    )
    groups = [
        {"params": [plain.matrix], "weight_decay": 0.3},
        {"params": [plain.gain, plain.bias], "weight_decay": 0.0},
    ]
    reference = (
        torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-8)
        if name == "adamw"
        else torch.optim.NAdam(groups, betas=(0.9, 0.95), eps=1e-8, decoupled_weight_decay=True)
    )
    for step in range(5):
        x = torch.randn(11, 7, generator=torch.Generator().manual_seed(step))
        plain.zero_grad()
        (plain(x).square().sum() / 10).backward()
        norm = torch.linalg.vector_norm(torch.cat([p.grad.flatten() for p in plain.parameters() if p.grad is not None]))
        if clip:
            nn.utils.clip_grad_norm_(plain.parameters(), clip / math.sqrt(4))
        for group in reference.param_groups:
            group["lr"] = learning_rate(step, section())
        reference.step()
        loss = weights.current.module(x).square().sum()
        gradients = torch.autograd.grad(loss, weights.current.parameters)
        torch._foreach_add_(total.tensors, list(gradients))
        done = optimizer.step(weights.current.flat, total.flat, step, tokens=10)
        total.clear()
        assert done is not None and done.gradient_norm == pytest.approx(float(norm), rel=1e-5)
        if step == 2:
            weights.begin_version()  # the moments stay, the weights move
    for name_, value in weights.copy_tensors().items():
        torch.testing.assert_close(value, plain.get_parameter(name_).detach(), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", ["adamw", "nadam"])
@pytest.mark.parametrize(("beta1", "beta2"), [(0.9, 0.95), (0.9, 0.999), (0.0, 0.9)])
def test_a_mean_comes_near_the_bound_by_its_square_and_never_beyond_it(name: str, beta1: float, beta2: float) -> None:
    weights, steps, largest = StageWeights(Small(), CPU), 120, 0.0
    optimizer = StageOptimizer(section(name=name, beta1=beta1, beta2=beta2), 1, weights.layout, weights.current.flat)
    generator = torch.Generator().manual_seed(3)
    (square,) = [moment for moment in optimizer.layout.moments if moment.is_square]
    for step in range(steps):
        # Some elements have the gradients by which a mean is largest, the others now and then a wild one.
        gradient = torch.full((weights.layout.numel,), (beta1 / beta2) ** (steps - 1 - step))
        gradient[:20] = torch.randn(20, generator=generator) * (1e4 if step % 30 == 0 else 1.0)
        optimizer.step(weights.current.flat, gradient, step)
        means, roots = optimizer.moments["mean"].abs(), optimizer.moments["square"].sqrt()
        largest = max(largest, float((means / (roots + 1e-10)).max()))
    assert 0.99 * square.root_bound < largest < 1.001 * square.root_bound


@pytest.mark.parametrize("values", [{"beta1": 0.9, "beta2": 0.5}, {"beta2": 0.0}, {"name": "adamw8bit"}])
def test_a_mean_has_no_bound_by_squares_that_forget_sooner_or_are_rounded(values: dict[str, object]) -> None:
    moments = with_moments(section(**values), StageWeights(Small(), CPU).layout).moments
    assert all(math.isinf(moment.root_bound) for moment in moments)


def test_a_sum_that_is_not_finite_changes_neither_weights_nor_moments() -> None:
    values = []
    for poisoned in (False, True):
        weights = StageWeights(Small(), CPU)
        optimizer, gradient = (
            StageOptimizer(section(), 1, weights.layout, weights.current.flat),
            torch.full((weights.layout.numel,), 0.5),
        )
        if poisoned:
            bad = gradient.clone()
            bad[3] = float("nan")
            assert optimizer.step(weights.current.flat, bad, 0) is None
        assert optimizer.step(weights.current.flat, gradient, 0) is not None
        values.append(weights.current.flat.clone())
    assert torch.equal(values[0], values[1])


def test_flat_weights_are_aligned_shared_where_shared_and_leave_out_what_is_frozen() -> None:
    original = Small()
    weights = StageWeights(original, CPU)
    assert [slot.name for slot in weights.layout.slots] == ["matrix", "gain", "bias"]
    assert all(slot.offset % ALIGNMENT == 0 for slot in weights.layout.slots)
    module = weights.current.module
    assert module.shared is module.matrix
    assert module.frozen is original.frozen
    x = torch.randn(3, 7)
    torch.testing.assert_close(module(x), original(x))
    before = weights.current.flat.clone()
    weights.begin_version()
    assert weights.previous is not None
    assert weights.previous.module is module
    assert weights.current.module.frozen is original.frozen
    assert weights.current.module.table is original.table
    with torch.no_grad():
        weights.current.flat.add_(1.0)
    assert torch.equal(weights.previous.flat, before)
    assert not torch.equal(weights.current.module(x), module(x))
