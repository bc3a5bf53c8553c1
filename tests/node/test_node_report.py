"""Claims about the report of a daemon and what is shown of it."""

from __future__ import annotations

import dataclasses
import json

from agora_protocol.identity import Identity
from agora_protocol.ids import Span, peer_name
from agora_protocol.records import Claim, StageAccount

from agora.cli import status_command
from agora.core.sync_mode import ONLY_ALL_REDUCE, StepPlan
from agora.node.control.node_report import (
    NodeReport,
    SpanReport,
    WindowedRate,
    notes_of,
    progress_record,
    report_json,
    service_status,
    status_json,
)
from agora.node.process.watchdog import Watchdog
from agora.node.startup import Notifier
from agora.observe import events
from agora.observe.reporter import Counters
from agora.replica.decide import GradientCompression
from agora.swarm.health import Health
from agora.swarm.status import RunIdentity
from agora.swarm.view import View, merge
from agora.train.stage import StageProgress

ME = Identity(bytes([1]) * 32).peer
SPAN = SpanReport(
    Span(0, 1),
    (
        StageProgress(
            0, 7, 7, 0, 0, 0, (3, 1), 64, 0, StageAccount(640, 64, 544, 0, 0, 4, 1000, 0.25), ONLY_ALL_REDUCE, {}
        ),
        StageProgress(1, 8, 8, 0, 0, 0, (0, 2), 0, 1, StageAccount(), ONLY_ALL_REDUCE, {}),
    ),
    {0: "96 tokens are missing", 1: ""},
    {0: 0, 1: 1},
    gradient_wires={
        0: GradientCompression("normal4", "normal4: nothing waits for its uplink"),
        1: GradientCompression("int8", ""),
    },
    agreement={0: "mean gradients, sent as normal4", 1: "inner steps since step 3"},
    busy_fraction=0.51239,
    in_progress=2,
    queue=1,
    path_s=0.2,
    is_origin=True,
    loss=3.5,
    metrics={},
    send_window="8: twice what is on its way",
    shortage="",
    correction="",
)


def report(**fields: object) -> NodeReport:
    """A daemon that serves stages 0-1 of two."""
    view = merge(View(), [Claim(ME, Span(0, 1), 5, (), "serving", 0.0)], 100.0, 20.0)
    node = NodeReport(
        peer=ME,
        incarnation=5,
        run=RunIdentity("ab" * 32, "poems", 2, 256),
        state="serving",
        startup_step="",
        pause_reason="",
        link="",
        health=Health("OK", "every stage steps"),
        now_unix=101.0,
        counters=Counters(steps={0: 7, 1: 8}, counted_tokens=640, stage_loss=3.25, last_sign_unix=100.0),
        tokens_per_second=12.34,
        view=view,
        traffic=events.Traffic(1, 20, 30, 4, 5),
        span=SPAN,
    )
    return dataclasses.replace(node, **fields)  # type: ignore[arg-type]


def test_a_serving_daemon_answers_everything_that_is_counted_as_json() -> None:
    answer = json.loads(json.dumps(report_json(report())))
    assert answer["span"] == [0, 1] and answer["steps"] == {"0": 7, "1": 8}
    assert answer["tokens_predicted"] == {"0": 64, "1": 0}
    assert answer["staleness"] == {"0": [3, 1], "1": [0, 2]} and answer["refused_nonfinite"] == 1
    assert answer["gradient_wire"] == "stage 0: normal4: nothing waits for its uplink"
    assert answer["waits_for"] == {"0": "96 tokens are missing", "1": ""} and answer["behind"] == {"0": 0, "1": 1}
    assert answer["notes"] == [] and answer["target_tokens"] == 256
    assert answer["accounts"]["0"] == {
        "tokens_computed": 640,
        "tokens_counted": 544,
        "tokens_waiting": 64,
        "tokens_lost": 32,
        "share_counted": 0.9444,
        "tokens_per_step": 250.0,
        "staleness": 0.25,
    }
    assert answer["accounts"]["1"]["share_counted"] is None and answer["accounts"]["1"]["tokens_per_step"] is None
    assert answer["bytes"] == {"boundary": 1, "sent": 20, "received": 30, "averaging": 4, "state": 5}
    assert (answer["busy_fraction"], answer["tokens_per_second"], answer["in_progress"]) == (0.5124, 12.3, 2)
    assert (answer["state"], answer["paused"], answer["link"]) == ("serving", False, None)


def test_a_daemon_without_a_span_answers_what_it_has_and_publishes_no_progress() -> None:
    node = report(span=None, state="joining")
    assert report_json(node)["state"] == "joining" and "span" not in report_json(node)
    assert progress_record(node) is None


def test_progress_has_the_origins_loss_or_else_that_of_the_last_stage() -> None:
    record = progress_record(report())
    assert record is not None and (record.steps, record.loss, record.incarnation) == ((7, 8), 3.5, 5)
    later = progress_record(report(span=dataclasses.replace(SPAN, is_origin=False, loss=None)))
    assert later is not None and later.loss == 3.25
    first = dataclasses.replace(SPAN, span=Span(0, 0), stages=SPAN.stages[:1], is_origin=False, loss=None)
    moved = progress_record(report(span=first))
    assert moved is not None and moved.loss is None, "what the last stage said before this peer moved is over"


