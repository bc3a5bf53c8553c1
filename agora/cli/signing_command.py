"""`swarm invite` and `swarm ban`: signs tickets and revocations with this machine's key, where that may sign them."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from agora_protocol.errors import AgoraError, IdentityError
from agora_protocol.identity import Identity
from agora_protocol.ids import PeerId, is_peer_id
from agora_protocol.invite import Invite
from agora_protocol.limits import MAX_ADDRESSES
from agora_protocol.manifest import SignedManifest
from agora_protocol.messages import TookRevocations
from agora_protocol.tickets import (
    DELEGATE,
    MEMBER,
    ROLES,
    InviteTicket,
    Revocation,
    Ticket,
    extend_proof,
    make_proof,
    open_proof,
    seal_revocation,
    seal_ticket,
)

from agora.cli import console
from agora.cli.console import EXIT_STALLED, EXIT_USAGE, Failure
from agora.cli.handing_in import homes_not_told, in_words, tell_daemons
from agora.cli.stage_sources import FoundRun, find_run
from agora.node import run_files, runs
from agora.node.control import control_client
from agora.swarm.admission import LISTED, TICKET, Admission, Revocations, judge_proof

DAY_S: Final = 86_400


@dataclass(frozen=True, slots=True)
class InviteRequest:
    """The flags of `swarm invite`. peer: the only one that may use it; None: any. days: of its ticket."""

    peer: str | None = None
    days: float = 30.0
    role: str = MEMBER


@dataclass(frozen=True, slots=True)
class Signer:
    """A key of this machine that may sign for a run. proof: makes it a delegate's key; b"" for the founder's."""

    identity: Identity
    proof: bytes


def print_invite(run: str, request: InviteRequest, directory: Path | None, *, as_json: bool) -> int:
    """A ticket is made in mode TICKET and for the role DELEGATE; without one `days` has no effect. Raises Failure if no
    key here may sign.
    """
    _check_request(request)
    found = find_run(run, [directory] if directory else [])
    signed = found.signed
    ticket = None
    revoke_by = request.peer
    amended = run_files.manifest_on_disk(found.homes, signed, time.time())
    mode = amended.admission.mode
    until_unix = int(time.time() + request.days * DAY_S)
    if mode == TICKET or request.role == DELEGATE:
        ticket, revoke_by = _make_ticket(signed, find_signer(found), request, until_unix)
    elif request.role != MEMBER:
        raise Failure(f"the run has mode {mode}, in which tickets of readers do not count; see docs/use/admission.md")
    elif mode == LISTED and request.peer is not None and not amended.admits_without_ticket(PeerId(request.peer)):
        raise Failure(
            f"the run has mode listed, and does not list {request.peer}; list it by `swarm amend`, see "
            "docs/use/admission.md"
        )
    invite = Invite(signed.run_id, _find_addresses(run, found), signed.manifest.name, str(ticket or ""))
    if as_json:
        about = {"role": request.role, "peer": request.peer, "not_after": until_unix, "ban_by": revoke_by}
        console.print_json({"schema": 1, "invite": str(invite)} | (about if ticket is not None else {}))
        return console.EXIT_DONE
    print(invite, flush=True)
    if ticket is not None:
        until = datetime.fromtimestamp(until_unix, UTC).strftime("%Y-%m-%d %H:%M UTC")
        whom = request.peer or "whoever has the invite, so keep it secret"
        console.print_to_stderr(f"a ticket of a {request.role} until {until}, for {whom}")
        console.print_to_stderr(f"take it back with `swarm ban {run} {revoke_by}`")
    return console.EXIT_DONE


def ban(run: str, peer: str, directory: Path | None, *, as_json: bool) -> int:
    """Hands the signed ban to this machine's daemons, else to a peer; it also stays in data directories whose daemons
    did not take it. Raises Failure for a wrong id or the founder's, and if no key here may sign.
    """
    if not is_peer_id(peer):
        raise Failure(
            f"{peer[:60]!r} is not a peer id; `swarm status RUN --json` lists them, such as 12D3KooW...", EXIT_USAGE
        )
    found = find_run(run, [directory] if directory else [])
    if peer == found.signed.founder:
        raise Failure("the founder cannot be banned")
    signer = find_signer(found)
    revocation = Revocation(signer.identity.peer, PeerId(peer), int(time.time()), signer.proof)
    sealed = seal_revocation(revocation, found.signed.run_id, signer.identity)
    told = tell_daemons(found, "revoke", revocation=sealed.hex())
    for home in homes_not_told(found, told):
        kept = run_files.read_revocations(home, found.signed.run_id)
        run_files.write_revocations(home, found.signed.run_id, [*kept, sealed])
    receivers = in_words(told) or tell_peer(run, found, sealed, signer)
    if as_json:
        console.print_json({"schema": 1, "run_id": found.signed.run_id, "banned": peer, "told": receivers})
    else:
        console.print_to_stderr(
            f"{peer} is banned from run {found.signed.run_id[:12]}; passed on by {', '.join(receivers)}"
        )
    return console.EXIT_DONE


def _check_request(request: InviteRequest) -> None:
    if request.role not in ROLES:
        raise Failure(f"--role is one of {', '.join(ROLES)}", EXIT_USAGE)
    if request.peer is not None and not is_peer_id(request.peer):
        raise Failure(
            f"--peer {request.peer[:60]!r} is not a peer id; `agora-node doctor` prints a machine's own", EXIT_USAGE
        )
    if request.role == DELEGATE and request.peer is None:
        raise Failure("a delegate's ticket is for one machine: name it with --peer ID", EXIT_USAGE)
    if not 0 < request.days <= 36_500:
        raise Failure("--days is a number above 0, and at most 36500", EXIT_USAGE)


def _make_ticket(
    signed: SignedManifest, signer: Signer, request: InviteRequest, until_unix: int
) -> tuple[InviteTicket, str]:
    if request.role == DELEGATE and signer.proof:
        raise Failure("only the founder can name delegates; ask it, or leave out --role")
    bearer = Identity.generate() if request.peer is None else None
    holder = bearer.peer if bearer is not None else PeerId(request.peer or "")
    ticket = Ticket(signer.identity.peer, holder, bearer is not None, request.role, until_unix)
    sealed = seal_ticket(ticket, signed.run_id, signer.identity)
    proof = extend_proof(signer.proof, sealed) if signer.proof else make_proof(sealed)
    secret = bearer.key_file_bytes()[4:36] if bearer is not None else b""
    return InviteTicket(proof, secret), holder


def find_signer(found: FoundRun) -> Signer:
    """Raises Failure if no key of this machine may sign for the run."""
    run = found.signed.run_id
    founder = found.signed.founder
    for home in found.homes:
        with contextlib.suppress(IdentityError):
            identity = Identity.load(home.identity)
            if identity.peer == founder:
                return Signer(identity, b"")
            proof = run_files.read_proof(home, run)
            judged = judge_proof(open_proof(proof, run), identity.peer, time.time(), Revocations(founder))
            if isinstance(judged, Admission) and judged.role == DELEGATE:
                return Signer(identity, proof)
    raise Failure(f"only the founder {founder} or a delegate can sign; do it on its machine, or name it with --dir DIR")


def _find_addresses(run: str, found: FoundRun) -> tuple[str, ...]:
    for entry in found.daemons:
        with contextlib.suppress(control_client.DaemonUnreachable, control_client.DaemonRefused, AgoraError):
            return Invite.parse(control_client.ask(Path(entry.socket), "invite")["invite"]).addresses
    if addresses := known_addresses(run, found):
        return addresses
    raise Failure("no address of a peer is known here; run it where `agora-node join` runs", EXIT_STALLED)


def known_addresses(run: str, found: FoundRun) -> tuple[str, ...]:
    """Returns addresses of peers of the run, as this machine has them on disk or in the invite `run`."""
    known = dict.fromkeys(runs.resolve(run, found.homes[0]).addresses)
    for home in found.homes:
        manifest = home.manifest(found.signed.run_id)
        if manifest.is_file():
            known |= dict.fromkeys(runs.resolve(str(manifest), home).addresses)
    return tuple(known)[:MAX_ADDRESSES]


def tell_peer(run: str, found: FoundRun, sealed: bytes, signer: Signer) -> list[str]:
    """Over the network, to the first peer that answers. Raises Failure if none can be reached, or if it does not
    accept.
    """
    from agora.net.dht import status_client

    addresses = known_addresses(run, found)
    credentials = status_client.Credentials(signer.identity, signer.proof)
    try:
        took: TookRevocations = status_client.share_revocations(addresses, found.signed.run_id, [sealed], credentials)
    except AgoraError as error:
        text = f"nobody could be told ({error}); it is kept here, and a daemon that starts here passes it on"
        raise Failure(text, EXIT_STALLED) from None
    if took.refused:
        raise Failure("the peer that was asked does not accept this ban; its clock or this machine's may be wrong")
    return ["a peer of the run"]
