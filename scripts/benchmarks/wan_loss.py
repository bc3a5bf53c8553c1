"""A loss run: all stages of a small model in one process, boundaries crossing by the daemons' codecs, both ways.

A microbatch is finished before the next begins: a swarm's delay between forward and backward is the same for all
settings.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from agora_protocol.manifest import Manifest

from agora.codec import BoundaryCodec
from agora.train.memory import keep_freed_memory
from agora.train.span_trainer import NonFinite
from benchmarks.codec_samples import Stages
from benchmarks.codecs import crossing
from benchmarks.wan_curves import Length
from benchmarks.worker import Channel


def train(manifest: Manifest, cache: Path, length: Length, heldout: int) -> list[tuple[int, float]]:
    """Trains and returns (step, loss over `heldout` batches) of each evaluation; ends early when numbers overflow."""
    stages = Stages(manifest, cache, crossing(BoundaryCodec(manifest.boundary.codec, manifest.seed)))
    curve: list[tuple[int, float]] = []
    try:
        for step in range(length.most):
            stages.learn(step)
            if (step + 1) % length.every == 0:
                curve.append((step + 1, stages.loss(heldout)))
                if length.must_end(curve):
                    break
    except NonFinite:
        pass
    return curve


def serve(spec: dict[str, Any], channel: Channel) -> None:
    """{"manifest": its file, "length": {...}} trains and answers {"curve": [[step, loss], ...]}."""
    torch.set_num_threads(int(spec["threads"]))
    keep_freed_memory()
    for order in channel.orders():
        manifest = Manifest.from_toml(Path(order["manifest"]).read_text(encoding="utf-8"), order["manifest"])
        channel.say({"curve": train(manifest, Path(spec["cache"]), Length(**order["length"]), int(spec["heldout"]))})
