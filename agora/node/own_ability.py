"""What the run's stages ask of a machine, and what this machine can do, in the words of placement.

Knows: the manifest, this machine's memory, what its own work was measured to take. Must not know: the view, other
peers, what is decided. The work of a stage is taken as its number of layers; its state as weights and moments.
"""

from __future__ import annotations

import torch
from agora_protocol.codec_names import parse_codec
from agora_protocol.ids import Span
from agora_protocol.manifest import Manifest

from agora.node import doctor
from agora.node.settings import Settings
from agora.state.layout import VALUE_BYTES
from agora.swarm.placement import Ability, StageDemands
from agora.threads import run_in_thread
from agora.train.memory import available_bytes
from agora.train.trained_stage import stage_layout


class OwnAbility:
    """This machine's ability. demands: of the run; both are known once `look_at_memory` has ended."""

    def __init__(self, manifest: Manifest, settings: Settings) -> None:
        self._manifest = manifest
        self._settings = settings
        self._longest: tuple[int, ...] = ()
        self._speed = 0.0
        self._bandwidth = 0.0
        self.demands = StageDemands(work_of_stages(manifest), 0.0, (0.0,) * manifest.stage_count)

    async def look_at_memory(self) -> None:
        """Finds out which spans fit into the memory that is free now. Takes up to seconds for a large model."""
        self.demands, self._longest = await run_in_thread(self._read_demands)

    def _read_demands(self) -> tuple[StageDemands, tuple[int, ...]]:
        """Returns the run's demands, and the longest span from each stage on that fits."""
        free, settings = available_bytes(torch.device("cpu")), self._settings
        allowed = doctor.allowed_bytes(free, settings.memory_gib)
        return demands_of(self._manifest), longest_spans(self._manifest, allowed, settings.most_stages)

    @property
    def ability(self) -> Ability:
        """What this machine can do, as far as it was measured."""
        return Ability(self._speed, self._bandwidth, self._longest)

    def measure(self, span: Span, service_s: float, bandwidth: float | None) -> float:
        """Records the device seconds of a microbatch in `span`, and the uplink's rate; returns its rate per second."""
        capacity = 1.0 / max(service_s, 1e-9)
        self._speed = capacity * sum(self.demands.work[stage] for stage in span.stages)
        self._bandwidth = bandwidth or self._bandwidth
        return capacity


def work_of_stages(manifest: Manifest) -> tuple[float, ...]:
    """Returns the work of one microbatch in each stage, as a multiple of their mean: by the number of layers."""
    layers = [len(manifest.layers_of(stage)) for stage in range(manifest.stage_count)]
    mean = sum(layers) / len(layers)
    return tuple(count / mean for count in layers)


def demands_of(manifest: Manifest) -> StageDemands:
    """Returns what the run's stages ask of a machine. Builds every stage without values, which takes a moment."""
    codec, shape = parse_codec(manifest.boundary.codec), manifest.boundary_shape()
    boundary_bytes = max(codec.bytes_of(shape, "forward"), codec.bytes_of(shape, "backward"))
    layouts = [stage_layout(manifest, stage) for stage in range(manifest.stage_count)]
    states = [layout.nbytes + VALUE_BYTES * sum(moment.numel for moment in layout.moments) for layout in layouts]
    return StageDemands(work_of_stages(manifest), float(boundary_bytes), tuple(map(float, states)))


def longest_spans(manifest: Manifest, allowed_bytes: int, most_stages: int) -> tuple[int, ...]:
    """Returns for each first stage how many stages from it on fit into `allowed_bytes`; 0 where it does not itself.

    most_stages: no more than so many, 0 for no limit.
    """
    count, longest, length = manifest.stage_count, [], 0
    most = most_stages or count
    for first in range(count):
        length = max(0, length - 1)
        while length < min(most, count - first):
            if doctor.needed_bytes(manifest, Span(first, first + length)) > allowed_bytes:
                break
            length += 1
        longest.append(length)
    return tuple(longest)
