"""Claims about the report of a daemon and what is shown of it."""

from __future__ import annotations

import asyncio
import dataclasses
import json

import pytest
from agora_protocol.errors import ProtocolError
from agora_protocol.identity import Identity
from agora_protocol.ids import Span, peer_name
from agora_protocol.manifest_sections import AdmissionSection
from agora_protocol.records import Claim, StageAccount

from agora.cli import status_command
from agora.cli.status_command import lines_of
from agora.core.moving_average import WindowedRate
from agora.core.step_schedule import ONLY_ALL_REDUCE, SyncSchedule
from agora.node.control.node_report import (
    NodeReport,
    SpanReport,
    notes_of,
    progress_record,
    report_json,
    service_status,
    status_json,
    use_of_device,
)
from agora.node.daemon_context import SystemdNotifier
from agora.node.process.watchdog import Watchdog
from agora.observe import events
from agora.observe.reporter import Counters
from agora.pipeline.device_time import DeviceTime
from agora.replica.sync_rules import GradientCompression
from agora.swarm.health import Health
from agora.swarm.status import RunIdentity
from agora.swarm.view import View, merge
from agora.train.device_use import DeviceReading
from agora.train.stage import StageProgress

ME = Identity(bytes([1]) * 32).peer
OTHER = Identity(bytes([2]) * 32).peer
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
    latency_s=0.2,
    is_origin=True,
    loss=3.5,
    metrics={},
    send_window="8: twice what is on its way",
    window_limit_note="",
    staleness_excess_note="",
)


