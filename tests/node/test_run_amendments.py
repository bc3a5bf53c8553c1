"""Claims about how amendments spread between real hosts, what is kept of them, and what a false one costs."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from agora_protocol.amendments import SealedAmendment
from agora_protocol.ids import PeerId
from agora_protocol.messages import GetAmendments, KnownAmendments, ShareAmendments, TookAmendments
from agora_protocol.tickets import READER

from agora.core.calls import Reply
from agora.net.rpc.connection import IncomingCall
from agora.node import run_files
from agora.node.paths import Home
from agora.node.peer.run_amendments import Amendments, Taken
from agora.observe import events
from tests.net.helpers import Peer, after, introduce, make_peer, run, until
from tests.swarm.test_amendments import DELEGATE, MEMBER, RUN, SIGNED, made


class Member:
    """A peer that answers for its amendments as a daemon does. step: that the run has come to, as it thinks."""

    def __init__(self, home: Home) -> None:
        self.home = home
        self.step = 10
        self.reported: list[events.Event] = []
        self.violations: list[PeerId] = []
        self.banned: set[PeerId] = set()
        self.peer: Peer
        self.amendments: Amendments

    async def answer(self, call: IncomingCall) -> Reply:
        return await self.amendments.answer(call)

    def open(self) -> None:
        context: Any = SimpleNamespace(home=self.home, report_event=self.reported.append)
        self.amendments = Amendments(
            context,
            SIGNED,
            self.peer.network,
            lambda peer, *_: self.violations.append(peer),
            is_banned=self.banned.__contains__,
            present_step=lambda: self.step,
        )

    @property
    def chain(self) -> tuple[SealedAmendment, ...]:
        return self.amendments.book.chain

    def events(self, kind: type[events.Event]) -> list[Any]:
        return [event for event in self.reported if type(event) is kind]

    async def meet(self, *others: Member) -> None:
        for other in others:
            await self.peer.network.call(other.peer.id, GetAmendments(bytes(32)), deadline=after(10))


@asynccontextmanager
async def members(folder: Path, count: int, reader: int | None = None) -> AsyncIterator[Sequence[Member]]:
    async with AsyncExitStack() as stack:
        found = [Member(Home(folder / f"m{number}")) for number in range(count)]
        for number, member in enumerate(found):
            (folder / f"m{number}").mkdir()
            gate = {"role": READER} if number == reader else {}
            member.peer = await make_peer(folder / f"m{number}", "p", member.answer, run_id=RUN, gate=gate)
            stack.push_async_callback(member.peer.close)
            member.open()
        introduce(*(member.peer for member in found))
        yield found


def test_an_amendment_passes_from_neighbour_to_neighbour_and_is_kept_on_every_disk(tmp_path: Path) -> None:
    async def main() -> None:
        async with members(tmp_path, 3) as (first, middle, last):
            await middle.meet(first, last)  # first and last have no connection
            one, two = made(), made(after=made(), rate=0.002)
            assert first.amendments.take([one.sealed, two.sealed], begins_here=True) == Taken(2, 0)
            await until(lambda: last.chain == middle.chain == (one, two))
            for member in (first, middle, last):
                assert [event.number for event in member.events(events.AmendmentTaken)] == [1, 2]
                assert member.amendments.live.at(100).optimizer.learning_rate == 0.002
                assert run_files.read_amendments(member.home, RUN) == [one.sealed, two.sealed]
                assert member.home.amendments(RUN).stat().st_mode & 0o777 == 0o600
                member.open()
                assert member.chain == (one, two) and member.amendments.live.number_at(100) == 2

    run(main)


def test_who_was_away_asks_for_what_it_lacks_and_two_that_know_the_same_send_nothing(tmp_path: Path) -> None:
    async def main() -> None:
        async with members(tmp_path, 2) as (here, away):
            one = made()
            here.amendments.take([one.sealed])
            await away.amendments.fetch([here.peer.id])
            assert away.chain == (one,)
            known = GetAmendments(away.amendments.book.digest())
            reply = await away.peer.network.call(here.peer.id, known, deadline=after(10))
            assert reply.message == KnownAmendments(())

    run(main)


def test_a_false_or_foreign_one_changes_nothing_goes_no_further_and_counts_against_its_sender(tmp_path: Path) -> None:
    async def main() -> None:
        async with members(tmp_path, 3) as (liar, honest, other):
            await honest.meet(liar, other)
            false = made().sealed[:-1] + bytes([made().sealed[-1] ^ 1])
            for wrong, is_violation in ((false, True), (b"\xc1", True), (made(MEMBER, proof=b"").sealed, False)):
                before = len(honest.violations)
                reply = await liar.peer.network.call(
                    honest.peer.id, ShareAmendments((wrong, wrong)), deadline=after(10)
                )
                assert isinstance(reply.message, TookAmendments)
                assert (reply.message.new, reply.message.refused) == (0, 2) and reply.message.why
                assert len(honest.violations) - before == 2 * is_violation
            assert [(event.peer, event.count) for event in honest.events(events.AmendmentRefused)] == [
                (liar.peer.id, 2)
            ] * 3
            assert honest.chain == other.chain == () and run_files.read_amendments(honest.home, RUN) == []
            assert honest.amendments.live.at(10**6) is SIGNED.manifest
            assert not other.events(events.AmendmentTaken)

    run(main)


def test_a_replay_changes_nothing(tmp_path: Path) -> None:
    async def main() -> None:
        async with members(tmp_path, 2) as (first, second):
            one, two = made(), made(after=made(), rate=0.002)
            second.amendments.take([one.sealed, two.sealed])
            second.step = 5000
            reply = await first.peer.network.call(
                second.peer.id, ShareAmendments((one.sealed, two.sealed)), deadline=after(10)
            )
            assert reply.message == TookAmendments(0, 0, "")
            assert len(second.events(events.AmendmentTaken)) == 2

    run(main)


def test_who_hands_one_in_is_refused_when_its_step_is_near_or_over(tmp_path: Path) -> None:
    async def main() -> None:
        async with members(tmp_path, 2, reader=1) as (member, reader):
            for step, says in ((95, "too near"), (5000, "too near or over")):
                member.step = step
                reply = await reader.peer.network.call(
                    member.peer.id, ShareAmendments((made().sealed,)), deadline=after(10)
                )
                assert isinstance(reply.message, TookAmendments) and reply.message.refused == 1
                assert says in reply.message.why and "--from-step" in reply.message.why
                assert member.amendments.take([made().sealed], begins_here=True).refused == 1
            member.step = 20
            assert member.amendments.take([made().sealed], begins_here=True) == Taken(1, 0)

    run(main)


def test_a_ban_takes_back_what_a_delegate_has_signed_and_says_so(tmp_path: Path) -> None:
    async def main() -> None:
        async with members(tmp_path, 1) as (member,):
            by_delegate = made(DELEGATE, rate=0.5)
            member.amendments.take([by_delegate.sealed])
            assert member.amendments.live.at(100).optimizer.learning_rate == 0.5
            member.banned.add(DELEGATE.peer)
            member.amendments.forget_refused()
            assert member.chain == () and member.amendments.live.at(100) is SIGNED.manifest
            (dropped,) = member.events(events.AmendmentDropped)
            assert (dropped.number, dropped.digest) == (1, by_delegate.hash.hex())

    run(main)


def test_two_halves_of_a_split_have_one_chain_once_they_meet(tmp_path: Path) -> None:
    async def main() -> None:
        async with members(tmp_path, 2) as (left, right):
            of_delegate, of_founder = made(DELEGATE, rate=0.5), made(rate=0.25)
            left.amendments.take([of_delegate.sealed])
            right.amendments.take([of_founder.sealed])
            left.amendments.send_all(right.peer.id)
            right.amendments.send_all(left.peer.id)
            both = (left.amendments.book, right.amendments.book)
            await until(
                lambda: all((book.chain, book.not_counting) == ((of_founder,), (of_delegate,)) for book in both)
            )
            assert left.events(events.AmendmentDropped) and not right.events(events.AmendmentDropped)
            await until(lambda: run_files.read_amendments(left.home, RUN) == run_files.read_amendments(right.home, RUN))

    run(main)


def test_a_damaged_file_costs_the_damaged_lines(tmp_path: Path) -> None:
    home, one = Home(tmp_path), made()
    run_files.write_amendments(home, RUN, [one.sealed, b"nothing", made(MEMBER, proof=b"").sealed])
    home.amendments(RUN).write_text(home.amendments(RUN).read_text() + "not hex\n")
    member = Member(home)
    member.peer = SimpleNamespace(network=None)
    member.open()
    assert member.chain == (one,)
