"""Builds a daemon step by step: every room in its order, wired to the others; each step named and timed.

Knows: every room's front door. Must not know: processes, signals, or how any room does its work. What has been built is
closed in the opposite order by the exit stack, also when a later step fails.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import torch
from agora_protocol.codec_names import parse_codec
from agora_protocol.errors import AgoraError, InputError, LocalError, NotAdmitted, ProtocolError
from agora_protocol.ids import PeerId, RunId, Span
from agora_protocol.manifest import Manifest, SignedManifest
from agora_protocol.records import Claim, Cut, Progress

from agora.data import Sampler, open_corpus, open_tokenizer
from agora.net.calls import NetLimits, Network
from agora.net.directory import Directory
from agora.net.host import Host
from agora.node import doctor, joining, paths, runs
from agora.node.batches import OriginBatches
from agora.node.collecting import Collector
from agora.node.joining import Unreachable
from agora.node.keeping import Keeper, KeeperConfig
from agora.node.parts import Early, Parts, Where
from agora.node.replicas import Replicas
from agora.node.serving import Meter, MeteredCaller, Service
from agora.node.steps import Steps
from agora.node.threads import run_in_thread
from agora.observe import events, faults
from agora.observe.events import Report
from agora.pipeline.admission import Admission
from agora.pipeline.gate import StepGate
from agora.pipeline.hop import Hop, HopConfig
from agora.pipeline.interfaces import WireShapes
from agora.pipeline.origin import Origin, OriginConfig, OwnStage, Share
from agora.pipeline.results import ResultCache
from agora.pipeline.router import Router
from agora.swarm.conduct import Offence
from agora.swarm.membership import Membership, MembershipConfig
from agora.swarm.offences import OffenceLog
from agora.swarm.placement import Placement
from agora.train.compute import Compute
from agora.train.held import LIMIT_PER_SEAT
from agora.train.memory import available_bytes

Spawn = Callable[[str, Coroutine[Any, Any, None]], None]
"""Starts a task by name that lives as long as the daemon; the daemon ends when it does."""

LEAST_IN_FLIGHT, IN_FLIGHT_PER_STAGE = 32, 4
SEATS_SHARE, MOST_SEATS_BYTES = 0.125, 4 * 2**30
LEAST_HELD_BYTES = 64 * 2**20
MOST_LOADS = 3
"""A peer whose span was taken while it loaded loads another; the last one it serves, whatever others do."""


class Builder:
    """`build` returns the parts; `early` is filled on the way, so that an invite can be given before the end."""

    def __init__(
        self, where: Where, report: Report, steps: Steps, closing: AsyncExitStack, early: Early, spawn: Spawn
    ) -> None:
        self._where = where
        self._report = report
        self._steps = steps
        self._closing = closing
        self._early = early
        self._spawn = spawn
        self._seats = 0
        self._offences = OffenceLog(report)

    async def build(self, status: Callable[[], dict[str, Any]]) -> Parts:
        """Raises an AgoraError, one sentence and what to do, when this machine or the run cannot."""
        reference = self._where.run
        invited = bool(reference.run) and reference.signed is None
        signed = None if invited else await self._manifest_of_file()
        host = await self._host()
        bootstrap = await self._bootstrap(host, signed)
        if signed is None:
            signed = await self._manifest_of_peers(host, RunId(reference.run), bootstrap)
        self._check_machine()
        self._seats = seats(signed.manifest, available_bytes(torch.device("cpu")))
        meter = Meter()
        service = Service(signed, status, meter, self._offences.report_offence)
        network = await self._network(host, signed, service)
        directory = await self._directory(host, signed, bootstrap)
        membership, span = await self._placement(directory, signed)
        compute, batches = await self._load(signed, membership, span)
        keeper = await self._state(signed, compute, membership, network, directory, service)
        caller = MeteredCaller(network, meter)
        router = self._router(signed.manifest, caller, network, membership)
        admission = Admission(self._seats)
        gate = step_gate(signed.manifest, compute)
        hop = self._hop(signed.manifest, compute, router, admission, gate)
        me, report = self._where.peer, self._report
        replicas = Replicas(signed, me, compute, membership, caller, keeper, report, self._offences.report_offence)
        origin = None if batches is None else self._origin(signed.manifest, hop, batches, membership, replicas)
        self._follow_steps(compute, keeper, replicas, gate, origin)
        service.hop, service.replicas = hop, replicas
        membership.subscribe(router.view_changed)
        collected = self._where.home.collected(signed.run_id)
        return Parts(
            signed,
            host,
            network,
            directory,
            membership,
            compute,
            admission,
            router,
            hop,
            origin,
            meter,
            keeper,
            replicas,
            Collector(signed, collected, compute, lambda: membership.view, network, self._report_false_state),
        )

    # --- the run

    async def _manifest_of_file(self) -> SignedManifest:
        with self._steps.step("manifest") as note:
            where = self._where
            signed, note.text = await joining.from_file(where.run, where.identity, where.home, self._found)
            note.text += f", run {signed.run_id[:12]} ({signed.manifest.name})"
        return signed

    async def _manifest_of_peers(self, host: Host, run: RunId, addresses: Sequence[str]) -> SignedManifest:
        with self._steps.step("manifest") as note:
            signed = await joining.fetch_manifest(host, run, addresses)
            self._found(signed)
            note.text = f"fetched, hash and signature checked, run {run[:12]} ({signed.manifest.name})"
        return signed

    def _found(self, signed: SignedManifest) -> None:
        """Keeps the manifest, and makes this daemon findable on this machine under its run."""
        where = self._where
        if not signed.manifest.admits(where.peer):
            raise NotAdmitted(f"the run admits only listed peers; ask its founder to list {where.peer}")
        runs.remember(where.home, signed)
        paths.make_private(paths.runtime_directory())
        socket, root = str(paths.socket_of(where.home)), str(where.home.root)
        name, founder = signed.manifest.name, signed.founder
        paths.register(paths.Entry(signed.run_id, name, founder, where.peer, os.getpid(), root, socket))
        self._early.signed = signed

    def _check_machine(self) -> None:
        with self._steps.step("doctor") as note:
            note.text = doctor.check_disk(self._where.home.root)

    # --- the network

    async def _host(self) -> Host:
        settings = self._where.settings
        with self._steps.step("host") as note:
            host = await Host.create(
                identity_path=self._where.home.identity,
                listen=settings.listen,
                announce=settings.announce,
                link=settings.link_spec,
            )
            self._closing.push_async_callback(host.close)
            self._early.addresses = joining.ordered(await host.addresses())
            note.text = self._early.addresses[0] if self._early.addresses else "listens nowhere"
            note.text += f", behind a link of {settings.link}" if settings.link else ""
        return host

    async def _bootstrap(self, host: Host, signed: SignedManifest | None) -> tuple[str, ...]:
        """Connects to whom we know; who founds a run, or comes back to one, may find nobody and waits for others."""
        known = self._where.run.addresses
        with self._steps.step("bootstrap") as note:
            if signed is not None:
                known += await joining.neighbours(signed.run_id, os.getpid())
            known = tuple(dict.fromkeys(address for address in known if not address.endswith(host.peer)))
            self._early.others = known
            reached, reason = 0, "it names no other peer"
            if known:
                try:
                    reached = await host.connect(known)
                except AgoraError as error:
                    reason = str(error)
            if not reached and signed is None:
                raise Unreachable(f"no peer of the invite answers ({reason}); ask for a newer invite")
            peers = len({address.rpartition("/")[2] for address in known})
            note.text = f"{reached} of {peers} peers answered" if peers else "nobody to ask, the first peer here"
        return known

    async def _network(self, host: Host, signed: SignedManifest, service: Service) -> Network:
        payload = signed.manifest.max_payload_bytes
        held = max(LEAST_HELD_BYTES, 2 * self._seats * payload)
        greeting = joining.hello(signed.run_id, self._early.addresses)
        limits = NetLimits(max_payload_bytes=payload, max_held_bytes=held)
        network = Network(
            host,
            lambda: greeting,
            service.answer,
            limits,
            report_violation=self._offences.report_violation,
            shut_out_s=self._offences.shut_out_s,
            report_failure=self._handler_failed,
        )
        self._closing.push_async_callback(network.close)
        await network.start()
        return network

    def _handler_failed(self, peer: PeerId, error: Exception) -> None:
        self._report(events.TaskFailed(f"answering {peer}", f"{type(error).__name__}: {error}"))

    def _report_false_state(self, peer: PeerId, error: ProtocolError) -> None:
        self._offences.report_offence(peer, Offence.FALSE_STATE, f"{error.code}: {error}")

    async def _directory(self, host: Host, signed: SignedManifest, bootstrap: Sequence[str]) -> Directory:
        with self._steps.step("directory"):
            directory = await Directory.create(host, signed.run_id, bootstrap, stages=signed.manifest.stage_count)
            self._closing.push_async_callback(directory.close)
        return directory

    async def _placement(self, directory: Directory, signed: SignedManifest) -> tuple[Membership, Span]:
        where, count = self._where, signed.manifest.stage_count
        pinned = where.settings.span
        if pinned is not None and pinned.last >= count:
            raise InputError(f"--stages {pinned} is beyond the run's last stage; give stages within 0-{count - 1}.")
        with self._steps.step("placement") as note:
            config = MembershipConfig(signed.run_id, count)
            membership = Membership(config, directory, where.identity, self._report)
            claim = Claim(where.peer, Span(0, 0), where.incarnation, self._early.addresses, "joining", 0.0)
            placement = await membership.join(claim, 1, pinned)
            self._spawn("membership", membership.run())  # from now on: the claim must live through a long load
            note.text = self._says(signed.manifest, placement)
        return membership, placement.span

    def _says(self, manifest: Manifest, placement: Placement) -> str:
        need = doctor.check_memory(manifest, placement.span, self._where.settings.memory_gib)
        return f"stages {placement.span}: {placement.reason}; {need}"

    # --- the work

    async def _load(
        self, signed: SignedManifest, membership: Membership, span: Span
    ) -> tuple[Compute, OriginBatches | None]:
        """Loads what the span needs, and what another needs when this one was taken while it loaded."""
        more = MOST_LOADS - 1 if self._where.settings.span is None else 0
        while True:
            found = await self._load_span(signed, membership, span, ask=more > 0)
            if not isinstance(found, Placement):
                return found
            with self._steps.step("placement") as note:
                note.text = self._says(signed.manifest, found)
            span, more = found.span, more - 1

    async def _load_span(
        self, signed: SignedManifest, membership: Membership, span: Span, *, ask: bool
    ) -> tuple[Compute, OriginBatches | None] | Placement:
        """What the span needs; or, asked whether it still stands, the one to load instead, with nothing kept."""
        async with AsyncExitStack() as loaded:
            batches = await self._corpus(signed, span) if 0 in span else None
            compute = await self._model(signed.manifest, span)
            loaded.push_async_callback(compute.close, 1.0)
            other = await self._confirm(membership) if ask else None
            if other is not None:
                return other
            self._closing.push_async_exit(loaded.pop_all())
        return compute, batches

    async def _confirm(self, membership: Membership) -> Placement | None:
        with self._steps.step("confirm") as note:
            other = await membership.confirm()
            note.text = "the span stands" if other is None else "others took it meanwhile"
        return other

    async def _corpus(self, signed: SignedManifest, span: Span) -> OriginBatches:
        """The text that this origin draws from; loaded off the loop, since it may be long."""
        where, manifest = self._where, signed.manifest
        _check_files(where, manifest)
        cache = Path(where.settings.corpus_cache or where.home.corpus)

        def load() -> tuple[Sampler, int]:
            tokenizer = open_tokenizer(manifest.data.tokenizer, manifest.model.vocabulary, base=where.run.base)
            corpus = open_corpus(manifest.data.corpus, tokenizer, cache, base=where.run.base)
            sampler = Sampler(corpus, manifest.model.context, manifest.data.heldout, manifest.seed)
            return sampler, len(corpus.tokens)

        with self._steps.step("corpus") as note:
            sampler, count = await run_in_thread(load)
            note.text = f"{count:,} tokens"
        reserved = where.home.manifest(signed.run_id).with_name("drawn.txt")
        return OriginBatches(sampler, where.peer, manifest.schedule.microbatch, reserved, self._report)

    async def _model(self, manifest: Manifest, span: Span) -> Compute:
        settings = self._where.settings
        if settings.threads:
            torch.set_num_threads(settings.threads)
        with self._steps.step("model") as note:
            compute = await Compute.create(
                manifest,
                span,
                report=self._report,
                device=settings.device,
                in_flight=usual_in_flight(manifest),
                fault=faults.reach_blocking,
            )
            count = doctor.parameters_of(manifest, span)
            note.text = f"{count:,} parameters on {compute.device}, {torch.get_num_threads()} threads"
        return compute

    async def _state(
        self,
        signed: SignedManifest,
        compute: Compute,
        membership: Membership,
        network: Network,
        directory: Directory,
        service: Service,
    ) -> Keeper:
        """Fills the stages with the newest state there is: this machine's, the other replicas', or the seed's."""
        where, folder = self._where, self._where.home.checkpoints(signed.run_id)

        async def publish(record: Cut, lifetime_s: float) -> bool:
            return await directory.publish(record, where.identity, lifetime_s)

        config = KeeperConfig(where.peer, where.incarnation, signed.run_id, signed.manifest, folder)
        keeper = Keeper(
            config, compute, membership, network, self._report, publish=publish, strike=self._report_false_state
        )
        with self._steps.step("state") as note:
            steps = await keeper.find()
            service.keeper = keeper
            if any(steps):
                await membership.tell(Progress(where.peer, compute.span, 0, steps, 0.0, None, 0, 0))
            await membership.refresh()
            note.text = await keeper.start()
        return keeper

    def _follow_steps(
        self, compute: Compute, keeper: Keeper, replicas: Replicas, gate: StepGate | None, origin: Origin | None
    ) -> None:
        """Passes each step that the device thread takes on to everyone whom it concerns."""

        async def follow() -> None:
            async for event in compute.step_events():
                replicas.stepped(event.stage, event.step, event.own_tokens)
                keeper.stepped(event.stage, event.step)
                if gate is not None:
                    gate.stepped()
                if origin is not None:
                    origin.stepped()

        self._spawn("step events", follow())
        self._spawn("keeper", keeper.run())
        self._spawn("replicas", replicas.run())

    def _router(self, manifest: Manifest, caller: MeteredCaller, network: Network, membership: Membership) -> Router:
        def round_trip_s(peer: Any) -> float | None:
            seen = network.statistics().peers.get(peer)
            return seen.rtt_s if seen else None

        return Router(
            caller,
            lambda: membership.view,
            me=self._where.peer,
            stage_count=manifest.stage_count,
            shapes=shapes(manifest),
            report=self._report,
            report_offence=self._offences.report_offence,
            is_shut_out=self._offences.is_shut_out,
            round_trip_s=round_trip_s,
        )

    def _hop(
        self, manifest: Manifest, compute: Compute, router: Router, admission: Admission, gate: StepGate | None
    ) -> Hop:
        config = HopConfig(self._where.peer, manifest.stage_count, shapes(manifest))
        results = ResultCache()
        return Hop(
            config, compute, router, admission, results=results, report=self._report, gate=gate, fault=faults.reach
        )

    def _origin(
        self, manifest: Manifest, hop: Hop, batches: OriginBatches, membership: Membership, replicas: Replicas
    ) -> Origin:
        schedule, me = manifest.schedule, self._where.peer
        synchronous = schedule.kind == "synchronous"
        config = OriginConfig(
            me=me,
            stage_count=manifest.stage_count,
            synchronous=synchronous,
            target_tokens=manifest.optimizer.target_tokens,
            tokens_per_microbatch=manifest.tokens_per_microbatch,
            ceiling=usual_in_flight(manifest) if synchronous else self._seats,
            max_in_flight=schedule.max_in_flight,
        )

        def share() -> Share:
            origins = [seen.peer for seen in membership.view.replicas(0)]
            return Share(origins.index(me), len(origins)) if me in origins else Share()

        def ready() -> bool:
            view, stages = membership.view, range(manifest.stage_count)
            return schedule.least_replicas == 1 or all(
                len(view.replicas(stage)) >= schedule.least_replicas for stage in stages
            )

        return Origin(
            config,
            hop,
            batches,
            self._report,
            share=share,
            stage=OwnStage(lambda: replicas.step_of(0), lambda: replicas.missing_tokens(0), ready),
            path_s=hop.path_s,
        )