def test_progress_tells_others_what_became_of_tokens_what_stages_wait_for_and_remarks() -> None:
    record = progress_record(report(pause_reason="paused by its owner"))
    assert record is not None and record.accounts[0] == (640, 64, 544, 0, 0, 4, 1000, 0.25)
    assert (record.waits_for, record.note) == ("stage 0: 96 tokens are missing", "paused by its owner")
    first = dataclasses.replace(SPAN, span=Span(0, 0), stages=SPAN.stages[:1], waits_for={0: "caf\u00e9\x1b[2J" * 99})
    strange = progress_record(report(span=first))
    assert strange is not None and strange.waits_for.startswith("caf??[2J") and len(strange.waits_for) == 256


def test_a_note_says_why_a_stage_is_behind_and_which_setting_keeps_an_idle_device_waiting() -> None:
    span = dataclasses.replace(SPAN, behind={0: 3, 1: 1}, shortage="schedule.staleness allows it 1")
    assert notes_of(report(span=span)) == [
        "stage 0 is 3 steps behind its replicas: 96 tokens are missing",
        "its device works 51% of the time: schedule.staleness allows it 1",
    ]
    assert notes_of(report(span=dataclasses.replace(span, behind={}, busy_fraction=0.95))) == []
    slow = GradientCompression("normal2", "normal2: too slow", True)
    short = dataclasses.replace(SPAN, behind={}, gradient_wires={0: slow, 1: slow})
    assert notes_of(report(span=short)) == [f"stage {stage} sends gradients as normal2: too slow" for stage in (0, 1)]
    first, second = SPAN.stages
    second = dataclasses.replace(second, plan=StepPlan(0, 3, 20))
    partly_local = dataclasses.replace(short, stages=(first, second))
    assert notes_of(report(span=partly_local)) == [
        "stage 1 takes inner steps since step 3",
        "stage 0 sends gradients as normal2: too slow",
    ]
    corrected = dataclasses.replace(SPAN, behind={}, correction="it has 4 in flight, at predicted weights")
    assert notes_of(report(span=corrected)) == ["it has 4 in flight, at predicted weights"]
    local = dataclasses.replace(short, span=Span(1, 1), stages=(second,), gradient_wires={1: slow})
    assert notes_of(report(span=local)) == ["stage 1 takes inner steps since step 3"], "no gradients are sent"


def test_status_says_of_the_asked_peer_that_it_is_paused_and_its_link() -> None:
    status = status_json(report(pause_reason="paused by its owner", link="10mbit,50ms"))
    (peer,) = status["peers"]
    assert (peer["path"], peer["note"]) == ("self", "paused by its owner; link 10mbit,50ms")
    assert status["name"] == "poems" and len(status["stages"]) == 2
    assert status["stages"][0]["tokens_per_step"] == 250.0, "newer than what this peer has published"


def test_an_origin_says_what_of_the_samples_it_knew_at_its_newest_step_and_nobody_else_does() -> None:
    counters = Counters()
    for step, seen in ((4, 100), (5, 128)):
        counters.take(events.SamplesCounted(step, epoch=1, seen=seen, repeated=3, missed=2), 100.0)
    told = status_json(report(counters=counters))
    name = peer_name(ME)
    assert told["samples"] == {"told_by": name, "step": 5, "epoch": 1, "seen": 128, "repeated": 3, "missed": 2}
    line = f"samples epoch 1: 128 seen, 3 repeated, 2 missed, as {name} knew at step 5"
    assert line in status_command.lines_of(told)
    moved = dataclasses.replace(SPAN, span=Span(1, 1), stages=SPAN.stages[1:], is_origin=False)
    for silent in (report(), report(counters=counters, span=None), report(counters=counters, span=moved)):
        assert status_json(silent)["samples"] is None
        assert not any(line.startswith("samples") for line in status_command.lines_of(status_json(silent)))


def test_systemds_line_has_health_work_steps_and_speed() -> None:
    line = service_status(report(), "working on 2 microbatches")
    assert line == "OK: working on 2 microbatches; stage 0 step 7, stage 1 step 8; 12 tokens/s"
    moved = report(span=dataclasses.replace(SPAN, span=Span(1, 1)))
    assert service_status(moved, "idle") == "OK: idle; stage 1 step 8; 12 tokens/s"


def test_a_rate_is_that_of_the_last_fifteen_seconds() -> None:
    rate = WindowedRate()
    assert rate.update(0.0, 0) == 0.0
    for second in range(1, 40):
        latest = rate.update(float(second), 100 * second if second < 20 else 2000 + 10 * (second - 20))
    assert latest == 10.0


def test_the_watchdog_reports_what_has_changed_and_nothing_twice() -> None:
    seen: list[events.Event] = []
    watchdog = Watchdog(report, seen.append, Notifier({}), age_s=lambda: 10.0)
    for _ in range(2):
        watchdog.report_traffic(report())
    assert seen == [events.Traffic(1, 20, 30, 4, 5)]
