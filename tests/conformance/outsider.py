"""A peer written from protocol/SPEC.md alone, on py-libp2p and raw msgpack: it shares no line of code with agora.

Run as a program in its own process (py-libp2p and hivemind cannot live in one). It reads one JSON object from standard
input, {"address": "/ip4/.../p2p/...", "run": hex, "tasks": [...]}, and writes {"results": [...]} to standard output.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import struct
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import msgpack
import trio
from libp2p import new_host
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.custom_types import TProtocol
from libp2p.peer.peerinfo import info_from_p2p_addr
from multiaddr import Multiaddr

PREFIX = struct.Struct("<BBHIII")
MAGIC = 0xA6
HELLO, REQUEST, PROGRESS, ANSWER, REFUSAL, CANCEL, GOODBYE = range(1, 8)
KIND_HELLO, KIND_PING, KIND_PROCESS, KIND_GET_MANIFEST, KIND_GET_STATUS = 1, 2, 3, 8, 10


def frame(kind: int, call: int, head: bytes = b"", body: bytes = b"", **wrong: int) -> bytes:
    """A frame; `wrong` replaces fields of its prefix."""
    fields = {"magic": MAGIC, "type": kind, "reserved": 0, "call": call, "header": len(head), "payload": len(body)}
    return PREFIX.pack(*(fields | wrong).values()) + head + body


def header(kind: int, fields: dict[str, Any], tensors: list[Any] | None = None) -> bytes:
    """A frame's header."""
    return bytes(msgpack.packb([kind, fields, tensors or []]))


class Wire:
    """One stream to the node under test."""

    def __init__(self, stream: Any) -> None:
        self.stream, self.pending = stream, b""

    async def send(self, data: bytes) -> None:
        """Writes all of it."""
        await self.stream.write(data)

    async def exactly(self, count: int) -> bytes:
        """`count` bytes; EOFError when the stream ends before."""
        while len(self.pending) < count:
            more = await self.stream.read(1 << 16)
            if not more:
                raise EOFError
            self.pending += more
        data, self.pending = self.pending[:count], self.pending[count:]
        return data

    async def frame(self) -> tuple[int, int, Any, bytes]:
        """Type, call, header, payload of the next frame."""
        magic, kind, _, call, header_bytes, payload_bytes = PREFIX.unpack(await self.exactly(PREFIX.size))
        if magic != MAGIC:
            raise ValueError("not a frame")
        head = await self.exactly(header_bytes)
        return kind, call, msgpack.unpackb(head) if head else None, await self.exactly(payload_bytes)


def hello(me: Outsider, run: bytes | None = None, version: int = 1, role: str = "member", cut: int = 32) -> bytes:
    """The first frame. run: the run's id, default that of the order. cut: bytes of the salted hash that are sent."""
    salt, to = os.urandom(16), me.peer.to_base58()
    said = b"agora hello 1\0" + salt + (me.run if run is None else run) + me.me.encode() + to.encode()
    fields = {
        "version": version,
        "salt": salt,
        "run": hashlib.sha256(said).digest()[:cut],
        "role": role,
        "proof": b"",
        "software": "outsider 1",
        "addresses": [],
    }
    return frame(HELLO, 0, header(KIND_HELLO, fields))


def process_fields(me: str, **changes: Any) -> dict[str, Any]:
    """The fields of a Process request, a fresh microbatch every time."""
    fields = {
        "microbatch": os.urandom(16),
        "origin": me,
        "stage": 1,
        "purpose": "train",
        "deadline_ms": 20_000,
        "hint": [],
        "step": 0,
        "references": [],
    }
    return fields | changes


