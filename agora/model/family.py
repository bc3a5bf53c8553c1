"""From the manifest to a stage: build stage k alone, with the weights that every peer gives it.

Knows which families there are and how a seed becomes weights. Must not know how a family computes, nor peers.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from agora_protocol.errors import ManifestError
from agora_protocol.manifest import ModelSection

from agora.model.initial import generator_for, normal_like
from agora.model.stage import Context, Stage, stage_loss
from agora.model.subspace import SubspaceStage

__all__ = ["Context", "Stage", "build_stage", "parameter_shapes", "stage_loss"]

FAMILIES: dict[str, Callable[[ModelSection, range, bool, bool], Stage]] = {"subspace": SubspaceStage}


def build_stage(model: ModelSection, layers: range, stage: int, stage_count: int, seed: int) -> Stage:
    """Stage `stage` of `stage_count`, holding `layers`, with its initial weights, float32 on the CPU.

    Each tensor's values depend on `seed` and its full name only: every cut of the model, on every peer, starts from the
    same weights. Raises ManifestError for a family that this version does not have, DerivationError where this
    machine's libraries would give its fixed tensors other values.
    """
    built = _make(model, layers, stage, stage_count)
    built.derive(seed)
    with torch.no_grad():
        for name, parameter in built.named_parameters():
            std = built.initial_std(name)
            if std is None:
                parameter.fill_(1.0)
            else:
                parameter.copy_(normal_like(parameter.shape, std, generator_for(seed, name)))
    return built


def parameter_shapes(model: ModelSection, layers: range, stage: int, stage_count: int) -> dict[str, tuple[int, ...]]:
    """Full name -> shape of every parameter of a stage, in its order, without allocating any."""
    with torch.device("meta"):
        return {name: tuple(p.shape) for name, p in _make(model, layers, stage, stage_count).named_parameters()}


def _make(model: ModelSection, layers: range, stage: int, stage_count: int) -> Stage:
    make = FAMILIES.get(model.family)
    if make is None:
        raise ManifestError(f"model.family {model.family!r} is unknown; use {' or '.join(map(repr, FAMILIES))}.")
    return make(model, layers, stage == 0, stage == stage_count - 1)
