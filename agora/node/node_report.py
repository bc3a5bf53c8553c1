"""The report of one daemon about itself, and everything made of it: one typed snapshot, several projections.

Knows: names, types, the JSON of the commands' contract. Must not know: where a number comes from, torch, who asks.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, field
from typing import TYPE_CHECKING, Any

from agora_protocol.ids import PeerId, Span, peer_name
from agora_protocol.limits import MAX_TEXT_BYTES
from agora_protocol.records import Progress

from agora.averaging.gradient_wire import GradientWire
from agora.net.reaching import relays_of
from agora.observe.events import Traffic
from agora.observe.reporter import Counters
from agora.swarm.health import Health
from agora.swarm.stage_tokens import sum_accounts
from agora.swarm.status import RunIdentity, SamplesTold, status
from agora.swarm.view import View, merge

if TYPE_CHECKING:
    from agora.train.trained_stage import StageProgress

RATE_WINDOW_S = 15.0
"""Seconds over which tokens per second are averaged."""
NO_TRAFFIC = Traffic(0, 0, 0)
IDLE_BELOW = 0.9
"""A device that is busy for a smaller part of its time has time left: what limits it is then noted."""
MIN_BEHIND = 2
"""Steps behind its replicas that are worth a note: replicas take a step within moments of each other, not at once."""


@dataclass(frozen=True, slots=True)
class SpanReport:
    """A snapshot of the span held here. Immutable.

    waits_for: what each stage waits for, in words. gradient_wire: how gradients are sent, and why.
    behind: how many steps each stage is behind the replica that is furthest, 0 for none.
    busy_fraction: the part of its time that the device thread spends on jobs. queue: microbatches at the device.
    path_s: seconds from here to the last stage and back, None until measured. loss, metrics: the origin's averages.
    credit: in words how many microbatches it may have in flight. shortage: the setting that allows it fewer than it
    could use, in words, "" for none.
    """

    span: Span
    stages: Sequence[StageProgress]
    waits_for: Mapping[int, str]
    behind: Mapping[int, int]
    gradient_wire: GradientWire
    busy_fraction: float
    in_hand: int
    queue: int
    path_s: float | None
    is_origin: bool
    loss: float | None
    metrics: Mapping[str, float]
    credit: str
    shortage: str


@dataclass(frozen=True, slots=True)
class NodeReport:
    """A snapshot of one daemon. Immutable.

    state: the state of its claim (joining, serving, leaving). step_of_start: the step of its start that runs, or "".
    resting: why it rests, "" when it works. clock_remark: a sentence on its clock, "" for none.
    tokens_per_second: the rate of tokens counted here over the last 15 s. paths: how each connected peer is reached.
    span: the report of the span, None while no stages are loaded.
    """

    peer: PeerId
    incarnation: int
    run: RunIdentity
    state: str
    step_of_start: str
    resting: str
    link: str
    health: Health
    now_unix: float
    counters: Counters
    tokens_per_second: float = 0.0
    view: View = field(default_factory=View)
    paths: Mapping[PeerId, str] = field(default_factory=dict)
    traffic: Traffic = NO_TRAFFIC
    span: SpanReport | None = None
    clock_remark: str = ""

    @property
    def empty_stages(self) -> list[int]:
        """The stages that no peer serves."""
        return [stage for stage in range(self.run.stage_count) if not self.view.replicas(stage)]


def status_json(report: NodeReport) -> dict[str, Any]:
    """Returns what `swarm status --json` prints, and what a peer's GetStatus is answered with."""
    view, own, paths = report.view, progress_record(report), {**report.paths, report.peer: "self"}
    if own is not None:  # newer than what this peer has published
        view = merge(view, [own], report.now_unix, 0.0)
    return status(view, report.run, report.health, report.now_unix, paths, sample_counts(report))


def sample_counts(report: NodeReport) -> SamplesTold | None:
    """Returns the counts of samples at this peer's newest step of stage 0; None unless it is an origin on samples."""
    counted = report.counters.samples
    if counted is None or report.span is None or not report.span.is_origin:
        return None  # the counts from before a move to other stages are out of date
    return SamplesTold(
        peer_name(report.peer), counted.step, counted.epoch, counted.seen, counted.repeated, counted.missed
    )


