"""`swarm amend`: signs a change of a live run with the founder's or a delegate's key, or lists what was signed."""

from __future__ import annotations

import contextlib
import time
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from agora_protocol.amendments import (
    Amendment,
    SealedAmendment,
    check_follows,
    check_key,
    manifest_at,
    seal_amendment,
    with_changes,
)
from agora_protocol.errors import AgoraError, AmendmentError, ManifestError, ProtocolError
from agora_protocol.ids import PeerId
from agora_protocol.limits import MAX_AMENDMENTS, MAX_CHANGES_BYTES, MAX_SHARED_AMENDMENTS
from agora_protocol.manifest import Manifest
from agora_protocol.packing import pack_canonical

from agora import SOFTWARE
from agora.cli import console
from agora.cli.console import EXIT_STALLED, EXIT_USAGE, Failure
from agora.cli.handing_in import homes_not_told, in_words, tell_daemons
from agora.cli.signing_command import Signer, find_signer, known_addresses
from agora.cli.stage_sources import FoundRun, find_run
from agora.data.evaluation_tasks import SCHEDULED
from agora.node import run_files
from agora.node.control import control_client
from agora.swarm.admission import is_outdated
from agora.swarm.amendments import AmendmentBook, describe_changes


# What is known of the run's amendments, and the furthest step that it has come to; None if nobody has told it.
@dataclass(frozen=True, slots=True)
class _Known:
    book: AmendmentBook
    step: int | None


def amend(run: str, from_step: int | None, sets: Sequence[str], directory: Path | None, *, as_json: bool) -> int:
    """Signs an amendment, and hands it to this machine's daemons, else to a peer. Raises Failure, which says what to do
    for values and steps that this run does not allow, if no key here may sign, and if nobody tells the run's step.
    """
    if from_step is None or not sets:
        raise Failure("give --from-step N and --set SECTION.FIELD=VALUE, or --list", EXIT_USAGE)
    values = parse_values(sets)
    found = find_run(run, [directory] if directory else [])
    signer = find_signer(found)
    known = _gather(run, found, signer)
    if known.step is None:
        raise Failure(
            "no daemon here and no peer of the run tells which step it has come to; run this where `agora-node join` "
            "runs, or check this machine's network",
            EXIT_STALLED,
        )
    sealed = _sign(found, signer, known, from_step, values)
    told = tell_daemons(found, "amend", refusal="bad-amendment", amendment=sealed.hex())
    if not told:
        _tell_peer(run, found, known.book, signer)
    receivers = in_words(told) or ["a peer of the run"]
    for home in homes_not_told(found, told):
        run_files.write_amendments(home, found.signed.run_id, known.book.sealed())
    (added,) = known.book.chain[-1:]
    if as_json:
        about = {"told": receivers, "step": known.step, "amendment": _as_json(added, counts=True, step=known.step)}
        console.print_json({"schema": 1, "run_id": found.signed.run_id} | about)
    else:
        text = f"amendment {added.amendment.number} is in force from step {from_step} on, the run is at {known.step}"
        console.print_to_stderr(f"{text}: {describe_changes(added.amendment)}; passed on by {', '.join(receivers)}")
    return console.EXIT_DONE


def list_amendments(run: str, directory: Path | None, *, as_json: bool) -> int:
    """Prints the amendments that are known: to a daemon of this machine, to a peer of the run, or on this disk."""
    found = find_run(run, [directory] if directory else [])
    known = _gather(run, found, None)
    rows = [(each, True) for each in known.book.chain] + [(each, False) for each in known.book.not_counting]
    if as_json:
        listed = [_as_json(each, counts=counts, step=known.step) for each, counts in rows]
        console.print_json({"schema": 1, "run_id": found.signed.run_id, "step": known.step, "amendments": listed})
        return console.EXIT_DONE
    for each, counts in rows:
        amendment = each.amendment
        state = "counts" if counts else "does not count: another of its number goes before it, or its signer is banned"
        if counts and known.step is not None:
            state = "in force" if amendment.from_step <= known.step else f"in {amendment.from_step - known.step} steps"
        console.print_to_stdout(
            f"{amendment.number:>3}  from step {amendment.from_step}  {describe_changes(amendment)}  ({state})"
        )
    if not rows:
        console.print_to_stderr("the run has no amendments: its manifest holds as it was signed")
    return console.EXIT_DONE


def parse_values(sets: Sequence[str]) -> dict[str, Any]:
    """Returns the new values by key of "SECTION.FIELD=VALUE", with values as TOML writes them. Raises Failure."""
    values: dict[str, Any] = {}
    for text in sets:
        key, equals, value = (part.strip() for part in text.partition("="))
        if not equals or not value:
            raise Failure(
                f"--set {text[:60]!r} is not SECTION.FIELD=VALUE, such as optimizer.total_steps=4000", EXIT_USAGE
            )
        try:
            check_key(key)
        except AmendmentError as error:
            raise Failure(str(error), EXIT_USAGE) from None
        if key in values:
            raise Failure(f"{key} is set twice; give it once", EXIT_USAGE)
        try:
            read = tomllib.loads(f"value = {value}")["value"]
            values[key] = read.isoformat() if isinstance(read, date) else read
        except tomllib.TOMLDecodeError:
            values[key] = value  # a word need not be quoted
    tasks = values.get("evaluation.tasks")
    if isinstance(tasks, list) and (unknown := [task for task in tasks if task not in SCHEDULED]):
        raise Failure(f"there is no task {unknown[0]!r}; evaluation.tasks may have {', '.join(SCHEDULED)}", EXIT_USAGE)
    return values


