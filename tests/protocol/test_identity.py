"""Identity files: libp2p's own format, private, never overwritten, and refused with what to do about it."""

from __future__ import annotations

import errno
import importlib.util
import os
import pickle
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from agora_protocol.errors import IdentityError, ProtocolError
from agora_protocol.identity import Identity, peer_id_bytes, public_key_of, verify
from agora_protocol.ids import PeerId

RSA_KEY = bytes.fromhex("080012") + b"\x40" + bytes(64)


def test_a_key_file_is_libp2ps_and_private(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "identity.key"
    made = Identity.create(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.read_bytes() == made.key_file_bytes() and len(made.key_file_bytes()) == 68
    assert Identity.load(path).peer == made.peer == Identity.load_or_create(path).peer
    assert [it.name for it in path.parent.iterdir()] == ["identity.key"]


def test_an_existing_identity_is_never_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "identity.key"
    first = Identity.create(path)
    with pytest.raises(IdentityError, match="exists already"):
        Identity.create(path)
    assert Identity.load(path).peer == first.peer


def test_creators_at_the_same_moment_end_with_one_identity(tmp_path: Path) -> None:
    for turn in range(5):
        path = tmp_path / f"{turn}.key"
        with ThreadPoolExecutor(8) as pool:
            peers = {it.peer for it in pool.map(lambda _: Identity.load_or_create(path), range(8))}
        assert peers == {Identity.load(path).peer}


def test_on_a_file_system_without_hard_links_there_is_one_identity_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on exFAT, and in folders that a virtual machine shares."""

    def refuse(*_: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    path = tmp_path / "identity.key"
    made = Identity.create(path)
    with pytest.raises(IdentityError, match="exists already"):
        Identity.create(path)
    assert Identity.load_or_create(path).peer == made.peer
    assert [it.name for it in tmp_path.iterdir()] == ["identity.key"]


@pytest.mark.parametrize(
    ("data", "mode", "what"),
    [
        (b"", 0o600, "not a libp2p Ed25519 key file"),
        (b"\x08", 0o600, "not a libp2p Ed25519 key file"),
        (RSA_KEY, 0o600, "type RSA where Ed25519 is needed; move it away"),
        (b"\x08\x02\x12\x20" + bytes(32), 0o600, "type Secp256k1"),
        (bytes.fromhex("08011240") + bytes(64), 0o600, "two halves do not match"),
        (bytes(100_000), 0o600, "not a libp2p Ed25519 key file"),
        (bytes(68), 0o644, "chmod 600"),
        (bytes(68), 0o660, "chmod 600"),
    ],
)
def test_a_bad_key_file_is_refused_with_what_to_do(tmp_path: Path, data: bytes, mode: int, what: str) -> None:
    path = tmp_path / "identity.key"
    path.write_bytes(data)
    path.chmod(mode)
    for read in (Identity.load, Identity.load_or_create):
        with pytest.raises(IdentityError, match=what) as caught:
            read(path)
        assert str(path) in str(caught.value)
    assert path.read_bytes() == data


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(IdentityError, match="no identity file"):
        Identity.load(tmp_path / "none")
    with pytest.raises(IdentityError, match="not a regular file"):
        Identity.load(tmp_path)
    os.mkfifo(tmp_path / "pipe", 0o600)
    with pytest.raises(IdentityError, match="not a regular file"):
        Identity.load(tmp_path / "pipe")
    (tmp_path / "file").touch()
    for method in (Identity.create, Identity.load_or_create):
        with pytest.raises(IdentityError, match="cannot be written"):
            method(tmp_path / "file" / "below")


def test_signatures_bind_key_and_message(alice: Identity, bob: Identity) -> None:
    signature = alice.sign(b"message")
    assert verify(alice.peer, b"message", signature)
    assert not verify(alice.peer, b"massage", signature)
    assert not verify(bob.peer, b"message", signature)
    for bad in (b"", signature[:-1], signature + b"\0", bytes(64), b"\xff" * 64):
        assert not verify(alice.peer, b"message", bad)
    assert not verify(PeerId("nobody"), b"message", signature)


def test_the_public_key_is_in_the_peer_id(alice: Identity) -> None:
    assert public_key_of(alice.peer) == alice.key_file_bytes()[36:]
    assert peer_id_bytes(alice.peer) == bytes.fromhex("002408011220") + public_key_of(alice.peer)
    with pytest.raises(ProtocolError, match="not the peer id") as caught:
        public_key_of(PeerId("x" * 1_000_000))
    assert caught.value.code == "wrong-key" and len(str(caught.value)) < 200


def test_the_secret_is_neither_printed_nor_pickled(alice: Identity) -> None:
    assert repr(alice) == f"Identity({alice.peer})"
    with pytest.raises(TypeError, match="not pickled"):
        pickle.dumps(alice)


PY_LIBP2P = """
import sys
from libp2p.crypto.ed25519 import Ed25519PrivateKey
from libp2p.crypto.pb import crypto_pb2
from libp2p.peer.id import ID
key = crypto_pb2.PrivateKey.FromString(open(sys.argv[1], "rb").read())
assert key.key_type == crypto_pb2.KeyType.Ed25519, key
private = Ed25519PrivateKey.from_bytes(key.data[:32])
assert private.get_public_key().to_bytes() == key.data[32:]
print(ID.from_pubkey(private.get_public_key()).to_base58())
"""


def test_py_libp2p_derives_the_same_peer_id(tmp_path: Path) -> None:
    made = Identity.create(tmp_path / "identity.key")
    command = [sys.executable, "-c", PY_LIBP2P, str(tmp_path / "identity.key")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.strip() == made.peer, done.stderr


def test_go_libp2p_derives_the_same_peer_id(tmp_path: Path) -> None:
    made = Identity.create(tmp_path / "identity.key")
    found = importlib.util.find_spec("hivemind")  # only to find its p2pd; importing it takes seconds
    assert found is not None and found.origin is not None
    daemon = Path(found.origin).parent / "hivemind_cli" / "p2pd"
    socket, key = f"/unix{tmp_path}/p2pd.sock", tmp_path / "identity.key"
    command = [str(daemon), "-listen", socket, "-id", str(key), "-hostAddrs", "/ip4/127.0.0.1/tcp/0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            assert process.stdout is not None
            lines = [process.stdout.readline() for _ in range(2)]
        finally:
            process.kill()
    assert f"Peer ID: {made.peer}\n" in lines