def progress_record(report: NodeReport) -> Progress | None:
    """Returns this peer's progress record for the directory, not signed yet; None while no span is loaded."""
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
        waits_for=_printable(_by_stage(span.waits_for), MAX_TEXT_BYTES // 4),
        note=_printable("; ".join(notes_of(report)), MAX_TEXT_BYTES),
    )


def notes_of(report: NodeReport) -> list[str]:
    """Returns remarks on this daemon: what its owner has set, its clock, how far and why stages are behind their
    replicas, and what limits its gradients' format and its work. [] if there is nothing to remark.
    """
    notes = [report.resting] * bool(report.resting) + [f"link {report.link}"] * bool(report.link)
    notes += [report.clock_remark] * bool(report.clock_remark)
    span = report.span
    if span is None:
        return notes
    for stage, steps in span.behind.items():
        if steps >= MIN_BEHIND:
            notes.append(f"stage {stage} is {steps} steps behind its replicas: {span.waits_for.get(stage, '')}")
    if span.gradient_wire.is_limited:
        notes.append(f"gradients are sent as {span.gradient_wire.reason}")
    if span.shortage and span.busy_fraction < IDLE_BELOW:
        notes.append(f"its device works {span.busy_fraction:.0%} of the time: {span.shortage}")
    return notes


def _by_stage(texts: Mapping[int, str]) -> str:
    """Returns the texts of all stages as one text, with the stages' numbers if there are several."""
    if len(texts) == 1:
        return next(iter(texts.values()))
    return "; ".join(f"stage {stage}: {text}" for stage, text in texts.items() if text)


def _printable(text: str, most: int) -> str:
    """Returns at most `most` characters of the text, with "?" for whatever is not printable ASCII, for a record."""
    return re.sub("[^ -~]", "?", text)[:most]


def service_status(report: NodeReport, sentence: str) -> str:
    """Returns systemd's STATUS line: health, `sentence` (the watchdog's, about the work), steps, tokens per second."""
    held = report.span.span.stages if report.span else range(0)
    taken = {stage: step for stage, step in sorted(report.counters.steps.items()) if stage in held}
    steps = ", ".join(f"stage {stage} step {step}" for stage, step in taken.items())
    return f"{report.health.state}: {sentence}; {steps or 'no step yet'}; {report.tokens_per_second:.0f} tokens/s"


def report_json(report: NodeReport) -> dict[str, Any]:
    """Returns the answer to the control question "report": the counters, the daemon's state and its span's, if any.

    relays: the peers through which its own claim says that it is reached.
    """
    span = report.span
    own = {
        "peer": report.peer,
        "paused": bool(report.resting),
        "link": report.link or None,
        "state": report.state,
        "in_hand": span.in_hand if span is not None else 0,
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
        "waits_for": {str(stage): reason for stage, reason in span.waits_for.items()},
        "gradient_wire": span.gradient_wire.reason,
        "behind": {str(stage): steps for stage, steps in span.behind.items()},
        "notes": notes_of(report),
        "refused_nonfinite": sum(stage.refused_nonfinite for stage in span.stages),
        "busy_fraction": round(span.busy_fraction, 4),
        "tokens_per_second": round(report.tokens_per_second, 1),
        "loss": span.loss,
        "tuning": dict(span.metrics),
        "credit": span.credit,
    }


def add_traffic(former: Traffic, latter: Traffic) -> Traffic:
    """Returns the sums of the two, field by field."""
    return Traffic(*map(sum, zip(astuple(former), astuple(latter), strict=True)))


class WindowedRate:
    """Computes the rate per second of a growing total over the last RATE_WINDOW_S."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, int]] = deque()

    def update(self, now: float, total: int) -> float:
        """Records the total at `now`, in seconds, and returns the rate per second; 0 before the second call."""
        self._samples.append((now, total))
        while len(self._samples) > 2 and now - self._samples[0][0] > RATE_WINDOW_S:
            self._samples.popleft()
        began, earlier = self._samples[0]
        return (total - earlier) / (now - began) if now > began else 0.0
