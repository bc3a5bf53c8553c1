"""A peer's Ed25519 key and its file, in libp2p's format.

The file is the protobuf `PrivateKey {1: KeyType = Ed25519 (1), 2: data = 32 private bytes || 32 public bytes}`, 68
bytes, mode 0600. It is the file that go-libp2p reads and writes, and so hivemind's daemon too.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from functools import lru_cache
from pathlib import Path
from typing import Final

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from agora_protocol.errors import IdentityError, ProtocolError
from agora_protocol.ids import PEER_ID_PREFIX, PeerId, key_in_peer_id, peer_id_of
from agora_protocol.limits import MAX_KEY_FILE_BYTES

KEY_FILE_PREFIX: Final = bytes.fromhex("08011240")  # field 1 = Ed25519; field 2 = 64 bytes
KEY_TYPES: Final = {0: "RSA", 1: "Ed25519", 2: "Secp256k1", 3: "ECDSA"}


class Identity:
    """A peer's private Ed25519 key and its peer id. It signs; it never prints or pickles the secret. Immutable."""

    __slots__ = ("_private", "peer")

    def __init__(self, private_key: bytes) -> None:
        """private_key: the raw 32 bytes, from which the peer id is computed."""
        self._private: Final = Ed25519PrivateKey.from_private_bytes(private_key)
        self.peer: Final[PeerId] = peer_id_of(self._private.public_key().public_bytes_raw())

    @classmethod
    def generate(cls) -> Identity:
        """Returns a new random identity, in memory only."""
        return cls(secrets.token_bytes(32))

    @classmethod
    def create(cls, path: Path) -> Identity:
        """Makes a new identity, writes it to `path` with mode 0600, and returns it.

        Raises IdentityError if the file exists or cannot be written.
        """
        identity = cls.generate()
        try:
            written = _write_new(Path(path), identity.key_file_bytes())
        except OSError as error:
            raise IdentityError(
                f"The identity file {path} cannot be written ({error.strerror}); choose a directory you can write."
            ) from error
        if not written:
            raise IdentityError(f"{path} exists already; use it, or move it away to make a new identity.")
        return identity

    @classmethod
    def load(cls, path: Path) -> Identity:
        """Returns the identity in a key file.

        Raises IdentityError if the file is missing, unreadable, readable by other users, damaged, or not of Ed25519.
        """
        return cls(_parse_key_file(_read_private_file(Path(path)), Path(path)))

    @classmethod
    def load_or_create(cls, path: Path) -> Identity:
        """Returns the identity in the file `path`, which it creates if missing.

        Two processes that do this at the same time get the same identity. Raises IdentityError if the file cannot be
        written, or is unreadable, readable by other users, damaged, or not of Ed25519.
        """
        if not os.path.lexists(path):
            with contextlib.suppress(IdentityError):
                return cls.create(path)
            if not os.path.lexists(path):
                return cls.create(path)  # not a race: raise why it cannot be written
        return cls.load(path)

    def sign(self, message: bytes) -> bytes:
        """Returns the 64-byte Ed25519 signature of `message`. Callers must prepend a tag for the kind of message."""
        return self._private.sign(message)

    def key_file_bytes(self) -> bytes:
        """Returns the key file's 68 bytes. They are secret."""
        return KEY_FILE_PREFIX + self._private.private_bytes_raw() + self._private.public_key().public_bytes_raw()

    def __repr__(self) -> str:
        return f"Identity({self.peer})"

    def __reduce__(self) -> str:
        # The secret is never pickled or copied.
        raise TypeError("an identity is not pickled")


def peer_id_bytes(peer: PeerId) -> bytes:
    """Returns the peer id's 38 multihash bytes. Raises ProtocolError("wrong-key") if it is not an Ed25519 peer id."""
    return PEER_ID_PREFIX + public_key_of(peer)


def public_key_of(peer: PeerId) -> bytes:
    """Returns the raw 32-byte public key inside a peer id. Raises ProtocolError("wrong-key") for any other text."""
    key = key_in_peer_id(peer)
    if key is None:
        raise ProtocolError("wrong-key", f"{peer[:64]!r} is not the peer id of an Ed25519 key.")
    return key


@lru_cache(maxsize=1024)
def _verifier(public_key: bytes) -> Ed25519PublicKey:
    # Cached, since building a key object costs more than a check.
    return Ed25519PublicKey.from_public_bytes(public_key)


def verify(peer: PeerId, message: bytes, signature: bytes) -> bool:
    """Returns whether `signature` is that of `peer` over `message`; False for malformed ids and signatures too."""
    key = key_in_peer_id(peer)
    if key is None or len(signature) != 64:
        return False
    try:
        _verifier(key).verify(signature, message)
    except InvalidSignature:
        return False
    return True


def _write_new(path: Path, data: bytes) -> bool:
    # Wholly or not at all: a draft is written, then linked to the path.
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        return _link_new(draft, path)
    finally:
        draft.unlink(missing_ok=True)


def _link_new(draft: Path, path: Path) -> bool:
    # Fails where `path` exists, so two creators cannot both win.
    try:
        os.link(draft, path)
    except FileExistsError:
        return False
    except OSError:  # a file system without hard links, as exFAT: an empty file is the winner's until it is replaced
        try:
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        except FileExistsError:
            return False
        draft.replace(path)
    return True


def _read_private_file(path: Path) -> bytes:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError as error:
        raise IdentityError(f"There is no identity file at {path}; `agora-node join` makes one.") from error
    except OSError as error:
        raise IdentityError(
            f"The identity file {path} cannot be read ({error.strerror}); check its owner and mode."
        ) from error
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise IdentityError(f"{path} is not a regular file; give the path of an identity key file.")
        if status.st_mode & 0o077:
            raise IdentityError(f"{path} can be read by other users of this machine; run `chmod 600 {path}`.")
        return os.read(descriptor, MAX_KEY_FILE_BYTES)
    except OSError as error:
        raise IdentityError(f"The identity file {path} cannot be read ({error.strerror}); check its disk.") from error
    finally:
        os.close(descriptor)


def _parse_key_file(data: bytes, path: Path) -> bytes:
    kind = KEY_TYPES.get(data[1]) if len(data) > 2 and data[0] == 0x08 else None
    if kind is not None and kind != "Ed25519":
        raise IdentityError(
            f"{path} holds a key of type {kind} where Ed25519 is needed; move it away and a new one is made."
        )
    if len(data) != 68 or not data.startswith(KEY_FILE_PREFIX):
        raise IdentityError(
            f"{path} is not a libp2p Ed25519 key file; restore it from a copy, or move it away to get a new one."
        )
    private, public = data[4:36], data[36:]
    if Ed25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw() != public:
        raise IdentityError(
            f"{path} is damaged (its two halves do not match); restore it from a copy, or move it away."
        )
    return private
