"""Turns errors into the Refusal that is sent, and a received Refusal into the error that it stands for."""

from __future__ import annotations

from typing import Final

from agora_protocol import errors
from agora_protocol.errors import PROTOCOL_CODES, AgoraError, ProtocolError
from agora_protocol.limits import MAX_DEADLINE_MS, MAX_TEXT_BYTES
from agora_protocol.messages import Refusal

_REFUSALS: Final = {
    kind.code: kind
    for kind in (errors.NotMyStage, errors.NotAdmitted, errors.WrongRun, errors.Unsupported, errors.Refused)
}


def clip_text(sentence: str, most: int = MAX_TEXT_BYTES) -> str:
    """Returns `sentence` cut to at most `most` bytes of UTF-8, between two characters."""
    return sentence.encode(errors="replace")[:most].decode(errors="ignore")


def refusal_of_error(error: AgoraError) -> Refusal:
    """Returns the Refusal to send for an error.

    A refusal, a violation or a peer's failure is sent with its code and text; any other error as "failed", with
    only its code in the text.
    """
    sentence = clip_text(str(error))
    if isinstance(error, errors.Busy):
        return Refusal("busy", sentence, min(max(error.retry_after_ms, 0), MAX_DEADLINE_MS))
    if isinstance(error, errors.Unavailable):
        return Refusal("unavailable", clip_text("; ".join(error.reasons)), stage=error.stage)
    if isinstance(error, ProtocolError | errors.Refused | errors.PeerFailed):
        return Refusal(error.code, sentence)
    return Refusal("failed", f"the peer could not finish ({error.code})")


def error_of_refusal(message: Refusal) -> AgoraError:
    """Returns the error that a peer's Refusal stands for; a code that this version does not know becomes PeerFailed.

    Its text is one line of printable characters, "?" in place of others: a peer forges no second line of what is shown.
    """
    text = "".join(sign if sign.isprintable() else "?" for sign in message.text)
    if message.code == errors.Busy.code:
        return errors.Busy(text, message.retry_after_ms)
    if message.code == errors.Unavailable.code:
        return errors.Unavailable(message.stage, [text] if text else [])
    if message.code in _REFUSALS:
        return _REFUSALS[message.code](text)
    if message.code in PROTOCOL_CODES:
        return ProtocolError(message.code, text)
    unknown = "" if message.code == errors.PeerFailed.code else f"{message.code}: "
    return errors.PeerFailed(unknown + text)
