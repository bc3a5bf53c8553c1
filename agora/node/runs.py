"""Resolves what a user calls a run: a manifest file, an invite, or the name of a run that this machine has joined.

Also keeps on disk what this machine must not forget of a run: its manifest, addresses, ticket, revocations; and the
owner's bans, which hold in every run. Loads the manifest's code only when there is a manifest to read, so that asking
about an invite stays instant.
"""

from __future__ import annotations

import difflib
import fcntl
import functools
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from agora_protocol.addresses import address_problem
from agora_protocol.errors import AmendmentError, DiskError, InputError, LocalError, ManifestError, ProtocolError
from agora_protocol.ids import PeerId, RunId, is_peer_id, is_run_id
from agora_protocol.invite import SCHEME, Invite
from agora_protocol.limits import (
    MAX_AMENDMENT_BYTES,
    MAX_KEPT_AMENDMENTS,
    MAX_PROOF_BYTES,
    MAX_REVOCATION_BYTES,
    MAX_REVOCATIONS,
)

from agora.node import paths

if TYPE_CHECKING:
    from agora_protocol.identity import Identity
    from agora_protocol.manifest import Manifest, SignedManifest

    from agora.swarm.amendments import AmendmentBook, IsBanned

STDIN = "-"
MAX_INVITE_CHARACTERS = 64 * 1024
MAX_BANNED = 10_000  # at most this many peers are kept in banned.txt
MAX_LINE_CHARACTERS = 64  # for each peer that banned.txt may have, this many of its characters are read


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

    def is_of(self, entry: paths.DaemonEntry) -> bool:
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
    path = Path(text).expanduser()
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

    A signed one's reference also has the addresses that `home` remembers of the run. Raises ManifestError for a file
    that is not text, malformed or wrongly signed, DiskError for an unreadable one.
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


def entries_of_run(text: str, home: paths.Home, entries: Sequence[paths.DaemonEntry]) -> list[paths.DaemonEntry]:
    """Returns which of `entries` take part in the run `text`: a name or id among `entries`, or what `resolve` accepts.

    Unless an entry has that name or id, raises InputError for an unknown run or a malformed invite, ManifestError for a
    bad manifest, DiskError for a manifest that cannot be read.
    """
    if named := [entry for entry in entries if text in (entry.name, entry.run)]:
        return named
    reference = resolve(text, home)
    return [entry for entry in entries if reference.is_of(entry)]


def sign(
    reference: RunReference, identity: Identity, on_signed: Callable[[SignedManifest], None]
) -> tuple[SignedManifest, str]:
    """Signs a draft and writes the signature into its file; returns the signed manifest and a note of what was done.

    If the file was signed meanwhile, returns the manifest in it instead; if it cannot be written, the file stays
    unsigned. on_signed: called with the returned manifest while the file is locked, so that two daemons that start from
    one draft found one run. Raises ManifestError if the file is not a manifest any more, and lets errors of `on_signed`
    through.
    """
    from agora_protocol.manifest import SignedManifest, is_signed

    assert reference.draft is not None and reference.file is not None
    path = reference.file
    signed = SignedManifest.sign(reference.draft, identity)
    try:
        with path.open("r+", encoding="utf-8") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # two daemons that start from one draft found one run
            text = file.read()
            if is_signed(text, str(path)):
                found = SignedManifest.from_toml(text, str(path))
                on_signed(found)
                return found, f"{path} was signed meanwhile"
            _overwrite(file.fileno(), _with_signature(text, signed).encode())
            on_signed(signed)
    except OSError as error:
        on_signed(signed)
        return signed, f"{path} stays unsigned ({error.strerror}); the signed copy is in the data directory"
    return signed, f"signed {path} as founder"


def _overwrite(descriptor: int, data: bytes) -> None:
    old_size = os.fstat(descriptor).st_size
    try:
        os.posix_fallocate(descriptor, 0, len(data))  # a full disk raises here, before anything is overwritten
    except OSError:
        os.ftruncate(descriptor, old_size)
        raise
    os.pwrite(descriptor, data, 0)
    os.ftruncate(descriptor, len(data))


