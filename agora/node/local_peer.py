"""The local peer: what lives as long as the daemon, whichever stages it holds.

Knows: the network, the directory, membership, the router, earlier answers. Must not know: stages, training
(loaded_span.py), processes, signals.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack

import torch
from agora_protocol.addresses import peer_of_address
from agora_protocol.codec_names import parse_codec
from agora_protocol.ids import PeerId
from agora_protocol.limits import MAX_ADDRESSES
from agora_protocol.manifest import Manifest, SignedManifest
from agora_protocol.records import Progress

from agora.averaging.partition import owning_bandwidths
from agora.clock import loop_time
from agora.net.address_book import addresses_by_peer
from agora.net.directory import Directory
from agora.net.host import Host
from agora.net.incoming import NetLimits
from agora.net.network import Network
from agora.net.own_addresses import is_circuit, public_only
from agora.net.reaching import WaysToReach
from agora.net.relay import RelayService
from agora.net.uplink import SAMPLE_S, UplinkMeter
from agora.node import doctor, runs
from agora.node.background import BackgroundTasks
from agora.node.base_supply import BaseSupply
from agora.node.clock_keeping import ClockKeeper
from agora.node.connection_watch import watch_connections
from agora.node.memory_guard import MemoryGuard
from agora.node.node_report import NodeReport, progress_record, status_json
from agora.node.own_ability import OwnAbility
from agora.node.reachability_keeper import ReachabilityKeeper
from agora.node.requests import ADMISSION_REQUESTS, BASE_REQUESTS, REACH_REQUESTS, RequestHandler, SentTensors
from agora.node.run_admission import RunAdmission
from agora.node.startup import Startup
from agora.observe import events
from agora.pipeline.interfaces import WireShapes
from agora.pipeline.ledger import WorkLedger
from agora.pipeline.router import Router
from agora.plan.cost_of_run import usual_in_flight
from agora.swarm.membership import Membership, MembershipConfig
from agora.swarm.offences import OffenceLog
from agora.swarm.redialling import Redialling
from agora.swarm.view import PeerView
from agora.train.memory import available_bytes
from agora.train.weight_versions import LIMIT_PER_SEAT

SEATS_SHARE, MAX_SEATS_BYTES = 0.125, 4 * 2**30
"""The part of the free memory, and the bytes, that seats beyond the usual number may take; the lesser counts."""
MIN_HELD_BYTES = 64 * 2**20
"""Bytes of payloads that the network may hold in any run."""
REMEMBER_S = 15.0
"""Seconds between two writes of other peers' addresses to disk."""
REDIAL_S = 5.0
"""Seconds between two checks of which peers are missing from the view."""
DIAL_S = 4.0
"""Seconds that redialling missing peers may take."""
MEET_S = 2.0
"""Seconds that reading the directory waits for strangers to be met."""


