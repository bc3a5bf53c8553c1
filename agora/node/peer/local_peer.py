"""The local peer: what a working daemon keeps, whichever stages it holds. A pause closes it."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import random
import statistics
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Final

from agora_protocol.addresses import peer_of_address
from agora_protocol.errors import AgoraError
from agora_protocol.ids import PeerId
from agora_protocol.limits import MAX_ADDRESSES
from agora_protocol.manifest import Manifest, SignedManifest

from agora.core.calls import Announcement, ConnectionBroken
from agora.core.clock import loop_time
from agora.core.live_manifest import LiveManifest
from agora.core.tasks import BackgroundTasks
from agora.cost.manifest_cost import default_in_flight
from agora.net.dht.bounded_dht import DhtRules
from agora.net.dht.directory import Directory
from agora.net.nat.reachability_keeper import ReachabilityKeeper
from agora.net.nat.relay import RelayService
from agora.net.p2pd.addresses import addresses_by_peer, is_circuit, public_network, public_only
from agora.net.p2pd.host import Host
from agora.net.rpc.budgets import NetLimits
from agora.net.rpc.dialling import AddressBook, DialStrategy
from agora.net.rpc.network import Network
from agora.net.shaping.bandwidth import SAMPLE_INTERVAL_S, UplinkMeter
from agora.node import run_files
from agora.node.control.node_report import NodeReport, progress_record, status_json
from agora.node.daemon_context import DaemonContext
from agora.node.limits.memory import MemoryGuard, measure_budget
from agora.node.peer.base_supply import BaseSupply
from agora.node.peer.capacity_probe import CapacityProbe
from agora.node.peer.clock_keeper import ClockKeeper
from agora.node.peer.requests import (
    ADMISSION_REQUESTS,
    AMENDMENT_REQUESTS,
    BASE_REQUESTS,
    REACH_REQUESTS,
    RequestHandler,
    SentTensors,
)
from agora.node.peer.run_admission import Bans, RunAdmission
from agora.node.peer.run_amendments import Amendments
from agora.node.peer.run_evaluations import Evaluations
from agora.observe import events
from agora.pipeline.process_call import WireRules
from agora.pipeline.router import Router
from agora.pipeline.work_ledger import WorkLedger
from agora.replica.reducers import reducing_bandwidths
from agora.swarm.lost_peers import LostPeers
from agora.swarm.membership import Membership, MembershipConfig
from agora.swarm.peer_score import PeerScore
from agora.swarm.redialling import Redialling
from agora.swarm.view import PeerView, View
from agora.train.weight_versions import MAX_TIMES_IN_FLIGHT

# All slots together may take SLOTS_FRACTION of the free memory, at most MAX_SLOTS_BYTES; the usual number of slots
# exists in any case.
SLOTS_FRACTION = 0.125
MAX_SLOTS_BYTES = 4 * 2**30
MIN_HELD_BYTES = 64 * 2**20  # bytes of payloads that the network may hold in any run
ADDRESS_BOOK_INTERVAL_S = 15.0  # seconds between two writes of other peers' addresses to disk
KEPT_ADDRESSES: Final = 16  # addresses that are written
REDIAL_INTERVAL_S = 5.0  # seconds between two checks of which peers are missing from the view
REDIAL_TIMEOUT_S = 4.0  # seconds that one attempt to redial missing peers may take
HELLO_TIMEOUT_S = 2.0  # seconds that a read of the directory waits for HELLO to be exchanged with unknown peers
ADMISSION_INTERVAL_S: Final = 1.0  # seconds between two looks whether an amendment of admission has come into force
NOT_ADMITTED_NOW: Final = (
    "the founder has amended who takes part in this run, and this machine does not any more: the others end their "
    "connections with it; stop it with `agora-node leave`, or ask the founder for an invite and join again"
)
CONNECTIONS_INTERVAL_S: Final = 1.0  # seconds between two checks of which peers are connected
CHECK_DIAL_TIMEOUT_S: Final = 4.0  # seconds after which a dial counts as failed


class LocalPeer:
    """What a working daemon keeps, whichever stages it holds: network, membership, router, ledger and more.

    slots: how many microbatches may be in progress here at the same time.
    """

    def __init__(
        self,
        context: DaemonContext,
        signed: SignedManifest,
        host: Host,
        proof: bytes,
        sample_node_report: Callable[[], NodeReport],
        on_task_end: Callable[[str, BaseException | None], None],
    ) -> None:
        """Wires a peer of the run on `host`, which its creator closes after it. Nothing runs until `start`.

        proof: this machine's tickets, b"" for none. sample_node_report: what other peers are told of this one.
        on_task_end: see BackgroundTasks. Raises DiskError when the bans or revocations on this disk cannot be read.
        """
        settings, manifest, me, unix = context.settings, signed.manifest, context.me, context.clock.unix
        self.context, self.signed, self.host, self._report = context, signed, host, context.report_event
        self._sample_node_report = sample_node_report

        # Who may take part, how peers behave, and what they ask.
        self.peer_score = score = PeerScore(self._report, loop_time)
        self.admission = RunAdmission(
            context,
            signed,
            proof,
            addresses=self._own_addresses,
            rules=lambda: self.live.last.admission,
            unix=unix,
        )
        self.slots = compute_slots(manifest, measure_budget("cpu", settings.owners_memory).host)
        self.ledger = WorkLedger(me, self.slots, self._report)
        self.requests = RequestHandler(
            signed, lambda: status_json(sample_node_report()), score.report_violation, self.ledger
        )

        # Connections to other peers.
        payload = manifest.max_payload_bytes
        largest = manifest.largest_payload_bytes
        held = max(MIN_HELD_BYTES, 2 * self.slots * payload, 2 * largest)
        self.sent = SentTensors()
        self.network = Network(
            host,
            self.admission.gate,
            self.requests.answer,
            NetLimits(max_payload_bytes=largest, max_held_bytes=held),
            report_protocol_error=score.report_protocol_error,
            suspended_s=score.suspended_s,
            report_failure=self._report_failure,
            count_sent=self.sent.add,
            tell_time=context.clock.time_for_others_unix,
            on_handshake=self._on_handshake,
            dial_strategy=DialStrategy(self._may_dial, self._punch_hole),
        )
        self.relay = RelayService(host, settings.relay_peers, self._may_use_relay, settings.relay_mbit * 125e3)

        # Who is in the run, and how they and this peer are reached.
        self.directory = Directory(
            host,
            signed.run_id,
            stages=manifest.stage_count,
            rules=DhtRules(
                may_call=self.admission.may_call,
                is_admitted_member=self.admission.gate.is_admitted_member,
                is_verified=self._is_verified,
                is_from_member=self.admission.is_from_member,
                greet=self.network.connect_member,
                report_protocol_error=score.report_protocol_error,
            ),
            unix=unix,
        )
        self.membership = Membership(
            MembershipConfig(
                run=signed.run_id,
                stage_count=manifest.stage_count,
                incarnation=context.incarnation,
                addresses=first_addresses(host, settings.allow_private),
                proof=proof,
                is_member=self.admission.is_member,
            ),
            self.directory,
            context.identity,
            self._report,
            progress=lambda: progress_record(sample_node_report()),
            on_change=self._on_view_change,
            is_verified=self._is_verified,
            dial_unverified=self._dial_unverified,
            unix=unix,
        )
        self.reachability = ReachabilityKeeper(
            host,
            self.network,
            known=lambda: announcements(self.view),
            announce=self.membership.announce_addresses,
            allow_private=settings.allow_private,
            upnp=settings.upnp,
            relays_for=settings.relay_peers,
        )
        self._redialling = Redialling(me, random.Random())
        self.amendments = Amendments(
            context,
            signed,
            self.network,
            score.report_violation,
            is_banned=self.admission.book.has_founder_banned,
            present_step=self.present_step,
            unix=unix,
        )
        self.evaluations = Evaluations(context, signed.run_id, self.admission, unix=unix)
        holders = (self.membership, self.directory, self.amendments, self.evaluations)
        self.bans = Bans(context, signed.run_id, self.admission.book, self.network, holders, unix=unix)

        # What a span works with, whichever it is.
        self.router = Router(
            self.network,
            lambda: self.view,
            me=me,
            stage_count=manifest.stage_count,
            wire_rules=WireRules.of_run(self.live),
            report=self._report,
            peer_score=score,
            round_trip_s=self.network.round_trip_s,
        )
        self.base_supply = BaseSupply(context, manifest, self.network, lambda: self.view, score.report_violation)
        self.capacity_probe = CapacityProbe(manifest, settings, context.home.root)

        self.tasks = BackgroundTasks(on_task_end)
        self._closing = ExitStack()
        self._uplink = UplinkMeter()

    # --- what an object asks of others that are made after it; none of them asks before `start`

    def _own_addresses(self) -> Sequence[str]:
        return self.reachability.announcement().addresses

    def _may_dial(self, address: str) -> bool:
        return self.reachability.may_dial(address)

    async def _punch_hole(self, peer: PeerId, relay_peer: PeerId) -> None:
        await self.reachability.punch_hole(peer, relay_peer)

    def _on_handshake(self, peer: PeerId) -> None:
        self.membership.promote_verified()
        self.bans.send_revocations(peer)
        self.amendments.send_all(peer)

    def _on_view_change(self) -> None:
        for peer, seen in self.view.peers.items():
            if peer != self.context.me:
                self.network.address_book.learn_announced(peer, seen.addresses)
        self.router.on_view_changed()

    # --- what they ask of several

    def _report_failure(self, requester: PeerId, error: Exception) -> None:
        self._report(events.TaskFailed(f"answering {requester}", f"{type(error).__name__}: {error}"))

    def _is_verified(self, peer: PeerId) -> bool:
        return self.network.has_handshaken(peer) and self.peer_score.suspended_s(peer) <= 0.0

    def _may_use_relay(self, peer: PeerId) -> bool:
        connection = self.network.connection_to(peer)
        return connection is not None and not connection.is_reader and self.peer_score.suspended_s(peer) == 0

    async def _dial_unverified(self, unverified: Sequence[PeerView]) -> None:
        # Errors are ignored: `_is_verified` says with which peer HELLO was exchanged.
        dials = [asyncio.create_task(self.network.connect_announced(seen.peer, seen.addresses)) for seen in unverified]
        _, late = await asyncio.wait(dials, timeout=HELLO_TIMEOUT_S)
        for dial in late:
            dial.cancel()  # the dial itself goes on
        await asyncio.gather(*dials, return_exceptions=True)

    @property
    def manifest(self) -> Manifest:
        return self.signed.manifest

    @property
    def live(self) -> LiveManifest:
        return self.amendments.live

    @property
    def view(self) -> View:
        return self.membership.view

    async def start(self, others: tuple[str, ...]) -> None:
        """Starts serving requests, asks peers for the time, joins the DHT, and starts the background tasks.

        others: multiaddrs of known peers: it asks them for the time, joins through them, and dials them again when they
        are missing from the view.
        """
        self._closing.enter_context(self.requests.answering(BASE_REQUESTS, self.base_supply.answer))
        self._closing.enter_context(self.requests.answering(ADMISSION_REQUESTS, self.bans.answer))
        self._closing.enter_context(self.requests.answering(AMENDMENT_REQUESTS, self.amendments.answer))
        self._closing.enter_context(self.requests.answering(REACH_REQUESTS, self.reachability.answer))
        await self.directory.start()
        await self.network.start()
        await self.relay.start()
        self.tasks.start("network", self.network.check_connections())
        self.tasks.start("reachability", self.reachability.run())
        clock = ClockKeeper(self.context, self.network)
        by_peer = addresses_by_peer(others)
        for peer, known in by_peer.items():
            self.network.address_book.learn(peer, known)
            self._redialling.learn(loop_time(), peer, known)
        await clock.ask_at_start(by_peer)
        await self.directory.bootstrap(others)
        await self.amendments.fetch(self.network.members())
        self.tasks.start("amendments", self.amendments.keep_asking())
        self.tasks.start("membership", self.membership.run())
        self.tasks.start("bans", self.bans.exchange_lists(self.directory))
        self.tasks.start("admission", self._follow_admission())
        self.tasks.start("evaluations", self.evaluations.exchange_lists(self.directory))
        self.tasks.start("redial", self._redial_missing_peers())
        members = self.membership
        self.tasks.start(
            "connections",
            watch_connections(
                self.host, self.network.address_book, lambda: self.view, members.lost_peers, on_lost=members.forget_lost
            ),
        )
        self.tasks.start("addresses", self._keep_writing_addresses())
        self.tasks.start("uplink", self._measure_uplink())
        self.tasks.start("clock", clock.run())
        if limit_bytes := self.context.settings.owners_memory.host:
            self.tasks.start("memory", MemoryGuard(limit_bytes, self.ledger, self.context.report_event).run())

    async def close(self) -> None:
        """Ends the tasks, stops answering requests, leaves the DHT, and closes the network with all calls."""
        await self.tasks.close()
        self._closing.close()
        await self.base_supply.close()
        await self.network.close()
        await self.directory.close()

    def replicas_in_view(self, stage: int) -> list[PeerId]:
        return [seen.peer for seen in self.view.replicas(stage)]

    def bandwidths(self, stage: int) -> Mapping[PeerId, float]:
        """Returns, for each serving replica of a stage, the uplink in bytes/s with which it reduces shards.

        That is its published uplink; the median if it published none; less behind a relay. See reducing_bandwidths.
        """
        replicas = self.view.replicas(stage)
        claimed = {seen.peer: (seen.bandwidth, seen.reachability) for seen in replicas}
        return reducing_bandwidths(claimed, self.networks(stage))

    def networks(self, stage: int) -> Mapping[PeerId, str]:
        """Returns the public networks of a stage's serving replicas and of this peer, as far as they are known.

        A peer's network is the one from which it is connected here, since a claim can name any address. Only where that
        one is private or unknown, it is the network of an address in the claim.
        """
        observed = self.network.address_prefixes
        announced = {seen.peer: seen.addresses for seen in self.view.replicas(stage)}
        if (own := self.membership.claim) is not None:
            announced[self.context.me] = own.addresses
        found = {peer: public_network(observed.get(peer, ""), addresses) for peer, addresses in announced.items()}
        return {peer: network for peer, network in found.items() if network}

    def steps_of(self, stage: int) -> Mapping[PeerId, int]:
        """Returns, for each serving replica of a stage, how many steps it has published there; 0 if none is known."""
        return {seen.peer: seen.step_of(stage) for seen in self.view.replicas(stage)}

    def steps_of_run(self) -> list[Collection[int]]:
        """Returns, for each stage in turn, the steps of its serving replicas in no order; 0 if unknown.

        A stage without replicas has an empty collection.
        """
        return [self.steps_of(stage).values() for stage in range(self.manifest.stage_count)]

    def present_step(self) -> int:
        """Returns the step that the run has come to: the greatest of its own steps and of each stage's upper median."""
        span = self._sample_node_report().span
        own = [progress.step for progress in span.stages] if span is not None else []
        return max([0, *own, *(statistics.median_high(steps) for steps in self.steps_of_run() if steps)])

    def _present_manifest(self) -> Manifest:
        # While no step of the run is known, the run may be past every amendment.
        amended = self.live.of_all_steps
        if all(manifest.admission == amended[0].admission for manifest in amended):
            return amended[0]  # sampling the step costs something
        step = self.present_step()
        return self.live.at(step) if step else self.live.last

    async def _follow_admission(self) -> None:
        while True:
            if (changed := self.admission.follow(self._present_manifest(), self.context.me)) is not None:
                self._report(changed)
                if not changed.is_admitted:
                    self._report(events.OwnerTold(NOT_ADMITTED_NOW))
                self.bans.enforce()
            await asyncio.sleep(ADMISSION_INTERVAL_S)

    def uplink_bytes_per_s(self) -> float | None:
        """Returns the measured rate of this peer's uplink in bytes per second; None until bytes had to wait for it."""
        return self._uplink.rate.value

    def has_connections(self) -> bool:
        return bool(self.network.paths)

    def traffic(self) -> events.Traffic:
        """Returns the bytes sent and received since this object was made; of the sent ones, also those of tensors."""
        (bytes_in, bytes_out), sent = self.network.carried_bytes, self.sent
        return events.Traffic(sent.boundary_bytes, bytes_out, bytes_in, sent.averaging_bytes, sent.state_bytes)

    async def _measure_uplink(self) -> None:
        while True:
            given, waiting = self.network.given_and_waiting_bytes
            self._uplink.measure(loop_time(), given, waiting)
            await asyncio.sleep(SAMPLE_INTERVAL_S)

    async def _redial_missing_peers(self) -> None:
        while True:
            await asyncio.sleep(REDIAL_INTERVAL_S)
            now = loop_time()
            view = self.view
            self._redialling.remember_view(now, view, self.reachability.may_dial)
            due = self._redialling.take_due_peers(now, view)
            known = [address for peer in due for address in self._redialling.addresses_of(peer)]
            addresses = await self.network.address_book.resolve(known)
            behind_relays = {peer_of_address(address) for address in addresses if is_circuit(address)}
            await asyncio.gather(*map(self.reachability.try_to_connect, behind_relays))
            # Who answers becomes a neighbour in the DHT again: else a swarm that was split in two stays so.
            if addresses:
                await self.directory.bootstrap(addresses, timeout_s=REDIAL_TIMEOUT_S)

    async def _keep_writing_addresses(self) -> None:
        home, run = self.context.home, self.signed.run_id
        while True:
            await asyncio.sleep(ADDRESS_BOOK_INTERVAL_S)
            peers = [peer for peer in self._redialling.remembered_peers() if self.admission.may_call(peer)]
            if addresses := addresses_to_keep(map(self._redialling.addresses_of, peers), self.network.address_book):
                try:
                    await asyncio.to_thread(run_files.remember_addresses, home, run, addresses)
                except OSError as error:
                    trouble = events.DiskTrouble(str(home.peers(run)), error.strerror or str(error))
                    self.context.report_event(trouble)


