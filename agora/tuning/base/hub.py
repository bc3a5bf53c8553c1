"""Finds a model or adapter of the Hugging Face Hub by its id, in this machine's cache or there; fetches missing files.

Only config, tokenizer and safetensors files are fetched: never pickled weights, never code. The cache is that of every
program that uses the package huggingface_hub, which is imported when an id is looked up.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final, Literal

from agora_protocol.manifest_model import ADAPTER_FILE

from agora.core.hub_files import (
    ADAPTER_CONFIG_FILE,
    CHAT_TEMPLATE_FILE,
    CONFIG_FILE,
    GENERATION_CONFIG_FILE,
    SPECIAL_TOKENS_FILE,
    TOKENIZER_CONFIG_FILE,
    TOKENIZER_FILE,
    WEIGHTS_FILE,
    WEIGHTS_INDEX_FILE,
)
from agora.core.optional_packages import import_optional
from agora.core.user_paths import expand_home
from agora.tuning.base.store import BaseModelError, names_in_index

# The files that are fetched besides the weights, if the model has them.
DESCRIPTIONS: Final = (
    CONFIG_FILE,
    GENERATION_CONFIG_FILE,
    TOKENIZER_FILE,
    TOKENIZER_CONFIG_FILE,
    SPECIAL_TOKENS_FILE,
    CHAT_TEMPLATE_FILE,
    WEIGHTS_INDEX_FILE,
)
ADAPTER_FILES: Final = (ADAPTER_CONFIG_FILE, ADAPTER_FILE)
Kind = Literal["model", "adapter"]
_import_hub: Final = partial(import_optional, purpose="What lies on the Hub", extra="tuning")
MAX_REASON: Final = 200  # characters of an error of the Hub that are shown
_ID = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95})(?:@(?P<revision>\w[\w./-]{0,127}))?")
# The folder of one revision in the Hub's cache; a name has no "--" in it.
_CACHED = re.compile(r"models--(?P<org>[\w.-]+?)--(?P<name>[\w.-]+)/snapshots/(?P<commit>\w[\w.-]*)", re.ASCII)


@dataclass(frozen=True, slots=True)
class HubId:
    """The name of a model or adapter on the Hub. repo: ORG/NAME. revision: a branch, a tag or a commit; None: main."""

    repo: str
    revision: str | None = None

    def __str__(self) -> str:
        return self.repo if self.revision is None else f"{self.repo}@{self.revision}"


@dataclass(frozen=True, slots=True)
class HubFolder:
    """The folder in this machine's cache that has the files of hub_id, which has the cached commit."""

    folder: Path
    hub_id: HubId


def hub_id_of(named: Path) -> HubId | None:
    """None unless it looks like ORG/NAME[@REVISION] and is no existing folder. The Hub is not asked."""
    match = _ID.fullmatch(str(named))
    if match is None or named.is_dir():
        return None
    return HubId(match["repo"], match["revision"])


def find_or_fetch(wanted: HubId, kind: Kind = "model") -> HubFolder:
    """Returns the folder of a model or adapter in the cache; if a file is missing there, fetches it from the Hub first.

    A complete copy in the cache is used without asking the Hub. Blocks. Raises PackageMissing, and BaseModelError
    for what the Hub lacks, refuses or has without safetensors files, and when the network or disk fails.
    """
    return find_cached(wanted, kind) or (fetch_adapter(wanted) if kind == "adapter" else fetch_model(wanted))


def find_cached(wanted: HubId, kind: Kind = "model") -> HubFolder | None:
    """Returns the folder in the cache, without asking the Hub; the result's hub_id has the cached commit.

    Returns None if the config or a weights file is missing, or if the id is not valid on the Hub; tokenizer files may
    be missing. Raises PackageMissing, and BaseModelError if an index is malformed.
    """
    hub = _import_hub("huggingface_hub")
    description = ADAPTER_FILES[0] if kind == "adapter" else DESCRIPTIONS[0]
    try:
        config = hub.try_to_load_from_cache(wanted.repo, description, revision=wanted.revision)
    except ValueError:  # not a valid name on the Hub
        return None
    if not isinstance(config, str):
        return None
    folder = Path(config).parent
    weights = [ADAPTER_FILE] if kind == "adapter" else _weight_files(folder)
    if not all((folder / name).is_file() for name in weights):
        return None
    return HubFolder(folder, replace(wanted, revision=folder.name))


