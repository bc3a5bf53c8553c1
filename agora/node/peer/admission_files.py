"""Keeps on disk what a daemon must not forget about admission: its ticket, the run's revocations, the owner's bans.

| file | what | mode |
|---|---|---|
| runs/<run id>/ticket | this machine's proof, hex | 0600 |
| runs/<run id>/revocations | the sealed revocations, hex, one per line, the newest last | 0600 |
| banned.txt | peers that the owner has banned from this machine, one per line, in every run | 0600 |
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from agora_protocol.errors import DiskError, InputError, LocalError
from agora_protocol.ids import PeerId, is_peer_id
from agora_protocol.limits import MAX_PROOF_BYTES, MAX_REVOCATION_BYTES, MAX_REVOCATIONS

from agora.node.paths import Home

MAX_BANNED = 10_000  # at most this many peers are kept in banned.txt
MAX_LINE_CHARACTERS = 64  # characters that are read of banned.txt for each of them, on average


def read_proof(home: Home, run: str) -> bytes:
    """Returns this machine's proof (its tickets) for a run, b"" when it has none; does not check the tickets.

    Raises LocalError if the file is not hex, DiskError if it cannot be read.
    """
    path = home.ticket(run)
    try:
        return bytes.fromhex(_read(path, 2 * MAX_PROOF_BYTES + 2))
    except ValueError:
        raise LocalError(
            f"{path} is damaged; remove it, and join again with the invite that carried the ticket."
        ) from None


def write_proof(home: Home, run: str, proof: bytes) -> None:
    """Writes this machine's proof for a run to disk, in place of an earlier one. Raises DiskError."""
    _write(home.ticket(run), proof.hex() + "\n")


def read_revocations(home: Home, run: str) -> list[bytes]:
    """Returns the sealed revocations of a run that are on disk, oldest first; leaves out lines that are not hex.

    Raises DiskError if the file cannot be read.
    """
    lines = _read(home.revocations(run), MAX_REVOCATIONS * (2 * MAX_REVOCATION_BYTES + 1)).split()
    return [bytes.fromhex(line) for line in lines if _is_hex(line)]


def write_revocations(home: Home, run: str, sealed: Iterable[bytes]) -> None:
    """Writes the sealed revocations of a run to disk, in place of all earlier ones. Raises DiskError."""
    _write(home.revocations(run), "".join(f"{data.hex()}\n" for data in sealed))


def read_banned(home: Home) -> list[PeerId]:
    """Returns the peers that the owner has banned from this machine; leaves out lines that are not peer ids.

    Raises DiskError if the file cannot be read.
    """
    lines = _read(home.banned, MAX_BANNED * MAX_LINE_CHARACTERS).splitlines()
    return [PeerId(line.strip()) for line in lines if is_peer_id(line.strip())]


def add_banned(home: Home, peer: str) -> PeerId:
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
        _write(home.banned, "".join(f"{known}\n" for known in [*banned, peer]))
    return PeerId(peer)


def _is_hex(line: str) -> bool:
    try:
        bytes.fromhex(line)
    except ValueError:
        return False
    return True


def _read(path: Path, max_characters: int) -> str:
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            return file.read(max_characters)
    except FileNotFoundError:
        return ""
    except OSError as error:
        raise DiskError(f"Cannot read {path} ({error.strerror}); check its owner and mode.") from error


def _write(path: Path, text: str) -> None:
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
