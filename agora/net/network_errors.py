"""The errors of the network: how a call ends without an answer. Knows: their texts. Must not know: streams, peers."""

from __future__ import annotations

from agora_protocol.errors import AgoraError


class ConnectionBroken(AgoraError):
    """Error of a call: its stream broke before the answer came, or could not be opened; another peer may do."""

    code = "broken"


class DialsCrossed(AgoraError):
    """Error of a dial: both peers dialled at once (RFC 9293, 3.5); neither p2pd dials again for some seconds."""

    code = "crossed"


class DeadlinePassed(AgoraError):
    """Error of a call: no answer came before the caller's deadline; a peer that had the request was told to stop."""

    code = "deadline"


class Unreachable(AgoraError):
    """Error of the light client: no peer that it tried answered; the text says why of each, and what to do."""

    code = "unreachable"
