"""One daemon's report of itself: a typed snapshot, and what status, directory, systemd and control socket get of it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, field
from typing import TYPE_CHECKING, Any

from agora_protocol.evaluations import Evaluation
from agora_protocol.ids import PeerId, Span, peer_name
from agora_protocol.limits import MAX_TEXT_BYTES
from agora_protocol.manifest_sections import AdmissionSection
from agora_protocol.records import Progress

from agora.net.p2pd.addresses import relays_of
from agora.observe.events import DeviceUsed, Traffic
from agora.observe.reporter import Counters
from agora.pipeline.device_time import DeviceTime
from agora.replica.sync_rules import GradientCompression
from agora.swarm.admission import first_second, is_outdated
from agora.swarm.health import Health
from agora.swarm.status import RunIdentity, SampleReport, build_status, sum_accounts
from agora.swarm.view import View, merge

if TYPE_CHECKING:
    from agora.train.device_use import DeviceReading
    from agora.train.stage import StageProgress

NO_TRAFFIC = Traffic(0, 0, 0)
NO_DEVICE_TIME = DeviceTime()
# A device that is busy for a smaller fraction of its time is partly idle: a note then says what limits it.
IDLE_BELOW = 0.9
# Steps behind its replicas from which a stage gets a note: replicas do not take a step at the same moment.
MIN_BEHIND = 2


@dataclass(frozen=True, slots=True)
class SpanReport:
    """A snapshot of the span held here."""

    span: Span
    stages: Sequence[StageProgress]  # the progress of each, in stage order
    waits_for: Mapping[int, str]  # what each stage does or waits for, in words
    behind: Mapping[int, int]  # how many steps each stage is behind the live replica with the most
    gradient_wires: Mapping[int, GradientCompression]  # how the gradients of each stage are sent, and why
    agreement: Mapping[int, str]  # how each stage agrees with its replicas, in words
    busy_fraction: float  # fraction of its time that the device thread works
    in_progress: int  # microbatches in progress or opened here
    queue: int  # microbatches at the device
    latency_s: float | None  # median seconds from here to the last stage and back; None until measured
    is_origin: bool
    loss: float | None  # the origin's average; None without an origin
    metrics: Mapping[str, float]  # the origin's averages; {} without an origin
    send_window: str  # in words, how many microbatches the origin may have in flight
    window_limit_note: str  # the setting that allows it fewer than it could use, in words; "" for none
    staleness_excess_note: str  # that it has more in flight than schedule.staleness, in words; "" if it has not
    device_remark: str = ""  # why a GPU of the machine stays unused, in words; "" if none does
    compile_problem: str = ""  # why layers are not compiled, in words; "" if they need not be
    device: DeviceUsed | None = None  # how the device is used
    device_time: DeviceTime = NO_DEVICE_TIME  # what the device's time was spent on since the span was loaded
    recent_device_time: DeviceTime = NO_DEVICE_TIME  # the same of the last minute


@dataclass(frozen=True, slots=True)
class NodeReport:
    """A snapshot of one daemon."""

    peer: PeerId
    incarnation: int
    run: RunIdentity
    state: str  # of its claim: joining, serving or leaving
    start_phase: str  # the phase of its start that runs, or ""
    pause_reason: str  # why it is paused; "" when it works
    link: str  # the emulated link; "" for none
    health: Health
    now_unix: float
    counters: Counters
    tokens_per_second: float = 0.0  # the rate of tokens counted here over about 15 s
    view: View = field(default_factory=View)
    paths: Mapping[PeerId, str] = field(default_factory=dict)  # how each connected peer is reached: direct, punched...
    traffic: Traffic = NO_TRAFFIC
    span: SpanReport | None = None  # None while no stages are loaded
    clock_remark: str = ""  # a sentence that its clock is wrong; "" if it is not
    amendments: tuple[tuple[int, int, str], ...] = ()  # those that count: number, first step, new values in words
    evaluations: Sequence[Evaluation] = ()  # that members have signed, the newest first
    software: Mapping[PeerId, str] = field(default_factory=dict)  # of each connected peer, and of this one
    admission: AdmissionSection = field(default_factory=AdmissionSection)  # as it was amended last
    key_remark: str = ""  # a sentence that another daemon has this one's key; "" while none has tried

    @property
    def empty_stages(self) -> list[int]:
        return [stage for stage in range(self.run.stage_count) if not self.view.replicas(stage)]


def status_json(report: NodeReport) -> dict[str, Any]:
    """Returns the status for `swarm status --json` and for GetStatus, from the report's view.

    This peer's own progress is taken from the report itself, which is newer than what it has published.
    """
    view = report.view
    paths = {**report.paths, report.peer: "self"}
    own = progress_record(report)
    if own is not None:  # newer than what this peer has published
        view = merge(view, [own], report.now_unix, 0.0)
    span = report.span
    devices = {report.peer: span.device} if span is not None and span.device is not None else {}
    status = build_status(view, report.run, report.health, report.now_unix, paths, sample_counts(report), devices)
    status["amendments"] = [
        {"number": number, "from_step": step, "changes": changes, "in_force": step <= status["step"]}
        for number, step, changes in report.amendments
    ]
    status["evaluations"] = [
        {
            "task": each.task,
            "step": each.step,
            "values": dict(each.values),
            "items": each.items,
            "tokens": each.tokens or None,
            "seconds": round(each.seconds, 3),
            "peer": each.issuer,
            "name": peer_name(each.issuer),
            "unix": each.issued_unix,
        }
        for each in report.evaluations
    ]
    for peer in status["peers"]:
        peer["software"] = report.software.get(peer["peer"], "")
    status["upgrade"] = upgrade_status(report)
    return status


def upgrade_status(report: NodeReport) -> dict[str, Any] | None:
    """Returns which connected peers are older than the run's oldest version, and when they are left out.

    None if the run names no oldest version.
    """
    section = report.admission
    if not section.oldest_version:
        return None
    outdated = sorted(peer for peer, software in report.software.items() if is_outdated(software, section))
    return {
        "oldest_version": section.oldest_version,
        "from": section.oldest_version_from or None,
        "counts": report.now_unix >= first_second(section.oldest_version_from),
        "peers": [{"peer": peer, "name": peer_name(peer), "software": report.software[peer]} for peer in outdated],
        "do": "pip install --upgrade agora-swarm",
    }


def sample_counts(report: NodeReport) -> SampleReport | None:
    """Returns how many samples were seen, repeated and missed by this peer's newest step of stage 0.

    None before the first such step, and for a peer that is not an origin of a run on samples.
    """
    counted = report.counters.samples
    if counted is None or report.span is None or not report.span.is_origin:
        return None  # the counts from before a move to other stages are out of date
    return SampleReport(
        peer_name(report.peer), counted.step, counted.epoch, counted.seen, counted.repeated, counted.missed
    )


def progress_record(report: NodeReport) -> Progress | None:
    """Returns this peer's progress record for the directory, not signed yet; None while no span is loaded.

    The record's loss: the origin's; without an origin, that of the last stage if it is held; otherwise None.
    """
    span, counters = report.span, report.counters
    if span is None:
        return None
    holds_last = span.span.last == report.run.stage_count - 1  # a loss from before a move is out of date
    return Progress(
        report.peer,
        span.span,
        report.incarnation,
        steps=tuple(stage.step for stage in span.stages),
        tokens_per_second=report.tokens_per_second,
        loss=span.loss if span.is_origin else counters.stage_loss if holds_last else None,
        queue=span.queue,
        completed=max(counters.counted.values(), default=0),
        accounts=tuple(tuple(stage.account) for stage in span.stages),
        metrics=tuple(span.metrics.values()),
        waits_for=_to_printable_ascii(_join_by_stage(span.waits_for), MAX_TEXT_BYTES // 4),
        note=_to_printable_ascii("; ".join(notes_of(report)), MAX_TEXT_BYTES),
    )


def notes_of(report: NodeReport) -> list[str]:
    """Returns remarks on this daemon, [] for none.

    They are: why it is paused, that another machine has its key, its emulated link, that its clock is wrong; and, while
    a span is loaded, how its GPU is used, a GPU that stays unused, layers that could not be compiled, stages that took
    half a step, stages that are MIN_BEHIND or more steps behind their replicas, inner steps, a limited format of
    gradients, more microbatches in flight than the manifest's staleness, and what keeps its device idle.
    """
    link_note = f"link {report.link}" if report.link else ""
    notes = [note for note in (report.pause_reason, report.key_remark, link_note, report.clock_remark) if note]
    span = report.span
    if span is None:
        return notes
    if span.device is not None and span.device.idle_in_jobs is not None:  # a GPU; the only way to tell other peers
        notes.append(span.device.in_words())
    notes += [remark for remark in (span.device_remark, span.compile_problem) if remark]
    for progress in span.stages:
        if progress.is_torn:
            notes.append(f"stage {progress.stage} took half a step, because its device failed: it fetches a state")
    for stage, steps in span.behind.items():
        if steps >= MIN_BEHIND:
            notes.append(f"stage {stage} is {steps} steps behind its replicas: {span.waits_for.get(stage, '')}")
    inner_stages = {stage.stage for stage in span.stages if stage.sync_schedule.is_inner(stage.step)}
    for stage in sorted(inner_stages):
        notes.append(f"stage {stage} takes {span.agreement.get(stage, 'inner steps')}")
    for stage, wire in span.gradient_wires.items():
        if wire.is_limited and stage not in inner_stages:
            notes.append(f"stage {stage} sends gradients as {wire.reason}")
    if span.staleness_excess_note:
        notes.append(span.staleness_excess_note)
    return notes + _idle_notes(span)


def _idle_notes(span: SpanReport) -> list[str]:
    notes = []
    if span.window_limit_note and span.busy_fraction < IDLE_BELOW:
        notes.append(f"its device works {span.busy_fraction:.0%} of the time: {span.window_limit_note}")
    recent = span.recent_device_time
    if recent.busy < IDLE_BELOW * recent.seconds and (waits := recent.describe()):
        notes.append(f"in the last minute its device waited {waits}")
    return notes


def _join_by_stage(texts: Mapping[int, str]) -> str:
    if len(texts) == 1:
        return next(iter(texts.values()))
    return "; ".join(f"stage {stage}: {text}" for stage, text in texts.items() if text)


def _to_printable_ascii(text: str, max_characters: int) -> str:
    return re.sub("[^ -~]", "?", text)[:max_characters]


def service_status(report: NodeReport, sentence: str) -> str:
    """Returns systemd's STATUS line: health, the watchdog's `sentence`, newest step of each held stage, tokens/s."""
    held = report.span.span.stages if report.span else range(0)
    taken = {stage: step for stage, step in sorted(report.counters.steps.items()) if stage in held}
    steps = ", ".join(f"stage {stage} step {step}" for stage, step in taken.items())
    return f"{report.health.state}: {sentence}; {steps or 'no step yet'}; {report.tokens_per_second:.0f} tokens/s"


def report_json(report: NodeReport) -> dict[str, Any]:
    """Returns the answer to the control question "report": the counters, the daemon's state and, if any, its span's.

    Its field `relays` has the peers through which this peer's claim says that it can be reached.
    """
    span = report.span
    own = {
        "peer": report.peer,
        "paused": bool(report.pause_reason),
        "link": report.link or None,
        "state": report.state,
        "in_progress": span.in_progress if span is not None else 0,
        "relays": sorted(relays_of(seen.addresses)) if (seen := report.view.peers.get(report.peer)) else [],
        "bytes": {name.removesuffix("_bytes"): count for name, count in asdict(report.traffic).items()},
    }
    answer = report.counters.summary() | own
    if span is None:
        return answer
    return answer | {
        "span": [span.span.first, span.span.last],
        "steps": {str(stage.stage): stage.step for stage in span.stages},
        "target_tokens": report.run.target_tokens,
        "accounts": {
            str(stage.stage): {
                **asdict(sum_accounts([stage.account])),
                "tokens_waiting": stage.account.waiting,
                "tokens_lost": stage.account.computed - stage.account.waiting - stage.account.counted,
            }
            for stage in span.stages
        },
        "staleness": {str(stage.stage): list(stage.staleness) for stage in span.stages},
        "tokens_predicted": {str(stage.stage): stage.tokens_predicted for stage in span.stages},
        "waits_for": {str(stage): reason for stage, reason in span.waits_for.items()},
        "gradient_wire": _join_by_stage({stage: wire.reason for stage, wire in span.gradient_wires.items()}),
        "agreement": {str(stage): text for stage, text in span.agreement.items()},
        "behind": {str(stage): steps for stage, steps in span.behind.items()},
        "notes": notes_of(report),
        "refused_nonfinite": sum(stage.refused_nonfinite for stage in span.stages),
        "busy_fraction": round(span.busy_fraction, 4),
        "tokens_per_second": round(report.tokens_per_second, 1),
        "loss": span.loss,
        "tuning": dict(span.metrics),
        "credit": span.send_window,
        "device": asdict(span.device) if span.device is not None else None,
        "waits": {name: round(seconds, 3) for name, seconds in span.device_time._asdict().items()},
    }


def add_traffic(former: Traffic, latter: Traffic) -> Traffic:
    return Traffic(*map(sum, zip(astuple(former), astuple(latter), strict=True)))


def use_of_device(
    reading: DeviceReading, flops_per_s: float | None, idle_in_jobs: float | None, precision: str = ""
) -> DeviceUsed:
    """Returns how the device is used. flops_per_s: of the model, without recomputation; None before a microbatch."""
    peak = reading.peak_flops
    mfu = flops_per_s / peak if flops_per_s is not None and peak is not None else None
    return DeviceUsed(reading.name, reading.memory_used, reading.memory_total, mfu, idle_in_jobs, precision)
