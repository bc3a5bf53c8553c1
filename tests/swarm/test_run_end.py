"""Claims about the end of a run: when it is over, at which step stages stop, and what origins still send."""

from __future__ import annotations

import pytest
from agora_protocol.amendments import Amendment, open_amendment, seal_amendment
from agora_protocol.identity import Identity
from agora_protocol.manifest import Manifest, SignedManifest
from agora_protocol.packing import pack_canonical

from agora.core.live_manifest import LiveManifest
from agora.swarm.run_end import RunEnd, has_ended
from agora.swarm.view import View
from tests.swarm.makers import seen, view

FOUNDER = Identity(bytes([1]) * 32)
END, LATER_END = 40, 60


def live_run(kind: str = "asynchronous") -> LiveManifest:
    """A run of two stages with END steps."""
    base = Manifest().model_dump()
    base["optimizer"] |= {"total_steps": END, "warmup_steps": 4}
    base["schedule"] |= {"kind": kind}
    return LiveManifest(Manifest.model_validate(base))


def extend(live: LiveManifest) -> None:
    run = SignedManifest.sign(live.core, FOUNDER).run_id
    amendment = Amendment(
        FOUNDER.peer,
        number=1,
        previous=bytes.fromhex(run),
        signed_step=END,
        from_step=END,
        issued_unix=1_790_000_000,
        changes=pack_canonical({"optimizer.total_steps": LATER_END}),
        proof=b"",
    )
    live.amend((open_amendment(seal_amendment(amendment, run, FOUNDER), run),))


def other_stage(step: int) -> View:
    """This peer at stage 0, another one at stage 1 and `step`."""
    return view(seen("me", "0", steps=(END,)), seen("other", "1", steps=(step,)))


@pytest.mark.parametrize("replicas", [4, 16])
@pytest.mark.parametrize("claim", [0, 40, 10**9])
def test_one_peers_claim_neither_ends_a_run_nor_keeps_it_from_its_end(replicas: int, claim: int) -> None:
    def with_liar(step: int) -> View:
        honest = [seen(f"p{n}", "0-1", steps=(step, step)) for n in range(replicas - 1)]
        return view(*honest, seen("liar", "0-1", steps=(claim, claim)))

    assert not has_ended(with_liar(39), 2, 40)
    assert has_ended(with_liar(40), 2, 40)


def test_no_claim_ends_a_run_before_the_own_stages_have_ended() -> None:
    """Also where this peer is alone with a liar."""
    known = view(seen("me", "0", steps=(10,)), seen("liar", "0-1", steps=(40, 40)))
    assert not has_ended(known, 2, 40, {0: 10})
    assert has_ended(known, 2, 40, {0: 40})


def test_a_run_stays_over_when_a_peer_leaves_until_an_amendment_extends_it() -> None:
    live = live_run()
    end = RunEnd(live, goes_on=False)
    assert not end.is_over(other_stage(END - 1), {0: END})
    assert end.is_over(other_stage(END), {0: END})
    assert end.is_over(view(), {0: END}) and end.is_over(other_stage(0), {0: END})
    extend(live)
    assert not end.is_over(other_stage(END), {0: END})


def test_an_origin_sends_all_then_what_other_stages_lack_then_nothing() -> None:
    end = RunEnd(live_run(), goes_on=False)
    assert end.of_origin(other_stage(END), {0: END - 1}) == ""
    assert end.of_origin(other_stage(END - 1), {0: END}) == "last"
    assert end.of_origin(other_stage(END), {0: END}) == "over"


def test_an_origin_that_joins_an_ended_run_sends_nothing_while_a_stage_is_unknown() -> None:
    end = RunEnd(live_run(), goes_on=False)
    assert end.of_origin(view(seen("me", "0", steps=(END,))), {0: END}) == "over"
    assert end.of_origin(view(seen("other", "1", steps=())), {0: END}) == "over", "it has published no steps yet"
    assert end.of_origin(other_stage(END - 1), {0: END}) == "last"


def test_stages_stop_at_the_end_unless_a_peer_of_the_run_goes_on() -> None:
    end = RunEnd(live_run(), goes_on=False)
    assert end.stops_at(other_stage(END), {0: END}) == END, "origins may still send"
    assert end.stops_at(other_stage(END + 1), {0: END}) == 0


def test_synchronous_stages_stop_until_all_have_ended_whatever_others_say() -> None:
    end = RunEnd(live_run("synchronous"), goes_on=False)
    assert end.stops_at(other_stage(END - 1), {0: END}) == END
    ahead = view(seen("me", "0", steps=(END - 1,)), seen("other", "1", steps=(END + 1,)))
    assert end.stops_at(ahead, {0: END - 1}) == END
    assert end.stops_at(other_stage(END), {0: END}) == 0, "nothing is sent any more"


def test_where_the_owner_goes_on_there_is_no_end() -> None:
    end = RunEnd(live_run(), goes_on=True)
    ended = other_stage(END)
    assert not end.is_over(ended, {0: END})
    assert end.stops_at(ended, {0: END}) == 0 and end.of_origin(ended, {0: END}) == ""
    assert end.total_steps == 0 and RunEnd(live_run(), goes_on=False).total_steps == END
    assert end.has_ended(ended, {0: END}), "the result is exported all the same"