def report(**fields: object) -> NodeReport:
    """A daemon that serves stages 0-1 of two."""
    view = merge(View(), [Claim(ME, Span(0, 1), 5, (), "serving", 0.0)], 100.0, 20.0)
    node = NodeReport(
        peer=ME,
        incarnation=5,
        run=RunIdentity("ab" * 32, "poems", 2, 256),
        state="serving",
        start_phase="",
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
    return dataclasses.replace(node, **fields)


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
    span = dataclasses.replace(SPAN, behind={0: 3, 1: 1}, window_limit_note="schedule.staleness allows it 1")
    assert notes_of(report(span=span)) == [
        "stage 0 is 3 steps behind its replicas: 96 tokens are missing",
        "its device works 51% of the time: schedule.staleness allows it 1",
    ]
    assert notes_of(report(span=dataclasses.replace(span, behind={}, busy_fraction=0.95))) == []
    idle = dataclasses.replace(SPAN, behind={}, recent_device_time=DeviceTime(60.0, 30.0, 15.0, 12.0, 2.0, 1.0))
    waited = "in the last minute its device waited 25% for microbatches, 20% for a mean gradient"
    assert notes_of(report(span=idle)) == [waited]
    busy = dataclasses.replace(idle, recent_device_time=DeviceTime(60.0, 55.0, 5.0))
    assert notes_of(report(span=busy)) == []
    torn = dataclasses.replace(SPAN.stages[0], is_torn=True)
    assert notes_of(
        report(
            span=dataclasses.replace(
                SPAN,
                stages=(torn,),
                behind={},
                device_remark="torch sees no GPU",
                compile_problem="layers are not compiled (there is no C compiler)",
            )
        )
    ) == [
        "torch sees no GPU",
        "layers are not compiled (there is no C compiler)",
        "stage 0 took half a step, because its device failed: it fetches a state",
    ]
    slow = GradientCompression("normal2", "normal2: too slow", True)
    short = dataclasses.replace(SPAN, behind={}, gradient_wires={0: slow, 1: slow})
    assert notes_of(report(span=short)) == [f"stage {stage} sends gradients as normal2: too slow" for stage in (0, 1)]
    first, second = SPAN.stages
    second = dataclasses.replace(second, sync_schedule=SyncSchedule(0, 3, 20))
    partly_local = dataclasses.replace(short, stages=(first, second))
    assert notes_of(report(span=partly_local)) == [
        "stage 1 takes inner steps since step 3",
        "stage 0 sends gradients as normal2: too slow",
    ]
    corrected = dataclasses.replace(SPAN, behind={}, staleness_excess_note="it has 4 in flight, at predicted weights")
    assert notes_of(report(span=corrected)) == ["it has 4 in flight, at predicted weights"]
    local = dataclasses.replace(short, span=Span(1, 1), stages=(second,), gradient_wires={1: slow})
    assert notes_of(report(span=local)) == ["stage 1 takes inner steps since step 3"], "no gradients are sent"


def test_status_says_of_the_asked_peer_that_it_is_paused_and_its_link() -> None:
    status = status_json(report(pause_reason="paused by its owner", link="10mbit,50ms"))
    (peer,) = status["peers"]
    assert (peer["path"], peer["note"]) == ("self", "paused by its owner; link 10mbit,50ms")
    assert status["name"] == "poems" and len(status["stages"]) == 2
    assert status["stages"][0]["tokens_per_step"] == 250.0, "newer than what this peer has published"


GPU = events.DeviceUsed("NVIDIA H100", 20 * 2**30, 80 * 2**30, 0.3125, 0.0625, "bf16")


def test_status_says_how_the_asked_peers_device_is_used_and_a_note_tells_it_of_every_gpu() -> None:
    span = dataclasses.replace(SPAN, behind={}, device=GPU)
    status = status_json(report(span=span))
    (peer,) = status["peers"]
    assert peer["device"] == {
        "name": "NVIDIA H100",
        "precision": "bf16",
        "memory_used": 20 * 2**30,
        "memory_total": 80 * 2**30,
        "mfu": 0.3125,
        "idle_in_jobs": 0.0625,
    }
    words = "NVIDIA H100, bf16, 20.0 of 80.0 GiB, MFU 31.2%, idle for 6% of the time within its jobs"
    assert f"device  {peer_name(ME)}: {words}" in status_command.lines_of(status)
    assert report_json(report(span=span))["device"]["mfu"] == 0.3125
    record = progress_record(report(span=span))
    assert record is not None and record.note == words
    other = Identity(bytes([2]) * 32).peer
    claims = [Claim(peer, Span(0, 1), 5, (), "serving", 0.0) for peer in (ME, other)]
    both = status_json(report(span=span, view=merge(View(), claims, 100.0, 20.0)))
    assert {one["peer"]: one["device"] is None for one in both["peers"]} == {ME: False, other: True}


def test_of_a_cpu_there_are_name_and_memory_and_no_note() -> None:
    span = dataclasses.replace(SPAN, behind={}, device=events.DeviceUsed("AMD EPYC", 2**30, 2**33))
    status = status_json(report(span=span))
    assert status["peers"][0]["device"]["mfu"] is None and notes_of(report(span=span)) == []
    assert f"device  {peer_name(ME)}: AMD EPYC, 1.0 of 8.0 GiB" in status_command.lines_of(status)
    for silent in (report(), report(span=None)):
        assert status_json(silent)["peers"][0]["device"] is None
        assert not any(line.startswith("device") for line in status_command.lines_of(status_json(silent)))


def test_mfu_is_the_models_operations_per_second_by_those_of_the_data_sheet() -> None:
    gpu = DeviceReading("gpu", 1, 2, peak_flops=1e12)
    assert use_of_device(gpu, 2.5e11, 0.1) == events.DeviceUsed("gpu", 1, 2, 0.25, 0.1)
    assert use_of_device(gpu, 0.0, None).mfu == 0.0
    assert use_of_device(gpu, 0.0, None, "fp16").precision == "fp16"
    assert use_of_device(gpu, None, None).mfu is None, "before the first microbatch"
    assert use_of_device(DeviceReading("cpu", 1, 2), 2.5e11, None).mfu is None


@pytest.mark.parametrize(
    "changes", [{"name": None}, {"memory_used": "much"}, {"mfu": "high"}, {"idle_in_jobs": []}, {"memory_total": None}]
)
def test_a_malformed_device_of_a_peer_is_a_malformed_status(changes: dict[str, object]) -> None:
    status = status_json(report(span=dataclasses.replace(SPAN, device=GPU)))
    status_command.check_status(status)
    status["peers"][0]["device"] |= changes
    if changes == {"name": None}:
        del status["peers"][0]["device"]["name"]
    with pytest.raises(ProtocolError, match="malformed status"):
        status_command.check_status(status)
    status["peers"][0].pop("device")
    status_command.check_status(status)  # of an older peer


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


def test_the_report_has_what_the_device_waited_for_in_seconds() -> None:
    waits = DeviceTime(60.0, 30.0, 15.0, 12.0, 2.0, 1.0, 7.5)
    told = report_json(report(span=dataclasses.replace(SPAN, device_time=waits)))["waits"]
    assert told == waits._asdict() and sum(told[name] for name in list(told)[1:-1]) == told["seconds"]


def test_the_watchdog_reports_what_has_changed_and_nothing_twice() -> None:
    seen: list[events.Event] = []
    watchdog = Watchdog(report, seen.append, SystemdNotifier({}), age_s=lambda: 10.0)
    for _ in range(2):
        watchdog.report_traffic(report())
    assert seen == [events.Traffic(1, 20, 30, 4, 5)]


def test_the_watchdog_reports_how_the_device_is_used_now_and_then() -> None:
    async def test() -> list[events.Event]:
        seen: list[events.Event] = []
        spans = iter([SPAN, dataclasses.replace(SPAN, device=GPU), dataclasses.replace(SPAN, device=GPU)])
        reported = asyncio.Event()

        def take() -> NodeReport:
            if (span := next(spans, None)) is None:
                reported.set()
            return report(span=span)

        watching = asyncio.create_task(Watchdog(take, seen.append, SystemdNotifier({}), age_s=lambda: 10.0).run())
        await reported.wait()
        watching.cancel()
        return seen

    seen = asyncio.run(test())
    assert [event for event in seen if isinstance(event, events.DeviceUsed)] == [GPU]


def test_status_says_who_must_upgrade_and_by_when() -> None:
    section = AdmissionSection(oldest_version="0.2.0", oldest_version_from="2027-02-28")
    software = {ME: "agora 0.2.0", OTHER: "agora 0.1.0"}
    assert status_json(report(software=software))["upgrade"] is None
    claim = Claim(ME, Span(0, 0), 1, (), "serving", 1.0)
    view = merge(View(), [claim], 1_803_772_799.0, 600.0)
    status = status_json(report(software=software, admission=section, now_unix=1_803_772_799.0, view=view))
    assert status["upgrade"]["counts"] is False and status["upgrade"]["from"] == "2027-02-28"
    assert [each["peer"] for each in status["upgrade"]["peers"]] == [OTHER]
    assert {peer["peer"]: peer["software"] for peer in status["peers"]}[ME] == "agora 0.2.0"
    assert status_json(report(software=software, admission=section, now_unix=1_803_772_800.0))["upgrade"]["counts"]
    line = next(line for line in lines_of(status) if line.startswith("upgrade"))
    assert line.startswith("upgrade agora 0.2.0 or later is asked for from 2027-02-28 (UTC); not yet: ")
    assert "(agora 0.1.0)" in line and line.endswith("do: pip install --upgrade agora-swarm")
    everybody = status_json(report(software={ME: "agora 0.2.0"}, admission=section))
    assert "every connected peer has it" in "\n".join(lines_of(everybody))
