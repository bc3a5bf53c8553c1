"""The messages by which peers find out whether they can be dialled, and meet through the NATs between them.

SPEC.md, section 10.
"""

from __future__ import annotations

from typing import Any, Final

from agora_protocol.addresses import PARTS
from agora_protocol.fields import addresses_field, int_field, list_field, peer_id_field, text_field
from agora_protocol.ids import PeerId
from agora_protocol.limits import MAX_DEADLINE_MS, MAX_PORTS, MAX_SEEN_BYTES
from agora_protocol.message_base import FrameType, Message

_DEADLINE_DOC: Final = "milliseconds left for the answer, counted from arrival"
_NOT_AN_ADDRESS: Final = "must be empty, or like /ip4/ADDRESS/tcp/PORT"


def _find_address_problem(address: str) -> str | None:
    if not address:
        return None
    words = address.split("/")
    if len(words) != 5 or words[0] or words[1] not in ("ip4", "ip6") or words[3] != "tcp":
        return _NOT_AN_ADDRESS
    is_ip, is_port = PARTS[words[1]], PARTS["tcp"]
    is_address = is_ip is not None and is_port is not None and is_ip(words[2]) and is_port(words[4])
    return None if is_address else _NOT_AN_ADDRESS


def _port_field() -> Any:
    return int_field(1, 65_535)


class DialBack(Message, kind=40, frames=(FrameType.REQUEST,)):
    """Asks the receiver to open a TCP connection to the sender at the IP address from which it sees the sender."""

    ports: tuple[int, ...] = list_field(_port_field(), MAX_PORTS, doc="the ports to try; nothing is sent there")
    deadline_ms: int = int_field(1, MAX_DEADLINE_MS, default=8_000, doc=_DEADLINE_DOC)


class DialedBack(Message, kind=41, frames=(FrameType.ANSWER,)):
    """Answers DialBack."""

    seen: str = text_field(
        MAX_SEEN_BYTES, doc="where the answering peer sees the asker, /ip4/ADDRESS/tcp/PORT; empty if through a relay"
    )
    reached: tuple[int, ...] = list_field(_port_field(), MAX_PORTS, doc="the ports at which it was reached")

    def find_problem(self) -> str | None:
        """Returns a complaint when `seen` is not an address, else None."""
        return _find_address_problem(self.seen)


class Introduce(Message, kind=42, frames=(FrameType.REQUEST,)):
    """Asks the receiver, connected to both, to have `peer` and the sender dial each other at the same moment."""

    peer: PeerId = peer_id_field(doc="whom the sender wants to meet")
    deadline_ms: int = int_field(1, MAX_DEADLINE_MS, default=8_000, doc=_DEADLINE_DOC)


class Meet(Message, kind=43, frames=(FrameType.REQUEST,)):
    """Asks the receiver to dial `peer` now; that peer dials the receiver at the same moment."""

    peer: PeerId = peer_id_field(doc="who asked for an introduction")
    seen: str = text_field(MAX_SEEN_BYTES, doc="where the sender sees that peer, /ip4/ADDRESS/tcp/PORT")
    deadline_ms: int = int_field(1, MAX_DEADLINE_MS, default=8_000, doc=_DEADLINE_DOC)

    def find_problem(self) -> str | None:
        """Returns a complaint when `seen` is not an address, else None."""
        return _find_address_problem(self.seen)


class Meeting(Message, kind=44, frames=(FrameType.ANSWER,)):
    """Answers Introduce: the other peer dials the sender now; and Meet: the receiver dials `peer` now."""

    seen: str = text_field(
        MAX_SEEN_BYTES, doc="to Introduce: where the answering peer sees the other one; to Meet: empty"
    )

    def find_problem(self) -> str | None:
        """Returns a complaint when `seen` is not an address, else None."""
        return _find_address_problem(self.seen)


class GetAddresses(Message, kind=45, frames=(FrameType.REQUEST,)):
    """Asks where `peer`, which the receiver named as a DHT node, can be dialled. Answered by PeerAddresses."""

    peer: PeerId = peer_id_field(doc="whom the sender wants to dial")
    deadline_ms: int = int_field(1, MAX_DEADLINE_MS, default=2_000, doc=_DEADLINE_DOC)


class PeerAddresses(Message, kind=46, frames=(FrameType.ANSWER,)):
    """Answers GetAddresses with what that peer has announced in its HELLO or claim."""

    addresses: tuple[str, ...] = addresses_field(doc="where it can be dialled; empty when that is not known")
