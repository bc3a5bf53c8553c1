"""Invites: texts that one person sends to another, who can join a run with it. Nothing in it needs quoting in a shell.

The run id is the hash of the manifest, so an invite cannot lead to another run than it names.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final
from urllib.parse import quote, unquote

from agora_protocol.addresses import address_problem
from agora_protocol.errors import InputError
from agora_protocol.ids import RunId, is_run_id
from agora_protocol.limits import MAX_ADDRESSES, MAX_INVITE_BYTES, MAX_NAME_BYTES

SCHEME: Final = "agora://"
_FORM: Final = re.compile(r"([^/@]*)/([^/@]*)(?:/([^/@]*))?@(.*)\Z")
_TICKET: Final = re.compile(r"[A-Za-z0-9_-]*\Z")
_ADVICE: Final = "copy the whole line that `agora-node join` printed."


@dataclass(frozen=True, slots=True)
class Invite:
    """A run's id, its name for people, 1 to MAX_ADDRESSES addresses of peers that were in it, and perhaps a ticket.

    Immutable. ticket: a text that tickets.InviteTicket parses; "" for none. str(invite) is what a person sends, and
    `parse` reads it. An invite with a bearer ticket is a secret: anyone who has it may take part.
    """

    run: RunId
    addresses: tuple[str, ...]
    name: str = ""
    ticket: str = ""

    def __post_init__(self) -> None:
        if not is_run_id(self.run):
            raise InputError(f"The invite's run id is not 64 hex characters; {_ADVICE}")
        if not 1 <= len(self.addresses) <= MAX_ADDRESSES:
            raise InputError(f"An invite has 1 to {MAX_ADDRESSES} addresses, not {len(self.addresses)}; {_ADVICE}")
        for address in self.addresses:
            if problem := address_problem(address):
                raise InputError(f"The invite's address {address[:60]!r} {problem}; {_ADVICE}")
        if _TICKET.match(self.ticket) is None:
            raise InputError(f"The invite's ticket is damaged; {_ADVICE}")
        if len(self.name.encode(errors="replace")) > MAX_NAME_BYTES or not self.name.isprintable():
            raise InputError(f"The invite's name is longer than {MAX_NAME_BYTES} bytes or unprintable; {_ADVICE}")

    def __str__(self) -> str:
        ticket = f"/{self.ticket}" if self.ticket else ""
        return f"{SCHEME}{self.run}/{quote(self.name, safe='')}{ticket}@{','.join(self.addresses)}"

    @classmethod
    def parse(cls, text: str) -> Invite:
        """Returns the invite in a text; spaces around it are ignored. Raises InputError, which says what is wrong."""
        text = text.strip()
        if not text.startswith(SCHEME) or len(text) > MAX_INVITE_BYTES:
            raise InputError(f"An invite begins with {SCHEME} and has at most {MAX_INVITE_BYTES} characters; {_ADVICE}")
        match = _FORM.match(text[len(SCHEME) :])
        if match is None:
            raise InputError(f"The invite is not of the form {SCHEME}RUN/NAME@ADDRESS; {_ADVICE}")
        return cls(RunId(match[1].lower()), tuple(match[4].split(",")), unquote(match[2]), match[3] or "")
