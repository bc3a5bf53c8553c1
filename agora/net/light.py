"""The light client: asks a peer of a run for its status or manifest, without a daemon, torch or hivemind.

Knows: py-libp2p, trio and the wire protocol. Must not know: hivemind, nor anything of agora that imports it: two libp2p
implementations cannot live in one process.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

import trio
from agora_protocol import messages
from agora_protocol.errors import AgoraError, ProtocolError, WrongRun
from agora_protocol.frames import FrameLimits, FrameType, Prefix, decode_header, encode_frame
from agora_protocol.ids import PeerId, RunId
from agora_protocol.limits import PREFIX_BYTES, PROTOCOL_NAME, PROTOCOL_VERSION
from agora_protocol.messages import Message
from libp2p import new_host
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.custom_types import TProtocol
from libp2p.peer.id import ID
from libp2p.peer.peerinfo import PeerInfo
from multiaddr import Multiaddr

from agora.net.address_book import addresses_by_peer
from agora.net.network_errors import Unreachable

TIMEOUT_S: Final = 10.0
STAGGER_S: Final = 0.4  # the next peer is tried beside those that have not answered yet
SOFTWARE: Final = "agora light client"
LIMITS: Final = FrameLimits(max_payload_bytes=0)

R = TypeVar("R")


def fetch_status(addresses: Sequence[str], run: RunId, timeout_s: float = TIMEOUT_S) -> dict[str, Any]:
    """Returns a run's status (`swarm status --json`) as the first peer that answers sees it.

    addresses: multiaddrs with /p2p/PEER. Takes at most about `timeout_s`. Raises InputError for a malformed address,
    WrongRun when all peers that answered train another run, Unreachable when none answered.
    """

    def decode_status(answer: Message) -> dict[str, Any]:
        """Returns the JSON object in a peer's answer. Raises ProtocolError when there is none."""
        try:
            status = json.loads(answer.status) if isinstance(answer, messages.StatusAnswer) else None
        except ValueError:
            status = None
        if not isinstance(status, dict):
            raise ProtocolError("bad-message", "The status is not a JSON object.")
        return status

    return _fetch(addresses, run, timeout_s, messages.GetStatus(), decode_status)


def fetch_manifest(addresses: Sequence[str], run: RunId, timeout_s: float = TIMEOUT_S) -> bytes:
    """Returns a run's signed manifest as bytes, its hash and signature checked. Raises as `fetch_status` does."""
    from agora_protocol.manifest import SignedManifest  # it needs pydantic, which a status does not

    def verify_manifest(answer: Message) -> bytes:
        """Returns the manifest in a peer's answer, its hash and signature checked. Raises AgoraError for another."""
        if not isinstance(answer, messages.ManifestAnswer):
            raise ProtocolError("bad-message", f"{type(answer).__name__} is no answer to the question.")
        SignedManifest.from_bytes(answer.manifest, run)
        return answer.manifest

    return _fetch(addresses, run, timeout_s, messages.GetManifest(), verify_manifest)


def _fetch(addresses: Sequence[str], run: RunId, timeout_s: float, request: Message, read: Callable[[Message], R]) -> R:
    """Runs `_ask_all` in a trio loop, and returns what `read` makes of the first answer that it accepts.

    Raises InputError, WrongRun and Unreachable as `fetch_status` does.
    """
    logging.getLogger("libp2p").setLevel(logging.CRITICAL)
    result: R = trio.run(_ask_all, addresses_by_peer(addresses), run, timeout_s, request, read)
    return result


