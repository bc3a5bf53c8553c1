"""Signs the unsigned manifest of a run that this machine founds, in the file that its user wrote."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Callable

from agora_protocol.errors import ManifestError
from agora_protocol.identity import Identity
from agora_protocol.manifest import SignedManifest, is_signed

from agora.node.runs import RunReference


def sign_draft(
    reference: RunReference, identity: Identity, on_signed: Callable[[SignedManifest], None]
) -> tuple[SignedManifest, str]:
    """Signs a draft and writes the signature into its file; returns the signed manifest and a note of what was done.

    If the file was signed meanwhile, returns the manifest in it instead; if it cannot be written, the file stays
    unsigned. on_signed: called with the returned manifest while the file is locked, so that two daemons that start from
    one draft found one run. Raises ManifestError if the file is not a manifest any more, and lets errors of `on_signed`
    through.
    """
    assert reference.draft is not None and reference.file is not None
    path = reference.file
    signed = SignedManifest.sign(reference.draft, identity)
    try:
        with path.open("r+", encoding="utf-8") as file:
            # Two daemons that start from one draft found one run. On a file system without locks, of two at once the
            # later one founds it.
            with contextlib.suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_EX)
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
    table = signed.to_toml().rpartition("\n[signed]")[2]
    lines = text.rstrip().split("\n")
    begin = next((i for i, line in enumerate(lines) if line.strip() and not line.lstrip().startswith("#")), 0)
    lines.insert(begin, f'founder = "{signed.founder}"')
    whole = "\n".join(lines) + f"\n\n[signed]{table}"
    try:
        return whole if SignedManifest.from_toml(whole, "the signed draft") == signed else signed.to_toml()
    except ManifestError:
        return signed.to_toml()
