"""What the checkpoints of a test's daemons hold: weights by step, and the held-out loss of the model that they make."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from agora_protocol.manifest import Manifest
from safetensors.numpy import load_file

from agora.cli.local_swarm import LocalDaemon
from agora.data.sampling import Sampler
from agora.model import family_of
from agora.train.objectives import stage_loss


def checkpoints(daemon: LocalDaemon) -> dict[int, Path]:
    """The folders of its checkpoints, by step; a daemon of these tests holds one stage."""
    found = sorted(daemon.root.glob("runs/*/checkpoints/stage-*/step-*/checkpoint.json"))
    return {int(json.loads(path.read_text())["step"]): path.parent for path in found}


def weights_in(folder: Path) -> dict[str, np.ndarray]:
    """The weights in a checkpoint, by name."""
    return dict(load_file(folder / "weights.safetensors"))


@torch.no_grad()
def heldout_loss(manifest: Manifest, sampler: Sampler, weights: Sequence[Mapping[str, np.ndarray]]) -> float:
    """Returns the mean loss per held-out token, in nats, of the model whose stages have these weights, in order."""
    stages = []
    for number, tensors in enumerate(weights):
        stage = family_of(manifest.model).build_stage(manifest.layers_of(number), manifest.seed)
        stage.load_state_dict({name: torch.from_numpy(values.copy()) for name, values in tensors.items()})
        stages.append(stage)
    loss_sum, count = 0.0, 0
    for windows in sampler.heldout_batches(64, limit=32):
        ids = torch.from_numpy(windows).long()
        hidden = ids[:, :-1]
        for stage in stages:
            hidden = stage(hidden, ids[:, :-1])
        loss_sum += float(stage_loss(hidden, ids[:, 1:]))
        count += ids[:, 1:].numel()
    return loss_sum / count
