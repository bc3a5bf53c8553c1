"""Resolves what a user calls a run: a manifest file, an invite, or the name of a run that this machine has joined.

Loads the manifest's code only when there is a manifest to read, so that asking about an invite stays instant.
"""

from __future__ import annotations

import difflib
import functools
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from agora_protocol.errors import DiskError, InputError, ManifestError
from agora_protocol.ids import RunId, is_run_id
from agora_protocol.invite import SCHEME, Invite

from agora.core.user_paths import expand_home
from agora.node import daemon_registry, paths
from agora.node.daemon_registry import DaemonEntry
from agora.node.run_files import remembered_addresses

if TYPE_CHECKING:
    from agora_protocol.manifest import Manifest, SignedManifest


STDIN = "-"
MAX_INVITE_CHARACTERS = 64 * 1024


@dataclass(frozen=True, slots=True)
class RunReference:
    """What is known of a run before any peer is asked."""

    run: str  # its id; "" for a draft
    name: str
    addresses: tuple[str, ...] = ()  # of its peers
    signed: SignedManifest | None = None  # the signed manifest; None when it must be fetched, or for a draft
    draft: Manifest | None = None  # an unsigned manifest
    file: Path | None = None  # the user's file with the manifest or draft; None for a run given by name or invite
    ticket: str = ""  # carried by the invite, see agora_protocol.tickets.InviteTicket

    @property
    def base(self) -> Path:
        return self.file.parent.absolute() if self.file is not None else Path.cwd()

    def is_of(self, entry: DaemonEntry) -> bool:
        """Returns whether a daemon takes part in this run.

        A draft is compared as if the founder of the daemon's run had signed it: equal drafts then give the same run id.
        """
        if self.run:
            return entry.run == self.run
        return self.draft is not None and self.draft.model_copy(update={"founder": entry.founder}).run_id == entry.run


def resolve(text: str, home: paths.Home) -> RunReference:
    """Returns what is known of the run that `text` names.

    It is an invite, a file with an invite or a manifest, "-" for an invite on standard input, or a joined run's name or
    id.

    The addresses of an invite are followed by those that `home` remembers of its run. Raises InputError for an unknown
    run or a malformed invite, ManifestError for a bad manifest, DiskError for a manifest that cannot be read.
    """
    if text == STDIN:
        text = read_standard_input()
        if not text.startswith(SCHEME):
            raise InputError("Standard input holds no invite; give one: `agora-node join - < FILE`.")
    if text.startswith(SCHEME):
        return _by_invite(text, home)
    path = expand_home(text)
    if path.is_file() and (invite := _read_invite(path)):
        return _by_invite(invite, home)
    if path.is_file():
        return from_file(path, home)
    if path.is_dir():
        raise InputError(f"{text} is a directory; name the manifest file in it.")
    if "/" in text or text.endswith(".toml"):
        raise InputError(f"There is no manifest {text}; write one with `swarm new {text}`, or correct the path.")
    return _by_name(text, home)


def read_standard_input() -> str:
    """Returns what standard input held. Reads it once: `--watch` resolves the run again and again."""
    return _read_once(sys.stdin)


@functools.lru_cache(maxsize=1)
def _read_once(stream: TextIO) -> str:
    return stream.read(MAX_INVITE_CHARACTERS).strip()


def _by_invite(text: str, home: paths.Home) -> RunReference:
    invite = Invite.parse(text)
    known = remembered_addresses(home, invite.run)
    addresses = tuple(dict.fromkeys([*invite.addresses, *known]))
    return RunReference(invite.run, invite.name, addresses, ticket=invite.ticket)


def _read_invite(path: Path) -> str:
    # An invite with a ticket is a secret, and a process' arguments are not: a file keeps it out of `ps` and histories.
    with suppress(OSError, UnicodeDecodeError), path.open(encoding="utf-8") as file:
        text = file.read(MAX_INVITE_CHARACTERS).strip()
        return text if text.startswith(SCHEME) and len(text.split()) == 1 else ""
    return ""


def from_file(path: Path, home: paths.Home) -> RunReference:
    """Returns a reference to the run of a manifest file: its signed manifest, or its draft if it is unsigned.

    For a signed one, the reference also has the addresses that `home` remembers of the run. Raises ManifestError for a
    file that is not text, malformed or wrongly signed, DiskError for an unreadable one.
    """
    from agora_protocol.manifest import Manifest, SignedManifest, is_signed

    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ManifestError(f"{path} is not a text file; is it a manifest?") from None
    except OSError as error:
        raise DiskError(f"Cannot read {path} ({error.strerror}); check its owner and mode.") from error
    if not is_signed(text, str(path)):
        draft = Manifest.from_toml(text, str(path))
        return RunReference("", draft.name, draft=draft, file=path)
    signed = SignedManifest.from_toml(text, str(path))
    return RunReference(
        signed.run_id, signed.manifest.name, remembered_addresses(home, signed.run_id), signed, file=path
    )


def entries_of_run(text: str, home: paths.Home, entries: Sequence[DaemonEntry]) -> list[DaemonEntry]:
    """Returns which of `entries` take part in the run `text`: a name or id among `entries`, or what `resolve` accepts.

    Unless an entry has that name or id, raises InputError for an unknown run or a malformed invite, ManifestError for a
    bad manifest, DiskError for a manifest that cannot be read.
    """
    if named := [entry for entry in entries if text in (entry.name, entry.run)]:
        return named
    reference = resolve(text, home)
    return [entry for entry in entries if reference.is_of(entry)]


def _by_name(text: str, home: paths.Home) -> RunReference:
    roots = dict.fromkeys([home.root, *(Path(entry.root) for entry in daemon_registry.find_running_daemons())])
    joined = {reference.run: reference for root in roots for reference in _find_joined(paths.Home(root))}
    matching = [r for r in joined.values() if text in (r.name, r.run) or (len(text) >= 6 and r.run.startswith(text))]
    if len(matching) == 1:
        return matching[0]
    if matching:
        listed = ", ".join(reference.run[:12] for reference in matching)
        raise InputError(f"Several runs are called {text!r}; give the beginning of one's id: {listed}.")
    if is_run_id(text):
        return RunReference(RunId(text), "")
    close = difflib.get_close_matches(text, [reference.name for reference in joined.values()], n=1)
    hint = f"did you mean {close[0]!r}?" if close else "give a manifest file (run.toml) or an invite (agora://...)."
    raise InputError(f"{text!r} is not a file, an invite or a run that this machine has joined; {hint}")


def _find_joined(home: paths.Home) -> Iterator[RunReference]:
    for path in sorted(home.runs.glob("*/run.toml")):
        with suppress(DiskError, ManifestError):
            reference = from_file(path, home)
            if reference.signed is not None:
                yield replace(reference, file=None)  # else relative paths would begin in the data directory
