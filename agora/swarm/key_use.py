"""Finds out whether another process signs with this peer's key, since a data directory was copied. Deterministic.

Two processes with one key are one peer to all others, which call either and get answers that do not fit together. So
the one that started later must not serve. Both publish under the same key of the directory, where the later record
replaces the earlier one, and each start has a higher incarnation than any before it:

| a record of this peer's own id, incarnation | is of |
|---|---|
| from its first to its latest | itself |
| higher | a process that started later: the owner is told, and this one goes on |
| lower, and progress that changes | a process that runs and started earlier: this one must end |
| lower, otherwise | an earlier life, or a process that runs |

At the start a probe shows which of the two it is. The probe is progress of this peer, which nobody counts without a
claim. If another record stands in its place afterwards, a running process has published it.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from agora_protocol.errors import LocalError
from agora_protocol.ids import PeerId, Span
from agora_protocol.records import Claim, Progress, Record

# Seconds after which records of an earlier life are usually gone from the directory.
OLD_RECORDS_S: Final = 30.0


class KeyInUse(LocalError):
    """Raised when another process uses this peer's key; the text says which and what to do."""

    code = "key-in-use"


def key_in_use_text(me: PeerId, where: str) -> str:
    return (
        f"The key of this data directory ({me}) is used by another daemon, {where}: the directory was copied. "
        "Remove identity.key here, and this machine gets a key of its own at the next start; or stop the other daemon."
    )


class KeyUse:
    """Finds other processes that use this peer's key, by the records under this peer's own id.

    remark: a sentence for the owner once another process has tried to use the key; "" before. suspect: a claim of an
    earlier start, which may be an earlier life of this process or one that runs. error: set for good once this process
    must not serve.
    """

    def __init__(self, me: PeerId, incarnation: int, addresses: Collection[str], now: float) -> None:
        """incarnation: of this start. addresses: this process's own."""
        self._me = me
        self._first = incarnation
        self._addresses = frozenset(addresses)
        self._began = now
        self._probed_span: Span | None = None
        self._earlier: Progress | None = None
        self._seen_again = 0
        self.remark = ""
        self.suspect: Claim | None = None
        self.error: KeyInUse | None = None

    def take(self, record: Claim | Progress, latest: int, now: float) -> str:
        """Takes a record under this peer's own id; returns a sentence for the owner if it shows something new, else "".

        latest: the incarnation of this peer's latest claim.
        """
        if record.incarnation > latest:
            return self._note_later(record)
        if record.incarnation >= self._first:
            return ""
        if self._is_published_again(record, now):
            self.error = self.error or KeyInUse(key_in_use_text(self._me, self._describe(record)))
        elif isinstance(record, Claim) and record.state != "leaving" and not self._is_of_this_place(record):
            self.suspect = record
        return ""

    def _is_published_again(self, record: Claim | Progress, now: float) -> bool:
        if not isinstance(record, Progress):
            return False
        former, self._earlier = self._earlier, record
        was_replaced = record.span == self._probed_span
        if not was_replaced and now - self._began <= OLD_RECORDS_S:
            return False
        # A repeated record may be one that a slow node has kept, or one that was published while a clock was ahead.
        self._seen_again += was_replaced
        is_of_one_start = former is not None and (former.span, former.incarnation) == (record.span, record.incarnation)
        return (is_of_one_start and record != former) or self._seen_again > 1

    def probe(self, seen: Claim) -> Progress:
        """Returns the progress to publish while `seen` is suspect: it is in no view, and its note tells the other."""
        self._probed_span = seen.span
        note = f"a second daemon started with the key of this one; {_where(self._addresses)}"
        steps = tuple(0 for _ in seen.span.stages)
        return Progress(
            self._me, seen.span, self._first, steps, tokens_per_second=0.0, loss=None, queue=0, completed=0, note=note
        )

    def _note_later(self, record: Claim | Progress) -> str:
        if self.remark:
            return ""
        where = _where(record.addresses) if isinstance(record, Claim) else record.note.rpartition("; ")[2]
        self.remark = (
            "another daemon was started with a copy of this one's data directory and key"
            f"{f' ({where})' if where else ''}; it is told to end: remove identity.key there, so that it gets its own"
        )
        return self.remark

    def _describe(self, record: Record) -> str:
        claim = record if isinstance(record, Claim) else self.suspect
        if claim is None:
            return "which publishes its progress"
        return f"which holds stages {claim.span} {_where(claim.addresses)}".rstrip()

    def _is_of_this_place(self, claim: Claim) -> bool:
        # Nobody else can listen where this process listens: the claim is of its former life, and nobody need wait.
        return bool(claim.addresses) and self._addresses.issuperset(claim.addresses)


def _where(addresses: Collection[str]) -> str:
    shown = sorted(address.rpartition("/p2p/")[0] or address for address in addresses)[:2]
    return f"at {' and '.join(shown)}" if shown else ""
