"""The errors that agora raises on purpose, in one tree.

    AgoraError
    |-- InputError           what a person typed (an invite, a span) cannot be read
    |-- ManifestError        the run's description is malformed, or is not what its hash or signature says
    |-- AmendmentError       a change of a live run is not one that this run, or this signer, allows
    |-- DataError            a data file has no known format, or a record is not what its format says
    |-- ProtocolError        a peer sent what the protocol forbids (a violation)
    |-- Refused              a peer refused before working: Busy | NotMyStage | NotAdmitted | WrongRun | Unsupported
    |-- Unavailable          no peer could serve a stage before the deadline; names the stage and the reasons
    |-- PeerFailed           a peer began and could not finish, for a reason of its own
    `-- LocalError           this machine cannot do it: DiskError | OutOfMemory | DeviceError | IdentityError

A text is a sentence that says what is wrong, and what to do where there is something to do. That of a Refused or a
PeerFailed is a clause, because it is quoted behind a peer's name.
"""

from collections.abc import Sequence
from typing import ClassVar, Final

PROTOCOL_CODES: Final[dict[str, str]] = {
    "bad-frame": "the 16-byte prefix is malformed: magic, type, reserved bits, or a call id or length its type forbids",
    "too-large": "a length exceeds its limit",
    "bad-message": "the header is not the msgpack of a known message, or a field has the wrong type or value",
    "bad-tensor": "a tensor's dtype, shape or byte count is not allowed, or not what the message or manifest implies",
    "bad-record": "a DHT record is malformed, or published under a key it does not belong to",
    "bad-ticket": "a ticket, a proof or a revocation is malformed",
    "bad-amendment": "an amendment is malformed, or changes what no amendment may",
    "bad-signature": "a signature does not verify",
    "wrong-key": "a record is signed by, or speaks for, another peer than its subkey names",
    "expired": "a record has expired",
    "lives-too-long": "a record's expiry is later than the limit allows",
    "wrong-run": "a record, manifest or request is of another run",
    "wrong-version": "the peer speaks another version of the protocol",
    "out-of-order": "the frame is not allowed in the state of the connection or of its call",
    "too-many-calls": "more calls are open on the connection than the limit allows",
}


class AgoraError(Exception):
    """Base of the errors that peers, files, people or this machine cause; a caller's mistake is a ValueError.

    `code` is a word for programs, str(error) a sentence for people.
    """

    code: ClassVar[str] = "error"


class InputError(AgoraError, ValueError):
    """Raised when a person's input cannot be read; the text says how it should look."""

    code: ClassVar[str] = "bad-input"


class ManifestError(AgoraError):
    """The run's description is malformed, or is not what its hash or signature says."""

    code: ClassVar[str] = "bad-manifest"


class AmendmentError(AgoraError):
    """A change of a live run is not one that this run, or this signer, allows; the text says what to do."""

    code: ClassVar[str] = "bad-amendment"


class DataError(AgoraError):
    """A data file has no known format, or one of its records is not what the format says; names file and line."""

    code: ClassVar[str] = "bad-data"


class ProtocolError(AgoraError):
    """A peer sent what the protocol forbids. `code` is one of PROTOCOL_CODES."""

    code: ClassVar[str] = "bad-frame"

    def __init__(self, code: str, text: str) -> None:
        """Raises ValueError for a code that is not one of PROTOCOL_CODES."""
        super().__init__(text)
        if code not in PROTOCOL_CODES:
            raise ValueError(f"{code!r} is not one of PROTOCOL_CODES")
        self.__dict__["code"] = code  # only this class has a code per instance; the class attribute stays a ClassVar


class Refused(AgoraError):
    """A peer refused before doing any work; another peer may accept."""

    code: ClassVar[str] = "refused"


class Busy(Refused):
    """The peer can take no more work now; asking again before `retry_after_ms` milliseconds is pointless."""

    code: ClassVar[str] = "busy"

    def __init__(self, text: str = "no slot free", retry_after_ms: int = 0) -> None:
        """retry_after_ms: milliseconds to wait before asking the peer again."""
        super().__init__(text)
        self.retry_after_ms = retry_after_ms


class NotMyStage(Refused):
    """The peer does not hold the stage asked for."""

    code: ClassVar[str] = "not-my-stage"


class NotAdmitted(Refused):
    """The run does not admit the asking peer: it is not listed, shows no ticket that counts, or is banned."""

    code: ClassVar[str] = "not-admitted"


class WrongRun(Refused):
    """The peer takes part in another run."""

    code: ClassVar[str] = "wrong-run"


class Unsupported(Refused):
    """The peer knows the request but does not serve it."""

    code: ClassVar[str] = "unsupported"


class Unavailable(AgoraError):
    """No peer could serve `stage` before the deadline; the text says why those that were tried last could not."""

    code: ClassVar[str] = "unavailable"

    def __init__(self, stage: int, reasons: Sequence[str]) -> None:
        """reasons: why each peer could not; () if no live peer claims the stage, which the text then says."""
        self.stage = stage
        self.reasons = tuple(reasons)
        why = "; ".join(self.reasons) or "no live peer claims it"
        super().__init__(f"stage {stage} is unavailable: {why}")


class PeerFailed(AgoraError):
    """A peer began the work and could not finish it, for a reason of its own; another peer may succeed."""

    code: ClassVar[str] = "failed"


class LocalError(AgoraError):
    """This machine cannot do what is needed; the text says what to do about it."""

    code: ClassVar[str] = "local"


class DiskError(LocalError):
    """Reading or writing a file failed."""

    code: ClassVar[str] = "disk"


class OutOfMemory(LocalError):
    """There is not enough memory."""

    code: ClassVar[str] = "memory"


class DeviceError(LocalError):
    """The compute device failed or is missing."""

    code: ClassVar[str] = "device"


class IdentityError(LocalError):
    """The identity key file is missing, unreadable, of another type, or open to others."""

    code: ClassVar[str] = "identity"
