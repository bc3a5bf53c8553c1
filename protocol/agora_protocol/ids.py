"""The ids of peers, runs and microbatches, and spans of stages.

A peer id is libp2p's: base58 of the identity multihash of the protobuf-wrapped Ed25519 public key, so the key itself
can be read out of the id and no lookup is ever needed to check a signature.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, NewType

from agora_protocol import base58
from agora_protocol.errors import InputError
from agora_protocol.limits import MAX_STAGES

PeerId = NewType("PeerId", str)
RunId = NewType("RunId", str)
MicrobatchId = NewType("MicrobatchId", bytes)

MICROBATCH_BYTES: Final = 16
PEER_ID_PREFIX: Final = bytes.fromhex(
    "002408011220"
)  # identity multihash of 36 bytes: protobuf {1: Ed25519, 2: 32 bytes}
PEER_ID_CHARACTERS: Final = 52
# The points of order 1, 2, 4 and 8 of edwards25519 without their sign bits, in every encoding that some library takes:
# under such a key a signature of anything can be made by anybody.
SMALL_ORDER_KEYS: Final = frozenset(
    bytes.fromhex(key)
    for key in (
        "0000000000000000000000000000000000000000000000000000000000000000",
        "0100000000000000000000000000000000000000000000000000000000000000",
        "26e8958fc2b227b045c3f489f2ef98f0d5dfac05d3c63339b13802886d53fc05",
        "c7176a703d4dd84fba3c0b760d10670f2a2053fa2c39ccc64ec7fd7792ac037a",
        "ecffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f",
        "edffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f",
        "eeffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f",
    )
)
_RUN_ID: Final = re.compile(r"[0-9a-f]{64}\Z")
_SPAN: Final = re.compile(r"(\d{1,4})(?:-(\d{1,4}))?\Z", re.ASCII)


@dataclass(frozen=True, slots=True, order=True)
class Span:
    """The consecutive stages that one peer holds, `first` to `last`, both included. Immutable."""

    first: int
    last: int

    def __post_init__(self) -> None:
        if not 0 <= self.first <= self.last < MAX_STAGES:
            raise InputError(
                f"{self.first}-{self.last} is not a span of stages; write it as 2 or 0-1, from 0 to {MAX_STAGES - 1}."
            )

    @property
    def stages(self) -> range:
        return range(self.first, self.last + 1)

    def __contains__(self, stage: int) -> bool:
        return self.first <= stage <= self.last

    def __len__(self) -> int:
        return self.last - self.first + 1

    def __str__(self) -> str:
        return str(self.first) if self.first == self.last else f"{self.first}-{self.last}"

    @classmethod
    def parse(cls, text: str) -> Span:
        """Returns the span that a text such as "0-1" or "2" names. Raises InputError for any other text."""
        match = _SPAN.match(text.strip())
        if match is None:
            raise InputError(f"{text[:40]!r} is not a span of stages; write one stage as 2, or several as 0-1.")
        return cls(int(match[1]), int(match[2] or match[1]))


def microbatch_id(session: bytes, counter: int) -> MicrobatchId:
    """Returns a microbatch id: 16 bytes of the HMAC-SHA-256 of `counter`, 8 bytes big endian, under the key `session`.

    session: random bytes that the origin tells nobody. So who has seen some of its ids cannot foretell another.
    """
    return MicrobatchId(hmac.digest(session, counter.to_bytes(8, "big"), "sha256")[:16])


def is_run_id(text: str) -> bool:
    """Returns whether `text` has the form of a run id: 64 lower-case hex characters."""
    return _RUN_ID.match(text) is not None


def peer_id_of(public_key: bytes) -> PeerId:
    """Returns the libp2p peer id of a raw 32-byte Ed25519 public key. Raises ValueError for another length."""
    if len(public_key) != 32:
        raise ValueError("an Ed25519 public key has 32 bytes")
    return PeerId(base58.encode(PEER_ID_PREFIX + public_key))


@lru_cache(maxsize=4096)
def _decode_key(text: str) -> bytes | None:
    try:
        data = base58.decode(text)
    except ValueError:
        return None
    if len(data) != 38 or not data.startswith(PEER_ID_PREFIX):
        return None
    key = data[6:]
    return None if key[:31] + bytes([key[31] & 0x7F]) in SMALL_ORDER_KEYS else key


def key_in_peer_id(text: str) -> bytes | None:
    """Returns the 32-byte Ed25519 public key inside a peer id, or None when `text` is no such peer id.

    None also for the keys of small order, under which anybody can sign.
    """
    return _decode_key(text) if len(text) == PEER_ID_CHARACTERS else None


def is_peer_id(text: str) -> bool:
    """Returns whether `text` is the peer id of an Ed25519 key."""
    return key_in_peer_id(text) is not None


_FIRST: Final = (
    "amber ashen azure black blue brisk bronze calm clear cobalt copper coral crimson deep dusky eager "
    "early ember fair fleet frosty gentle gilded golden grand green grey happy hazel humble icy indigo "
    "ivory jade jolly keen kind late lilac lively lunar maroon mellow merry misty noble ochre olive "
    "opal pale plain proud quiet rapid red rosy royal ruby rustic sandy scarlet silver sunny swift"
)
_SECOND: Final = (
    "avocet badger bat bear beaver bison bittern boar buzzard cat chough condor coot crane crow curlew "
    "deer dipper dove duck dunlin eagle egret eider elk falcon finch fox gannet goose grebe gull "
    "hare hawk heron hobby hoopoe ibis jackdaw jay kestrel kite knot lark linnet lynx magpie marten "
    "merlin mole newt osprey otter owl pipit plover puffin raven robin seal shrike stork swan wren"
)
_FIRST_WORDS: Final = tuple(_FIRST.split())
_SECOND_WORDS: Final = tuple(_SECOND.split())


def peer_name(peer: PeerId) -> str:
    """Returns two words for people, such as "olive-heron", chosen by the SHA-256 of the peer id.

    They are the same everywhere, but not unique: there are 4096 pairs.
    """
    digest = hashlib.sha256(peer.encode()).digest()
    return f"{_FIRST_WORDS[digest[0] % len(_FIRST_WORDS)]}-{_SECOND_WORDS[digest[1] % len(_SECOND_WORDS)]}"
