"""Publishes an export on the Hugging Face Hub: all of it in one commit, or nothing."""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar, Final

from agora_protocol.errors import LocalError

from agora.core.optional_packages import import_optional
from agora.state.files import EXPORT_INDEX, MAX_LIST_BYTES

_import_hub: Final = partial(import_optional, purpose="Publishing", extra="hub")
MAX_REASON: Final = 200  # characters of an error of the Hub that are shown
_REPO = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")


class PublishError(LocalError):
    """Raised when an export is not published; the repository then is as it was, or new and empty."""

    code: ClassVar[str] = "publish"


@dataclass(frozen=True, slots=True)
class Repository:
    """A model repository of the Hub that an export may be published to, as it was at `commit`.

    earlier: the files of an earlier export of the run, which a new one replaces.
    """

    repo: str
    commit: str
    earlier: frozenset[str]


def check_can_publish(repo: str) -> None:
    """Raises PublishError for a name that is not ORG/NAME and without a token, PackageMissing.

    The Hub is not asked.
    """
    if _REPO.fullmatch(repo) is None:
        raise PublishError(f"{repo[:120]!r} does not name a repository of the Hub; write it as ORG/NAME.")
    if _import_hub("huggingface_hub").get_token() is None:
        raise PublishError(
            "Nobody is logged in to the Hub on this machine; run `hf auth login` with a token that may write to "
            f"{repo}, or set HF_TOKEN."
        )


def open_repository(repo: str, run: str, *, private: bool) -> Repository:
    """Returns the repository `repo`, which is created if there is none. Blocks.

    run: the id of the run whose export is to be published. private: of a new repository. Raises PublishError when the
    Hub cannot be reached or refuses, and for a repository with anything but an earlier export of this run: what
    somebody else has put there is not replaced.
    """
    hub = _import_hub("huggingface_hub")
    api = hub.HfApi(endpoint=os.environ.get("HF_ENDPOINT") or None)
    with _as_publish_errors(repo):
        api.create_repo(repo, private=private, exist_ok=True)
        info = api.model_info(repo)
        present = {file.rfilename for file in info.siblings or ()}
        if EXPORT_INDEX in present:
            path = Path(api.hf_hub_download(repo, EXPORT_INDEX, revision=info.sha))
            return Repository(repo, info.sha, _files_of_earlier_export(path, repo, run) & present)
    # What the Hub's own page makes with a new repository.
    if foreign := sorted(present - {".gitattributes", "README.md"}):
        raise PublishError(f"{repo} has {foreign[0]} and is no export of a run; choose another name.")
    return Repository(repo, info.sha, frozenset())


def _files_of_earlier_export(index: Path, repo: str, run: str) -> frozenset[str]:
    try:
        with index.open("rb") as file:
            listed = json.loads(file.read(MAX_LIST_BYTES))
        former, names = str(listed["run_id"]), frozenset(map(str, listed["files"]))
    except (ValueError, KeyError, TypeError, RecursionError):
        raise PublishError(f"{repo} has an {EXPORT_INDEX} that no export wrote; choose another name.") from None
    if former != run:
        raise PublishError(f"{repo} has an export of run {former[:12]}, and this is {run[:12]}; choose another name.")
    return names


def publish_folder(folder: Path, to: Repository, message: str) -> str:
    """Publishes all files of `folder` in one commit, which also removes files of an earlier export that it lacks.

    Returns the commit's address. Blocks. Raises PublishError when the Hub cannot be reached or refuses, or if the
    repository was changed meanwhile; nothing of the export is published then.
    """
    hub = _import_hub("huggingface_hub")
    if not sys.stderr.isatty():
        _import_hub("huggingface_hub.utils").disable_progress_bars()
    names = sorted(file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file())
    operations = [hub.CommitOperationAdd(path_in_repo=name, path_or_fileobj=folder / name) for name in names]
    operations += [hub.CommitOperationDelete(path_in_repo=name) for name in sorted(to.earlier - set(names))]
    api = hub.HfApi(endpoint=os.environ.get("HF_ENDPOINT") or None)
    with _as_publish_errors(to.repo):
        # On top of the commit that was looked at: what somebody else publishes meanwhile is not undone.
        made = api.create_commit(to.repo, operations, commit_message=message, parent_commit=to.commit)
    return str(made.commit_url)


@contextlib.contextmanager
def _as_publish_errors(repo: str) -> Iterator[None]:
    errors = _import_hub("huggingface_hub.errors")
    try:
        yield
    except (errors.HTTPError, OSError, RuntimeError, ValueError) as error:
        status = getattr(getattr(error, "response", None), "status_code", None)
        if status in (401, 403):
            raise PublishError(
                f"The Hub does not let this machine's token write to {repo}; run `hf auth login` with one that may, or "
                "choose another name."
            ) from None
        if status == 412:
            raise PublishError(f"{repo} was changed meanwhile, so nothing is published; try again.") from None
        # A server may say in its answer what it was sent.
        said = str(error).replace(_import_hub("huggingface_hub").get_token() or "\0", "...")
        reason = (said.splitlines() or [type(error).__name__])[0][:MAX_REASON]
        raise PublishError(f"Cannot publish to {repo} ({reason}); nothing is published, try again.") from None