def announcements(view: View) -> dict[PeerId, Announcement]:
    """Returns what each peer of the view announces on how to connect to it; one that is leaving offers no relay."""
    return {
        seen.peer: Announcement(
            seen.reachability, seen.addresses, relays_for=0 if seen.state == "leaving" else seen.relays_for
        )
        for seen in view.peers.values()
    }


def addresses_to_keep(known: Iterable[Sequence[str]], book: AddressBook) -> list[str]:
    """Returns the addresses that are kept for the next start: at most two of each peer, KEPT_ADDRESSES in all.

    What is written counts as the owner's at the next start, and is dialled wherever it leads. So names that only peers
    have announced are left out.
    """
    kept = ([address for address in addresses if not book.is_unchecked(address)][:2] for addresses in known)
    return list(itertools.chain.from_iterable(kept))[:KEPT_ADDRESSES]


def first_addresses(host: Host, allow_private: bool) -> tuple[str, ...]:
    """Returns the addresses that a claim announces until it is known how others can connect: the host's own ones."""
    own = host.own_addresses if allow_private else public_only(host.own_addresses)
    return tuple(f"{address}/p2p/{host.peer}" for address in own)[:MAX_ADDRESSES]


def compute_slots(manifest: Manifest, free_bytes: int) -> int:
    """Returns how many microbatches may be in progress at a peer at the same time, as its memory allows.

    That is at least U = default_in_flight(manifest) and at most MAX_TIMES_IN_FLIGHT * U. The slots above U exist only
    if all slots together take at most an eighth of `free_bytes`, the machine's free memory, and at most 4 GiB. A slot
    holds the boundary received, its values as float32, the boundary sent, and the gradient.
    """
    usual = default_in_flight(manifest)
    slot_bytes = 3 * manifest.max_payload_bytes + 4 * math.prod(manifest.boundary_shape())
    affordable = min(int(SLOTS_FRACTION * free_bytes), MAX_SLOTS_BYTES) // slot_bytes
    return max(usual, min(MAX_TIMES_IN_FLIGHT * usual, affordable))