async def _ask_all(
    by_peer: dict[PeerId, list[str]], run: RunId, timeout_s: float, request: Message, read: Callable[[Message], R]
) -> R:
    """Asks peer after peer, the next after STAGGER_S or a failure, and returns the first answer that `read` accepts.

    Raises WrongRun when all peers that answered train another run, Unreachable when none did in time.
    """
    answers: list[R] = []
    errors: list[AgoraError] = []
    reasons: dict[PeerId, str] = dict.fromkeys(by_peer, "no answer in time")
    with trio.move_on_after(timeout_s):
        host = new_host(key_pair=create_new_key_pair())
        async with host.run(listen_addrs=[]), trio.open_nursery() as nursery:

            async def ask_one_peer(peer: PeerId, addresses: list[str], done: trio.Event) -> None:
                """Asks one peer: its answer stops the others, its failure is noted; sets `done` either way."""
                try:
                    answers.append(read(await _ask(host, peer, addresses, run, request)))
                    nursery.cancel_scope.cancel()
                except AgoraError as error:
                    errors.append(error)
                    reasons[peer] = str(error)
                except Exception as error:  # py-libp2p raises many kinds; each only means that this peer is no help
                    reasons[peer] = f"{type(error).__name__}: {error}"[:200].rstrip(": ")
                done.set()

            for peer, addresses in by_peer.items():
                done = trio.Event()
                nursery.start_soon(ask_one_peer, peer, addresses, done)
                with trio.move_on_after(STAGGER_S):
                    await done.wait()
    if answers:
        return answers[0]
    if errors and all(isinstance(error, WrongRun) for error in errors):
        raise errors[0]
    tried = "; ".join(f"{peer}: {why}" for peer, why in reasons.items()) or "no addresses are known"
    raise Unreachable(f"No peer of the run answered ({tried}). Check the invite, or ask for a new one.")


async def _ask(host: Any, peer: PeerId, addresses: list[str], run: RunId, request: Message) -> Message:
    """Connects to one peer, exchanges HELLOs, and returns its answer to `request`, answering its Pings meanwhile.

    Raises WrongRun, the peer's refusal, or py-libp2p's own errors.
    """
    identity = ID.from_base58(peer)
    await host.connect(PeerInfo(identity, [Multiaddr(address.rpartition("/p2p/")[0]) for address in addresses]))
    stream = await host.new_stream(identity, [TProtocol(PROTOCOL_NAME)])
    frames = _Frames(stream)
    await frames.send_frame(FrameType.HELLO, 0, messages.Hello(PROTOCOL_VERSION, b"", SOFTWARE, ()))
    while True:
        prefix, message = await frames.next()
        match prefix.type, message:
            case FrameType.HELLO, messages.Hello() as hello if hello.run != bytes.fromhex(run):
                raise WrongRun(f"The peer trains run {hello.run.hex()[:12] or 'none'}, not {run[:12]}.")
            case FrameType.HELLO, messages.Hello():
                await frames.send_frame(FrameType.REQUEST, 1, request)
            case FrameType.REQUEST, messages.Ping():
                await frames.send_frame(FrameType.ANSWER, prefix.call, messages.Pong())
            case FrameType.ANSWER, Message() as answer if prefix.call == 1:
                await stream.close()
                return answer
            case ((FrameType.REFUSAL | FrameType.GOODBYE), messages.Refusal() as refusal):
                raise messages.refusal_from_wire(refusal)


class _Frames:
    """Writes frames to a py-libp2p stream, and reads them one by one."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    async def send_frame(self, type: FrameType, call: int, message: Message) -> None:
        """Writes one frame without payload."""
        await self._stream.write(b"".join(encode_frame(type, call, message)))

    async def next(self) -> tuple[Prefix, Message | None]:
        """Waits for the next frame and returns its prefix and message.

        Raises ProtocolError for one with a payload or a malformed one, Unreachable at the stream's end.
        """
        prefix = Prefix.parse(await self._exactly(PREFIX_BYTES), LIMITS)
        message, _ = decode_header(prefix, await self._exactly(prefix.header_bytes))
        return prefix, message

    async def _exactly(self, count: int) -> bytes:
        """Reads exactly `count` bytes. Raises Unreachable when the stream ends before."""
        taken = b""
        while len(taken) < count:
            data = await self._stream.read(count - len(taken))
            if not data:
                raise Unreachable("the peer closed the stream")
            taken += data
        return taken
