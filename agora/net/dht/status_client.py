"""The status client: asks a peer of a run for its status or amendments, or gives it a revocation or an amendment.

It needs no daemon, no torch and no hivemind.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import trio
from agora_protocol import messages, refusals
from agora_protocol.errors import AgoraError, NotAdmitted, ProtocolError, WrongRun
from agora_protocol.frames import FrameLimits, FrameType, Prefix, decode_header, encode_frame
from agora_protocol.identity import Identity
from agora_protocol.ids import PeerId, RunId
from agora_protocol.limits import PREFIX_BYTES, PROTOCOL_NAME, PROTOCOL_VERSION, SALT_BYTES
from agora_protocol.messages import Message
from agora_protocol.tickets import READER, run_token
from libp2p import new_host
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.custom_types import TProtocol
from libp2p.peer.id import ID
from libp2p.peer.peerinfo import PeerInfo
from multiaddr import Multiaddr

from agora.net.p2pd.addresses import addresses_by_peer

TIMEOUT_S: Final = 10.0  # maximum duration of one query to the swarm, in seconds
# Seconds after which the next peer is tried in parallel to those that have not answered yet.
STAGGER_INTERVAL_S: Final = 0.4
SOFTWARE: Final = "agora light client"  # the `software` in its HELLO
# Codes of refusals: where all peers that answered gave the same one of them, it is the error.
ONE_CAUSE: Final = frozenset({WrongRun.code, NotAdmitted.code, "wrong-version"})
LIMITS: Final = FrameLimits(max_payload_bytes=0)  # the answers to this client's requests have no payload


class Unreachable(AgoraError):
    """Raised by the status client when no peer answered; the text has each peer's reason, and what to do."""

    code = "unreachable"


@dataclass(frozen=True, slots=True)
class Credentials:
    """The requester: an identity, and the tickets (`proof`) that let it read or ban; b"" for a stranger."""

    identity: Identity
    proof: bytes = b""


def fetch_status(
    addresses: Sequence[str], run: RunId, timeout_s: float = TIMEOUT_S, credentials: Credentials | None = None
) -> dict[str, Any]:
    """Asks the peers at `addresses` for a run's status (`swarm status --json`); returns the first answer, decoded.

    addresses: multiaddrs with /p2p/PEER. credentials: None asks as a stranger, by a new identity. Blocks for at most
    about `timeout_s`. Raises InputError for a malformed address, WrongRun when all peers that answered train another
    run, NotAdmitted when all of them refused to answer, Unreachable when none answered, ProtocolError for an answer
    without a status.
    """
    return _decode_status(_ask_run(addresses, run, messages.GetStatus(), timeout_s, credentials))


def share_revocations(
    addresses: Sequence[str],
    run: RunId,
    sealed: Sequence[bytes],
    credentials: Credentials,
    timeout_s: float = TIMEOUT_S,
) -> messages.TookRevocations:
    """Sends sealed revocations to peers of a run until one answers, and returns its answer.

    Several peers may get them: the next one is asked while those before have not answered. Blocks for at most about
    `timeout_s`. Raises InputError for a malformed address, WrongRun or NotAdmitted when all peers that answered refused
    for that reason, Unreachable when none answered, ProtocolError for another kind of answer.
    """
    answer = _ask_run(addresses, run, messages.ShareRevocations(tuple(sealed)), timeout_s, credentials)
    if not isinstance(answer, messages.TookRevocations):
        raise ProtocolError("bad-message", "The peer sent an unexpected message as the answer to a revocation.")
    return answer


def share_amendments(
    addresses: Sequence[str],
    run: RunId,
    sealed: Sequence[bytes],
    credentials: Credentials,
    timeout_s: float = TIMEOUT_S,
) -> messages.TookAmendments:
    """Sends sealed amendments to peers of a run until one answers, and returns its answer, as share_revocations."""
    answer = _ask_run(addresses, run, messages.ShareAmendments(tuple(sealed)), timeout_s, credentials)
    if not isinstance(answer, messages.TookAmendments):
        raise ProtocolError("bad-message", "The peer sent an unexpected message as the answer to an amendment.")
    return answer


def fetch_amendments(
    addresses: Sequence[str], run: RunId, timeout_s: float = TIMEOUT_S, credentials: Credentials | None = None
) -> tuple[bytes, ...]:
    """Asks the peers at `addresses` for the run's sealed amendments; returns those of the first answer.

    Nothing of them is verified. Else as fetch_status.
    """
    answer = _ask_run(addresses, run, messages.GetAmendments(bytes(32)), timeout_s, credentials)
    if not isinstance(answer, messages.KnownAmendments):
        raise ProtocolError("bad-message", "The peer sent an unexpected message in place of its amendments.")
    return answer.amendments