def fetch_model(wanted: HubId) -> HubFolder:
    """Fetches the model's missing files into the cache, at the commit that the revision names now; returns the folder.

    Fetches the files DESCRIPTIONS and the weights files. Blocks. If the Hub cannot be reached, a complete copy in the
    cache is used. Raises BaseModelError when there is no such model or revision, when access is denied, when the model
    has no config.json or no safetensors files, and when the network or disk fails.
    """
    _import_hub("huggingface_hub")
    folder = _download(wanted, list(DESCRIPTIONS), "model")
    found = HubFolder(folder, replace(wanted, revision=folder.name))
    if not (folder / DESCRIPTIONS[0]).is_file():
        raise BaseModelError(f"{wanted} on the Hub has no {DESCRIPTIONS[0]}; choose a model of transformers.")
    weights = _weight_files(folder)
    _download(found.hub_id, weights, "model")
    missing = [name for name in weights if not (folder / name).is_file()]
    if missing:
        raise BaseModelError(
            f"{wanted} on the Hub has no {missing[0]}, and other kinds of weights are not read; choose a model with "
            "safetensors files, or load it with transformers, write it with save_pretrained, and name that folder."
        )
    return found


def fetch_adapter(wanted: HubId) -> HubFolder:
    """Fetches an adapter's config and safetensors file into the cache, as fetch_model does a model's."""
    folder = _download(wanted, list(ADAPTER_FILES), "adapter")
    for name in ADAPTER_FILES:
        if not (folder / name).is_file():
            raise BaseModelError(
                f"{wanted} on the Hub has no {name}, and other files are not read; choose an adapter of peft with "
                "safetensors, or load it with peft, write it with save_pretrained, and name that folder."
            )
    return HubFolder(folder, replace(wanted, revision=folder.name))


def _weight_files(folder: Path) -> list[str]:
    index = folder / WEIGHTS_INDEX_FILE
    if (folder / WEIGHTS_FILE).is_file() or not index.is_file():
        return [WEIGHTS_FILE]
    try:
        return names_in_index(index)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise BaseModelError(f"{index} is not an index of weights files; choose another model or revision.") from error


def _download(wanted: HubId, names: list[str], kind: Kind) -> Path:
    hub = _import_hub("huggingface_hub")
    errors = _import_hub("huggingface_hub.errors")
    if not sys.stderr.isatty():
        _import_hub("huggingface_hub.utils").disable_progress_bars()
    endpoint = os.environ.get("HF_ENDPOINT") or None
    try:
        return Path(
            hub.snapshot_download(wanted.repo, revision=wanted.revision, allow_patterns=names, endpoint=endpoint)
        )
    except errors.GatedRepoError as error:
        raise BaseModelError(
            f"{wanted.repo} is given only to those who accept its terms; accept them on its page of the Hub, then log "
            "in with `hf auth login`."
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise BaseModelError(
            f"There is no folder {wanted}, and the Hub has no such {kind}; correct the name, or log in with `hf auth "
            f"login` if the {kind} is private."
        ) from error
    except errors.RevisionNotFoundError as error:
        raise BaseModelError(f"{wanted.repo} has no revision {wanted.revision}; see its page on the Hub.") from error
    except errors.LocalEntryNotFoundError as error:
        raise BaseModelError(
            f"There is no folder {wanted}, the Hub cannot be reached, and the cache does not have that {kind} whole; "
            "check the network, or name a folder."
        ) from error
    except (errors.HTTPError, OSError, RuntimeError, ValueError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0][:MAX_REASON]
        raise BaseModelError(f"Cannot fetch {wanted} from the Hub ({reason}); try again: what came is kept.") from error


def public_name(folder: Path) -> str:
    """Returns how others may call the base model in `folder`: ORG/NAME@COMMIT if it lies in the Hub's cache, else the
    folder's name, without characters that cannot be printed; never a path.
    """
    place = expand_home(folder).absolute()
    for there in (place, place.resolve()):
        if match := _CACHED.fullmatch("/".join(there.parts[-3:])):
            return f"{match['org']}/{match['name']}@{match['commit']}"
    return "".join(c for c in place.resolve().name if c.isprintable() and c != "\\")[:255]


def absolute_name(named: Path) -> str:
    """For a process with another working directory; an id of the Hub unchanged."""
    return str(named) if hub_id_of(named) is not None else str(expand_home(named).absolute())


def find_or_fetch_folder(named: Path, show_line: Callable[[str], None], kind: Kind = "model") -> Path:
    """Returns the folder of a model or adapter: `named` itself or, if that is an id of the Hub, the one in its cache.

    Fetches what the cache does not have; blocks meanwhile. show_line: called, for an id only, with a line about the
    folder. Raises BaseModelError if it cannot be fetched or its files are malformed.
    """
    wanted = hub_id_of(named)
    if wanted is None:
        return named
    found = find_or_fetch(wanted, kind)
    show_line(f"{found.hub_id} is in {found.folder}")
    return found.folder
