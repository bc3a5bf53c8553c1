"""Work on the host for a job of a GPU is done beside the jobs before it, bounded, and as if the job had done it."""

from __future__ import annotations

import threading

import pytest

from agora.train.device_worker import MAX_AHEAD, HostPrefetch


def thread_name() -> str:
    return threading.current_thread().name


def test_it_is_done_on_a_thread_of_its_own_where_that_is_wanted() -> None:
    here, ahead = HostPrefetch(False), HostPrefetch(True)
    assert here.start(thread_name)() == thread_name()
    assert ahead.start(thread_name)().startswith("host work")
    ahead.close()


def test_no_more_than_a_few_jobs_have_it_done_before_their_turn() -> None:
    work = HostPrefetch(True)
    waiting = [work.start(thread_name) for _ in range(MAX_AHEAD + 3)]
    found = [result() for result in waiting]
    assert sum(name.startswith("host work") for name in found) == MAX_AHEAD and found[MAX_AHEAD:] == [thread_name()] * 3
    del waiting[:]
    assert work.start(thread_name)().startswith("host work"), "those that are over no longer count"
    work.close()


def test_what_failed_before_the_turn_is_tried_in_the_job() -> None:
    attempts: list[str] = []

    def fail_once() -> str:
        attempts.append(thread_name())
        if len(attempts) == 1:
            raise MemoryError
        return "done"

    work = HostPrefetch(True)
    assert work.start(fail_once)() == "done"
    assert attempts[0].startswith("host work") and attempts[1] == thread_name()

    def refuse() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        work.start(refuse)()
    work.close()