class LocalPeer:
    """Holds what takes part in the run whichever stages are held: network, membership, router, work ledger ...

    It implements averaging's ReplicaListing. seats: how many microbatches may be in work here at once.
    base_supply: gives and fetches tensors of the run's base model. ability: what this machine can do, for placement.
    """

    def __init__(
        self,
        startup: Startup,
        signed: SignedManifest,
        host: Host,
        directory: Directory,
        admission: RunAdmission,
        take_node_report: Callable[[], NodeReport],
    ) -> None:
        self.startup, self.signed, self.host, self.admission = startup, signed, host, admission
        self.manifest = manifest = signed.manifest
        self.seats = seats_of(manifest, _memory_limit(startup.settings.memory_gib))
        self.sent = SentTensors()
        self.ability = OwnAbility(manifest, startup.settings, startup.home.root)
        self.offences = OffenceLog(startup.report_event)
        self.ledger = WorkLedger(startup.me, self.seats, startup.report_event)
        report_offence = self.offences.report_offence
        self.requests = RequestHandler(signed, lambda: status_json(take_node_report()), report_offence, self.ledger)
        self.network = self._make_network()
        self.membership = self._make_membership(directory, lambda: progress_record(take_node_report()))
        settings = startup.settings
        self.reachability = ReachabilityKeeper(
            host, self.network, self.membership, settings.allow_private, settings.upnp, settings.relay_peers
        )
        self.network.reach_by(WaysToReach(self.reachability.may_dial, self.reachability.punch_hole))
        admission.gate.addresses = lambda: self.reachability.announcement().addresses
        self._relay = RelayService(host, settings.relay_peers, self._is_member, settings.relay_mbit * 125e3)
        self.router = self._make_router()
        self.base_supply = BaseSupply(startup, manifest, self.network, lambda: self.membership.view, report_offence)
        self.tasks, self._closing = BackgroundTasks(), ExitStack()
        self._directory = directory
        self._redialling = Redialling(startup.me, random.Random())
        self._uplink = UplinkMeter()

    def _make_membership(self, directory: Directory, progress: Callable[[], Progress | None]) -> Membership:
        """Returns the membership. It and the directory ask `is_met`; misuse of the directory is an offence."""
        startup, admission, count = self.startup, self.admission, self.manifest.stage_count
        own = self.host.own if startup.settings.allow_private else public_only(self.host.own)
        addresses = tuple(f"{address}/p2p/{self.host.peer}" for address in own)[:MAX_ADDRESSES]
        run, incarnation = self.signed.run_id, startup.incarnation
        membership = Membership(
            MembershipConfig(run, count, incarnation, addresses, admission.proof, admission.is_member),
            directory,
            startup.identity,
            startup.report_event,
            progress=progress,
            on_change=self._on_view_change,
            unix=startup.clock.unix,
        )
        membership.acquaintances = self
        self.network.on_met.append(lambda _peer: membership.count_members())
        directory.bounds.is_member = self.is_met
        directory.bounds.report_violation = self.offences.report_violation
        return membership

    def _make_router(self) -> Router:
        """Returns the router, which chooses among the peers of the membership's view."""
        return Router(
            self.network,
            lambda: self.membership.view,
            me=self.startup.me,
            stage_count=self.manifest.stage_count,
            shapes=wire_shapes(self.manifest),
            report=self.startup.report_event,
            offences=self.offences,
            round_trip_s=self.network.round_trip_s,
        )

    def _make_network(self) -> Network:
        """Returns the network, with limits that fit the run's microbatches and this peer's seats."""
        payload = self.manifest.max_payload_bytes

        def report_failure(caller: PeerId, error: Exception) -> None:
            """Called when answering `caller` failed by an unforeseen error: reports TaskFailed."""
            self.startup.report_event(events.TaskFailed(f"answering {caller}", f"{type(error).__name__}: {error}"))

        network = Network(
            self.host,
            self.admission.gate,
            self.requests.answer,
            NetLimits(max_payload_bytes=payload, max_held_bytes=max(MIN_HELD_BYTES, 2 * self.seats * payload)),
            report_violation=self.offences.report_violation,
            shut_out_s=self.offences.shut_out_s,
            report_failure=report_failure,
            count_sent=self.sent.add,
        )
        network.tell_time = self.startup.clock.time_for_others_unix
        return network

    def _is_member(self, peer: PeerId) -> bool:
        """Returns whether `peer` is connected as a member and not shut out: only such peers may use this relay."""
        connection = self.network.connection_to(peer)
        return connection is not None and not connection.is_reader and self.offences.shut_out_s(peer) == 0

    def _on_view_change(self) -> None:
        """Called when the view has changed: learns peers' addresses, and tells the router."""
        for peer, seen in self.membership.view.peers.items():
            if peer != self.startup.me:
                self.network.learn_announced(peer, seen.addresses)
        self.router.on_view_changed()

    async def start(self, others: tuple[str, ...]) -> None:
        """Starts serving requests, asks peers for the time, joins the DHT, and starts the background tasks.

        others: multiaddrs of known peers, which are asked first, and redialled when they are missing.
        """
        self._closing.enter_context(self.requests.answering(BASE_REQUESTS, self.base_supply.answer))
        self._closing.enter_context(self.requests.answering(ADMISSION_REQUESTS, self.admission.answer))
        self._closing.enter_context(self.requests.answering(REACH_REQUESTS, self.reachability.answer))
        self.admission.attach(self.network, self.membership, self._directory)
        await self.network.start()
        await self._relay.start()
        self.tasks.start("reachability", self.reachability.run())
        clock, by_peer = ClockKeeper(self.startup, self.network), addresses_by_peer(others)
        for peer, known in by_peer.items():
            self.network.learn(peer, known)
            self._redialling.learn(loop_time(), peer, known)
        await clock.ask_at_start(by_peer)
        await self._directory.bootstrap(others)
        self.tasks.start("membership", self.membership.run())
        self.tasks.start("bans", self.admission.exchange_ban_lists(self._directory))
        self.tasks.start("redial", self._redial_the_missing())
        members = self.membership
        self.tasks.start(
            "connections",
            watch_connections(self.host, lambda: members.view, members.lost_peers, on_lost=members.forget_lost),
        )
        self.tasks.start("addresses", self._remember_addresses())
        self.tasks.start("uplink", self._measure_uplink())
        self.tasks.start("clock", clock.run())
        if limit_bytes := self.startup.settings.memory_bytes:
            self.tasks.start("memory", MemoryGuard(limit_bytes, self.ledger, self.startup.report_event).run())

    async def close(self) -> None:
        """Ends the tasks and all calls. Host and directory stay open: the caller that opened them closes them."""
        await self.tasks.close()
        self._closing.close()
        await self.base_supply.close()
        await self.network.close()

    def replicas_in_view(self, stage: int) -> Mapping[PeerId, float]:
        """Returns, by replica of a stage, the bytes per second that count for owning parts; the median if unknown."""
        replicas = self.membership.view.replicas(stage)
        return owning_bandwidths({seen.peer: (seen.bandwidth, seen.reachability) for seen in replicas})

    def steps_of(self, stage: int) -> Mapping[PeerId, int]:
        """Returns, by replica of a stage, the number of steps that it has taken."""
        return {seen.peer: seen.step_of(stage) for seen in self.membership.view.replicas(stage)}

    def steps_of_run(self) -> list[Collection[int]]:
        """Returns, for each stage of the run, the steps that its replicas have taken."""
        return [self.steps_of(stage).values() for stage in range(self.manifest.stage_count)]

    def uplink(self) -> float | None:
        """Returns the measured rate of this peer's uplink in bytes per second; None until bytes had to wait for it."""
        return self._uplink.rate.value

    def is_connected(self) -> bool:
        """Returns whether this peer has a connection to any other peer now."""
        return bool(self.network.paths)

    def traffic(self) -> events.Traffic:
        """Returns the bytes sent and received since the start, and the tensors' shares of those sent."""
        (bytes_in, bytes_out), sent = self.network.carried_bytes, self.sent
        return events.Traffic(sent.boundary_bytes, bytes_out, bytes_in, sent.averaging_bytes, sent.state_bytes)

    def is_met(self, peer: PeerId) -> bool:
        """Returns whether `peer` counts as met (see Network.has_met) and is not shut out for its conduct."""
        return self.network.has_met(peer) and self.offences.shut_out_s(peer) <= 0.0

    async def meet(self, strangers: Sequence[PeerView]) -> None:
        """Exchanges HELLO with strangers whose claims were read, for MEET_S at most; slower dials go on afterwards.

        Errors are ignored: `is_met` tells who was met.
        """
        dials = [asyncio.create_task(self.network.meet(seen.peer, seen.addresses)) for seen in strangers]
        _, late = await asyncio.wait(dials, timeout=MEET_S)
        for dial in late:
            dial.cancel()  # the dial itself goes on
        await asyncio.gather(*dials, return_exceptions=True)

    async def _measure_uplink(self) -> None:
        """Every SAMPLE_S, until cancelled, measures the uplink by the bytes that were sent and those that wait."""
        while True:
            self._uplink.measure(loop_time(), *self.network.given_and_waiting_bytes)
            await asyncio.sleep(SAMPLE_S)

    async def _redial_the_missing(self) -> None:
        """Every REDIAL_S, until cancelled, dials peers that have left the view, so that no swarm stays split in two."""
        while True:
            await asyncio.sleep(REDIAL_S)
            now, view = loop_time(), self.membership.view
            self._redialling.saw(now, view, self.reachability.may_dial)
            due = self._redialling.due(now, view)
            addresses = [address for peer in due for address in self._redialling.addresses_of(peer)]
            behind_relays = {peer_of_address(address) for address in addresses if is_circuit(address)}
            await asyncio.gather(*map(self.reachability.try_to_connect, behind_relays))
            if addresses:
                await self._directory.bootstrap(addresses, timeout_s=DIAL_S)

    async def _remember_addresses(self) -> None:
        """Every REMEMBER_S, until cancelled, writes up to 16 addresses of other peers to disk for the next start."""
        home, run = self.startup.home, self.signed.run_id
        while True:
            await asyncio.sleep(REMEMBER_S)
            peers = [peer for peer in self._redialling.remembered_peers() if self.admission.may_call(peer)]
            if addresses := [address for peer in peers for address in self._redialling.addresses_of(peer)[:2]][:16]:
                try:
                    await asyncio.to_thread(runs.remember_addresses, home, run, addresses)
                except OSError as error:
                    trouble = events.DiskTrouble(str(home.peers(run)), error.strerror or str(error))
                    self.startup.report_event(trouble)


def _memory_limit(limit_gib: float) -> int:
    """Returns the lesser of this machine's free memory and `limit_gib`, in bytes. limit_gib: 0 for no limit."""
    return doctor.allowed_bytes(available_bytes(torch.device("cpu"), within_limit=False), limit_gib)


def seats_of(manifest: Manifest, free_bytes: int) -> int:
    """Returns how many microbatches may be in work at a peer at once: usual_in_flight, for long links up to 4 times.

    More than the usual number may take an eighth of `free_bytes`, the machine's free memory, and at most 4 GiB. A seat
    holds the boundary received, its values as float32, the boundary sent, and the gradient.
    """
    usual, shape = usual_in_flight(manifest), manifest.boundary_shape()
    seat_bytes = 3 * manifest.max_payload_bytes + 4 * math.prod(shape)
    affordable = min(int(SEATS_SHARE * free_bytes), MAX_SEATS_BYTES) // seat_bytes
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
