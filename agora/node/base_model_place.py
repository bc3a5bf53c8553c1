"""Turns what --base-model names, a folder or a model of the Hugging Face Hub, into a folder of this machine.

Knows: that a folder which exists wins over an id, and the cache over the network. Must not know: what is in the folder.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from agora.node.settings import Settings
from agora.state.hub_models import find_or_fetch, hub_id_of


def absolute_name(named: Path) -> str:
    """Returns a folder's absolute path, for a process with another working directory; an id of the Hub unchanged."""
    return str(named) if hub_id_of(named) is not None else str(named.expanduser().absolute())


def base_model_place(named: Path, say: Callable[[str], None]) -> Path:
    """Returns the folder of the base model, which is fetched if `named` is an id that this machine does not have yet.

    say: called with a line that says where a model of the Hub is. Raises BaseModelError as hub_models.fetch_model does.
    """
    wanted = hub_id_of(named)
    if wanted is None:
        return named
    found = find_or_fetch(wanted)
    say(f"{found.name} is in {found.folder}")
    return found.folder


def names_hub_model(settings: Settings) -> bool:
    """Returns whether the owner named a base model of the Hub, which has to be found before it can be used."""
    return settings.base_model_folder is not None and hub_id_of(settings.base_model_folder) is not None


def with_base_model_place(settings: Settings, say: Callable[[str], None]) -> Settings:
    """Returns settings whose base_model is a folder; see base_model_place. Blocks while a model is fetched."""
    named = settings.base_model_folder
    if named is None:
        return settings
    return settings.model_copy(update={"base_model": str(base_model_place(named, say))})