class Outsider:
    """Everything the tests ask it to do; each task has a stream of its own."""

    def __init__(self, host: Any, peer: Any, run: bytes) -> None:
        self.host, self.peer, self.run, self.me = host, peer, run, host.get_id().to_base58()

    async def open(self, greet: bool = True, role: str = "member") -> Wire:
        """A stream, greeted by both sides unless told otherwise."""
        wire = Wire(await self.host.new_stream(self.peer, [TProtocol("/agora/1")]))
        if greet:
            await wire.send(hello(self, role=role))
            kind, call, head, _ = await wire.frame()
            if kind == GOODBYE:
                raise Refused(head[1]["code"])
            if (kind, call, head[0]) != (HELLO, 0, KIND_HELLO):
                raise ValueError(f"no hello but {kind} {head}")
        return wire

    async def handshake(self, task: dict[str, Any]) -> dict[str, Any]:
        """Says hello, as a reader where asked, and tells what the node said, and whether it named the run."""
        wire = Wire(await self.host.new_stream(self.peer, [TProtocol("/agora/1")]))
        await wire.send(hello(self, role="reader" if task.get("reader") else "member"))
        _, _, head, _ = await wire.frame()
        said = dict(head[1])
        named = b"agora hello 1\0" + said["salt"] + self.run + self.peer.to_base58().encode() + self.me.encode()
        is_of_run = said["run"] == hashlib.sha256(named).digest()
        return {"version": said["version"], "is_of_run": is_of_run, "software": said["software"]}

    async def ask(self, task: dict[str, Any]) -> dict[str, Any]:
        """GetStatus or GetManifest, as a reader."""
        wire = await self.open(role="reader")
        kind = {"status": KIND_GET_STATUS, "manifest": KIND_GET_MANIFEST}[task["what"]]
        await wire.send(frame(REQUEST, 1, header(kind, {"deadline_ms": 5_000})))
        answer = await self.answer(wire, 1)
        body = answer["fields"][task["what"]]
        return {"body": base64.b64encode(body).decode()}

    async def answer(self, wire: Wire, call: int) -> dict[str, Any]:
        """The answer of a call, and how many progress frames came before it."""
        progress = []
        while True:
            kind, of, head, payload = await wire.frame()
            if kind == PROGRESS and of == call:
                progress.append(head[1]["event"])
            elif kind == ANSWER and of == call:
                return {"fields": head[1], "tensors": head[2], "payload": payload, "progress": progress}
            elif kind in (REFUSAL, GOODBYE):
                raise Refused(head[1]["code"] if head else "closed")

    async def process(self, task: dict[str, Any]) -> dict[str, Any]:
        """Sends a microbatch; tells loss, token count and the gradient's bytes."""
        wire = await self.open()
        tensors = [[t["dtype"], t["shape"]] for t in task["tensors"]]
        payload = b"".join(base64.b64decode(t["data"]) for t in task["tensors"])
        fields = process_fields(self.me, **task["fields"])
        answers = []
        for call in range(1, 1 + 2 * task.get("times", 1), 2):
            await wire.send(frame(REQUEST, call, header(KIND_PROCESS, fields, tensors), payload))
            answer = await self.answer(wire, call)
            answers.append(
                {
                    "loss_sum": answer["fields"]["loss_sum"],
                    "tokens": answer["fields"]["tokens"],
                    "tensors": answer["tensors"],
                    "gradient": base64.b64encode(answer["payload"]).decode(),
                    "progress": answer["progress"],
                }
            )
        return {"answers": answers}

    async def violate(self, task: dict[str, Any]) -> dict[str, Any]:
        """Does one forbidden thing and tells with which code the node refused it."""
        return {"code": await VIOLATIONS[task["name"]](self, task)}

    async def refusal(self, wire: Wire) -> str:
        """The code of the next refusal or goodbye."""
        while True:
            kind, _, head, _ = await wire.frame()
            if kind in (REFUSAL, GOODBYE):
                return str(head[1]["code"]) if head else "closed"


class Refused(Exception):
    """The node said no; the text is the code."""


Violation = Callable[[Outsider, dict[str, Any]], Awaitable[str]]
VIOLATIONS: dict[str, Violation] = {}


def violation(function: Violation) -> Violation:
    """Registers a forbidden thing under its function's name."""
    VIOLATIONS[function.__name__] = function
    return function


def raw(name: str, data: Callable[[Outsider, dict[str, Any]], bytes]) -> None:
    """Registers a forbidden thing that is some bytes after a proper hello."""

    async def send(me: Outsider, task: dict[str, Any]) -> str:
        wire = await me.open()
        await wire.send(data(me, task))
        return await me.refusal(wire)

    VIOLATIONS[name] = send


def greeting(name: str, data: Callable[[Outsider], bytes]) -> None:
    """Registers a forbidden thing that comes instead of a proper hello."""

    async def send(me: Outsider, task: dict[str, Any]) -> str:
        wire = await me.open(greet=False)
        await wire.send(data(me))
        return await me.refusal(wire)

    VIOLATIONS[name] = send


def request(me: Outsider, task: dict[str, Any], call: int = 1, **changes: Any) -> bytes:
    """A Process request with the task's good tensors, but for what `changes` says."""
    tensors = changes.pop("tensors", [[t["dtype"], t["shape"]] for t in task["tensors"]])
    payload = changes.pop("payload", b"".join(base64.b64decode(t["data"]) for t in task["tensors"]))
    return frame(REQUEST, call, header(KIND_PROCESS, process_fields(me.me, **changes), tensors), payload)


def good(task: dict[str, Any], index: int) -> bytes:
    """The bytes of one of the task's good tensors."""
    return base64.b64decode(task["tensors"][index]["data"])


def specs(task: dict[str, Any], index: int, **changes: Any) -> list[Any]:
    """The task's tensor specs with one of them changed."""
    listed = [[t["dtype"], t["shape"]] for t in task["tensors"]]
    listed[index] = [changes.get("dtype", listed[index][0]), changes.get("shape", listed[index][1])]
    return listed


