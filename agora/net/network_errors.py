"""The errors of the network: how a call ends without an answer. Knows: their texts. Must not know: streams, peers."""

from __future__ import annotations

from typing import ClassVar

from agora_protocol.errors import AgoraError


class ConnectionBroken(AgoraError):
    """The stream to the peer broke before the answer came, or could not be opened at all; another peer may do."""

    code: ClassVar[str] = "broken"


class DialsCrossed(ConnectionBroken):
    """Both peers dialled in the same instant (RFC 9293, 3.5); neither p2pd dials again for some seconds."""


class DeadlinePassed(AgoraError):
    """The answer did not come before the caller's deadline; the peer was told to stop."""

    code: ClassVar[str] = "deadline"


class Unreachable(AgoraError):
    """None of the peers that were tried answered; the text says what happened to each, and what to do."""

    code: ClassVar[str] = "unreachable"
