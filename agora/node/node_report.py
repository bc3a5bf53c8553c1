"""The report of one daemon about itself, and everything that is shown of it: one typed snapshot, several projections.

Knows: names, types, the JSON of the commands' contract. Must not know: where a number comes from, torch, who asks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from agora_protocol.ids import PeerId, Span
from agora_protocol.records import Progress

from agora.observe.events import Traffic
from agora.observe.reporter import Counters
from agora.swarm.health import Health
from agora.swarm.status import RunIdentity, status
from agora.swarm.view import View

if TYPE_CHECKING:
    from agora.train.trained_stage import StageProgress

RATE_WINDOW_S = 15.0
NO_TRAFFIC = Traffic(0, 0, 0)


@dataclass(frozen=True, slots=True)
class SpanReport:
    """A snapshot of the span held here. waits_for: what each stage waits for, in words.

    busy_fraction: the part of its time that the device thread spends on jobs. queue: microbatches at the device.
    path_s: seconds from here to the last stage and back, None until measured. loss, credit: the origin's loss, and in
    words how many microbatches it may have in flight.
    """

    span: Span
    stages: Sequence[StageProgress]
    waits_for: Mapping[int, str]
    busy_fraction: float
    in_hand: int
    queue: int
    path_s: float | None
    is_origin: bool
    loss: float | None
    credit: str


@dataclass(frozen=True, slots=True)
class NodeReport:
    """A snapshot of one daemon.

    state: the state of its claim (joining, serving, leaving). step_of_start: the step of its start that runs, or "".
    tokens_per_second: the rate of tokens counted here over the last 15 s. paths: how each connected peer is reached.
    span: the report of the span, None while no stages are loaded.
    """

    peer: PeerId
    incarnation: int
    run: RunIdentity
    state: str
    step_of_start: str
    is_paused: bool
    link: str
    health: Health
    now_unix: float
    counters: Counters
    tokens_per_second: float = 0.0
    view: View = field(default_factory=View)
    paths: Mapping[PeerId, str] = field(default_factory=dict)
    traffic: Traffic = NO_TRAFFIC
    span: SpanReport | None = None

    @property
    def empty_stages(self) -> list[int]:
        """The stages that no peer serves."""
        return [stage for stage in range(self.run.stage_count) if not self.view.replicas(stage)]


def status_json(report: NodeReport) -> dict[str, Any]:
    """Returns what `swarm status --json` prints, also as the answer to a peer's GetStatus."""
    note = "; ".join(["paused by its owner"] * report.is_paused + [f"link {report.link}"] * bool(report.link))
    paths = {**report.paths, report.peer: "self"}
    return status(report.view, report.run, report.health, report.now_unix, paths, {report.peer: note})


def progress_record(report: NodeReport) -> Progress | None:
    """Returns this peer's progress record for the directory, not signed yet; None while no span is loaded."""
    span, counters = report.span, report.counters
    if span is None:
        return None
    holds_last = span.span.last == report.run.stage_count - 1  # a loss that was reported before a move is of no use
    return Progress(
        report.peer,
        span.span,
        report.incarnation,
        steps=tuple(stage.step for stage in span.stages),
        tokens_per_second=report.tokens_per_second,
        loss=span.loss if span.is_origin else counters.stage_loss if holds_last else None,
        queue=span.queue,
        completed=max(counters.counted.values(), default=0),
    )


def service_status(report: NodeReport, sentence: str) -> str:
    """Returns systemd's STATUS line: health, `sentence` (the watchdog's, about the work), steps, tokens per second."""
    held = report.span.span.stages if report.span else range(0)
    taken = {stage: step for stage, step in sorted(report.counters.steps.items()) if stage in held}
    steps = ", ".join(f"stage {stage} step {step}" for stage, step in taken.items())
    return f"{report.health.state}: {sentence}; {steps or 'no step yet'}; {report.tokens_per_second:.0f} tokens/s"


def report_json(report: NodeReport) -> dict[str, Any]:
    """Returns the answer to the control question "report": the counters, the daemon's state and its span's."""
    own = {"peer": report.peer, "paused": report.is_paused, "link": report.link or None, "state": report.state}
    answer, span = report.counters.summary() | own, report.span
    if span is None:
        return answer
    return answer | {
        "span": [span.span.first, span.span.last],
        "steps": {str(stage.stage): stage.step for stage in span.stages},
        "staleness": {str(stage.stage): list(stage.staleness) for stage in span.stages},
        "waits_for": {str(stage): reason for stage, reason in span.waits_for.items()},
        "refused_nonfinite": sum(stage.refused_nonfinite for stage in span.stages),
        "busy_fraction": round(span.busy_fraction, 4),
        "tokens_per_second": round(report.tokens_per_second, 1),
        "in_hand": span.in_hand,
        "loss": span.loss,
        "credit": span.credit,
        "bytes": {name.removesuffix("_bytes"): count for name, count in asdict(report.traffic).items()},
    }


class WindowedRate:
    """The rate per second of a growing total over the last 15 s."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, int]] = deque()

    def update(self, now: float, total: int) -> float:
        """Takes a sample of the total at `now`, in seconds, and returns the rate; 0 before the second sample."""
        self._samples.append((now, total))
        while len(self._samples) > 2 and now - self._samples[0][0] > RATE_WINDOW_S:
            self._samples.popleft()
        began, earlier = self._samples[0]
        return (total - earlier) / (now - began) if now > began else 0.0