PING = header(KIND_PING, {"deadline_ms": 1000})
greeting("request_before_hello", lambda me: frame(REQUEST, 1, PING))
greeting("hello_of_another_run", lambda me: hello(me, b"\x11" * 32))
greeting("hello_of_no_version", lambda me: hello(me, version=0))
greeting("run_of_a_wrong_length", lambda me: hello(me, cut=31))
raw("second_hello", lambda me, task: hello(me))
raw("bad_magic", lambda me, task: frame(REQUEST, 1, PING, magic=0x47))
raw("unknown_frame_type", lambda me, task: frame(99, 1, PING))
raw("reserved_bits", lambda me, task: frame(REQUEST, 1, PING, reserved=1))
raw("header_beyond_the_limit", lambda me, task: frame(REQUEST, 1, b"", header=(1 << 16) + 1))
raw("payload_beyond_the_limit", lambda me, task: frame(REQUEST, 1, PING, payload=(1 << 32) - 1))
raw("header_that_is_no_msgpack", lambda me, task: frame(REQUEST, 1, b"\xc1" * 20))
raw("header_of_deep_nesting", lambda me, task: frame(REQUEST, 1, b"\x91" * 2000 + b"\xc0"))
raw("unknown_message_kind", lambda me, task: frame(REQUEST, 1, header(77, {})))
raw("answer_of_unknown_kind", lambda me, task: frame(ANSWER, 2, header(77, {})))
raw("answer_as_request", lambda me, task: frame(REQUEST, 1, header(7, {"unix": 0.0})))
raw("call_id_of_the_other_side", lambda me, task: frame(REQUEST, 2, PING))
raw("answer_to_no_call", lambda me, task: frame(ANSWER, 40_002, header(7, {"unix": 0.0})))
raw("deadline_of_zero", lambda me, task: request(me, task, deadline_ms=0))
raw("deadline_beyond_the_limit", lambda me, task: request(me, task, deadline_ms=600_001))
raw("short_microbatch_id", lambda me, task: request(me, task, microbatch=b"\x01" * 15))
raw("origin_that_is_no_peer", lambda me, task: request(me, task, origin="somebody"))
raw("unknown_purpose", lambda me, task: request(me, task, purpose="profit"))
raw("stage_not_held", lambda me, task: request(me, task, stage=0))
raw("stage_beyond_the_run", lambda me, task: request(me, task, stage=700))
raw("tensor_of_unknown_dtype", lambda me, task: request(me, task, tensors=specs(task, 0, dtype="object")))
raw("tensor_of_another_dtype", lambda me, task: request(me, task, tensors=specs(task, 1, dtype="float32")))
raw("tensor_of_another_shape", lambda me, task: request(me, task, tensors=specs(task, 0, shape=[-1])))
raw("tensors_that_do_not_add_up", lambda me, task: request(me, task, payload=good(task, 0)))
raw("no_tensors", lambda me, task: request(me, task, tensors=[], payload=b""))
raw(
    "boundary_reshaped",
    lambda me, task: request(me, task, tensors=specs(task, 0, shape=list(reversed(task["tensors"][0]["shape"])))),
)
raw(
    "boundary_not_finite",
    lambda me, task: request(me, task, payload=b"\xff" * len(good(task, 0)) + good(task, 1)),
)
raw(
    "token_beyond_the_vocabulary",
    lambda me, task: request(me, task, payload=good(task, 0) + b"\x7f" * len(good(task, 1))),
)


@violation
async def reader_trains(me: Outsider, task: dict[str, Any]) -> str:
    """A reader asks for work."""
    wire = await me.open(role="reader")
    await wire.send(request(me, task))
    return await me.refusal(wire)


@violation
async def call_id_used_twice(me: Outsider, task: dict[str, Any]) -> str:
    """The same call id while its first call is still open."""
    wire = await me.open()
    await wire.send(request(me, task, call=1) + request(me, task, call=1))
    return await me.refusal(wire)


async def serve(order: dict[str, Any]) -> list[Any]:
    """Does the tasks in order; a failure of one is its result. With "alone", each by a peer of its own."""
    groups = [[task] for task in order["tasks"]] if order.get("alone") else [order["tasks"]]
    return [result for group in groups for result in await as_one_peer(order, group)]


async def as_one_peer(order: dict[str, Any], tasks: list[dict[str, Any]]) -> list[Any]:
    """Does these tasks under one fresh identity."""
    host = new_host(key_pair=create_new_key_pair())
    results: list[Any] = []
    async with host.run(listen_addrs=[Multiaddr("/ip4/127.0.0.1/tcp/0")]):
        info = info_from_p2p_addr(Multiaddr(order["address"]))
        await host.connect(info)
        me = Outsider(host, info.peer_id, bytes.fromhex(order["run"]))
        for task in tasks:
            try:
                with trio.fail_after(30):
                    results.append(await getattr(me, task["do"])(task))
            except Refused as refused:
                results.append({"refused": str(refused)})
            except (EOFError, trio.TooSlowError, ValueError, OSError) as error:
                results.append({"error": f"{type(error).__name__}: {error}"})
    return results


if __name__ == "__main__":
    print(json.dumps({"results": trio.run(serve, json.load(sys.stdin))}))
