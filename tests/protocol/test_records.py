"""Records: whose they are, for which run, for how long; everything else is refused with its word."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgpack
import pytest
from agora_protocol.directory_shards import HASHES, DirectoryShard, shard_bits, shard_hash
from agora_protocol.errors import ProtocolError
from agora_protocol.identity import Identity
from agora_protocol.ids import PeerId, RunId, Span
from agora_protocol.limits import (
    CLOCK_TOLERANCE_S,
    MAX_ADDRESS_BYTES,
    MAX_ADDRESSES,
    MAX_METRICS,
    MAX_RECORD_BYTES,
    MAX_RECORD_LIFETIME_S,
    MAX_SHARD_BITS,
    RECENT_STEPS,
)
from agora_protocol.records import (
    RECORD_TAG,
    RECORDS,
    Claim,
    Progress,
    Record,
    open_record,
    read_unverified,
    record_key,
    seal_record,
)

RUN = RunId("ab" * 32)
NOW = 1_790_000_000.0
ALICE = Identity(bytes(range(32)))
BOB = Identity(bytes(range(1, 33)))
CLAIM = Claim(ALICE.peer, Span(1, 3), 5, (f"/ip4/1.2.3.4/tcp/5/p2p/{ALICE.peer}",), "serving", 2.5)
FULL = (640, 64, 544, RECENT_STEPS, 256, RECENT_STEPS, 1000, 0.25)
PROGRESS = Progress(ALICE.peer, Span(1, 2), 5, (7, 8), 100.0, None, 2, 30)


def opened(data: bytes, **changes: Any) -> Record:
    how: dict[str, Any] = {"run": RUN, "key": record_key(RUN, "claim", 2), "subkey_peer": ALICE.peer, "now_unix": NOW}
    return open_record(data, **(how | changes))


def sealed(payload: Any, signer: Identity = ALICE, run: str = RUN) -> bytes:
    data = bytes(msgpack.packb(payload))
    return bytes(msgpack.packb([data, signer.sign(RECORD_TAG + bytes.fromhex(run) + data)]))


def claim_with(**changes: Any) -> list[Any]:
    return [1, 1, NOW + 60, {**CLAIM.to_fields(), **changes}]


def assert_refused(code: str, data: bytes, **changes: Any) -> None:
    with pytest.raises(ProtocolError) as caught:
        opened(data, **changes)
    assert caught.value.code == code, str(caught.value)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_claim_is_found_under_each_of_its_stages(stage: int) -> None:
    data = seal_record(CLAIM, RUN, ALICE, NOW + 60)
    assert opened(data, key=f"{RUN}/claim/{stage}") == CLAIM
    assert read_unverified(data) == (CLAIM, NOW + 60)


def test_a_progress_comes_back_with_its_unknown_loss() -> None:
    data = seal_record(PROGRESS, RUN, ALICE, NOW + 60)
    assert opened(data, key=record_key(RUN, Progress, 1)) == PROGRESS


def test_a_record_that_is_not_its_subkeys_is_refused() -> None:
    assert_refused("wrong-key", seal_record(CLAIM, RUN, ALICE, NOW + 60), subkey_peer=BOB.peer)
    assert_refused("wrong-key", seal_record(CLAIM, RUN, ALICE, NOW + 60), subkey_peer=PeerId("nobody"))
    assert_refused("bad-signature", sealed(claim_with(), BOB))
    with pytest.raises(ProtocolError, match="only be sealed by the peer") as caught:
        seal_record(CLAIM, RUN, BOB, NOW + 60)
    assert caught.value.code == "wrong-key"


def test_a_record_of_another_run_is_refused() -> None:
    other = RunId("cd" * 32)
    assert_refused("bad-signature", seal_record(CLAIM, other, ALICE, NOW + 60))
    assert_refused("wrong-run", seal_record(CLAIM, RUN, ALICE, NOW + 60), key=record_key(other, "claim", 2))


def test_an_unsigned_or_changed_record_is_refused() -> None:
    data = seal_record(CLAIM, RUN, ALICE, NOW + 60)
    payload = msgpack.unpackb(data)[0]
    for signature in (b"", bytes(63), bytes(64), bytes(65)):
        assert_refused("bad-signature", msgpack.packb([payload, signature]))
    for at in range(len(data)):
        changed = bytearray(data)
        changed[at] ^= 0x01
        with pytest.raises(ProtocolError):
            opened(bytes(changed))


def test_time() -> None:
    assert opened(seal_record(CLAIM, RUN, ALICE, NOW + 0.001)) == CLAIM
    assert_refused("expired", seal_record(CLAIM, RUN, ALICE, NOW))
    assert_refused("expired", seal_record(CLAIM, RUN, ALICE, NOW - 1e6))
    longest = NOW + MAX_RECORD_LIFETIME_S + CLOCK_TOLERANCE_S
    assert opened(seal_record(CLAIM, RUN, ALICE, longest)) == CLAIM
    assert_refused("lives-too-long", seal_record(CLAIM, RUN, ALICE, longest + 1))
    for expiry in (float("nan"), float("inf"), -1.0, 0.0, 1e12, int(NOW + 60), "soon", None, True):
        assert_refused("bad-record", sealed([1, 1, expiry, CLAIM.to_fields()]))


@pytest.mark.parametrize(
    ("payload", "says"),
    [
        (None, "list of 1, kind"),
        ([], "list of 1, kind"),
        ([2, 1, NOW + 60, {}], "list of 1, kind"),
        ([True, 1, NOW + 60, {}], "list of 1, kind"),
        ([1, 9, NOW + 60, {}], "9 is not the kind"),
        ([1, True, NOW + 60, {}], "True is not the kind"),
        ([1, 1, NOW + 60, []], "must be a map"),
        ([1, 1, NOW + 60, {}], "Claim lacks addresses"),
        (claim_with(span=[3, 1]), "must be \\[first, last\\]"),
        (claim_with(span=[1, 2, 3]), "must be \\[first, last\\]"),
        (claim_with(span=[0, 1024]), "must be \\[first, last\\]"),
        (claim_with(span=[False, 3]), "must be \\[first, last\\]"),
        (claim_with(span="1-3"), "must be \\[first, last\\]"),
        (claim_with(span=[0, 256]), "at most 256 stages"),
        (claim_with(span=[3, 3]), "does not belong"),
        (claim_with(addresses=[f"/ip4/1.2.3.4/tcp/5/p2p/{BOB.peer}"]), "address of another peer"),
        (claim_with(addresses=["/unix/run/x"]), "'unix' is not an address part"),
        (claim_with(addresses=[f"/p2p/{ALICE.peer}"] * 17), "at most 16"),
        (claim_with(state="dead"), "one of joining"),
        (claim_with(capacity=float("inf")), "finite float"),
        (claim_with(capacity=1), "finite float"),
        (claim_with(incarnation=-1), "from 0 to"),
        (claim_with(peer="me"), "peer id"),
    ],
)
def test_a_malformed_record_is_refused(payload: Any, says: str) -> None:
    with pytest.raises(ProtocolError, match=says) as caught:
        opened(sealed(payload))
    assert caught.value.code == "bad-record"


def test_steps_go_with_the_span() -> None:
    with pytest.raises(ProtocolError, match="has 1 steps for a span of 2 stages"):
        Progress(ALICE.peer, Span(1, 2), 5, (7,), 1.0, 2.0, 0, 0)
    assert_refused("bad-record", seal_record(PROGRESS, RUN, ALICE, NOW + 60))  # under a claim's key


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"accounts": (FULL,)}, "has 1 accounts for a span of 2 stages"),
        ({"accounts": (FULL, (10, 4, 7, 0, 0, 0, 0, 0.0))}, "counts 11 tokens of 10 that were computed"),
        ({"accounts": (FULL, (*FULL[:3], RECENT_STEPS + 1, 0, 0, 0, 0.0))}, "must be from 0 to 16"),
        ({"accounts": (FULL, FULL[:7])}, "must be a list of 8"),
        ({"note": "two\nlines"}, "must match"),
        ({"waits_for": "\x1b[2J"}, "must match"),
        ({"note": "n" * 1025}, "is longer than 1024 bytes"),
    ],
)
def test_accounts_that_cannot_be_and_texts_that_move_a_cursor_are_refused(fields: Any, says: str) -> None:
    replace(PROGRESS, accounts=(FULL, FULL), note="fine")
    with pytest.raises(ProtocolError, match=says):
        replace(PROGRESS, **fields)


@pytest.mark.parametrize(
    ("key", "code"),
    [
        ("", "bad-record"),
        (RUN, "bad-record"),
        (f"{RUN}/claim", "bad-record"),
        (f"{RUN}/claim/2/3", "bad-record"),
        (f"{RUN}/strike/2", "bad-record"),
        (f"{RUN}/claim/x", "bad-record"),
        (f"{RUN}/claim/-2", "bad-record"),
        (f"{RUN}/claim/02", "bad-record"),
        (f"{RUN}/claim/\u0662", "bad-record"),
        (f"{RUN}/claim/1024", "bad-record"),
        (f"{RUN}/claim/2/", "bad-record"),
        (f"{RUN}/claim/2/2", "bad-record"),
        (f"{RUN}/claim/2/{'0' * 17}", "bad-record"),
        (f"{RUN}/claim/2/0/1", "bad-record"),
        (f"{RUN.upper()}/claim/2", "wrong-run"),
        ("/claim/2", "wrong-run"),
    ],
)
def test_a_key_that_is_no_records_is_refused(key: str, code: str) -> None:
    assert_refused(code, seal_record(CLAIM, RUN, ALICE, NOW + 60), key=key)


def test_a_record_belongs_under_the_keys_of_the_shards_that_its_peers_hash_is_in_and_of_no_other() -> None:
    data, bits = seal_record(CLAIM, RUN, ALICE, NOW + 60), shard_bits(shard_hash(RUN, ALICE.peer), MAX_SHARD_BITS)
    for depth in range(MAX_SHARD_BITS + 1):
        assert opened(data, key=record_key(RUN, Claim, 2, bits[:depth])) == CLAIM
    for depth in range(MAX_SHARD_BITS):
        sibling = bits[:depth] + str(1 - int(bits[depth]))
        assert_refused("bad-record", data, key=record_key(RUN, Claim, 2, sibling))


def test_a_peers_hash_is_another_in_each_run() -> None:
    other = RunId("cd" * 32)
    assert 0 <= shard_hash(RUN, ALICE.peer) < HASHES and shard_hash(RUN, ALICE.peer) != shard_hash(other, ALICE.peer)
    assert DirectoryShard(0, "1").first_hash == HASHES // 2 and DirectoryShard(0).first_hash == 0


def test_keys_are_made_for_known_records_only() -> None:
    assert record_key(RUN, Claim, 3) == f"{RUN}/claim/3" == record_key(RUN, "claim", 3)
    with pytest.raises(ValueError, match="use one of claim, progress"):
        record_key(RUN, "clam", 3)


@pytest.mark.parametrize(
    "data",
    [b"", b"\xc0", b"\x90", b"\x92\xc4\x00\xc0", b"\x93\xc4\x00\xc4\x00\xc0", msgpack.packb(["a", "b"]), b"\x92" * 50],
)
def test_bytes_that_are_no_record_are_refused(data: bytes) -> None:
    assert_refused("bad-record", data)
    with pytest.raises(ProtocolError):
        read_unverified(data)


def test_size() -> None:
    assert_refused("too-large", bytes(MAX_RECORD_BYTES + 1))
    address = f"/dns4/{'a' * 63}.{'b' * 63}/tcp/65535/p2p/{ALICE.peer}"
    address = address.replace("/tcp/", "." + "c" * (MAX_ADDRESS_BYTES - len(address) - 1) + "/tcp/")
    assert len(address) == MAX_ADDRESS_BYTES
    fullest = Claim(ALICE.peer, Span(0, 255), 2**63 - 1, (address,) * MAX_ADDRESSES, "joining", 1e9)
    key = record_key(RUN, "claim", 255)
    assert opened(seal_record(fullest, RUN, ALICE, NOW + 60), key=key) == fullest
    most = 2**63 - 1
    account = (most, 0, most, RECENT_STEPS, most, RECENT_STEPS, most, 1e12)
    accounts, metrics = (account,) * 256, (-1e30,) * MAX_METRICS
    steps, texts = (most,) * 256, ("w" * 256, "n" * 1024)
    longest = Progress(ALICE.peer, Span(0, 255), most, steps, 1e12, 1e30, most, most, accounts, metrics, *texts)
    key = record_key(RUN, "progress", 0)
    assert opened(seal_record(longest, RUN, ALICE, NOW + 60), key=key) == longest


def test_every_record_and_field_is_documented() -> None:
    for kind in RECORDS.values():
        assert kind.__doc__ and all(field.doc for field in kind.FIELDS.values()), kind
        assert {"peer", "span"} <= kind.FIELDS.keys()
