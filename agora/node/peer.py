"""The peer: what lives as long as the daemon, whichever stages it holds.

Knows: the network, the directory, membership, the router, what was answered already. Must not know: stages, training
(loaded_span.py), processes, signals.

Opened in this order, closed in the opposite one:

| step | opens |
|---|---|
| doctor | nothing; checks the disk |
| network | calls, and the answers to other peers' requests |
| directory | the DHT node |
| - | membership, router, background tasks |
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import torch
from agora_protocol.codec_names import parse_codec
from agora_protocol.ids import PeerId
from agora_protocol.manifest import Manifest, SignedManifest
from agora_protocol.records import Progress

from agora.net.calls import NetLimits, Network
from agora.net.directory import Directory
from agora.net.host import Host
from agora.node import doctor, joining, runs
from agora.node.background import BackgroundTasks
from agora.node.requests import CountingCaller, RequestHandler, SentTensors
from agora.node.startup import Startup
from agora.observe import events
from agora.pipeline.interfaces import WireShapes
from agora.pipeline.ledger import WorkLedger
from agora.pipeline.router import Router
from agora.swarm.membership import Membership, MembershipConfig
from agora.swarm.offences import OffenceLog
from agora.train.memory import available_bytes
from agora.train.weight_versions import LIMIT_PER_SEAT

LEAST_IN_FLIGHT, IN_FLIGHT_PER_STAGE = 32, 4
SEATS_SHARE, MOST_SEATS_BYTES = 0.125, 4 * 2**30
LEAST_HELD_BYTES = 64 * 2**20
REMEMBER_S = 15.0
REJOIN_S = 10.0


@dataclass(frozen=True, slots=True)
class Peer:
    """This machine's place in the run. `seats`: microbatches that may be inside it at once."""

    signed: SignedManifest
    addresses: tuple[str, ...]
    host: Host
    network: Network
    directory: Directory
    membership: Membership
    router: Router
    caller: CountingCaller
    requests: RequestHandler
    offences: OffenceLog
    ledger: WorkLedger
    sent: SentTensors
    seats: int
    tasks: BackgroundTasks


@asynccontextmanager
async def open_peer(
    startup: Startup,
    signed: SignedManifest,
    host: Host,
    addresses: tuple[str, ...],
    others: tuple[str, ...],
    *,
    status: Callable[[], dict[str, Any]],
    progress: Callable[[], Progress | None],
) -> AsyncIterator[Peer]:
    """Opens the peer on a running host, and closes it.

    addresses: of this peer. others: addresses of other peers that are known. status, progress: what this daemon says
    of itself when it is asked, and regularly in the directory. Raises an AgoraError that says what to do.
    """
    manifest, sent, offences = signed.manifest, SentTensors(), OffenceLog(startup.report)
    async with AsyncExitStack() as closing:
        with startup.steps.step("doctor") as note:
            note.text = doctor.check_disk(startup.home.root)
        seats = seats_of(manifest, available_bytes(torch.device("cpu")))
        ledger = WorkLedger(startup.peer, seats, startup.report)
        requests = RequestHandler(signed, status, sent, ledger)
        network = _make_network(startup, signed, host, addresses, requests, offences, seats)
        closing.push_async_callback(network.close)
        await network.start()
        with startup.steps.step("directory"):
            directory = await Directory.create(host, signed.run_id, others, stages=manifest.stage_count)
            closing.push_async_callback(directory.close)
        config = MembershipConfig(signed.run_id, manifest.stage_count, startup.incarnation, addresses)
        membership = Membership(config, directory, startup.identity, startup.report, progress=progress)
        caller = CountingCaller(network, sent)
        router = _make_router(startup, manifest, caller, network, membership, offences)
        tasks = await closing.enter_async_context(BackgroundTasks())
        tasks.start("membership", membership.run())
        tasks.start("rejoin", _rejoin_when_alone(directory, others))
        tasks.start("addresses", _remember_addresses(startup, signed, membership))
        yield Peer(
            signed,
            addresses,
            host,
            network,
            directory,
            membership,
            router,
            caller,
            requests,
            offences,
            ledger,
            sent,
            seats,
            tasks,
        )