async def watch_connections(
    host: Host, book: AddressBook, view_of: Callable[[], View], lost: LostPeers, on_lost: Callable[[], None]
) -> None:
    """Dials peers of the view whose connection broke, until cancelled, and records failed dials in `lost`.

    Looks every CONNECTIONS_INTERVAL_S, and dials several peers concurrently.
    lost: decides which peers to dial, and whether a failed dial makes a peer count as lost.
    on_lost: called for each peer that then counts as lost.
    """
    while True:
        await asyncio.sleep(CONNECTIONS_INTERVAL_S)
        with contextlib.suppress(ConnectionBroken):  # p2pd is gone: the daemon notices that
            connected = await host.connected_peers()
            due = lost.update_connected(loop_time(), connected, view_of())
            failed = await asyncio.gather(*(_is_unreachable(host, book, peer.peer) for peer in due))
            for peer in (peer for peer, has_failed in zip(due, failed, strict=True) if has_failed):
                if lost.record_failed_dial(loop_time(), peer.peer, peer.incarnation):
                    on_lost()


async def _is_unreachable(host: Host, book: AddressBook, peer: PeerId) -> bool:
    try:
        await host.reach(peer, await book.dialable(peer), CHECK_DIAL_TIMEOUT_S)
    except AgoraError as error:
        return isinstance(error, ConnectionBroken)
    return False
