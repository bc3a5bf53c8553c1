"""Reads and writes what this machine keeps on disk of each run: manifest, addresses, ticket, revocations, amendments,
evaluations.

Also the owner's bans, which hold in every run.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from agora_protocol.addresses import address_problem
from agora_protocol.errors import AmendmentError, DiskError, InputError, LocalError, ProtocolError
from agora_protocol.ids import PeerId, is_peer_id
from agora_protocol.limits import (
    MAX_AMENDMENT_BYTES,
    MAX_EVALUATION_BYTES,
    MAX_KEPT_AMENDMENTS,
    MAX_KEPT_EVALUATIONS,
    MAX_PROOF_BYTES,
    MAX_REVOCATION_BYTES,
    MAX_REVOCATIONS,
)

from agora.node import paths

if TYPE_CHECKING:
    from agora_protocol.manifest import Manifest, SignedManifest

    from agora.swarm.amendments import AmendmentBook, IsBanned


MAX_BANNED = 10_000  # at most this many peers are kept in banned.txt
MAX_LINE_CHARACTERS = 64  # for each peer that banned.txt may have, this many of its characters are read


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
    """Where this machine has what the run's manifest names and its commands need; None if unknown."""

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
    return _read_sealed(home.revocations(run), MAX_REVOCATIONS, MAX_REVOCATION_BYTES)


def write_revocations(home: paths.Home, run: str, sealed: Iterable[bytes]) -> None:
    """Writes the sealed revocations of a run to disk, in place of all earlier ones. Raises DiskError."""
    _write_sealed(home.revocations(run), sealed)


def read_amendments(home: paths.Home, run: str) -> list[bytes]:
    """Returns the sealed amendments of a run that are on disk, lowest number first; leaves out lines that are not hex.

    Raises DiskError if the file cannot be read.
    """
    return _read_sealed(home.amendments(run), MAX_KEPT_AMENDMENTS, MAX_AMENDMENT_BYTES)


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


def manifest_on_disk(homes: Iterable[paths.Home], signed: SignedManifest, now_unix: float) -> Manifest:
    """Returns the manifest as the last amendment has it that some data directories know: what the run comes to.

    For those who do not know the run's step. Raises DiskError.
    """
    from agora.core.live_manifest import LiveManifest

    return LiveManifest(signed.manifest, amendments_on_disk(homes, signed, now_unix).chain).last


def write_amendments(home: paths.Home, run: str, sealed: Iterable[bytes]) -> None:
    """Writes the sealed amendments of a run to disk, in place of all earlier ones. Raises DiskError."""
    _write_sealed(home.amendments(run), sealed)


def read_evaluations(home: paths.Home, run: str) -> list[bytes]:
    """Returns the sealed results of evaluations that are on disk; leaves out lines that are not hex.

    Raises DiskError if the file cannot be read.
    """
    return _read_sealed(home.evaluations(run), MAX_KEPT_EVALUATIONS, MAX_EVALUATION_BYTES)


def write_evaluations(home: paths.Home, run: str, sealed: Iterable[bytes]) -> None:
    """Writes the sealed results of evaluations to disk, in place of all earlier ones. Raises DiskError."""
    _write_sealed(home.evaluations(run), sealed)


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


def _read_sealed(path: Path, count: int, most_bytes: int) -> list[bytes]:
    lines = _read_text(path, count * (2 * most_bytes + 1)).split()
    return [bytes.fromhex(line) for line in lines if _is_hex(line)]


def _write_sealed(path: Path, sealed: Iterable[bytes]) -> None:
    _write_private(path, "".join(f"{data.hex()}\n" for data in sealed))


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