def _check_files(where: Where, manifest: Manifest) -> None:
    """A manifest that came over the network may not make this machine read its files, unless its owner says so."""
    sources = [source for source in manifest.data.corpus if source != "stdlib"]
    sources += [manifest.data.tokenizer] if manifest.data.tokenizer != "bytes" else []
    if where.run.file is None and sources and not where.settings.allow_files:
        raise LocalError(
            f"the run reads files of this machine ({', '.join(sources[:3])}); "
            "look at them, then join with --allow-files"
        )


def step_gate(manifest: Manifest, compute: Compute) -> StepGate | None:
    """Where microbatches wait for their step; None in an asynchronous run, in which nothing does, whatever it says."""
    return StepGate(compute.span, compute.step_of) if manifest.schedule.kind == "synchronous" else None


def usual_in_flight(manifest: Manifest) -> int:
    """For how many microbatches between forward and backward here the graphs are kept, where memory allows."""
    return max(LEAST_IN_FLIGHT, IN_FLIGHT_PER_STAGE * manifest.stage_count, manifest.schedule.max_in_flight)


def seats(manifest: Manifest, free_bytes: int) -> int:
    """How many microbatches may be inside this peer at once: what is usual, or up to four times that on long links.

    free_bytes: of this machine. A seat holds the boundary that came, what it means as float32, the one that left, and
    the gradient; where no graph is kept that is all of it.
    """
    usual, shape = usual_in_flight(manifest), manifest.boundary_shape()
    each = 3 * manifest.max_payload_bytes + 4 * math.prod(shape)
    fitting = min(int(SEATS_SHARE * free_bytes), MOST_SEATS_BYTES) // each
    return max(usual, min(LIMIT_PER_SEAT * usual, fitting))


def shapes(manifest: Manifest) -> WireShapes:
    """What the manifest implies for a microbatch's tensors."""
    codec, shape = parse_codec(manifest.boundary.codec), manifest.boundary_shape()
    return WireShapes(
        *codec.wire_format(shape, "forward"), *codec.wire_format(shape, "backward"), (shape[0], shape[1] + 1)
    )
