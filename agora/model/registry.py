"""Finds the family of a manifest's model. Knows which families there are. Must not know how any of them computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from agora_protocol.errors import ManifestError
from agora_protocol.manifest import ModelSection
from agora_protocol.manifest_rules import suggest

from agora.model.family import Family
from agora.model.subspace_family import SubspaceFamily

FAMILIES: Final[dict[str, Callable[[Any], Family]]] = {"subspace": SubspaceFamily}
"""What makes the family of a model section, by its `family`."""


def family_of(model: ModelSection) -> Family:
    """Returns the family that `model` names, with its values. Raises ManifestError for one that is not in FAMILIES."""
    if model.family not in FAMILIES:
        raise ManifestError(f"[model] family {model.family!r} is unknown; {suggest(model.family, FAMILIES)}")
    return FAMILIES[model.family](model)
