"""Measures what a direct path, a punched hole and a relay carry between two peers, in network namespaces.

Needs root, ip, tc and nft. Keeps all traffic inside namespaces of its own, and removes them however it ends.

    PYTHONPATH=.:protocol .venv/bin/python scripts/lab/nat.py --rate 200mbit
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path
from typing import Any, Final

import uvloop
from agora_protocol.identity import Identity
from agora_protocol.ids import MicrobatchId, PeerId, RunId
from agora_protocol.messages import Process, Processed
from agora_protocol.tensors import WireTensor

from agora.core.calls import Reply
from agora.net.nat import relay
from agora.net.nat.hole_punching import HolePuncher
from agora.net.nat.relay import RelayService
from agora.net.p2pd.host import Host
from agora.net.rpc.connection import IncomingCall
from agora.net.rpc.gate import Gate
from agora.net.rpc.network import Network
from tests.process.nat_lab import RESTRICTED, SYMMETRIC, NatLab

RUN: Final = RunId("00" * 32)
PORT: Final = 4001
ROUND_TRIPS: Final = 21
CALL_BYTES: Final = 4 * 2**20
CALLS, IN_FLIGHT, REPEATS = 16, 4, 3
CALL_S: Final = 300.0
KINDS: Final = {"direct": None, "punched": RESTRICTED, "relayed": SYMMETRIC}  # by path, the NAT of both peers


async def swallow(_: IncomingCall) -> Reply:
    """Answers every request with a few bytes."""
    return Reply(Processed(0.0, 1, 0.0), [tensor(64)])


def tensor(size: int) -> WireTensor:
    """Returns a tensor of `size` random bytes, which nothing compresses."""
    return WireTensor("uint8", (size,), memoryview(os.urandom(size)))


async def serve(line: str) -> None:
    """Runs one peer: prints its id, then carries out the commands that come as JSON lines, and answers each in JSON."""
    setting = json.loads(line)
    async with AsyncExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        Identity.create(key := Path(folder) / "key")
        host = await Host.create(identity_path=key, listen=[f"/ip4/0.0.0.0/tcp/{PORT}"], allow_private=False)
        stack.push_async_callback(host.close)
        network = Network(host, Gate(host.peer, RUN, "lab"), swallow)
        await network.start()
        stack.push_async_callback(network.close)
        holes = HolePuncher(host)
        stack.push_async_callback(holes.close)
        if setting["relays"]:
            await RelayService(host, 8, lambda _: True).start()
        print(json.dumps(host.peer), flush=True)
        while command := json.loads((await asyncio.to_thread(sys.stdin.readline)) or "null"):
            print(json.dumps(await carry_out(command, host, network, holes)), flush=True)


async def carry_out(command: dict[str, Any], host: Host, network: Network, holes: HolePuncher) -> Any:
    """Does what a command says, and returns its answer."""
    match command:
        case {"reach": peer, "at": addresses}:
            await host.reach(peer, addresses, 10.0)
        case {"reserve": peer}:
            await relay.reserve(host, peer)
        case {"expect": address}:
            holes.expect(address)
        case {"punch": peer, "at": address}:
            await holes.connect(peer, address)
        case {"measure": peer}:
            return await measure(network, peer)
    return None


async def measure(network: Network, peer: PeerId) -> dict[str, Any]:
    """Returns the path to a peer, the median round trip in seconds, and bytes per second of each repetition."""

    async def seconds(size: int, count: int) -> float:
        limit = asyncio.Semaphore(IN_FLIGHT)
        payload, tokens = tensor(size), WireTensor("int32", (1, 2), memoryview(bytes(8)))

        async def call() -> None:
            request = Process(MicrobatchId(os.urandom(16)), peer, 0, "train", int(CALL_S * 1000), ())
            async with limit:
                deadline = asyncio.get_running_loop().time() + CALL_S
                await network.call(peer, request, [payload, tokens], deadline=deadline)

        started = time.perf_counter()
        await asyncio.gather(*(call() for _ in range(count)))
        return time.perf_counter() - started

    await seconds(1000, 1)
    trips = [await seconds(1000, 1) for _ in range(ROUND_TRIPS)]
    rates = [CALLS * CALL_BYTES / await seconds(CALL_BYTES, CALLS) for _ in range(REPEATS)]
    return {"path": network.paths[peer], "trip_s": statistics.median(trips), "bytes_per_s": rates}


class Machine:
    """A peer on a machine of the lab, driven by commands."""

    def __init__(self, lab: NatLab, undo: ExitStack, name: str, relays: bool = False) -> None:
        setting = json.dumps({"relays": relays})
        words = [*lab.within(name), sys.executable, str(Path(__file__).resolve()), "--serve", setting]
        self._process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        undo.callback(self._process.kill)
        self.address = f"/ip4/{lab.public_address(name)}/tcp/{PORT}"
        self.peer = self._answer()

    def do(self, **command: Any) -> Any:
        """Has the peer carry out a command, and returns its answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("error: a peer ended without a word")
        return json.loads(line)


def measure_path(path: str, rate: str) -> dict[str, Any]:
    """Returns the figures of one path; rate: of every machine's link, as tc has it, "" for no limit."""
    with NatLab() as lab, ExitStack() as undo:
        lab.add_public("relay")
        for name in ("asker", "answerer"):
            kind = KINDS[path]
            if kind is None:
                lab.add_public(name)
            else:
                lab.add_behind(name, kind)
        for name in ("relay", "asker", "answerer") if rate else ():
            lab.limit(name, rate)
        middle = Machine(lab, undo, "relay", relays=True)
        asker, answerer = Machine(lab, undo, "asker"), Machine(lab, undo, "answerer")
        if path == "direct":
            asker.do(reach=answerer.peer, at=[answerer.address])
        elif path == "punched":
            answerer.do(expect=asker.address)
            asker.do(punch=answerer.peer, at=answerer.address)
        else:
            answerer.do(reach=middle.peer, at=[middle.address])
            answerer.do(reserve=middle.peer)
            asker.do(reach=answerer.peer, at=[f"{middle.address}/p2p/{middle.peer}/p2p-circuit"])
        figures: dict[str, Any] = asker.do(measure=answerer.peer)
        for name in ("relay", "asker", "answerer"):
            lab.kill_all_in(name)
    return figures


def main() -> None:
    """Measures all paths, or runs one peer."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rate", default="", help="of every machine's link, such as 200mbit; default: no limit")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve:
        uvloop.run(serve(given.serve))
        return
    print(f"| path | round trip of 1 KB | {IN_FLIGHT} calls of {CALL_BYTES // 2**20} MiB in flight |\n|---|---|---|")
    for path in KINDS:
        figures = measure_path(path, given.rate)
        rate = statistics.median(figures["bytes_per_s"]) / 1e6
        print(f"| {figures['path']} | {1000 * figures['trip_s']:.2f} ms | {rate:.0f} MB/s |", flush=True)


if __name__ == "__main__":
    main()
