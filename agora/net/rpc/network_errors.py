"""The errors of the network: how a call ends without an answer."""

from __future__ import annotations

from agora_protocol.errors import AgoraError


class ConnectionBroken(AgoraError):
    """Raised by a call whose stream broke before the answer came, or could not be opened; another peer may succeed."""

    code = "broken"


class SimultaneousOpen(AgoraError):
    """Raised by a dial when both peers dialled each other at the same time, and both dials failed.

    p2pd then backs off for some seconds; the peer with the lower id dials again first, see dialling.py.
    """

    code = "simultaneous-open"


class DeadlinePassed(AgoraError):
    """Raised by a call without an answer before the caller's deadline; a peer that had the request was sent CANCEL."""

    code = "deadline"


class Unreachable(AgoraError):
    """Raised by the light client when no peer answered; the text has the reason of each peer, and what to do."""

    code = "unreachable"
