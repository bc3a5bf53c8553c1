"""Anything valid that is written is read back equal (hypothesis)."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
from agora_protocol import base58
from agora_protocol.errors import ProtocolError
from agora_protocol.fields import REQUIRED, Structure
from agora_protocol.frames import FrameType, Prefix, decode_header, encode_frame, slice_payload
from agora_protocol.identity import Identity
from agora_protocol.ids import PeerId, RunId, Span, is_peer_id, peer_id_of
from agora_protocol.invite import Invite
from agora_protocol.limits import MAX_DEADLINE_MS, MAX_METRICS, MAX_STAGES, RECENT_STEPS
from agora_protocol.manifest import Manifest, SignedManifest, preset
from agora_protocol.messages import (
    CallProgress,
    Hello,
    Message,
    Ping,
    Process,
    Processed,
    Refusal,
)
from agora_protocol.packing import pack, pack_canonical, unpack
from agora_protocol.records import Claim, Progress, Record, open_record, record_key, seal_record
from agora_protocol.tensors import ITEM_BYTES, WireTensor
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

# For these tests alone: a profile loaded here would hold for every test that is collected after this file.
thirty_examples = settings(max_examples=30, suppress_health_check=[HealthCheck.too_slow])

# Keys of small order, such as 32 zeros, are nobody's.
PEERS = st.binary(min_size=32, max_size=32).map(peer_id_of).filter(is_peer_id)
STAGES = st.integers(0, MAX_STAGES - 1)
DEADLINES = st.integers(1, MAX_DEADLINE_MS)
UINTS = st.integers(0, 2**63 - 1)
RUNS = st.binary(min_size=32, max_size=32).map(lambda data: RunId(data.hex()))
TEXTS = st.text(st.characters(codec="utf-8"), max_size=60)
KEYS = st.binary(min_size=32, max_size=32).map(Identity)


def addresses_of(peer: PeerId) -> st.SearchStrategy[tuple[str, ...]]:
    hosts = st.one_of(
        st.ip_addresses(v=4).map(lambda it: f"/ip4/{it}"),
        st.ip_addresses(v=6).map(lambda it: f"/ip6/{it}"),
        st.from_regex(r"[a-z][a-z0-9-]{0,20}\.[a-z]{2,6}", fullmatch=True).map(lambda it: f"/dns4/{it}"),
    )
    ends = st.one_of(st.integers(0, 65535).map("/tcp/{}".format), st.integers(0, 65535).map("/udp/{}/quic-v1".format))
    return st.lists(st.builds("{}{}/p2p/{}".format, hosts, ends, st.just(peer)), max_size=3).map(tuple)


TENSORS = st.builds(
    lambda dtype, shape, fill: WireTensor(
        dtype, tuple(shape), memoryview(bytes([fill]) * (math.prod(shape) * ITEM_BYTES[dtype]))
    ),
    st.sampled_from([*ITEM_BYTES]),
    st.lists(st.integers(1, 4), max_size=6),
    st.integers(0, 255),
)
ADVANCES = st.builds(CallProgress, STAGES, PEERS, st.sampled_from(["accepted", "finished"]), UINTS)
PROCESSES = st.builds(
    Process,
    st.binary(min_size=16, max_size=16),
    PEERS,
    STAGES,
    st.sampled_from(["train", "evaluate"]),
    DEADLINES,
    st.lists(st.tuples(STAGES, PEERS), max_size=4).map(tuple),
)
PROCESSED = st.builds(
    Processed, st.floats(-1e30, 1e30), UINTS, st.floats(0, MAX_DEADLINE_MS, allow_nan=False, allow_infinity=False)
)
HELLOS = PEERS.flatmap(
    lambda peer: st.builds(
        Hello,
        st.integers(1, 65535),
        st.binary(min_size=16, max_size=16),
        RUNS.map(bytes.fromhex),
        st.sampled_from(["member", "reader"]),
        st.binary(max_size=64),
        TEXTS.filter(fits),
        addresses_of(peer),
    )
)
REFUSALS = st.builds(Refusal, st.from_regex(r"[a-z][a-z0-9-]{0,31}", fullmatch=True), TEXTS, DEADLINES, STAGES)
FRAMES = st.one_of(
    st.tuples(st.just(FrameType.HELLO), st.just(0), HELLOS, st.just([])),
    st.tuples(
        st.just(FrameType.REQUEST), st.integers(1, 2**32 - 1), PROCESSES, st.lists(TENSORS, min_size=2, max_size=2)
    ),
    st.tuples(st.just(FrameType.REQUEST), st.integers(1, 9), DEADLINES.map(Ping), st.just([])),
    st.tuples(st.just(FrameType.ANSWER), st.integers(1, 9), PROCESSED, st.lists(TENSORS, max_size=1)),
    st.tuples(st.just(FrameType.PROGRESS), st.integers(1, 9), ADVANCES, st.just([])),
    st.tuples(st.just(FrameType.REFUSAL), st.integers(1, 9), REFUSALS, st.just([])),
    st.tuples(st.just(FrameType.GOODBYE), st.just(0), st.none() | REFUSALS, st.just([])),
)


def fits(text: str) -> bool:
    return len(text.encode()) <= 64


@thirty_examples
def newer_and_older(structure: Structure) -> None:
    """A newer peer's has a field more, an older one's lacks one that has a usual value: both are read."""
    kind, fields = type(structure), unpack(pack(structure.to_fields()), 10**6)
    assert kind.from_fields({**fields, "of a newer version": ({"a": 1},)}) == structure
    for name, field in kind.FIELDS.items():
        older = {key: value for key, value in fields.items() if key != name}
        if field.default is REQUIRED:
            with pytest.raises(ProtocolError, match=f"lacks {name}"):
                kind.from_fields(older)
        else:
            try:
                usual = dataclasses.replace(structure, **{name: field.default})
            except ProtocolError:
                continue  # it does not fit the other fields, from whomever it comes
            assert kind.from_fields(older) == usual


@given(FRAMES)
def test_messages_of_newer_and_of_older_peers(frame: tuple[FrameType, int, Message | None, object]) -> None:
    if frame[2] is not None:
        newer_and_older(frame[2])


@given(KEYS.flatmap(lambda key: records_of(key)))
def test_records_of_newer_and_of_older_peers(record: Record) -> None:
    newer_and_older(record)


@given(FRAMES)
def test_frames(frame: tuple[FrameType, int, Message | None, list[WireTensor]]) -> None:
    kind, call, message, tensors = frame
    data = b"".join(encode_frame(kind, call, message, tensors))
    prefix = Prefix.parse(data[:16])
    assert prefix.to_bytes() == data[:16] and (prefix.type, prefix.call) == (kind, call)
    got, specs = decode_header(prefix, data[16 : 16 + prefix.header_bytes])
    assert got == message and slice_payload(specs, data[16 + prefix.header_bytes :]) == tensors


SPANS = st.tuples(STAGES, st.integers(0, 20)).map(lambda it: Span(it[0], min(it[0] + it[1], MAX_STAGES - 1)))


ACCOUNTS = st.tuples(
    st.integers(2**62, 2**63 - 1),
    st.integers(0, 2**61),
    st.integers(0, 2**61),
    st.integers(0, RECENT_STEPS),
    UINTS,
    st.integers(0, RECENT_STEPS),
    UINTS,
    st.floats(0, 1e12),
)
PRINTABLE_TEXTS = st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=256)


def records_of(key: Identity) -> st.SearchStrategy[Record]:
    states = st.sampled_from(["joining", "serving", "leaving"])
    claims = st.builds(Claim, st.just(key.peer), SPANS, UINTS, addresses_of(key.peer), states, st.floats(0, 1e9))
    progress = SPANS.flatmap(
        lambda span: st.builds(
            Progress,
            st.just(key.peer),
            st.just(span),
            UINTS,
            st.lists(UINTS, min_size=len(span), max_size=len(span)).map(tuple),
            st.floats(0, 1e12),
            st.none() | st.floats(-1e30, 1e30),
            UINTS,
            UINTS,
            st.lists(ACCOUNTS, min_size=len(span), max_size=len(span)).map(tuple) | st.just(()),
            st.lists(st.floats(-1e30, 1e30), max_size=MAX_METRICS).map(tuple),
            PRINTABLE_TEXTS,
            PRINTABLE_TEXTS,
        )
    )
    return claims | progress


@thirty_examples
@given(
    KEYS.flatmap(lambda key: st.tuples(st.just(key), records_of(key))), RUNS, st.floats(1, 1e11), st.floats(0.1, 600)
)
def test_records(signed: tuple[Identity, Record], run: RunId, now: float, lifetime: float) -> None:
    identity, record = signed
    data = seal_record(record, run, identity, now + lifetime)
    for stage in (record.span.first, record.span.last):
        how = {"run": run, "key": record_key(run, type(record), stage), "subkey_peer": identity.peer, "now_unix": now}
        assert open_record(data, **how) == record


@thirty_examples
@given(RUNS, PEERS.flatmap(addresses_of).filter(bool), TEXTS.filter(lambda it: fits(it) and it.isprintable()))
def test_invites(run: RunId, addresses: tuple[str, ...], name: str) -> None:
    invite = Invite(run, addresses, name)
    assert Invite.parse(str(invite)) == invite


@thirty_examples
@given(st.binary(max_size=40))
def test_base58(data: bytes) -> None:
    assert base58.decode(base58.encode(data)) == data


@thirty_examples
@given(SPANS)
def test_spans(span: Span) -> None:
    assert Span.parse(str(span)) == span


PLAIN: Any = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | TEXTS
    | st.binary(max_size=40),
    lambda inner: st.lists(inner, max_size=5).map(tuple) | st.dictionaries(TEXTS, inner, max_size=5),
    max_leaves=12,
)


@thirty_examples
@given(PLAIN)
def test_msgpack(value: object) -> None:
    assert unpack(pack(value), 100_000) == value
    assert unpack(pack_canonical(value), 100_000) == value
    assert pack_canonical(unpack(pack_canonical(value), 100_000)) == pack_canonical(value)


MANIFESTS = st.builds(
    lambda heads, groups, size, layers, count, batch, context, steps, rate, name, corpus: preset(
        "tiny",
        name=name,
        model={
            "heads": heads * groups,
            "key_value_heads": heads,
            "width": heads * groups * size * 2,
            "layers": layers + count - 1,
            "context": context,
        },
        stages={"count": count},
        schedule={"microbatch": batch},
        optimizer={"target_tokens": steps * batch * context, "learning_rate": rate},
        data={"corpus": corpus},
    ),
    st.integers(1, 4),
    st.integers(1, 4),
    st.integers(1, 16),
    st.integers(1, 20),
    st.integers(1, 8),
    st.integers(1, 16),
    st.integers(1, 256),
    st.integers(1, 50),
    st.floats(1e-9, 100),
    st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,20}", fullmatch=True),
    st.lists(TEXTS.filter(bool), min_size=1, max_size=3),
)


@thirty_examples
@given(MANIFESTS, KEYS)
def test_manifests(manifest: Manifest, key: Identity) -> None:
    signed = SignedManifest.sign(manifest, key)
    assert SignedManifest.from_bytes(signed.to_bytes(), signed.run_id) == signed
    assert SignedManifest.from_toml(signed.to_toml()) == signed
    layers = [layer for stage in range(manifest.stage_count) for layer in manifest.layers_of(stage)]
    assert layers == [*range(manifest.model.layers)] and all(
        len(manifest.layers_of(k)) for k in range(manifest.stage_count)
    )
