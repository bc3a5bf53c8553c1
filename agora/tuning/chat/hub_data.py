"""Finds a data set of the Hugging Face Hub by its id: fetches its files of records, those for training, into the cache.

The package huggingface_hub comes with transformers and is imported when an id is looked up. Nothing of a data set is
run: its files are read as any other, and loading scripts are not fetched.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from agora_protocol.errors import DataError

from agora.core.optional_packages import import_optional
from agora.data.data_file import format_suffix
from agora.data.record_files import READERS
from agora.tuning.chat.sample_file import SPLIT

DATA_SET: Final = re.compile(
    r"(?P<repo>[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95})(?:@(?P<revision>\w[\w./-]{0,127}))?"
    r"(?::(?P<part>[\w][\w./-]{0,127}))?"
)
MOST_FILES: Final = 64  # that a manifest names
USUAL_FOLDER: Final = "data"
DESCRIPTIONS: Final = ("dataset_infos.json", "dataset_info.json", "dataset_dict.json", "state.json")
MAX_REASON: Final = 200  # characters of an error of the Hub that are shown


def fetch_data_set(named: Path) -> tuple[Path, ...]:
    """Returns the files, in the Hub's cache, of the data set `named` ORG/NAME[@REVISION][:FOLDER], fetched if need be.

    () if `named` exists on this machine or does not look like that. FOLDER: which of several parts of the data set;
    of several splits only train is taken. Blocks. Raises PackageMissing; DataError if
    the Hub has no such data set, cannot be reached, or if no or several parts are meant.
    """
    match = DATA_SET.fullmatch(str(named))
    if match is None or named.exists() or format_suffix(named) in READERS:
        return ()
    hub = import_optional("huggingface_hub", "A data set of the Hub", "tuning")
    errors = import_optional("huggingface_hub.errors", "A data set of the Hub", "tuning")
    endpoint = os.environ.get("HF_ENDPOINT") or None
    where = {"repo_id": match["repo"], "repo_type": "dataset", "revision": match["revision"]}
    try:
        present = hub.HfApi(endpoint=endpoint).list_repo_files(**where)
        wanted = training_files(present, match["part"], str(named))
        folder = Path(hub.snapshot_download(**where, allow_patterns=wanted, endpoint=endpoint))
    except (errors.HTTPError, OSError, RuntimeError, ValueError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0][:MAX_REASON]
        raise DataError(
            f"There is no file {named}, and no data set of that name could be fetched from the Hub ({reason}); correct "
            "the name, log in with `hf auth login` if it is private, or download it and name its files."
        ) from error
    return tuple(folder / name for name in wanted)


def training_files(present: Iterable[str], part: str | None, named: str) -> list[str]:
    """Returns which files of a data set are its records for training, sorted. part: its folder, None for the only one.

    Raises DataError, which calls the data set `named`, if there are none, too many, or several parts to choose from.
    """
    known = sorted(
        name for name in present if format_suffix(Path(name)) in READERS and Path(name).suffix.lower() != ".txt"
    )
    known = [name for name in known if Path(name).name not in DESCRIPTIONS and not name.startswith(".")]
    if part is not None:
        known = [name for name in known if name == part or name.startswith(f"{part.rstrip('/')}/")]
    splits = {name: set(SPLIT.findall(name.lower())) for name in known}
    if any("train" in words for words in splits.values()):
        known = [name for name in known if "train" in splits[name]]
    elif part is None:
        known = [name for name in known if not splits[name]]
    if not known:
        inside = f" in {part}" if part else ""
        raise DataError(f"The data set {named} has no file of records for training{inside}; see its page on the Hub.")
    parts = {Path(name).parts[0] if "/" in name else "" for name in known} - {USUAL_FOLDER}
    if part is None and len(parts) > 1:
        shown = ", ".join(sorted(parts)[:20])
        raise DataError(f"The data set {named} has several parts ({shown}); choose one: {named}:FOLDER.")
    if len(known) > MOST_FILES:
        raise DataError(
            f"The data set {named} has {len(known)} files, more than the {MOST_FILES} that are named one by one; "
            "download it and give the folder."
        )
    return known
