"""The base of every message: its number, the frames that may carry it, how many tensors come with it."""

from __future__ import annotations

from enum import IntEnum
from typing import Any, ClassVar, Final

from agora_protocol.fields import Structure


class FrameType(IntEnum):
    """The type of a frame: the second byte of its prefix."""

    HELLO = 1
    REQUEST = 2
    PROGRESS = 3
    ANSWER = 4
    REFUSAL = 5
    CANCEL = 6
    GOODBYE = 7


class Message(Structure):
    """Base of all messages.

    KIND: the message's number on the wire. FRAMES: the frame types that may carry it. TENSORS: the least and the
    greatest number of tensors that come with it.
    """

    KIND: ClassVar[int] = 0
    FRAMES: ClassVar[tuple[FrameType, ...]] = ()
    TENSORS: ClassVar[tuple[int, int]] = (0, 0)

    def __init_subclass__(
        cls, *, kind: int, frames: tuple[FrameType, ...], tensors: tuple[int, int] = (0, 0), **rest: Any
    ) -> None:
        super().__init_subclass__(**rest)
        if kind in KINDS:
            raise TypeError(f"kind {kind} is {KINDS[kind].__name__} already")
        cls.KIND, cls.FRAMES, cls.TENSORS = kind, frames, tensors
        KINDS[kind] = cls


KINDS: Final[dict[int, type[Message]]] = {}
