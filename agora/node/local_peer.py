"""The local peer: what lives as long as the daemon, whichever stages it holds.

Knows: the network, the directory, membership, the router, what was answered already. Must not know: stages, training
(loaded_span.py), processes, signals.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack

import torch
from agora_protocol.addresses import peer_of_address
from agora_protocol.codec_names import parse_codec
from agora_protocol.ids import PeerId
from agora_protocol.limits import MAX_ADDRESSES
from agora_protocol.manifest import Manifest, SignedManifest

from agora.averaging.partition import owning_bandwidths
from agora.clock import loop_time
from agora.net.address_book import addresses_by_peer
from agora.net.directory import Directory
from agora.net.host import Host
from agora.net.incoming import NetLimits
from agora.net.network import Network
from agora.net.own_addresses import is_circuit, public_only
from agora.net.reaching import Ways
from agora.net.relay import RelayService
from agora.net.uplink import SAMPLE_S, UplinkMeter
from agora.node import joining, runs
from agora.node.background import BackgroundTasks
from agora.node.base_supply import BaseSupply
from agora.node.node_report import NodeReport, progress_record, status_json
from agora.node.own_ability import OwnAbility
from agora.node.reachability_keeper import ReachabilityKeeper
from agora.node.requests import BASE_REQUESTS, REACH_REQUESTS, RequestHandler, SentTensors
from agora.node.startup import Startup
from agora.observe import events
from agora.pipeline.interfaces import WireShapes
from agora.pipeline.ledger import WorkLedger
from agora.pipeline.router import Router
from agora.plan.cost_of_run import usual_in_flight
from agora.swarm.membership import Membership, MembershipConfig
from agora.swarm.offences import OffenceLog
from agora.swarm.redialling import Redialling
from agora.train.memory import available_bytes
from agora.train.weight_versions import LIMIT_PER_SEAT

SEATS_SHARE, MOST_SEATS_BYTES = 0.125, 4 * 2**30
LEAST_HELD_BYTES = 64 * 2**20
REMEMBER_S = 15.0
REDIAL_S = 5.0
"""Seconds from one look at which peers are out of sight to the next."""
DIAL_SECONDS = 4.0


class LocalPeer:
    """This machine's place in the run, whichever stages it holds: network, membership, router and work ledger.

    It tells who replicates a stage (a ReplicaListing). seats: how many microbatches may be inside it at once.
    base_supply: gives and fetches tensors of the run's base model. ability: what this machine can do, for placement.
    """

    def __init__(
        self,
        startup: Startup,
        signed: SignedManifest,
        host: Host,
        directory: Directory,
        take_node_report: Callable[[], NodeReport],
    ) -> None:
        self.startup = startup
        self.signed = signed
        self.manifest = manifest = signed.manifest
        self.host = host
        self.seats = seats_of(manifest, available_bytes(torch.device("cpu")))
        self.sent = SentTensors()
        settings = startup.settings
        self.ability = OwnAbility(manifest, startup.settings, startup.home.root)
        self.offences = OffenceLog(startup.report_event)
        self.ledger = WorkLedger(startup.me, self.seats, startup.report_event)
        report_offence = self.offences.report_offence
        self.requests = RequestHandler(signed, lambda: status_json(take_node_report()), report_offence, self.ledger)
        self.network = self._make_network()
        self.membership = self._make_membership(directory, take_node_report)
        self.reachability = ReachabilityKeeper(
            host, self.network, self.membership, settings.allow_private, settings.upnp, settings.relay_peers
        )
        self.network.reach_by(Ways(self.reachability.may_dial, self.reachability.punch_hole))
        self._relay = RelayService(host, settings.relay_peers, self._is_member, settings.relay_mbit * 125e3)
        self.router = Router(
            self.network,
            lambda: self.membership.view,
            me=startup.me,
            stage_count=manifest.stage_count,
            shapes=wire_shapes(manifest),
            report=startup.report_event,
            offences=self.offences,
            round_trip_s=self.network.round_trip_s,
        )
        self.base_supply = BaseSupply(startup, manifest, self.network, lambda: self.membership.view, report_offence)
        self.tasks = BackgroundTasks()
        self._closing = ExitStack()
        self._directory = directory
        self._redialling = Redialling(startup.me, random.Random())
        self._uplink = UplinkMeter()

    def _make_network(self) -> Network:
        """Returns the network, with limits that fit the run's microbatches and this peer's seats."""
        payload = self.manifest.max_payload_bytes

        def report_failure(caller: PeerId, error: Exception) -> None:
            """Called when answering `caller` failed by an unforeseen error: reports TaskFailed."""
            self.startup.report_event(events.TaskFailed(f"answering {caller}", f"{type(error).__name__}: {error}"))

        return Network(
            self.host,
            lambda: joining.hello(self.signed.run_id, self.reachability.announcement().addresses),
            self.requests.answer,
            NetLimits(max_payload_bytes=payload, max_held_bytes=max(LEAST_HELD_BYTES, 2 * self.seats * payload)),
            report_violation=self.offences.report_violation,
            shut_out_s=self.offences.shut_out_s,
            report_failure=report_failure,
            count_sent=self.sent.add,
        )

    def _make_membership(self, directory: Directory, take_node_report: Callable[[], NodeReport]) -> Membership:
        """Returns the membership, which publishes this peer's records and tells when the view has changed."""
        startup, signed = self.startup, self.signed
        own = self.host.own if startup.settings.allow_private else public_only(self.host.own)
        addresses = tuple(f"{address}/p2p/{self.host.peer}" for address in own)[:MAX_ADDRESSES]
        return Membership(
            MembershipConfig(signed.run_id, signed.manifest.stage_count, startup.incarnation, addresses),
            directory,
            startup.identity,
            startup.report_event,
            progress=lambda: progress_record(take_node_report()),
            on_change=self._on_view_change,
        )

    def _is_member(self, peer: PeerId) -> bool:
        """Returns whether a peer is connected here as one of the run: only those may use this peer as their relay."""
        connection = self.network.connection_to(peer)
        return connection is not None and not connection.is_observer and self.offences.shut_out_s(peer) == 0

    def _on_view_change(self) -> None:
        """Called when the view has changed: learns where peers can be dialled, and wakes the router."""
        for peer, seen in self.membership.view.peers.items():
            if peer != self.startup.me:
                self.network.learn_announced(peer, seen.addresses)
        self.router.view_changed()

    async def start(self, others: tuple[str, ...]) -> None:
        """Begins to answer other peers, and to keep membership up to date. others: addresses of peers of the run."""
        self._closing.enter_context(self.requests.answering(BASE_REQUESTS, self.base_supply.answer))
        self._closing.enter_context(self.requests.answering(REACH_REQUESTS, self.reachability.answer))
        await self.network.start()
        await self._relay.start()
        self.tasks.start("reachability", self.reachability.run())
        self.tasks.start("membership", self.membership.run())
        for peer, known in addresses_by_peer(others).items():
            self._redialling.learn(loop_time(), peer, known)
        self.tasks.start("redial", self._redial_the_missing())
        self.tasks.start("addresses", self._remember_addresses())
        self.tasks.start("uplink", self._measure_uplink())

    async def close(self) -> None:
        """Ends the tasks and all calls. Host and directory stay open; whoever opened them closes them."""
        await self.tasks.close()
        self._closing.close()
        await self.base_supply.close()
        await self.network.close()

    def listed(self, stage: int) -> Mapping[PeerId, float]:
        """Returns a stage's replicas, with the bandwidths that count for owning parts, in bytes per second."""
        replicas = self.membership.view.replicas(stage)
        return owning_bandwidths({seen.peer: (seen.bandwidth, seen.reachability) for seen in replicas})

    def steps_of(self, stage: int) -> Mapping[PeerId, int]:
        """Returns a stage's replicas, with the steps that they have taken."""
        return {seen.peer: seen.step_of(stage) for seen in self.membership.view.replicas(stage)}

    def steps_of_run(self) -> list[Collection[int]]:
        """Returns, for each stage of the run, the steps that its replicas have taken."""
        return [self.steps_of(stage).values() for stage in range(self.manifest.stage_count)]

    def uplink(self) -> float | None:
        """Returns the measured rate of this peer's uplink in bytes per second, None while nothing waits for it."""
        return self._uplink.rate.value

    def is_connected(self) -> bool:
        """Returns whether this peer has a connection to any other peer now."""
        return bool(self.network.paths)

    def traffic(self) -> events.Traffic:
        """Returns the bytes sent and received since the start, and the tensors' shares of those sent."""
        (bytes_in, bytes_out), sent = self.network.carried_bytes, self.sent
        return events.Traffic(sent.boundary_bytes, bytes_out, bytes_in, sent.averaging_bytes, sent.state_bytes)

    async def _measure_uplink(self) -> None:
        """Every 0.25 s, looks at what was sent and what still waits."""
        while True:
            self._uplink.measure(loop_time(), *self.network.given_and_waiting_bytes)
            await asyncio.sleep(SAMPLE_S)

    async def _redial_the_missing(self) -> None:
        """Every REDIAL_S, dials peers that went out of sight, so that no swarm stays in two parts; see Redialling."""
        while True:
            await asyncio.sleep(REDIAL_S)
            now, view = loop_time(), self.membership.view
            self._redialling.saw(now, view, self.reachability.may_dial)
            due = self._redialling.due(now, view)
            addresses = [address for peer in due for address in self._redialling.addresses_of(peer)]
            behind_relays = {peer_of_address(address) for address in addresses if is_circuit(address)}
            await asyncio.gather(*map(self.reachability.try_to_connect, behind_relays))
            if addresses:
                await self._directory.bootstrap(addresses, timeout_s=DIAL_SECONDS)

    async def _remember_addresses(self) -> None:
        """Every 15 s, writes up to 16 addresses of other peers to the disk for the next start."""
        home, run = self.startup.home, self.signed.run_id
        while True:
            await asyncio.sleep(REMEMBER_S)
            peers = self._redialling.remembered()
            if addresses := [address for peer in peers for address in self._redialling.addresses_of(peer)[:2]][:16]:
                try:
                    await asyncio.to_thread(runs.remember_addresses, home, run, addresses)
                except OSError as error:
                    trouble = events.DiskTrouble(str(home.peers(run)), error.strerror or str(error))
                    self.startup.report_event(trouble)


def seats_of(manifest: Manifest, free_bytes: int) -> int:
    """Returns how many microbatches may be inside this peer at once: usual_in_flight, for long links up to 4 times it.

    More than the usual number may fill an eighth of `free_bytes`, the machine's memory, and 4 GiB at most. A seat holds
    the boundary that came, its values as float32, the boundary that left, and the gradient.
    """
    usual, shape = usual_in_flight(manifest), manifest.boundary_shape()
    seat_bytes = 3 * manifest.max_payload_bytes + 4 * math.prod(shape)
    affordable = min(int(SEATS_SHARE * free_bytes), MOST_SEATS_BYTES) // seat_bytes
    return max(usual, min(LIMIT_PER_SEAT * usual, affordable))


def wire_shapes(manifest: Manifest) -> WireShapes:
    """Returns the dtypes and shapes that the manifest implies for a microbatch's tensors."""
    codec, shape = parse_codec(manifest.boundary.codec), manifest.boundary_shape()
    return WireShapes(
        codec.wire_format(shape, "forward"),
        codec.wire_format(shape, "backward"),
        manifest.tokens_shape(),
        manifest.objective.kind,
    )
