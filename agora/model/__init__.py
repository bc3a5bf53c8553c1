"""Stages as torch modules, and which families there are."""

import importlib
from collections.abc import Callable
from typing import Final, cast

from agora_protocol.errors import ManifestError
from agora_protocol.manifest_errors import suggest
from agora_protocol.manifest_model import ModelSection

from agora.model.family import Family, RunLayer, StageModule, keep_graph

__all__ = ["FAMILIES", "Family", "RunLayer", "StageModule", "family_of", "keep_graph"]

# The value of [model] family -> module and class of the Family, which is called with the model section. The module is
# imported when a run needs it: pretraining imports nothing of tuning.
FAMILIES: Final[dict[str, tuple[str, str]]] = {
    "subspace": ("agora.model.subspace_family", "SubspaceFamily"),
    "hf": ("agora.tuning.hf_family", "HfFamily"),
}


def family_of(model: ModelSection) -> Family:
    """Makes the Family (builder of stages) that a manifest's model section names in `model.family`.

    Raises ManifestError for a family that FAMILIES lacks.
    """
    if model.family not in FAMILIES:
        raise ManifestError(f"[model] family {model.family!r} is unknown; {suggest(model.family, FAMILIES)}")
    module, name = FAMILIES[model.family]
    make = cast(Callable[[ModelSection], Family], getattr(importlib.import_module(module), name))
    return make(model)
