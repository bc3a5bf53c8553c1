"""Finds which tensors of the base model the stages of a span need, before any of these stages is built."""

from __future__ import annotations

import torch
from agora_protocol.manifest import HfSection

from agora.tuning.base_model import WantedTensor
from agora.tuning.hf_family import wanted_tensors
from agora.tuning.hf_stage import HfStage


def needed_tensors(model: HfSection, layers: range) -> list[WantedTensor]:
    """Returns names and shapes of the base model's tensors that a stage of `layers` needs, each once.

    Builds the stage on the meta device, so nothing is allocated or read; importing transformers may take seconds.
    Raises TuningMissing without a package, ManifestError for a wrong config.
    """
    with torch.device("meta"):
        stage = HfStage(model, layers)
    return list(dict.fromkeys(wanted_tensors(stage).values()))
