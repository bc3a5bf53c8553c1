"""The vectors of what replicas agree on: gossip of steps and epochs, and the parts of averaging.

`make.py` writes them.
"""

from __future__ import annotations

import struct

from agora_protocol import messages
from agora_protocol.frames import FrameType
from agora_protocol.ids import PeerId
from agora_protocol.messages import Message
from agora_protocol.tensors import WireTensor


def averaging_frames(first: PeerId, second: PeerId) -> list[tuple[FrameType, int, Message | None, list[WireTensor]]]:
    """Returns frames of gossip and averaging, of steps of these two peers: type, call, message, tensors."""
    kind = FrameType
    values = WireTensor("float32", (3,), memoryview(struct.pack("<3f", 0.5, -1.25, 3.0)))
    levels = WireTensor("int8", (3,), memoryview(struct.pack("<3b", 21, -53, 127)))
    exponents = WireTensor("int8", (1,), memoryview(struct.pack("<1b", 2)))
    scales = WireTensor("uint8", (2,), memoryview(bytes([253, 0])))
    packed = WireTensor("uint8", (1,), memoryview(bytes([0b11_01_10])))
    reports = ((first, 40, 41, 8192, 900_000, 38, 7, 0, 134, 0), (second, 40, 40, 0, 9, 0, 0, 40, 0, 1500))
    return [
        (kind.REQUEST, 7, messages.GossipSteps(1, reports, 5_000), []),
        (kind.ANSWER, 7, messages.GossipedSteps(((second, 40, 40, 1024, 9216, 40, 2**32 - 1, 30, 0, 0),)), []),
        (
            kind.REQUEST,
            8,
            messages.GossipEpochs((1, 7, 40, 3, 12, 0, 1, 3, 5, 40, 1, 0, 0b11, 1, 2, 3, 0, 0), 5_000),
            [],
        ),
        (kind.ANSWER, 8, messages.GossipedEpochs((1, 7, 40, 4, 2, 0, 0, 0)), []),
        (
            kind.REQUEST,
            9,
            messages.Contribute(1, "slice", 12, 3, 20, 65536.0, False, "normal2", 10_000),
            [scales, packed],
        ),
        (
            kind.REQUEST,
            9,
            messages.Contribute(1, "gradient", 12, 3, 0, 8192.0, False, "int8", 10_000),
            [levels, exponents],
        ),
        (kind.REQUEST, 9, messages.Contribute(1, "gradient", 12, 3, 0, 0.0, True, "float32", 10_000), [values]),
        (kind.ANSWER, 9, messages.Averaged(3, 4, 196608.0, True, "int8", 6), [levels, exponents]),
        (kind.REQUEST, 11, messages.Recall(1, "slice", 12, 3, 20, 5_000), []),
        (kind.ANSWER, 11, messages.Recalled(3, 4, 196608.0, "normal2", 6), [scales, packed]),
        (kind.ANSWER, 11, messages.Recalled(0, 0, 0.0, "float32"), []),
    ]
