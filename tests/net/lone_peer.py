"""A peer in a process of its own, to be stopped or killed: prints [id, addresses, p2pd's pid], hangs in calls."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

from agora.core.calls import Reply
from agora.net.rpc.connection import IncomingCall
from tests.net.helpers import make_peer, run


async def hang(call: IncomingCall) -> Reply:
    await asyncio.sleep(600)
    raise AssertionError("nobody waits that long")


async def main() -> None:
    peer = await make_peer(Path(sys.argv[1]), "lone", hang)
    try:
        print(json.dumps([peer.id, peer.addresses, peer.host.p2p._child.pid]), flush=True)
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    finally:
        await peer.close()


if __name__ == "__main__":
    run(main, timeout_s=120)
