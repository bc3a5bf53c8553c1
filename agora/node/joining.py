"""How a daemon comes by the run's manifest and by addresses of others in it.

Knows: files, the registry, the wire's GetManifest. Must not know: what the daemon does afterwards.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

from agora_protocol import __version__
from agora_protocol.addresses import peer_of_address
from agora_protocol.errors import AgoraError, LocalError, ManifestError
from agora_protocol.identity import Identity
from agora_protocol.ids import PeerId, RunId
from agora_protocol.limits import MAX_ADDRESSES, PROTOCOL_VERSION
from agora_protocol.manifest import SignedManifest
from agora_protocol.messages import GetManifest, Hello, ManifestAnswer

from agora.net.calls import IncomingCall, Network, Reply
from agora.net.host import Host
from agora.node import control_client, paths, runs

FETCH_SECONDS = 15.0
NEIGHBOUR_SECONDS = 60.0


class Unreachable(LocalError):
    """Nobody of the run answers; the command ends with the exit code for that."""

    code = "unreachable"
    exit_code = 4


def hello(run: RunId, addresses: Sequence[str]) -> Hello:
    """What this daemon says first on every stream."""
    return Hello(PROTOCOL_VERSION, bytes.fromhex(run), f"agora {__version__}", tuple(addresses))


async def from_file(
    reference: runs.RunReference, identity: Identity, home: paths.Home, founded: Callable[[SignedManifest], None]
) -> tuple[SignedManifest, str]:
    """The signed manifest of a file or a joined run; a draft takes part in its founder's run, or is signed here."""
    if reference.signed is not None:
        founded(reference.signed)
        return reference.signed, "signed"
    for entry in paths.daemons():
        if reference.is_of(entry):
            running = runs.from_file(paths.Home(Path(entry.root)).manifest(entry.run), home)
            if running.signed is not None:
                founded(running.signed)
                return running.signed, f"founded by the daemon with pid {entry.pid}"
    return await asyncio.to_thread(runs.sign, reference, identity, founded)


async def fetch_manifest(host: Host, run: RunId, addresses: Sequence[str]) -> SignedManifest:
    """Asks the invite's peers for the manifest, one after the other, and checks hash and signature.

    Raises Unreachable when nobody has it, ManifestError when what came is not the run's.
    """
    network = Network(host, lambda: hello(run, ()), _nothing_here)
    failures: list[str] = []
    try:
        for peer in dict.fromkeys(peer_of_address(address) for address in addresses):
            network.learn(peer, addresses)
            try:
                return await _ask_manifest(network, peer, run)
            except ManifestError:
                raise
            except AgoraError as error:
                failures.append(str(error))
    finally:
        await network.close()
    raise Unreachable(
        f"no peer of the invite gives the run's manifest ({'; '.join(failures[:2]) or 'it names no peer'}); "
        "ask for a newer invite, or check this machine's network"
    )


async def _ask_manifest(network: Network, peer: PeerId, run: RunId) -> SignedManifest:
    deadline = asyncio.get_running_loop().time() + FETCH_SECONDS
    reply = await network.call(peer, GetManifest(), deadline=deadline)
    if not isinstance(reply.message, ManifestAnswer):
        raise ManifestError("the peer answered with something else; ask for another invite")
    return SignedManifest.from_bytes(reply.message.manifest, run)


async def _nothing_here(call: IncomingCall) -> Reply:
    raise LocalError("this peer is still joining")


async def neighbours(run: str, own_pid: int) -> tuple[str, ...]:
    """Addresses of this machine's other daemons of the run; waits for those that are just starting."""
    deadline = asyncio.get_running_loop().time() + NEIGHBOUR_SECONDS
    found: list[str] = []
    for entry in paths.daemons():
        while entry.run == run and entry.pid != own_pid and entry.alive:
            try:
                answer = await asyncio.to_thread(control_client.ask, Path(entry.socket), "addresses", timeout_s=2.0)
                found.extend(str(address) for address in answer["addresses"])
                break
            except (control_client.DaemonUnreachable, control_client.DaemonRefused):
                if asyncio.get_running_loop().time() > deadline:
                    break
                await asyncio.sleep(0.2)
    return tuple(found)


def ordered(addresses: Sequence[str]) -> tuple[str, ...]:
    """At most as many as a record may hold; those that others can dial before loopback."""
    return tuple(sorted(addresses, key=lambda address: "/127." in address or "/ip6/::1/" in address))[:MAX_ADDRESSES]