def _with_signature(text: str, signed: SignedManifest) -> str:
    # This keeps the comments. If the result would not read as `signed`, it returns the signed manifest's own text.
    from agora_protocol.manifest import SignedManifest

    table = signed.to_toml().rpartition("\n[signed]")[2]
    lines = text.rstrip().split("\n")
    begin = next((i for i, line in enumerate(lines) if line.strip() and not line.lstrip().startswith("#")), 0)
    lines.insert(begin, f'founder = "{signed.founder}"')
    whole = "\n".join(lines) + f"\n\n[signed]{table}"
    try:
        return whole if SignedManifest.from_toml(whole, "the signed draft") == signed else signed.to_toml()
    except ManifestError:
        return signed.to_toml()


def remember_manifest(home: paths.Home, signed: SignedManifest) -> None:
    """Writes the signed manifest to the data directory, so that the run's name is enough next time.

    Raises DiskError when it cannot be written.
    """
    path = home.manifest(signed.run_id)
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        paths.replace_text(path, signed.to_toml())
    except OSError as error:
        raise DiskError(f"Cannot write {path} ({error.strerror}); free some space, or choose another --dir.") from error


def remember_addresses(home: paths.Home, run: str, addresses: Sequence[str]) -> None:
    """Writes addresses of the run's peers to the data directory, atomically, in place of earlier ones. Raises OSError.

    The run's directory must exist.
    """
    paths.replace_text(home.peers(run), "".join(f"{address}\n" for address in addresses))


def remembered_addresses(home: paths.Home, run: str) -> tuple[str, ...]:
    """Returns at most 16 of the addresses that remember_addresses wrote last, in order; () if none can be read.

    Leaves out malformed ones, such as a line that was cut off or edited.
    """
    try:
        texts = home.peers(run).read_text(encoding="utf-8").split()
    except (OSError, UnicodeDecodeError):
        return ()
    return tuple(text for text in texts if address_problem(text) is None)[:16]


@dataclass(frozen=True, slots=True)
class KnownFiles:
    """Where this machine has what the run's manifest names and its commands need; None if nobody has said it."""

    tokenizer: Path | None = None
    base_model: Path | None = None  # its folder


def remember_files(home: paths.Home, run: str, known: KnownFiles) -> None:
    """Writes the known places to the data directory, atomically. A place that is None keeps its earlier value.

    The run's directory must exist. Raises OSError.
    """
    earlier = remembered_files(home, run)
    files = {"tokenizer": known.tokenizer or earlier.tokenizer, "base_model": known.base_model or earlier.base_model}
    written = {name: str(place.absolute()) for name, place in files.items() if place is not None}
    paths.replace_text(_files_of(home, run), json.dumps(written))