def _make_network(
    startup: Startup,
    signed: SignedManifest,
    host: Host,
    addresses: tuple[str, ...],
    requests: RequestHandler,
    offences: OffenceLog,
    seats: int,
) -> Network:
    greeting, payload = joining.hello(signed.run_id, addresses), signed.manifest.max_payload_bytes
    limits = NetLimits(max_payload_bytes=payload, max_held_bytes=max(LEAST_HELD_BYTES, 2 * seats * payload))

    def report_failure(peer: PeerId, error: Exception) -> None:
        startup.report(events.TaskFailed(f"answering {peer}", f"{type(error).__name__}: {error}"))

    return Network(
        host,
        lambda: greeting,
        requests.answer,
        limits,
        report_violation=offences.report_violation,
        shut_out_s=offences.shut_out_s,
        report_failure=report_failure,
    )


def _make_router(
    startup: Startup,
    manifest: Manifest,
    caller: CountingCaller,
    network: Network,
    membership: Membership,
    offences: OffenceLog,
) -> Router:
    def round_trip_s(peer: PeerId) -> float | None:
        connected = network.statistics().peers.get(peer)
        return connected.rtt_s if connected else None

    router = Router(
        caller,
        lambda: membership.view,
        me=startup.peer,
        stage_count=manifest.stage_count,
        shapes=wire_shapes(manifest),
        report=startup.report,
        report_offence=offences.report_offence,
        is_shut_out=offences.is_shut_out,
        round_trip_s=round_trip_s,
    )
    membership.subscribe(router.view_changed)
    return router


async def _rejoin_when_alone(directory: Directory, others: tuple[str, ...]) -> None:
    """Dials all known addresses again while the directory has no neighbour, so that no swarm stays in two parts."""
    while True:
        await asyncio.sleep(REJOIN_S)
        if others and directory.neighbours == 0:
            await directory.bootstrap(others, timeout_s=2.0)


async def _remember_addresses(startup: Startup, signed: SignedManifest, membership: Membership) -> None:
    """Writes addresses of other peers to the disk for the next start. A full disk costs that and nothing else."""
    while True:
        await asyncio.sleep(REMEMBER_S)
        others = [seen for seen in membership.view.peers.values() if seen.peer != startup.peer]
        addresses = [address for seen in others for address in seen.addresses[:2]][:16]
        if not addresses:
            continue
        try:
            await asyncio.to_thread(runs.remember_addresses, startup.home, signed.run_id, addresses)
        except OSError as error:
            path = str(startup.home.peers(signed.run_id))
            startup.report(events.DiskTrouble(path, error.strerror or str(error)))


def usual_in_flight(manifest: Manifest) -> int:
    """Returns for how many microbatches between forward and backward the graphs are kept, where memory allows."""
    return max(LEAST_IN_FLIGHT, IN_FLIGHT_PER_STAGE * manifest.stage_count, manifest.schedule.max_in_flight)


def seats_of(manifest: Manifest, free_bytes: int) -> int:
    """Returns how many microbatches may be inside this peer at once: the usual number, up to four times it.

    The higher numbers serve long links. free_bytes: memory of this machine. A seat holds the boundary that came, its
    values as float32, the boundary that left, and the gradient; where no graph is kept that is all of it.
    """
    usual, shape = usual_in_flight(manifest), manifest.boundary_shape()
    seat_bytes = 3 * manifest.max_payload_bytes + 4 * math.prod(shape)
    affordable = min(int(SEATS_SHARE * free_bytes), MOST_SEATS_BYTES) // seat_bytes
    return max(usual, min(LIMIT_PER_SEAT * usual, affordable))


def wire_shapes(manifest: Manifest) -> WireShapes:
    """Returns the dtypes and shapes that the manifest implies for a microbatch's tensors."""
    codec, shape = parse_codec(manifest.boundary.codec), manifest.boundary_shape()
    return WireShapes(
        *codec.wire_format(shape, "forward"), *codec.wire_format(shape, "backward"), (shape[0], shape[1] + 1)
    )
