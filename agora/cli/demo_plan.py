"""The plan of a demo: its flags, and the manifest that follows from them.

Knows: flags and presets. Must not know: processes.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from agora.cli.console import USAGE, Failure

if TYPE_CHECKING:
    from agora_protocol.manifest import Manifest

LEAST_WARMUP_STEPS = 8
"""With fewer, Adam's first steps at the full learning rate make the loss rise before it falls."""


@dataclass(frozen=True, slots=True)
class DemoPlan:
    """The flags of `swarm demo`, with their defaults."""

    peers: int = 4
    stages: int = 2
    steps: int = 40
    data: tuple[str, ...] = ("stdlib",)
    preset: str = "tiny"
    codec: str | None = None
    link: str | None = None
    kill_every: float | None = None
    seed: int = 0
    directory: Path | None = None


def cores() -> int:
    """Returns how many cores this process may use."""
    return len(os.sched_getaffinity(0))


def manifest_of(plan: DemoPlan) -> Manifest:
    """Returns the demo's manifest: the preset with the plan's stages, seed and data, its schedule as long as the demo.

    A codec that the plan names carries all of the width instead of the preset's subspace. Raises Failure (bad
    arguments) for a plan that cannot work.
    """
    from agora_protocol.errors import ManifestError
    from agora_protocol.manifest import preset

    from agora.net.link import LinkError, LinkSpec

    if plan.peers < plan.stages:
        why = f"--peers {plan.peers} cannot hold {plan.stages} stages; give --peers {plan.stages} or more"
        raise Failure(why, USAGE)
    corpus = tuple(text if text == "stdlib" else str(Path(text).expanduser().absolute()) for text in plan.data)
    try:
        if plan.link is not None:
            LinkSpec.parse(plan.link)
        base = preset(plan.preset)
        model: dict[str, object] = {"layers": max(base.model.layers, plan.stages)}
        return base.replaced(
            name="demo",
            seed=plan.seed,
            model=model | (base.model.full_boundary() if plan.codec else {}),
            stages={"count": plan.stages, "first_layers": ()},
            boundary={"codec": plan.codec} if plan.codec else {},
            optimizer={
                "warmup_steps": min(base.optimizer.warmup_steps, max(LEAST_WARMUP_STEPS, plan.steps // 4)),
                "total_steps": max(plan.steps, 2 * LEAST_WARMUP_STEPS),
            },
            data={"corpus": corpus},
        )
    except LinkError as error:
        raise Failure(f"--link: {error}", USAGE) from None
    except ManifestError as error:
        raise Failure(str(error), USAGE) from None
