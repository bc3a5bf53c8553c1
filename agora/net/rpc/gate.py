"""Who may connect to this peer: makes its HELLO, judges those of others, remembers admitted members."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Final

from agora_protocol.errors import AgoraError, NotAdmitted, ProtocolError, WrongRun
from agora_protocol.ids import PeerId, RunId, peer_name
from agora_protocol.limits import OLDEST_PROTOCOL_VERSION, PROTOCOL_VERSION, SALT_BYTES
from agora_protocol.messages import Hello
from agora_protocol.tickets import MEMBER, READER, run_token

# Maximum number of admitted members that are remembered; the one whose HELLO came longest ago is forgotten first.
MAX_ADMITTED: Final = 16_384

# Returns the role, MEMBER or READER, that a peer's proof bytes grant it. Raises NotAdmitted or ProtocolError.
Judge = Callable[[PeerId, bytes], str]


def admit_everyone(peer: PeerId, proof: bytes) -> str:
    """Returns MEMBER whatever the proof: the Judge of a peer that has nothing to protect yet, and of tests."""
    return MEMBER


class Gate:
    """Makes this peer's HELLO, judges that of others, and remembers which peers have been admitted as members.

    It also says which peers may be called, and which open connections may stay.
    """

    def __init__(
        self,
        me: PeerId,
        run: RunId,
        software: str,
        addresses: Callable[[], Sequence[str]] = tuple,
        *,
        proof: bytes = b"",
        judge: Judge = admit_everyone,
        refusal_reason: Callable[[PeerId], str] = lambda _: "",
        refusal_of_version: Callable[[str], str] = lambda _: "",
        version: int = PROTOCOL_VERSION,
        oldest_version: int = OLDEST_PROTOCOL_VERSION,
        role: str = MEMBER,
    ) -> None:
        """me, run, software, proof: what this peer's HELLO contains; proof: its tickets, b"" for none.

        addresses: returns where this peer can be dialled, also in HELLO. judge: returns the role that a peer's proof
        grants. refusal_reason: returns why a peer must be neither called nor answered, "" if it may be.
        refusal_of_version: returns why no member may have this software, as HELLO says it, "" if one may. role: what
        this peer asks to be, MEMBER or READER. version, oldest_version: the newest and the oldest version of the
        protocol that this peer speaks; two peers speak the newest that both know.
        """
        self._role = role
        self.version = version
        self._oldest_version = oldest_version
        self._me = me
        self._run = run
        self._software = software
        self._addresses = addresses
        self._proof = proof
        self._judge = judge
        self._refusal_reason = refusal_reason
        self._refusal_of_version = refusal_of_version
        self._admitted_members: OrderedDict[PeerId, None] = OrderedDict()

    def hello_to(self, peer: PeerId) -> Hello:
        """Returns a new HELLO for a stream to `peer`. No other peer can replay it or infer the run id from it."""
        salt = os.urandom(SALT_BYTES)
        token = run_token(self._run, salt, self._me, peer)
        return Hello(
            version=self.version,
            salt=salt,
            run=token,
            role=self._role,
            proof=self._proof,
            software=self._software,
            addresses=tuple(self._addresses()),
        )

    def admit(self, peer: PeerId, hello: Hello) -> str:
        """Returns the role in which `peer` is admitted by its HELLO, and remembers a member for `is_admitted_member`.

        A peer that asks to be a READER becomes one, even if its proof grants more. Raises NotAdmitted if the proof
        grants too little, WrongRun for another run, and ProtocolError "wrong-version", or with the code of what is
        wrong with the proof. No error text reveals the run id.
        """
        if min(hello.version, self.version) < self._oldest_version:
            # Both sides read it, so that it names both.
            versions = {peer_name(peer): hello.version, peer_name(self._me): self.version}
            older = min(versions, key=lambda name: versions[name])
            told = " and ".join(f"{name} speaks protocol version {version}" for name, version in versions.items())
            raise ProtocolError("wrong-version", f"{told}: {older} has the older agora, and must upgrade it.")
        if hello.run != run_token(self._run, hello.salt, peer, self._me):
            raise WrongRun("the peer takes part in another run; use an invite of that run")
        role = self._judge(peer, hello.proof)
        if hello.role == READER:
            return READER
        if role != MEMBER:
            raise NotAdmitted("the run lets this peer read, but not take part; ask its founder for a ticket")
        if why := self._refusal_of_version(hello.software):
            raise NotAdmitted(why)
        self._admitted_members[peer] = None
        self._admitted_members.move_to_end(peer)
        if len(self._admitted_members) > MAX_ADMITTED:
            self._admitted_members.popitem(last=False)
        return MEMBER

    def find_new_refusal(self, peer: PeerId, proof: bytes, software: str, role: str) -> AgoraError | None:
        """Judges a peer admitted in `role` again; returns the error to refuse it with, None if it may stay.

        Called for open connections, during which tickets expire, peers are banned and versions come to their end.
        """
        if role == MEMBER and (why := self._refusal_of_version(software)):
            return NotAdmitted(why)
        try:
            is_same = self._judge(peer, proof) in (MEMBER, role)
        except AgoraError as error:
            return error
        return None if is_same else NotAdmitted("the peer may not take part in the run any more; ask its founder")

    def find_refusal(self, peer: PeerId) -> AgoraError | None:
        """Returns the error to raise instead of calling `peer`, None if it may be called.

        It judges only the peer's id, by `refusal_reason`.
        """
        why = self._refusal_reason(peer)
        return NotAdmitted(f"{peer} is not admitted: {why}") if why else None

    def is_admitted_member(self, peer: PeerId) -> bool:
        """Returns whether `peer` was admitted as a member by a HELLO, is still remembered, and may still be called."""
        return peer in self._admitted_members and not self._refusal_reason(peer)

    def forget(self, peer: PeerId) -> None:
        """Forgets that `peer` was admitted as a member: `is_admitted_member` is False until its next HELLO."""
        self._admitted_members.pop(peer, None)
