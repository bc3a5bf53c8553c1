"""Stages as torch modules, and which families there are."""

from collections.abc import Callable
from typing import Any, Final

from agora_protocol.errors import ManifestError
from agora_protocol.manifest_errors import suggest
from agora_protocol.manifest_model import ModelSection

from agora.model.family import Family, RunLayer, StageModule, keep_graph, stage_loss
from agora.model.subspace_family import SubspaceFamily

__all__ = ["FAMILIES", "Family", "RunLayer", "StageModule", "family_of", "keep_graph", "stage_loss"]


def _hf_family(model: Any) -> Family:
    from agora.tuning.hf_family import HfFamily  # only here: a run without a base model never loads it

    return HfFamily(model)


# The value of [model] family -> the class that is called with the model section.
FAMILIES: Final[dict[str, Callable[[Any], Family]]] = {"subspace": SubspaceFamily, "hf": _hf_family}


def family_of(model: ModelSection) -> Family:
    """Makes the Family (builder of stages) that a manifest's model section names in `model.family`.

    Raises ManifestError for a family that FAMILIES lacks.
    """
    if model.family not in FAMILIES:
        raise ManifestError(f"[model] family {model.family!r} is unknown; {suggest(model.family, FAMILIES)}")
    return FAMILIES[model.family](model)
