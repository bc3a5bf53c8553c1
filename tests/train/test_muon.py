"""Muon against singular values: what it makes of a matrix, which tensors it has; equal gradients give equal bits."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch
from agora_protocol.manifest import preset
from agora_protocol.manifest_sections import OptimizerSection
from torch import nn

from agora.model import family_of
from agora.train import muon
from agora.train.muon import (
    CUBIC,
    ITERATIONS,
    LINEAR,
    MIN_SPLIT_ROWS,
    QUINTIC,
    UPDATE_RMS,
    MuonMatrices,
    orthogonalise,
)
from agora.train.optimizer import StageOptimizer, learning_rate
from agora.train.optimizer_offload import OptimizerOffload
from agora.train.weight_versions import StageWeights, tensor_in

CPU = torch.device("cpu")
HIDDEN = ["wide", "tall", "square", "turned"]


class Several(nn.Module):
    """Hidden matrices of four shapes, two of them each other's transpose; an embedding and vectors between them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embedding = nn.Parameter(torch.randn(40, 24))
        self.wide = nn.Parameter(torch.randn(24, 56))
        self.gain = nn.Parameter(torch.randn(24))
        self.tall = nn.Parameter(torch.randn(48, 24))
        self.square = nn.Parameter(torch.randn(24, 24))
        self.turned = nn.Parameter(torch.randn(56, 24))
        self.bias = nn.Parameter(torch.randn(7))


def section(**values: object) -> OptimizerSection:
    return OptimizerSection(**{"name": "muon", "warmup_steps": 0, "clip": 0.0, **values})


def stage(**values: object) -> tuple[StageWeights, StageOptimizer]:
    weights = StageWeights(Several(), CPU, HIDDEN)
    return weights, StageOptimizer(section(**values), 1, weights.layout, weights.current.flat)


def gradient_of(weights: StageWeights, seed: int) -> torch.Tensor:
    """A gradient whose matrices have singular values over two decades, as real ones do; zero in the padding."""
    random = torch.Generator().manual_seed(seed)
    flat = torch.zeros(weights.layout.numel)
    for slot in weights.layout.slots:
        values = torch.randn(slot.shape, generator=random)
        if values.dim() == 2:
            u, _, v = torch.linalg.svd(values, full_matrices=False)
            values = u * torch.logspace(0, -2, u.shape[1]) @ v
        tensor_in(flat, slot).copy_(1e-3 * values)
    return flat


def by_singular_values(matrix: torch.Tensor) -> torch.Tensor:
    """What five iterations make of a matrix, in float64: the polynomial of each singular value, between its vectors."""
    u, s, v = torch.linalg.svd(matrix.double(), full_matrices=False)
    s = s / s.square().sum().sqrt()
    for _ in range(ITERATIONS):
        s = LINEAR * s + CUBIC * s**3 + QUINTIC * s**5
    return u * s @ v


@pytest.mark.parametrize("shape", [(1, 24, 24), (3, 24, 56), (1, 1, 9), (2, 129, 129), (2, 130, 320)])
def test_an_orthogonalised_matrix_has_singular_values_near_one_and_its_own_singular_vectors(shape) -> None:
    matrices = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    found = orthogonalise(matrices)
    for matrix, mine in zip(matrices, found, strict=True):
        torch.testing.assert_close(mine.double(), by_singular_values(matrix), rtol=0, atol=2e-4)
        u, s, v = torch.linalg.svd(matrix, full_matrices=False)
        inside = s / s.square().sum().sqrt() > 0.01
        singular = torch.linalg.svdvals(mine)
        assert 0.6 < float(singular[: int(inside.sum())].min()) and float(singular.max()) < 1.25
        # orthogonal vectors on both sides: only the diagonal is left
        turned = u.mT @ mine @ v.mT
        assert float((turned - torch.diag(torch.diagonal(turned))).abs().max()) < 1e-3