def remembered_files(home: paths.Home, run: str) -> KnownFiles:
    """Returns what remember_files wrote, as far as it can be read and is still there."""
    try:
        files = json.loads(_files_of(home, run).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        files = None
    files = files if isinstance(files, dict) else {}
    places = {name: Path(place) for name, place in files.items() if isinstance(place, str)}
    tokenizer, base_model = places.get("tokenizer"), places.get("base_model")
    return KnownFiles(
        tokenizer if tokenizer is not None and tokenizer.exists() else None,
        base_model if base_model is not None and base_model.is_dir() else None,
    )


def _files_of(home: paths.Home, run: str) -> Path:
    return home.manifest(run).with_name("files.json")


def _by_name(text: str, home: paths.Home) -> RunReference:
    roots = dict.fromkeys([home.root, *(Path(entry.root) for entry in paths.find_running_daemons())])
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


def read_proof(home: paths.Home, run: str) -> bytes:
    """Returns this machine's proof (its tickets) for a run, b"" when it has none; does not check the tickets.

    Raises LocalError if the file is not hex, DiskError if it cannot be read.
    """
    path = home.ticket(run)
    try:
        return bytes.fromhex(_read_text(path, 2 * MAX_PROOF_BYTES + 2))
    except ValueError:
        raise LocalError(
            f"{path} is damaged; remove it, and join again with the invite that carried the ticket."
        ) from None


def write_proof(home: paths.Home, run: str, proof: bytes) -> None:
    _write_private(home.ticket(run), proof.hex() + "\n")


def read_revocations(home: paths.Home, run: str) -> list[bytes]:
    """Returns the sealed revocations of a run that are on disk, oldest first; leaves out lines that are not hex.

    Raises DiskError if the file cannot be read.
    """
    lines = _read_text(home.revocations(run), MAX_REVOCATIONS * (2 * MAX_REVOCATION_BYTES + 1)).split()
    return [bytes.fromhex(line) for line in lines if _is_hex(line)]


def write_revocations(home: paths.Home, run: str, sealed: Iterable[bytes]) -> None:
    """Writes the sealed revocations of a run to disk, in place of all earlier ones. Raises DiskError."""
    _write_private(home.revocations(run), "".join(f"{data.hex()}\n" for data in sealed))


def read_amendments(home: paths.Home, run: str) -> list[bytes]:
    """Returns the sealed amendments of a run that are on disk, lowest number first; leaves out lines that are not hex.

    Raises DiskError if the file cannot be read.
    """
    lines = _read_text(home.amendments(run), MAX_KEPT_AMENDMENTS * (2 * MAX_AMENDMENT_BYTES + 1)).split()
    return [bytes.fromhex(line) for line in lines if _is_hex(line)]


def amendments_on_disk(
    homes: Iterable[paths.Home], signed: SignedManifest, now_unix: float, is_banned: IsBanned = lambda _: False
) -> AmendmentBook:
    """Returns the amendments of a run that some data directories have, as far as they are valid. Raises DiskError.

    is_banned: whether the founder has banned a delegate.
    """
    from agora.swarm.amendments import AmendmentBook

    book = AmendmentBook(signed.run_id, signed.manifest, is_banned)
    for sealed in (sealed for home in homes for sealed in read_amendments(home, signed.run_id)):
        with suppress(AmendmentError, ProtocolError):
            book.add(sealed, now_unix)
    book.choose()
    return book


def write_amendments(home: paths.Home, run: str, sealed: Iterable[bytes]) -> None:
    """Writes the sealed amendments of a run to disk, in place of all earlier ones. Raises DiskError."""
    _write_private(home.amendments(run), "".join(f"{data.hex()}\n" for data in sealed))


def read_banned(home: paths.Home) -> list[PeerId]:
    """Returns the peers that the owner has banned from this machine; leaves out lines that are not peer ids.

    Raises DiskError if the file cannot be read.
    """
    lines = _read_text(home.banned, MAX_BANNED * MAX_LINE_CHARACTERS).splitlines()
    return [PeerId(line.strip()) for line in lines if is_peer_id(line.strip())]


def add_banned(home: paths.Home, peer: str) -> PeerId:
    """Adds a peer to banned.txt unless the file has it; returns its id. Writing removes lines that are not peer ids.

    Raises InputError for what is not a peer id, LocalError if the file is full (even if it has the peer already),
    DiskError if it cannot be written.
    """
    if not is_peer_id(peer):
        raise InputError(f"{peer[:60]!r} is not a peer id; `swarm status RUN --json` lists them, such as 12D3KooW...")
    banned = read_banned(home)
    if len(banned) >= MAX_BANNED:
        raise LocalError(f"{home.banned} has {MAX_BANNED} peers; remove some lines.")
    if peer not in banned:
        _write_private(home.banned, "".join(f"{known}\n" for known in [*banned, peer]))
    return PeerId(peer)


def _is_hex(line: str) -> bool:
    try:
        bytes.fromhex(line)
    except ValueError:
        return False
    return True


def _read_text(path: Path, max_characters: int) -> str:
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            return file.read(max_characters)
    except FileNotFoundError:
        return ""
    except OSError as error:
        raise DiskError(f"Cannot read {path} ({error.strerror}); check its owner and mode.") from error


def _write_private(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.new")
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            os.fchmod(file.fileno(), 0o600)
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        raise DiskError(f"Cannot write {path} ({error.strerror}); free some space, or choose another --dir.") from error
