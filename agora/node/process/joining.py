"""Finds the run: its manifest, addresses of its peers, and the network process through which they are reached."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from agora_protocol.addresses import peer_of_address
from agora_protocol.errors import (
    AgoraError,
    AmendmentError,
    DiskError,
    LocalError,
    ManifestError,
    NotAdmitted,
    ProtocolError,
)
from agora_protocol.ids import PeerId, RunId
from agora_protocol.invite import Invite
from agora_protocol.limits import MAX_ADDRESSES
from agora_protocol.manifest import Manifest, SignedManifest
from agora_protocol.messages import GetAmendments, GetManifest, KnownAmendments, ManifestAnswer
from agora_protocol.tickets import InviteTicket

from agora import SOFTWARE
from agora.core.calls import Reply
from agora.core.clock import loop_time
from agora.data.evaluation_tasks import SCHEDULED
from agora.net.p2pd.addresses import is_named, is_private
from agora.net.p2pd.host import Host
from agora.net.rpc.connection import IncomingCall
from agora.net.rpc.gate import Gate
from agora.net.rpc.network import Network
from agora.node import daemon_registry, paths, run_files, runs
from agora.node.control import control_client
from agora.node.daemon_context import DaemonContext, next_incarnation
from agora.node.limits.disk import MIN_FREE_BYTES, DiskGuard, check_disk
from agora.node.peer.run_admission import load_admission_book
from agora.node.peer.run_amendments import FETCH_TIMEOUT_S, MAX_ASKED
from agora.node.process.last_ports import is_free, read_ports, with_last_ports, write_ports
from agora.node.process.signing import sign_draft
from agora.node.process.unreachable import explain_nobody_left, explain_unreachable
from agora.node.span.load_span import check_stages_fit
from agora.node.span.training_data import DataUse, check_draft, explain_unused, remember_files
from agora.observe import events
from agora.swarm.admission import LISTED, AdmissionBook, AdmissionPolicy
from agora.swarm.view import View

MANIFEST_TIMEOUT_S = 15.0  # seconds within which each peer that is asked must answer with the manifest
LOCAL_DAEMONS_TIMEOUT_S = 60.0  # seconds to wait, in all, for other daemons of this machine that do not answer yet
INVITE_ADDRESSES = 8  # an invite has at most this many of this peer's own addresses, and at most as many of other peers


class RunUnreachable(LocalError):
    """Raised when no peer of the run answers a daemon that joins, or none gives the manifest. Exit code 4."""

    code = "unreachable"
    exit_code = 4


async def read_manifest(context: DaemonContext, host: Host | None = None) -> SignedManifest:
    """Returns the signed manifest of a file or of a joined run, after storing it and registering this daemon under it.

    For an unsigned file, returns the manifest that a running daemon here has signed from it; without such a daemon,
    this peer signs the file as founder, unless another process does so at this moment.

    host: to ask the known peers for amendments where this machine is not admitted by those on its disk.

    Raises NotAdmitted if the run does not admit this peer as a member, ManifestError or DiskError for the file, and
    DiskError if the data directory cannot be written. Before it signs, it raises what check_stages_fit and check_draft
    raise.
    """
    reference = context.reference
    with context.phases.enter("manifest") as note:
        signed, text = (reference.signed, "signed") if reference.signed is not None else _find_founded(context)
        if signed is not None:
            try:
                _accept_and_register(context, signed)
            except NotAdmitted:
                if host is None or not await _ask_what_is_amended(context, host, signed):
                    raise
                _accept_and_register(context, signed)
        else:
            signed, text = await _sign_as_founder(context)
        note.text = f"{text}, run {signed.run_id[:12]} ({signed.manifest.name})"
    return signed


async def _ask_what_is_amended(context: DaemonContext, host: Host, signed: SignedManifest) -> bool:
    # The founder may have let it in again meanwhile.
    known = leave_out_banned(context, signed, context.reference.addresses)
    if known:
        with contextlib.suppress(AgoraError):
            await host.connect(known)
        await learn_amendments(context, host, signed, known)
    return bool(known)


def _find_founded(context: DaemonContext) -> tuple[SignedManifest | None, str]:
    for entry in daemon_registry.find_running_daemons():
        if context.reference.is_of(entry):
            file = paths.Home(Path(entry.root)).manifest(entry.run)
            if (signed := runs.from_file(file, context.home).signed) is not None:
                return signed, f"founded by the daemon {entry.pid}"
    return None, ""


async def _sign_as_founder(context: DaemonContext) -> tuple[SignedManifest, str]:
    draft = context.reference.draft
    assert draft is not None
    context.phases.report_progress("reading what the run trains on, before it is signed")

    use = await asyncio.to_thread(_check_before_signing, context, draft)
    accept = partial(_accept_and_register, context)
    signed, text = await asyncio.to_thread(sign_draft, context.reference, context.identity, accept)
    return signed, f"{text}; {use.sentence()}" if use else text


def _check_before_signing(context: DaemonContext, draft: Manifest) -> DataUse | None:
    # Checks what a start would refuse: once signed, the manifest can no longer be edited to suit this machine.
    if unknown := [task for task in draft.evaluation.tasks if task not in SCHEDULED]:
        raise ManifestError(f"[evaluation] tasks: there is no task {unknown[0]!r}; name {', '.join(SCHEDULED)}.")
    check_disk_room(context, draft)
    check_stages_fit(draft, context.settings, context.home.root)
    use = check_draft(context, draft)
    if use is not None and (warning := use.warning()):
        context.report_event(events.OwnerTold(warning))
    return use


def check_disk_room(context: DaemonContext, manifest: Manifest) -> str:
    """Returns a text about the free disk space. Raises DiskError if a daemon cannot start with it. Blocks."""
    free = check_disk(context.home.root)
    DiskGuard(context.home, context.settings.disk_bytes).make_room(manifest, None, MIN_FREE_BYTES)
    return free


async def fetch_manifest(context: DaemonContext, host: Host, addresses: Sequence[str]) -> SignedManifest:
    """Asks the peers at `addresses` for the manifest, stores it, registers this daemon under its run, and returns it.

    Raises RunUnreachable when no peer gives it, NotAdmitted when all refuse this peer or the run does not admit this
    peer as a member, ManifestError at the first wrong manifest.
    """
    run = RunId(context.reference.run)
    with context.phases.enter("manifest") as note:
        gate = Gate(context.me, run, SOFTWARE, proof=own_proof(context, run))
        signed = await _ask_peers_in_turn(Network(host, gate, _refuse_while_joining), run, addresses)
        await learn_amendments(context, host, signed, addresses)
        _accept_and_register(context, signed)
        note.text = f"fetched, hash and signature checked, run {run[:12]} ({signed.manifest.name})"
    return signed


async def learn_amendments(
    context: DaemonContext, host: Host, signed: SignedManifest, addresses: Sequence[str]
) -> None:
    """Asks peers at `addresses` for the run's amendments, and writes those that are valid to the disk.

    Whoever these peers are: they may be members by amendments that are not known here yet, and what they tell is
    signed. Ignores those that do not answer. Raises DiskError.
    """
    known = run_files.amendments_on_disk([context.home], signed, time.time())
    before = known.digest()
    gate = Gate(context.me, signed.run_id, SOFTWARE, proof=own_proof(context, signed.run_id))
    network = Network(host, gate, _refuse_while_joining)
    try:
        for peer in [*dict.fromkeys(peer_of_address(address) for address in addresses)][:MAX_ASKED]:
            network.address_book.learn(peer, addresses)
            with contextlib.suppress(AgoraError):
                request = GetAmendments(known.digest())
                reply = await network.call(peer, request, deadline=loop_time() + FETCH_TIMEOUT_S)
                for sealed in reply.message.amendments if isinstance(reply.message, KnownAmendments) else ():
                    with contextlib.suppress(AmendmentError, ProtocolError):
                        known.add(sealed, time.time())
    finally:
        await network.close()
    if known.digest() != before:
        run_files.write_amendments(context.home, signed.run_id, known.sealed())


async def _ask_peers_in_turn(network: Network, run: RunId, addresses: Sequence[str]) -> SignedManifest:
    failures = list[str]()
    refusals = list[NotAdmitted]()
    try:
        for peer in dict.fromkeys(peer_of_address(address) for address in addresses):
            network.address_book.learn(peer, addresses)
            try:
                reply = await network.call(peer, GetManifest(), deadline=loop_time() + MANIFEST_TIMEOUT_S)
                # Its hash must be the run's id, so a wrong manifest is no accident: ask nobody else.
                if not isinstance(reply.message, ManifestAnswer):
                    raise ManifestError("The peer sent an unexpected message; ask for another invite.")
                return SignedManifest.from_bytes(reply.message.manifest, run)
            except ManifestError:
                raise
            except AgoraError as error:
                failures.append(str(error))
                if isinstance(error, NotAdmitted):
                    refusals.append(error)
    finally:
        await network.close()
    # Only if all refuse: a peer that failed in another way might have admitted this one.
    if refusals and len(refusals) == len(failures):
        raise refusals[0]
    raise RunUnreachable(
        f"No known peer of the run gives its manifest ({'; '.join(failures[:2]) or 'it names no peer'}); "
        "ask for a newer invite, or check this machine's network."
    )


async def _refuse_while_joining(_: IncomingCall) -> Reply:
    raise LocalError("This peer is still joining.")


def _accept_and_register(context: DaemonContext, signed: SignedManifest) -> None:
    home = context.home
    proof = own_proof(context, signed.run_id)
    book = AdmissionBook(signed.run_id, AdmissionPolicy.of(run_files.manifest_on_disk([home], signed, time.time())))
    if not book.judge(context.me, proof, time.time()).is_member:
        raise NotAdmitted("the run lets this machine only read its status; ask its founder for a ticket of a member")
    run_files.remember_manifest(home, signed)
    remember_files(context, signed.manifest)
    for sentence in explain_unused(context, signed.manifest):
        context.report_event(events.OwnerTold(sentence))
    if proof:
        run_files.write_proof(home, signed.run_id, proof)
    _register(context, signed.run_id, signed.manifest.name, signed.founder)


def register_paused(context: DaemonContext, signed: SignedManifest | None) -> None:
    """Registers a paused daemon, so that commands find it, even one that has no manifest yet (`signed` is None).

    Raises DiskError.
    """
    reference = context.reference
    manifest = signed or reference.signed
    run, name = (manifest.run_id, manifest.manifest.name) if manifest else (reference.run, reference.name)
    founder = manifest.founder if manifest else ""
    _register(context, run, name, founder)


def _register(context: DaemonContext, run: str, name: str, founder: str) -> None:
    home = context.home
    socket, supervisor = str(daemon_registry.socket_of(home)), os.environ.get(daemon_registry.SUPERVISOR_VARIABLE, "")
    pid = int(supervisor) if supervisor.isdecimal() else 0
    entry = daemon_registry.DaemonEntry(run, name, founder, context.me, os.getpid(), str(home.root), socket, pid)
    try:
        daemon_registry.register(entry)
    except OSError as error:
        folder = Path(entry.socket).parent
        advice = f"free some space there, or set {paths.RUNTIME_VARIABLE} to another folder."
        raise DiskError(f"Cannot write in {folder} ({error.strerror}); {advice}") from error


def context_after_pause(context: DaemonContext, signed: SignedManifest | None) -> DaemonContext:
    """Returns `context` for the start after a pause: with a higher incarnation, which it also writes to disk.

    Adds to it the addresses of the run's peers that are remembered on disk. Raises DiskError.
    """
    reference = context.reference
    incarnation = next_incarnation(context.home.incarnation, time.time_ns())
    run = signed.run_id if signed is not None else reference.run
    known = run_files.remembered_addresses(context.home, run) if run else ()
    addresses = tuple(dict.fromkeys([*reference.addresses, *known]))
    return replace(context, incarnation=incarnation, reference=replace(reference, addresses=addresses))


def make_invite(signed: SignedManifest, me: PeerId, own: Sequence[str], view: View, *, allow_private: bool) -> Invite:
    """Returns an invite with up to INVITE_ADDRESSES of `own`, plus one address each of as many other serving peers.

    allow_private: whether private addresses that others announce may be among them; host names never are.
    """

    def may_pass_on(address: str) -> bool:
        # What stands in an invite is dialled wherever it leads.
        return not is_named(address) and (allow_private or not is_private(address))

    serving = (seen for seen in view.peers.values() if seen.peer != me and seen.state == "serving")
    others = [address for seen in serving for address in [*filter(may_pass_on, seen.addresses)][:1]]
    return Invite(signed.run_id, (*own[:INVITE_ADDRESSES], *others[:INVITE_ADDRESSES]), signed.manifest.name)


def own_proof(context: DaemonContext, run: RunId) -> bytes:
    """Returns the proof by which the run may admit this machine: of the invite's ticket, else from disk; b"" for none.

    Raises InputError for a ticket that is not for this machine, LocalError or DiskError for the file.
    """
    if ticket := context.reference.ticket:
        return InviteTicket.parse(ticket).proof_for(context.me, run)
    return run_files.read_proof(context.home, run)


async def open_host(context: DaemonContext) -> tuple[Host, tuple[str, ...]]:
    """Starts the network process p2pd; returns the host, for the caller to close, and where others can dial it.

    The addresses are at most MAX_ADDRESSES multiaddrs, loopback last. Listens on the ports of the last start where the
    owner named none, and writes the present ones to disk.
    """
    settings = context.settings
    with context.phases.enter("host") as note:
        host = await Host.create(
            identity_path=context.home.identity,
            listen=with_last_ports(settings.listen, read_ports(context.home.ports), is_free),
            announce=settings.announce,
            link=settings.link_spec,
            limits=settings.rate_limits,
            allow_private=settings.allow_private,
            upnp=settings.upnp,
        )
        write_ports(context.home.ports, host.listen_endpoints)
        found = (*await host.addresses(), *(f"{address}/p2p/{host.peer}" for address in host.own_addresses))
        loopback_last = sorted(dict.fromkeys(found), key=lambda text: "/127." in text or "/ip6/::1/" in text)
        addresses = tuple(loopback_last[:MAX_ADDRESSES])
        note.text = addresses[0] if addresses else "listens nowhere"
        note.text += f", behind a link of {settings.link}" if settings.link else ""
    return host, addresses


async def connect_to_run(context: DaemonContext, host: Host, signed: SignedManifest | None) -> tuple[str, ...]:
    """Dials the run's known peers and, with `signed`, those in the invites of other daemons of the run on this machine.

    Returns the addresses of all these peers, whether they answered or not, without this peer's own and those of banned
    peers. signed: None while the manifest must still be fetched: then raises RunUnreachable when no peer answers.
    """
    given = context.reference.addresses
    reached = 0
    with context.phases.enter("bootstrap") as note:
        if signed is not None:
            given += await _ask_local_daemons(signed.run_id)
        others = tuple(dict.fromkeys(address for address in given if not address.endswith(host.peer)))
        known = leave_out_banned(context, signed, others)
        why = explain_nobody_left(len(given), len(others), context.home.banned)
        if known:
            with contextlib.suppress(AgoraError):
                reached = await host.connect(known)
            why = "" if reached else await explain_unreachable(known)
        if not reached and signed is None:
            raise RunUnreachable(f"No known peer of the run answers: {why}")
        if reached and signed is not None and _mode_on_disk(context, signed) == LISTED:
            await learn_amendments(context, host, signed, known)
        peers = len({address.rpartition("/")[2] for address in known})
        note.text = f"{reached} of {peers} peers answered" if peers else "nobody to ask"
        # Not "the first peer": a run that goes on may be known here by its manifest alone.
        note.text += f": {why}" if given and why else "" if peers else ": no other peer is known yet"
    return known


def _mode_on_disk(context: DaemonContext, signed: SignedManifest) -> str:
    return run_files.manifest_on_disk([context.home], signed, time.time()).admission.mode


def leave_out_banned(context: DaemonContext, signed: SignedManifest | None, known: Sequence[str]) -> tuple[str, ...]:
    """Returns those of the `known` addresses whose peers are not banned from this machine nor, with `signed`, from the
    run.

    Who is not listed stays: it may be by an amendment that is not known here yet.
    """
    if signed is None:
        banned = set(run_files.read_banned(context.home))
        return tuple(address for address in known if peer_of_address(address) not in banned)
    book = load_admission_book(context.home, signed, time.time())
    return tuple(address for address in known if not book.is_banned(peer_of_address(address)))


async def _ask_local_daemons(run: RunId) -> tuple[str, ...]:
    deadline = loop_time() + LOCAL_DAEMONS_TIMEOUT_S
    addresses = list[str]()
    for entry in daemon_registry.find_running_daemons():
        # Daemons that were started together with this one may not have an address yet.
        while entry.run == run and entry.pid != os.getpid() and entry.is_alive:
            try:
                answer = await asyncio.to_thread(control_client.ask, Path(entry.socket), "invite", timeout_s=2.0)
                addresses.extend(Invite.parse(answer["invite"]).addresses)
                break
            except (control_client.DaemonUnreachable, control_client.DaemonRefused):
                if loop_time() > deadline:
                    break
                await asyncio.sleep(0.2)
    return tuple(addresses)
