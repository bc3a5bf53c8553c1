"""Holds `--link`, which shapes inside the process, against the kernel's own shaping between network namespaces.

Needs root; makes two network namespaces of its own names, keeps all traffic inside them, and removes them however it
ends. The kernel's side is a token bucket (tbf) for the rate, and netem for the delay; where the kernel has no netem,
two tun devices with a relay between them that holds every packet for half the RTT.

    .venv/bin/python scripts/lab/links.py --link 20Mbit,50ms --link 200Mbit,50ms
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import fcntl
import json
import os
import selectors
import shutil
import signal
import statistics
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import uvloop
from agora_protocol.addresses import peer_of_address
from agora_protocol.identity import Identity
from agora_protocol.ids import MicrobatchId, RunId
from agora_protocol.messages import Process, Processed
from agora_protocol.tensors import WireTensor

from agora.core.calls import Reply
from agora.net.p2pd.host import Host
from agora.net.rpc.connection import IncomingCall
from agora.net.rpc.gate import Gate
from agora.net.rpc.network import Network
from agora.net.shaping.link import LinkSpec

RUN: Final = RunId("07" * 32)
ROUND_TRIPS: Final = 21
TRANSFERS: Final = 3
MEGABYTES: Final = 10
QUEUE_MS: Final = 100  # how long a packet may wait in the token bucket's queue before it is dropped
CALL_S: Final = 300.0
NEEDED: Final = ("ip", "tc")
IP_A, IP_B = "10.213.7.1", "10.213.7.2"
TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000


def sh(*words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Runs a command, and shows its output when it fails."""
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if check and done.returncode:
        raise SystemExit(f"error: {' '.join(words)}: {done.stderr.strip()}")
    return done


# --- the network


@contextlib.contextmanager
def namespaces() -> Iterator[tuple[str, str]]:
    """Makes two fresh network namespaces, and removes them at the end."""
    names = (f"agora-lab-{os.getpid()}-a", f"agora-lab-{os.getpid()}-b")
    with ExitStack() as undo:
        for name in names:
            sh("ip", "netns", "add", name)
            undo.callback(sh, "ip", "netns", "del", name, check=False)
            sh("ip", "-n", name, "link", "set", "lo", "up")
        yield names


