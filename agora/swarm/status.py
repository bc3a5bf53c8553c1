"""Makes what `swarm status --json` prints from a view: the same for a daemon and for a client that asks one. Pure.

Knows: the JSON that the command promises. Must not know: how it travels. Fields may be added, never removed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from agora_protocol.ids import PeerId, peer_name
from agora_protocol.manifest import Manifest

from agora.metrics import METRIC_NAMES
from agora.swarm.health import Health
from agora.swarm.stage_tokens import sum_accounts
from agora.swarm.view import PeerView, View

SCHEMA = 1


@dataclass(frozen=True, slots=True)
class SamplesTold:
    """Which samples the swarm has trained on, as far as the origin `told_by` knew at `step` of stage 0. Immutable.

    epoch: the first one that is not complete. seen: samples trained on; a sample counts once in each epoch. repeated:
    times that a sample was trained on again in the same epoch. missed: samples not done yet, of epochs before the
    newest. told_by: the origin's short name.
    """

    told_by: str
    step: int
    epoch: int
    seen: int
    repeated: int
    missed: int


@dataclass(frozen=True, slots=True)
class RunIdentity:
    """Identifies the run that a status describes. Immutable. target_tokens: of an optimizer step."""

    run_id: str
    name: str
    stage_count: int
    target_tokens: int
    objective: str = "lm"

    @classmethod
    def of(cls, manifest: Manifest) -> RunIdentity:
        """Returns the identity of the manifest's run."""
        target, objective = manifest.optimizer.target_tokens, manifest.objective.kind
        return cls(manifest.run_id, manifest.name, manifest.stage_count, target, objective)


def status(
    view: View,
    run: RunIdentity,
    health: Health,
    now_unix: float,
    paths: Mapping[PeerId, str] | None = None,
    samples: SamplesTold | None = None,
) -> dict[str, Any]:
    """Returns what `swarm status --json` prints; `step` is stage 0's, `tokens_per_second` the slowest stage's.

    paths: how the asked peer reaches others: "direct", "punched", "relayed" or "self"; a peer that is not among them is
    shown with the path that its claim suggests. The state "serving" is shown as "training". samples: what the asked
    peer knows of them; None in runs on text, and if it is not an origin or has seen no step yet.
    """
    stages = [_stage_status(view, stage, run.target_tokens) for stage in range(run.stage_count)]
    known = sorted(view.peers.values(), key=lambda seen: (seen.span.first, seen.span.last, seen.peer))
    return {
        "schema": SCHEMA,
        "run_id": run.run_id,
        "name": run.name,
        "step": stages[0]["step"] if stages else 0,
        "loss": _mean_over_peers((seen, seen.loss) for seen in known),
        "tokens_per_second": min((stage["tokens_per_second"] for stage in stages), default=0.0),
        "health": {"state": health.state, "why": health.why, "do": health.do},
        "stages": stages,
        "peers": [_peer_status(seen, (paths or {}).get(seen.peer) or _expected_path(seen), now_unix) for seen in known],
        "objective": run.objective,
        "unix": round(now_unix, 3),
        "tuning": _mean_metrics(view, run.objective),
        "samples": asdict(samples) if samples is not None else None,
    }


def _expected_path(seen: PeerView) -> str:
    """Returns the path by which a peer that is not connected would probably be reached, judged by its claim."""
    return seen.reachability if seen.reachability in ("punched", "relayed") else "direct"


def _peer_status(seen: PeerView, path: str, now_unix: float) -> dict[str, Any]:
    """Returns a peer's entry in the status's "peers". path: how the asked peer reaches it."""
    return {
        "peer": seen.peer,
        "name": peer_name(seen.peer),
        "span": [seen.span.first, seen.span.last],
        "state": "training" if seen.state == "serving" else seen.state,
        "step": seen.step_of(seen.span.first),
        "tokens_per_second": round(seen.tokens_per_second, 1),
        "path": path,
        "seen_seconds": round(max(0.0, now_unix - seen.seen_unix), 1),
        "note": seen.note,
        "waits_for": seen.waits_for,
        "capacity": round(seen.capacity, 3),
        "reachability": seen.reachability,
    }


def _stage_status(view: View, stage: int, target_tokens: int) -> dict[str, Any]:
    """Returns a stage's entry in the status's "stages": replicas, highest step, sum of tokens per second and more.

    In a run that is too large to be read whole, replicas and tokens per second are estimates, from `replicas_known`
    replicas. "waits_for" is that of the replica with the fewest steps, among those that publish one. The counts of
    StageTokens are part of the entry.
    """
    replicas, count = view.replicas(stage), view.replica_count(stage)
    last = min((p for p in replicas if p.waits_for), key=lambda seen: seen.step_of(stage), default=None)
    waits_for = last.waits_for if last else "" if replicas else "a peer that serves it"
    return {
        "stage": stage,
        "replicas": count,
        "step": max((p.step_of(stage) for p in replicas), default=0),
        "tokens_per_second": round(sum(p.tokens_per_second for p in replicas) * count / max(1, len(replicas)), 1),
        "replicas_known": len(replicas),
        "target_tokens": target_tokens,
        **asdict(sum_accounts([seen.account_of(stage) for seen in replicas])),
        "waits_for": f"{peer_name(last.peer)}: {waits_for}" if last and len(replicas) > 1 else waits_for,
    }


def _mean_metrics(view: View, objective: str) -> dict[str, float]:
    """Returns the mean of each metric of the objective over the peers that report it, by name; others are left out."""
    means = {}
    for index, name in enumerate(METRIC_NAMES[objective]):
        reported = [(seen, seen.metrics[index]) for seen in view.peers.values() if index < len(seen.metrics)]
        if (mean := _mean_over_peers(reported)) is not None:
            means[name] = mean
    return means


def _mean_over_peers(reported: Iterable[tuple[PeerView, float | None]]) -> float | None:
    """Returns the mean of what peers report, weighted by their tokens per second; None if no peer reports a number."""
    known = [(value, max(seen.tokens_per_second, 1e-3)) for seen, value in reported if value is not None]
    weights = sum(weight for _, weight in known)
    return round(sum(value * weight for value, weight in known) / weights, 4) if known else None