@pytest.mark.parametrize("smallest", [1e-2, 1e-7, 0.0])
def test_wide_matrices_are_orthogonalised_by_way_of_their_gram_matrix_nearly_as_exactly(smallest: float) -> None:
    values = torch.randn(2, MIN_SPLIT_ROWS, 2 * MIN_SPLIT_ROWS, generator=torch.Generator().manual_seed(1))
    u, _, v = torch.linalg.svd(values, full_matrices=False)
    singular = torch.logspace(0, math.log10(smallest or 1e-1), MIN_SPLIT_ROWS)
    singular[MIN_SPLIT_ROWS // 4 :] *= bool(smallest)  # else a gradient of low rank
    matrices = u * singular @ v
    for found, matrix in zip(orthogonalise(matrices), matrices, strict=True):
        expected = by_singular_values(matrix)
        assert float((found - expected).norm() / expected.norm()) < 3e-3


def test_bf16_orthogonalises_as_well_but_for_its_rounding() -> None:
    matrices = torch.randn(2, 48, 80, generator=torch.Generator().manual_seed(2))
    found = orthogonalise(matrices, torch.bfloat16)
    assert found.dtype == torch.float32
    for matrix, mine in zip(matrices, found, strict=True):
        expected = by_singular_values(matrix)
        assert float((mine - expected).norm() / expected.norm()) < 0.05


@pytest.mark.parametrize("size", [0.0, 1e-20, 1e15])
def test_any_size_of_a_gradient_gives_a_finite_update_and_zero_gives_none(size: float) -> None:
    matrices = size * torch.randn(1, 8, 16, generator=torch.Generator().manual_seed(3))
    found = orthogonalise(matrices)
    assert bool(found.isfinite().all())
    norm = float(torch.linalg.matrix_norm(found)[0])
    assert norm == 0.0 if size == 0.0 else 0.7 * math.sqrt(8) < norm < 1.2 * math.sqrt(8)


@pytest.mark.parametrize("decay", [0.0, 0.3])
def test_steps_are_those_of_a_slow_reference_by_singular_values(decay: float) -> None:
    weights, optimizer = stage(weight_decay=decay)
    plain = {name: value.double() for name, value in weights.copy_tensors().items()}
    means = {name: torch.zeros_like(plain[name]) for name in HIDDEN}
    for step in range(4):
        gradient = gradient_of(weights, step)
        rate = learning_rate(step, optimizer.section)
        for slot in weights.layout.slots:
            if (name := slot.name) in HIDDEN:
                slope = tensor_in(gradient, slot).double()
                means[name] = 0.95 * means[name] + 0.05 * slope
                direction = by_singular_values(0.95 * means[name] + 0.05 * slope)
                plain[name] -= rate * decay * plain[name]
                plain[name] -= rate * 0.2 * math.sqrt(max(slope.shape)) * direction
        assert optimizer.step(weights.current.flat, gradient, step) is not None
    for name in HIDDEN:
        found = weights.copy_tensors()[name].double()
        moved = float((found - Several().get_parameter(name).detach()).norm())
        assert float((found - plain[name]).norm()) < 1e-3 * moved


def test_what_is_no_hidden_matrix_gets_the_very_steps_of_adamw() -> None:
    values = []
    for name in ("muon", "adamw"):
        weights, optimizer = stage(name=name, weight_decay=0.3, clip=0.01)
        for step in range(3):
            assert optimizer.step(weights.current.flat, gradient_of(weights, step), step) is not None
        values.append(weights.copy_tensors())
    muon, adamw = values
    for name in muon:
        assert torch.equal(muon[name], adamw[name]) == (name not in HIDDEN), name


def test_an_updates_elements_are_as_large_as_those_of_adamw_and_padding_stays_zero() -> None:
    weights, optimizer = stage(weight_decay=0.0)
    before = weights.current.flat.clone()
    optimizer.step(weights.current.flat, gradient_of(weights, 0), 0)
    change = weights.current.flat - before
    for slot in weights.layout.slots:
        if slot.name in HIDDEN:
            size = float(change[slot.elements].square().mean().sqrt()) / learning_rate(0, optimizer.section)
            assert 0.6 * UPDATE_RMS < size < 1.25 * UPDATE_RMS, slot.name
    spare = before.clone()
    weights.layout.clear_padding(spare)
    assert torch.equal(spare, before)
    after = weights.current.flat.clone()
    weights.layout.clear_padding(after)
    assert torch.equal(after, weights.current.flat)


def test_weight_decay_shrinks_hidden_matrices_by_rate_times_decay() -> None:
    moved = {}
    for decay in (0.0, 0.5):
        weights, optimizer = stage(weight_decay=decay, learning_rate=0.01)
        optimizer.step(weights.current.flat, gradient_of(weights, 0), 0)
        moved[decay] = weights.copy_tensors()
    for name in HIDDEN:
        shrunk = moved[0.0][name] - moved[0.5][name]
        torch.testing.assert_close(shrunk, 0.005 * Several().get_parameter(name).detach(), rtol=1e-3, atol=1e-6)


def test_batches_of_matrices_change_nothing_but_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    updates = []
    for elements in (muon.BATCH_ELEMENTS, 1):
        monkeypatch.setattr(muon, "BATCH_ELEMENTS", elements)
        weights, optimizer = stage()
        hidden = MuonMatrices(optimizer.section, weights.layout, optimizer.moments["mean"], OptimizerOffload(CPU))
        updates.append({slot.name: found for slot, found in hidden.directions(gradient_of(weights, 0))})
    assert updates[0].keys() == updates[1].keys() == set(HIDDEN)
    for name in HIDDEN:
        torch.testing.assert_close(updates[0][name], updates[1][name], rtol=1e-4, atol=1e-5)


def test_two_replicas_with_equal_gradients_have_equal_bits() -> None:
    replicas = [stage() for _ in range(2)]
    for step in range(5):
        for weights, optimizer in replicas:
            if step == 2:
                weights.begin_version()
            optimizer.step(weights.current.flat, gradient_of(weights, step), step)
    (first, one), (second, other) = replicas
    assert torch.equal(first.current.flat, second.current.flat)
    assert all(torch.equal(one.moments[name], other.moments[name]) for name in ("mean", "square"))


def test_a_loaded_state_goes_on_bit_for_bit() -> None:
    (weights, optimizer), (_, fresh) = stage(), stage()
    for step in range(3):
        optimizer.step(weights.current.flat, gradient_of(weights, step), step)
    copied = copy.deepcopy(weights.current.flat)
    fresh.load(optimizer.updates, optimizer.moments)
    for step in range(3, 6):
        optimizer.step(weights.current.flat, gradient_of(weights, step), step)
        fresh.step(copied, gradient_of(weights, step), step)
    assert torch.equal(copied, weights.current.flat)


def test_a_graph_that_needs_the_weights_refuses_them_after_a_step() -> None:
    weights, optimizer = stage()
    parameter = weights.current.parameters[1]
    loss = (parameter * parameter).sum()
    optimizer.step(weights.current.flat, gradient_of(weights, 0), 0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("subspace", [64, 28])
def test_the_subspace_familys_hidden_matrices_are_all_matrices_inside_the_layers(subspace: int) -> None:
    manifest = preset("tiny", model={"width": 64, "subspace": subspace, "feed_forward": 96})
    for number in range(manifest.stage_count):
        built = family_of(manifest.model).build_stage(manifest.layers_of(number), 0)
        hidden = set(built.hidden_matrices())
        for name, parameter in built.named_parameters():
            assert (name in hidden) == (name.startswith("layers.") and parameter.dim() == 2)
        weights = StageWeights(built, CPU, hidden)
        assert {slot.name for slot in weights.layout.slots if slot.is_hidden_matrix} == hidden
        sizes = [int(np.prod(built.get_parameter(name).shape)) for name in hidden]
        (elements,) = weights.layout.ranges(lambda slot: slot.is_hidden_matrix)
        assert elements.stop - elements.start == sum(sizes), "one range: the embedding before it, the head behind"
