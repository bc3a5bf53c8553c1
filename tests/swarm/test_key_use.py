"""Two processes with one key: the one that started later ends, the other is told, and a restart is neither."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace

import pytest
from agora_protocol.identity import Identity
from agora_protocol.ids import PeerId, Span
from agora_protocol.records import Claim, Progress

from agora.core.calls import Announcement
from agora.observe.events import OwnerTold
from agora.swarm.key_use import OLD_RECORDS_S, KeyInUse, KeyUse
from agora.swarm.membership import KEY_WARNING_DURATION_S, PROBE_TIMEOUT_S, Membership, MembershipConfig
from agora.swarm.stage_capacity import MachineCapacity, equal_needs
from tests.swarm.makers import RUN
from tests.swarm.test_membership import Directory, Store, dial_nobody, unix
from tests.virtual_time import run

KEY = Identity(bytes([7]) * 32)
HOME, ELSEWHERE = f"/ip4/44.0.0.1/tcp/1/p2p/{KEY.peer}", f"/ip4/55.0.0.1/tcp/1/p2p/{KEY.peer}"


def claim(incarnation: int, address: str = HOME, state: str = "serving") -> Claim:
    return Claim(KEY.peer, Span(0, 0), incarnation, (address,), state, 0.0)


def progress(incarnation: int, completed: int = 0) -> Progress:
    return Progress(
        KEY.peer, Span(0, 0), incarnation, (4,), tokens_per_second=0.0, loss=None, queue=0, completed=completed
    )


def started(incarnation: int = 9, address: str = ELSEWHERE) -> KeyUse:
    return KeyUse(PeerId(KEY.peer), incarnation, (address,), 0.0)


def test_what_was_published_before_the_start_is_no_second_process() -> None:
    """A daemon that was killed and restarted elsewhere finds the claim and progress of its earlier life."""
    use = started()
    for record in (claim(5), progress(5), progress(5), progress(9), progress(5)):
        assert use.take(record, 9, 1.0) == ""
    assert use.suspect == claim(5) and use.error is None


def test_a_restart_that_takes_another_stage_is_no_second_process() -> None:
    """What its earlier life published of the former stage stays for a while beside its own progress."""
    use = started(address=HOME)
    for at in range(20):
        for record in (claim(5), progress(5), replace(progress(9), span=Span(1, 1))):
            use.take(record, 9, float(at))
    assert use.error is None


@pytest.mark.parametrize("state", ["joining", "serving"])
def test_a_restart_at_the_same_address_need_not_wait(state: str) -> None:
    use = started(address=HOME)
    use.take(claim(5, HOME, state), 9, 1.0)
    assert use.suspect is None


def test_a_claim_that_says_leaving_is_not_suspect() -> None:
    use = started()
    use.take(claim(5, HOME, "leaving"), 9, 1.0)
    assert use.suspect is None


@pytest.mark.parametrize("again", [[progress(5, completed=2)], [progress(5), progress(5)]])
def test_what_replaces_the_probe_was_published_by_a_process_that_runs(again: list[Progress]) -> None:
    use = started()
    for record in (claim(5), progress(5), use.probe(claim(5)), *again):
        use.take(record, 9, 1.0)
    assert isinstance(use.error, KeyInUse)
    for words in (str(KEY.peer), "/ip4/44.0.0.1/tcp/1", "stages 0", "identity.key"):
        assert words in str(use.error)


def test_progress_that_changes_long_after_the_start_is_of_a_process_that_runs() -> None:
    use = started()
    for at, record in enumerate((progress(9), progress(5, completed=1), claim(5), progress(5, completed=2))):
        assert use.error is None
        use.take(record, 9, OLD_RECORDS_S + 1.0 + at)
    assert use.error is not None


def test_old_records_that_stay_are_no_second_process() -> None:
    """They were published while a clock was ahead, and stand under the keys of other stages."""
    use = started()
    for at in range(100):
        for record in (claim(5), progress(5), claim(8, state="leaving")):
            use.take(record, 9, OLD_RECORDS_S + at)
    assert use.error is None


def test_the_older_one_is_told_once_and_goes_on() -> None:
    use = started(5, HOME)
    probe = started(9, ELSEWHERE).probe(claim(5))
    told = use.take(probe, 5, 100.0)
    assert "/ip4/55.0.0.1/tcp/1" in told and "identity.key" in told and use.remark == told
    assert use.take(claim(9, ELSEWHERE), 5, 101.0) == "" and use.error is None


def test_own_moves_are_its_own() -> None:
    use = started(5, HOME)
    for number in (5, 6, 7):
        assert use.take(claim(number), 7, 100.0) == use.take(progress(number), 7, 100.0) == ""
    assert use.error is None and not use.remark


class Process:
    """A process with the key, its membership and events."""

    def __init__(self, store: Store, incarnation: int, address: str, seed: int = 0) -> None:
        self.events: list = []
        self.completed = 0
        self.membership = Membership(
            MembershipConfig(RUN, 1, incarnation, addresses=(address,)),
            Directory(store),
            KEY,
            self.events.append,
            is_verified=lambda _: True,
            dial_unverified=dial_nobody,
            progress=self.count,
            rng=random.Random(incarnation + seed),
            unix=unix,
        )

    def count(self) -> Progress:
        self.completed += 1
        return replace(progress(0), completed=self.completed)

    async def join(self) -> None:
        await self.membership.claim_span(equal_needs(1), MachineCapacity(0.0, 0.0, (1,)), Span(0, 0))
        await self.membership.set_state("serving")

    def told(self) -> list[str]:
        return [event.text for event in self.events if isinstance(event, OwnerTold)]


@pytest.mark.parametrize("seed", range(20))
def test_a_copy_is_refused_before_it_claims_anything_and_the_first_is_told(seed: int) -> None:
    async def work() -> None:
        store = Store()
        first, copy = Process(store, 5, HOME, seed), Process(store, 900, ELSEWHERE, seed)
        await first.join()
        working = asyncio.create_task(first.membership.run())
        await asyncio.sleep(20.0)
        began = asyncio.get_running_loop().time()
        copying = asyncio.create_task(copy.membership.run())  # as a daemon does: what ends it ends the start
        with pytest.raises(KeyInUse, match="44.0.0.1"):
            await asyncio.gather(copy.join(), copying)
        assert not copying.done(), "the start ended it, with the warning behind it"
        copying.cancel()
        assert asyncio.get_running_loop().time() - began < PROBE_TIMEOUT_S + KEY_WARNING_DURATION_S + 2.0
        assert copy.membership.claim is None
        assert {found.incarnation for found in store.claims()} == {5}, "others never saw the copy"
        await asyncio.sleep(10.0)
        assert len(first.told()) == 1 and "55.0.0.1" in first.told()[0]
        assert first.membership.key_use.remark and not working.done()
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)

    run(work())


def test_two_that_meet_while_both_serve_part_the_later_one_without_saying_that_the_peer_leaves() -> None:
    """As when a network that was split is one again."""

    async def work() -> None:
        one_half, whole = Store(), Store()
        first, copy = Process(whole, 5, HOME), Process(one_half, 900, ELSEWHERE)
        await asyncio.gather(first.join(), copy.join())
        tasks = [asyncio.create_task(process.membership.run()) for process in (first, copy)]
        await asyncio.sleep(OLD_RECORDS_S + 10.0)
        one_half.records = whole.records
        async with asyncio.timeout(15.0):
            with pytest.raises(KeyInUse):
                await tasks[1]
        await copy.membership.set_state("leaving")
        await asyncio.sleep(8.0)
        assert {found.state for found in whole.claims()} == {"serving"}
        assert not tasks[0].done() and len(first.told()) == 1
        tasks[0].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    run(work())


@pytest.mark.parametrize(("address", "seconds"), [(HOME, 3.0), (ELSEWHERE, PROBE_TIMEOUT_S + 3.0)])
def test_a_killed_process_comes_back_at_once_or_after_a_look(address: str, seconds: float) -> None:
    async def work() -> None:
        store = Store()
        killed, again = Process(store, 5, HOME), Process(store, 900, address)
        await killed.join()
        working = asyncio.create_task(killed.membership.run())
        await asyncio.sleep(12.0)
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)
        began = asyncio.get_running_loop().time()
        await again.join()
        assert asyncio.get_running_loop().time() - began < seconds
        assert again.membership.claim is not None and again.membership.claim.incarnation == 900

    run(work())


def test_announced_addresses_do_not_matter_for_what_is_ones_own() -> None:
    async def work() -> None:
        store = Store()
        alone = Process(store, 5, HOME)
        await alone.join()
        working = asyncio.create_task(alone.membership.run())
        await alone.membership.announce_addresses(Announcement("public", (ELSEWHERE,)))
        await asyncio.sleep(OLD_RECORDS_S * 3)
        assert not working.done() and alone.told() == []
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)

    run(work())