def veth(names: tuple[str, str]) -> None:
    """Connects the two namespaces by a virtual cable."""
    ends = (f"lab{os.getpid()}a", f"lab{os.getpid()}b")
    sh("ip", "link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
    for name, end, address in zip(names, ends, (IP_A, IP_B), strict=True):
        sh("ip", "link", "set", end, "netns", name)
        raise_up(name, end, address)


def raise_up(name: str, device: str, address: str) -> None:
    """Names the device inside the namespace `lab0` and gives it its address."""
    sh("ip", "-n", name, "link", "set", device, "name", "lab0")
    sh("ip", "-n", name, "addr", "add", f"{address}/24", "dev", "lab0")
    sh("ip", "-n", name, "link", "set", "lab0", "up")


def shape(name: str, spec: LinkSpec, *, netem: bool) -> bool:
    """Limits and delays what leaves the namespace by tc; and returns whether the kernel can delay packets."""
    rate, burst = f"{int(spec.rate * 8)}bit", str(max(5_000, int(spec.rate / 250)))
    words = ("tc", "-n", name, "qdisc", "add", "dev", "lab0")
    sh(*words, "root", "handle", "1:", "tbf", "rate", rate, "burst", burst, "latency", f"{QUEUE_MS}ms")
    if not netem:
        return True
    delay = ("delay", f"{spec.rtt_s * 500:g}ms")
    return not sh(*words, "parent", "1:1", "handle", "10:", "netem", *delay, "limit", "100000", check=False).returncode


class Relay(threading.Thread):
    """Carries packets between two tun devices, each `delay_s` after it came, in order."""

    def __init__(self, delay_s: float) -> None:
        super().__init__(daemon=True)
        self.delay_s = delay_s
        self.names = (f"lab{os.getpid()}a", f"lab{os.getpid()}b")
        self.files = [_tun(name) for name in self.names]
        self.stopping = False

    def run(self) -> None:
        ways = {self.files[0]: self.files[1], self.files[1]: self.files[0]}
        waiting: deque[tuple[float, int, bytes]] = deque()
        with selectors.DefaultSelector() as selector:
            for file in self.files:
                selector.register(file, selectors.EVENT_READ)
            while not self.stopping:
                patience = max(0.0, waiting[0][0] - time.monotonic()) if waiting else 0.05
                for key, _ in selector.select(patience):
                    waiting.extend((time.monotonic() + self.delay_s, ways[key.fd], packet) for packet in _read(key.fd))
                while waiting and waiting[0][0] <= time.monotonic():
                    _, file, packet = waiting.popleft()
                    with contextlib.suppress(OSError):  # a device that is going away, or full: a lost packet
                        os.write(file, packet)

    def stop(self) -> None:
        """Ends the thread and removes the devices."""
        self.stopping = True
        self.join()
        for file in self.files:
            os.close(file)


def _tun(name: str) -> int:
    file = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(file, TUNSETIFF, struct.pack("16sH14x", name.encode(), IFF_TUN | IFF_NO_PI))
    return file


def _read(file: int) -> Iterator[bytes]:
    with contextlib.suppress(OSError):
        while True:
            yield os.read(file, 65_536)


@contextlib.contextmanager
def network(spec: LinkSpec | None) -> Iterator[tuple[tuple[str, str], str]]:
    """Yields two connected namespaces and how they are shaped: by the kernel when `spec` is given."""
    with ExitStack() as undo:
        names = undo.enter_context(namespaces())
        veth(names)
        if spec is None:
            yield names, "veth"
        elif all(shape(name, spec, netem=True) for name in names):
            yield names, "tbf + netem"
        else:
            undo.close()
            names = undo.enter_context(namespaces())
            relay = Relay(spec.rtt_s / 2)
            undo.callback(relay.stop)
            for name, device, address in zip(names, relay.names, (IP_A, IP_B), strict=True):
                sh("ip", "link", "set", device, "netns", name)
                raise_up(name, device, address)
                shape(name, spec, netem=False)
            relay.start()
            yield names, "tbf + relay"


# --- the two programs at its ends


async def swallow(_: IncomingCall) -> Reply:
    """Answers every request with a few bytes."""
    return Reply(Processed(0.0, 1, 0.0), [tensor(64)])


def tensor(size: int) -> WireTensor:
    """Returns a tensor of `size` random bytes, which nothing compresses."""
    return WireTensor("uint8", (size,), memoryview(os.urandom(size)))


@contextlib.asynccontextmanager
async def peer(address: str, link: str) -> Any:
    """Starts a host and its network."""
    with tempfile.TemporaryDirectory() as folder:
        key = Path(folder) / "key"
        Identity.create(key)
        spec = LinkSpec.parse(link) if link else None
        host = await Host.create(identity_path=key, listen=[f"/ip4/{address}/tcp/0"], link=spec)
        net = Network(host, Gate(host.peer, RUN, "lab"), swallow)
        try:
            await net.start()
            yield host, net
        finally:
            await net.close()
            await host.close()


async def answer(link: str) -> None:
    """Runs the answering peer: prints its address, then answers until its standard input ends."""
    async with peer(IP_B, link) as (host, _):
        found = [address for address in await host.addresses() if IP_B in address]
        print(found[0], flush=True)
        await asyncio.to_thread(sys.stdin.read)


async def ask(link: str, address: str) -> None:
    """Runs the asking peer: measures, and prints the figures as JSON."""
    async with peer(IP_A, link) as (host, net):
        other = peer_of_address(address)
        net.address_book.learn(other, [address])

        async def seconds(size: int) -> float:
            tensors = [tensor(size), WireTensor("int32", (1, 2), memoryview(bytes(8)))]
            request = Process(MicrobatchId(os.urandom(16)), host.peer, 0, "train", int(CALL_S * 1000), ())
            started = time.perf_counter()
            await net.call(other, request, tensors, deadline=asyncio.get_running_loop().time() + CALL_S)
            return time.perf_counter() - started

        await seconds(1000)
        trips = [await seconds(1000) for _ in range(ROUND_TRIPS)]
        transfers = [await seconds(MEGABYTES * 1_000_000) for _ in range(TRANSFERS)]
        figures = {"trip_s": statistics.median(trips), "transfers_s": transfers}
        print(json.dumps(figures), flush=True)


def measure(names: tuple[str, str], link: str) -> dict[str, Any]:
    """Runs both peers, each in its namespace, and returns the figures."""

    def start(name: str, role: str, *more: str) -> subprocess.Popen[str]:
        words = ["ip", "netns", "exec", name, sys.executable, str(Path(__file__).resolve()), "--role", role, *more]
        return subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    more = ["--in-process", link] if link else []
    with ExitStack() as undo:

        def first_words(name: str, role: str, *more: str) -> str:
            process = start(name, role, *more)
            undo.callback(_end, process)
            line = process.stdout.readline().strip() if process.stdout is not None else ""
            if not line:
                raise SystemExit(f"error: the program that should {role} ended without a word")
            return line

        address = first_words(names[1], "answer", *more)
        figures: dict[str, Any] = json.loads(first_words(names[0], "ask", "--address", address, *more))
    return figures


def _end(process: subprocess.Popen[str]) -> None:
    if process.stdin is not None:
        process.stdin.close()
    try:
        process.wait(10.0)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


# --- the table


def compare(link: str) -> list[list[str]]:
    """Returns three rows: by definition, shaped in the process, shaped by the kernel."""
    spec = LinkSpec.parse(link)
    ideal = MEGABYTES * 1e6 / spec.rate
    rows = [[link, "by definition", _ms(spec.rtt_s), f"{ideal + spec.rtt_s:.2f}", "1.00"]]
    for way in (None, spec):
        with network(way) as (names, how):
            figures = measure(names, link if way is None else "")
        took = statistics.median(figures["transfers_s"])
        first = f" (first {figures['transfers_s'][0]:.2f})"
        share = f"{ideal / (took - spec.rtt_s):.2f}"
        rows.append([link, how if way else "in the process", _ms(figures["trip_s"]), f"{took:.2f}{first}", share])
    return rows


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.1f} ms"


def main() -> None:
    """Compares the links of the command line and prints a markdown table; with --role it is one of the two peers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--link", action="append", metavar="RATE,RTT", help="may be repeated; default 20Mbit,50ms")
    parser.add_argument("--role", choices=("answer", "ask"), help=argparse.SUPPRESS)
    parser.add_argument("--in-process", default="", help=argparse.SUPPRESS)
    parser.add_argument("--address", default="", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.role == "answer":
        uvloop.run(answer(given.in_process))
        return
    if given.role == "ask":
        uvloop.run(ask(given.in_process, given.address))
        return
    if os.geteuid() != 0 or not all(map(shutil.which, NEEDED)):
        raise SystemExit("error: this needs root, and ip and tc (Debian: apt install iproute2)")
    links = given.link or ["20Mbit,50ms"]
    if any(spec.jitter_s or spec.loss for spec in map(LinkSpec.parse, links)):
        raise SystemExit("error: only rate and delay are compared; leave jitter and loss away")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    print(f"| link | shaped | round trip of 1 KB | {MEGABYTES} MB, seconds | of the rate |\n|---|---|---|---|---|")
    for link in links:
        for row in compare(link):
            print("| " + " | ".join(row) + " |", flush=True)


if __name__ == "__main__":
    main()