def _gather(run: str, found: FoundRun, signer: Signer | None) -> _Known:
    sealed, step = _ask_daemons(found)
    if step is None:
        told, step = _ask_peers(run, found, signer)
        sealed += told
    for home in found.homes:
        sealed += run_files.read_amendments(home, found.signed.run_id)
    book = AmendmentBook(found.signed.run_id, found.signed.manifest, _banned_delegates(found).__contains__)
    # What follows another is taken once that is: as often as a chain can be long, at most.
    for _ in range(MAX_AMENDMENTS):
        if not sum(_is_new(book, data) for data in dict.fromkeys(sealed)):
            break
    book.choose()
    return _Known(book, step)


def _is_new(book: AmendmentBook, sealed: bytes) -> bool:
    try:
        return book.add(sealed, time.time()) is not None
    except (AmendmentError, ProtocolError):
        return False  # a peer or a file has told what does not count


def _banned_delegates(found: FoundRun) -> set[PeerId]:
    from agora.swarm.admission import AdmissionBook, AdmissionPolicy

    book = AdmissionBook(found.signed.run_id, AdmissionPolicy.of(found.signed.manifest))
    subjects = set()
    for home in found.homes:
        for sealed in run_files.read_revocations(home, found.signed.run_id):
            with contextlib.suppress(AgoraError):
                if (revocation := book.add_revocation(sealed, time.time())) is not None:
                    subjects.add(revocation.subject)
    return {subject for subject in subjects if book.has_founder_banned(subject)}


def _ask_daemons(found: FoundRun) -> tuple[list[bytes], int | None]:
    for entry in found.daemons:
        with contextlib.suppress(control_client.DaemonUnreachable, control_client.DaemonRefused, KeyError, ValueError):
            answer = control_client.ask(Path(entry.socket), "amendments")
            return [bytes.fromhex(data) for data in answer["known"]], int(answer["step"])
    return [], None


def _ask_peers(run: str, found: FoundRun, signer: Signer | None) -> tuple[list[bytes], int | None]:
    from agora.net.dht import status_client

    addresses, run_id = known_addresses(run, found), found.signed.run_id
    credentials = status_client.Credentials(signer.identity, signer.proof) if signer is not None else None
    try:
        status = status_client.fetch_status(addresses, run_id, credentials=credentials)
        told = status_client.fetch_amendments(addresses, run_id, credentials=credentials)
        return list(told), int(status["step"])
    except (AgoraError, KeyError, TypeError, ValueError):
        return [], None


def _sign(found: FoundRun, signer: Signer, known: _Known, from_step: int, values: Mapping[str, Any]) -> bytes:
    core, run = found.signed.manifest, found.signed.run_id
    number, previous = known.book.next_amendment()
    before = [each.amendment for each in known.book.chain]
    if number > MAX_AMENDMENTS:
        raise Failure(f"the run has {MAX_AMENDMENTS} amendments, the most there can be; go on with a new run")
    try:
        changes = pack_canonical(_as_the_manifest_has_them(manifest_at(core, before, from_step), values))
        if len(changes) > MAX_CHANGES_BYTES:
            raise Failure(f"the new values take {len(changes)} bytes; set them by several amendments", EXIT_USAGE)
        amendment = Amendment(
            signer.identity.peer,
            number,
            previous,
            known.step or 0,
            from_step,
            int(time.time()),
            changes,
            signer.proof,
        )
        check_follows(amendment, core, before)
        admission = manifest_at(core, [*before, amendment], from_step).admission
        if is_outdated(SOFTWARE, admission):
            raise Failure(f"this machine has {SOFTWARE}, which the amendment would leave out; upgrade it first")
        sealed = seal_amendment(amendment, run, signer.identity)
        known.book.add(sealed, time.time())
    except ManifestError as error:
        raise Failure(f"these values do not fit the run: {error}", EXIT_USAGE) from None
    except (AmendmentError, ProtocolError) as error:
        raise Failure(str(error)) from None
    known.book.choose()
    if not known.book.chain or known.book.chain[-1].sealed != sealed:
        raise Failure("the founder has banned this machine's key, so what it signs does not count; ask the founder")
    return sealed


def _as_the_manifest_has_them(manifest: Manifest, values: Mapping[str, Any]) -> dict[str, Any]:
    dumped = with_changes(manifest, values).model_dump()
    sections = {key: key.partition(".") for key in values}
    return {key: dumped[section][name] for key, (section, _, name) in sections.items()}


def _tell_peer(run: str, found: FoundRun, book: AmendmentBook, signer: Signer) -> None:
    from agora.net.dht import status_client

    credentials = status_client.Credentials(signer.identity, signer.proof)
    newest = [each.sealed for each in book.chain][-MAX_SHARED_AMENDMENTS:]
    try:
        took = status_client.share_amendments(known_addresses(run, found), found.signed.run_id, newest, credentials)
    except AgoraError as error:
        raise Failure(f"nobody could be told ({error}), so nothing is amended; try again", EXIT_STALLED) from None
    if took.refused:
        raise Failure(f"the peer that was asked does not accept it: {took.why}")


def _as_json(each: SealedAmendment, *, counts: bool, step: int | None) -> dict[str, Any]:
    amendment = each.amendment
    return {
        "number": amendment.number,
        "from_step": amendment.from_step,
        "changes": amendment.values,
        "issuer": amendment.issuer,
        "signed_step": amendment.signed_step,
        "issued_unix": amendment.issued_unix,
        "hash": each.hash.hex(),
        "counts": counts,
        "in_force": counts and step is not None and amendment.from_step <= step,
    }