def _ask_run(
    addresses: Sequence[str], run: RunId, request: Message, timeout_s: float, credentials: Credentials | None
) -> Message:
    logging.getLogger("libp2p").setLevel(logging.CRITICAL)
    requester = credentials or Credentials(Identity.generate())
    answer: Message = trio.run(_ask_all, addresses_by_peer(addresses), _Query(run, request, requester), timeout_s)
    return answer


# The request that is sent to each peer, the run that it is about, and the requester's credentials.
@dataclass(frozen=True, slots=True)
class _Query:
    run: RunId
    request: Message
    requester: Credentials

    def hello_to(self, peer: PeerId) -> messages.Hello:
        me = self.requester.identity.peer
        salt = os.urandom(SALT_BYTES)
        token = run_token(self.run, salt, me, peer)
        return messages.Hello(PROTOCOL_VERSION, salt, token, READER, self.requester.proof, SOFTWARE, ())

    def is_of_run(self, hello: messages.Hello, peer: PeerId) -> bool:
        return hello.run == run_token(self.run, hello.salt, peer, self.requester.identity.peer)


async def _ask_all(by_peer: dict[PeerId, list[str]], query: _Query, timeout_s: float) -> Message:
    answers: list[Message] = []
    errors: list[AgoraError] = []
    reasons: dict[PeerId, str] = dict.fromkeys(by_peer, "no answer in time")
    with trio.move_on_after(timeout_s):
        host = new_host(key_pair=create_new_key_pair(query.requester.identity.key_file_bytes()[4:36]))
        async with host.run(listen_addrs=[]), trio.open_nursery() as nursery:

            async def ask_one_peer(peer: PeerId, addresses: list[str], done: trio.Event) -> None:
                try:
                    answers.append(await _ask(host, peer, addresses, query))
                    nursery.cancel_scope.cancel()
                except AgoraError as error:
                    errors.append(error)
                    reasons[peer] = str(error)
                except Exception as error:  # py-libp2p raises many kinds; each only means that this peer cannot answer
                    reasons[peer] = f"{type(error).__name__}: {error}"[:200].rstrip(": ")
                done.set()

            for peer, addresses in by_peer.items():
                done = trio.Event()
                nursery.start_soon(ask_one_peer, peer, addresses, done)
                with trio.move_on_after(STAGGER_INTERVAL_S):
                    await done.wait()
    if answers:
        return answers[0]
    if errors and {error.code for error in errors} <= {errors[0].code} & ONE_CAUSE:
        raise errors[0]
    tried = "; ".join(f"{peer}: {why}" for peer, why in reasons.items()) or "no addresses are known"
    raise Unreachable(f"No peer of the run answered ({tried}). Check the invite, or ask for a new one.")


async def _ask(host: Any, peer: PeerId, addresses: list[str], query: _Query) -> Message:
    identity = ID.from_base58(peer)
    await host.connect(PeerInfo(identity, [Multiaddr(address.rpartition("/p2p/")[0]) for address in addresses]))
    stream = await host.new_stream(identity, [TProtocol(PROTOCOL_NAME)])

    async def send(type: FrameType, call: int, message: Message) -> None:
        await stream.write(b"".join(encode_frame(type, call, message)))

    await send(FrameType.HELLO, 0, query.hello_to(peer))
    while True:
        prefix = Prefix.parse(await _read_exactly(stream, PREFIX_BYTES), LIMITS)
        message, _ = decode_header(prefix, await _read_exactly(stream, prefix.header_bytes))
        match prefix.type, message:
            case FrameType.HELLO, messages.Hello() as hello if not query.is_of_run(hello, peer):
                raise WrongRun("the peer takes part in another run; use an invite of this one")
            case FrameType.HELLO, messages.Hello():
                await send(FrameType.REQUEST, 1, query.request)
            case FrameType.REQUEST, messages.Ping():
                await send(FrameType.ANSWER, prefix.call, messages.Pong())
            case FrameType.ANSWER, Message() as answer if prefix.call == 1:
                await stream.close()
                return answer
            case ((FrameType.REFUSAL | FrameType.GOODBYE), messages.Refusal() as refusal):
                raise refusals.error_of_refusal(refusal)


def _decode_status(answer: Message) -> dict[str, Any]:
    try:
        status = json.loads(answer.status) if isinstance(answer, messages.StatusAnswer) else None
    except (ValueError, RecursionError):  # a megabyte of brackets is deeper than any parser goes
        status = None
    if not isinstance(status, dict):
        raise ProtocolError("bad-message", "The status is not a JSON object.")
    return status


async def _read_exactly(stream: Any, count: int) -> bytes:
    data = b""
    while len(data) < count:
        chunk = await stream.read(count - len(data))
        if not chunk:
            raise Unreachable("the peer closed the stream")
        data += chunk
    return data
