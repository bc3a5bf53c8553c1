"""Claims about the sums of what the replicas of a stage publish of their tokens."""

from __future__ import annotations

from agora_protocol.records import StageAccount

from agora.swarm.status import StageTokens, sum_accounts


def test_tokens_that_wait_for_a_step_are_not_lost() -> None:
    found = sum_accounts([StageAccount(100, 40, 60), StageAccount(100, 20, 60)])
    assert (found.tokens_computed, found.tokens_counted, found.share_counted) == (200, 120, round(120 / 140, 4))


def test_a_step_holds_what_each_replica_stepped_along_on_its_own() -> None:
    both = [StageAccount(own_steps=4, along_own=300), StageAccount(own_steps=2, along_own=100)]
    assert sum_accounts(both).tokens_per_step == 100.0


def test_a_mean_of_all_is_one_step_whoever_tells_of_it_and_the_longest_memory_counts() -> None:
    both = [StageAccount(mean_steps=4, in_mean=400), StageAccount(mean_steps=2, in_mean=160)]
    assert sum_accounts(both).tokens_per_step == sum_accounts(both[::-1]).tokens_per_step == 100.0


def test_a_step_that_one_took_alone_before_others_came_is_one_more() -> None:
    first = StageAccount(own_steps=1, along_own=100, mean_steps=4, in_mean=400)
    assert sum_accounts([first, StageAccount(mean_steps=5, in_mean=500)]).tokens_per_step == 100.0


def test_staleness_is_weighted_by_the_tokens_counted() -> None:
    assert sum_accounts([StageAccount(counted=300, staleness=1.0), StageAccount(counted=100)]).staleness == 0.75


def test_a_stage_of_which_nothing_is_known_has_no_figures() -> None:
    assert sum_accounts([]) == sum_accounts([StageAccount()]) == StageTokens(0, 0, None, None, None)
