"""Names and errors: spans, peer ids, two-word names, and every error's way over the wire and back."""

from __future__ import annotations

import hashlib

import pytest
from agora_protocol import base58, errors, ids
from agora_protocol.errors import AgoraError, InputError, ProtocolError
from agora_protocol.identity import Identity, verify
from agora_protocol.ids import PeerId, Span, microbatch_id, peer_name
from agora_protocol.limits import MAX_TEXT_BYTES
from agora_protocol.messages import Refusal
from agora_protocol.refusals import error_of_refusal, refusal_of_error


@pytest.mark.parametrize(("text", "span"), [("0-1", Span(0, 1)), ("2", Span(2, 2)), (" 10-1023 ", Span(10, 1023))])
def test_a_span_reads_what_it_writes(text: str, span: Span) -> None:
    assert Span.parse(text) == span
    assert str(span) == text.strip()
    assert Span.parse(str(span)) == span


@pytest.mark.parametrize(
    "text", ["", "-1", "1-0", "a", "1-", "0-1024", "1,2", "0-1-2", "99999", "\u0661", "0" * 10_000]
)
def test_what_is_no_span_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(InputError, match="0-1"):
        Span.parse(text)


def test_a_span_knows_its_stages() -> None:
    assert [*Span(2, 4).stages] == [2, 3, 4]
    assert 4 in Span(2, 4) and 5 not in Span(2, 4) and len(Span(2, 4)) == 3


@pytest.mark.parametrize(
    ("data", "text"),
    [(b"", ""), (b"\0", "1"), (b"\0\0a", "112g"), (b"hello world", "StV1DL6CwTryKyV"), (b"\xff" * 4, "7YXq9G")],
)
def test_base58_is_bitcoins(data: bytes, text: str) -> None:
    assert base58.encode(data) == text
    assert base58.decode(text) == data


@pytest.mark.parametrize("text", ["0", "O", "I", "l", "a b", "\u00e9"])
def test_base58_refuses_other_characters(text: str) -> None:
    with pytest.raises(ValueError, match="base58"):
        base58.decode(text)


def test_only_ed25519_peer_ids_are_peer_ids(alice: Identity) -> None:
    assert ids.is_peer_id(alice.peer) and alice.peer.startswith("12D3KooW")
    rsa = "QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"
    for other in (rsa, "", alice.peer[:-1], alice.peer + "1", "1" * 52, alice.peer[:-1] + "0", "\u00e9" * 52):
        assert not ids.is_peer_id(other)


def test_names_are_two_words_and_never_change() -> None:
    assert len({*ids._FIRST_WORDS}) == len(ids._FIRST_WORDS) == 64
    assert len({*ids._SECOND_WORDS}) == len(ids._SECOND_WORDS) == 64
    names = {peer_name(PeerId(hashlib.sha256(bytes([n])).hexdigest())) for n in range(200)}
    assert len(names) > 150 and all(name.count("-") == 1 for name in names)


def test_who_has_seen_microbatch_ids_cannot_foretell_the_next_one() -> None:
    session = bytes(range(32))
    ids = [microbatch_id(session, number) for number in range(256)]
    assert len({*ids}) == 256 and {len(made) for made in ids} == {16}
    assert not any(session[:4] in made for made in ids) and len({made[:4] for made in ids}) == 256, "nothing in common"
    assert microbatch_id(session, 7) == ids[7] != microbatch_id(session[::-1], 7), "by the origin's key and the counter"


@pytest.mark.parametrize(
    "error",
    [
        errors.Busy("no slot", 250),
        errors.NotMyStage("I hold 0-1"),
        errors.NotAdmitted("not listed"),
        errors.WrongRun("another"),
        errors.Unsupported("no"),
        errors.Refused("no"),
        errors.PeerFailed("not finite"),
        ProtocolError("bad-tensor", "wrong shape"),
    ],
)
def test_an_error_crosses_the_wire_as_itself(error: AgoraError) -> None:
    back = error_of_refusal(refusal_of_error(error))
    assert type(back) is type(error) and back.code == error.code and str(back) == str(error)
    if isinstance(error, errors.Busy):
        assert isinstance(back, errors.Busy) and back.retry_after_ms == 250


def test_unavailable_keeps_its_stage_and_reasons() -> None:
    back = error_of_refusal(refusal_of_error(errors.Unavailable(3, ["a: busy", "b: gone"])))
    assert isinstance(back, errors.Unavailable)
    assert back.stage == 3 and str(back) == "stage 3 is unavailable: a: busy; b: gone"
    assert "no live peer" in str(errors.Unavailable(0, []))


def test_a_peer_learns_no_details_of_our_own_failures() -> None:
    refusal = refusal_of_error(errors.DiskError("/home/alice/secret is full"))
    assert refusal.code == "failed" and "alice" not in refusal.text and "disk" in refusal.text
    assert isinstance(error_of_refusal(refusal), errors.PeerFailed)


def test_a_word_from_a_newer_version_is_a_failure_not_a_crash() -> None:
    back = error_of_refusal(Refusal("too-sunny", "come back at night"))
    assert isinstance(back, errors.PeerFailed) and "too-sunny" in str(back)


def test_long_texts_are_cut_at_a_character() -> None:
    refusal = refusal_of_error(errors.NotMyStage("\u00e9" * MAX_TEXT_BYTES + "\ud800"))
    assert len(refusal.text.encode()) == MAX_TEXT_BYTES


def test_every_error_has_a_word_of_its_own() -> None:
    def tree(kind: type[AgoraError]) -> list[type[AgoraError]]:
        return [kind, *(below for sub in kind.__subclasses__() for below in tree(sub))]

    ours = [kind for kind in tree(AgoraError) if kind.__module__ == errors.__name__]
    words = [kind.code for kind in ours if kind is not ProtocolError]
    assert len(words) == len(set(words))
    with pytest.raises(ValueError, match="PROTOCOL_CODES"):
        ProtocolError("no-such-word", "")


PRIME = 2**255 - 19


def _times_eight(y: int) -> tuple[int, int] | None:
    """Eight times the point of edwards25519 with this y, by its formulas; None if there is none."""
    d = -121665 * pow(121666, -1, PRIME) % PRIME
    square = (y * y - 1) * pow(d * y * y + 1, -1, PRIME) % PRIME
    x = pow(square, (PRIME + 3) // 8, PRIME)
    if x * x % PRIME != square:
        x = x * pow(2, (PRIME - 1) // 4, PRIME) % PRIME
    if x * x % PRIME != square:
        return None
    for _ in range(3):
        product = d * x * x * y * y
        x, y = 2 * x * y * pow(1 + product, -1, PRIME), (y * y + x * x) * pow(1 - product, -1, PRIME)
        x, y = x % PRIME, y % PRIME
    return x, y


def test_no_peer_has_a_key_under_which_anybody_can_sign() -> None:
    small = sorted(ids.SMALL_ORDER_KEYS)
    for key in small:
        y = int.from_bytes(key, "little")
        assert _times_eight(y % PRIME) == (0, 1), "the neutral point: its order divides 8"
        for sign in (0, 0x80):
            peer = ids.peer_id_of(key[:31] + bytes([key[31] | sign]))
            assert not ids.is_peer_id(peer) and ids.key_in_peer_id(peer) is None
            assert not verify(peer, b"anything", bytes([1]) + bytes(63))
    # Of order 8 there are four points in two values of y, of order 4 one y, of order 2 and 1 one each.
    assert len({int.from_bytes(key, "little") % PRIME for key in small}) == 5
    assert all(ids.is_peer_id(Identity.generate().peer) for _ in range(100))
