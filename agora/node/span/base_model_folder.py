"""Turns what --base-model names, a folder or a model of the Hugging Face Hub, into a folder of this machine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from agora.node.settings import Settings
from agora.tuning.base.hub import find_or_fetch, hub_id_of


def absolute_name(named: Path) -> str:
    """Returns a folder's absolute path, for a process with another working directory; an id of the Hub unchanged.

    named: the folder, or ORG/NAME[@REVISION].
    """
    return str(named) if hub_id_of(named) is not None else str(named.expanduser().absolute())


def find_or_fetch_base_model(named: Path, show_line: Callable[[str], None]) -> Path:
    """Returns the folder of a base model: `named` itself or, if that is an id of the Hub, the one in the Hub's cache.

    Fetches a model that the cache does not have; blocks meanwhile. show_line: called, for an id only, with a line about
    the model's folder. Raises BaseModelError if the model cannot be fetched or its files are malformed.
    """
    wanted = hub_id_of(named)
    if wanted is None:
        return named
    found = find_or_fetch(wanted)
    show_line(f"{found.hub_id} is in {found.folder}")
    return found.folder


def names_hub_model(settings: Settings) -> bool:
    """Returns whether the owner named a base model by an id of the Hub, which must be turned into a folder first."""
    return settings.named_base_model is not None and hub_id_of(settings.named_base_model) is not None


def with_fetched_base_model(settings: Settings, show_line: Callable[[str], None]) -> Settings:
    """Returns settings whose base_model is a folder, after find_or_fetch_base_model; unchanged if none is configured.

    May fetch gigabytes, and blocks meanwhile. Raises BaseModelError if the model cannot be fetched.
    """
    named = settings.named_base_model
    if named is None:
        return settings
    return settings.model_copy(update={"base_model": str(find_or_fetch_base_model(named, show_line))})
