"""Makes what `swarm status --json` prints from a view: the same for a daemon and for a client that asks one. Pure.

Fields may be added, never removed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median_low
from typing import Any

from agora_protocol.ids import PeerId, peer_name
from agora_protocol.manifest import Manifest
from agora_protocol.records import StageAccount

from agora.core.metrics import METRIC_NAMES
from agora.observe.events import DeviceUsed
from agora.swarm.health import DEGRADED, OK, Health
from agora.swarm.view import PeerView, View

SCHEMA = 1
SLOW_SHARE = 0.5  # a stage below this share of the others' usual rate is named in the run's health
MAX_TIMES_USUAL = 4.0  # a claim of tokens per second counts as at most this many times the median


@dataclass(frozen=True, slots=True)
class SampleReport:
    """How many training samples the swarm has trained on, as one origin (a peer that feeds data in) knows it.

    told_by: the origin's short name. step: of stage 0 when the origin knew this. epoch: the first that is not complete.
    seen: a sample counts once in each epoch. repeated: trained on again in the same epoch. missed: of epochs before the
    newest.
    """

    told_by: str
    step: int
    epoch: int
    seen: int
    repeated: int
    missed: int


@dataclass(frozen=True, slots=True)
class RunIdentity:
    """The facts about a run, from its manifest, that a status contains. objective: a key of METRIC_NAMES."""

    run_id: str
    name: str
    stage_count: int
    target_tokens: int
    objective: str = "lm"

    @classmethod
    def of(cls, manifest: Manifest) -> RunIdentity:
        return cls(
            manifest.run_id,
            manifest.name,
            manifest.stage_count,
            manifest.optimizer.target_tokens,
            manifest.objective.kind,
        )


def build_status(
    view: View,
    run: RunIdentity,
    health: Health,
    now_unix: float,
    paths: Mapping[PeerId, str] | None = None,
    samples: SampleReport | None = None,
    devices: Mapping[PeerId, DeviceUsed] | None = None,
) -> dict[str, Any]:
    """Returns the object that `swarm status --json` prints: the run, its health, an entry for each stage and each peer.

    | field | what it is |
    |---|---|
    | step | that of stage 0 |
    | tokens_per_second | that of the slowest stage; a peer's counts up to MAX_TIMES_USUAL times the peers' median |
    | loss, the metrics in tuning | means over the peers that report them, weighted by tokens per second |
    | loss_spread | the range of the losses that peers report, without the outermost quarter at each end |
    | tokens_counted, of a peer | tokens that went into a step, once for each of its stages, as it says itself |
    | bandwidth, of a peer | bytes per second, as it says itself |
    | health, of a stage | left out while the asked peer starts or is paused: then the run's is not that of the swarm |

    paths: by peer, how the asked peer reaches it: "direct", "punched", "relayed" or "self". samples: None in runs on
    text, and if the asked peer is no origin or has seen no step. devices: by peer, how its device is used; the asked
    peer knows that of itself alone, since records do not have it.
    """
    usual = _usual_rate(view)
    losses = [(peer.loss, _counted_rate(peer, usual)) for peer in view.peers.values() if peer.loss is not None]
    stages = [_stage_status(view, stage, run.target_tokens, usual) for stage in range(run.stage_count)]
    for row, judged in zip(stages, health.stages, strict=False):
        row["health"] = _health_status(judged)
    shown = _name_slowest(health, stages)
    known = sorted(view.peers.values(), key=lambda peer: (peer.span.first, peer.span.last, peer.peer))
    return {
        "schema": SCHEMA,
        "run_id": run.run_id,
        "name": run.name,
        "step": stages[0]["step"] if stages else 0,
        "loss": _mean(losses),
        "tokens_per_second": min((stage["tokens_per_second"] for stage in stages), default=0.0),
        "health": _health_status(shown),
        "stages": stages,
        "peers": [
            {
                **_peer_status(peer, (paths or {}).get(peer.peer) or _expected_path(peer), now_unix),
                "device": _device_status((devices or {}).get(peer.peer)),
            }
            for peer in known
        ],
        "objective": run.objective,
        "unix": round(now_unix, 3),
        "tuning": _mean_metrics(view, run.objective, usual),
        "samples": asdict(samples) if samples is not None else None,
        "loss_spread": [round(loss, 4) for loss in _spread([loss for loss, _ in losses])] if losses else None,
    }


def _name_slowest(health: Health, stages: Sequence[Mapping[str, Any]]) -> Health:
    # A run whose every stage steps may still be slow, and then by its slowest stage.
    if health.state not in (OK, DEGRADED) or len(stages) < 2 or not all(row["step"] for row in stages):
        return health
    slowest, *others = sorted(stages, key=lambda row: float(row["tokens_per_second"]))
    least, usual = slowest["tokens_per_second"], median_low(row["tokens_per_second"] for row in others)
    if least >= SLOW_SHARE * usual:
        return health
    stage = slowest["stage"]
    why = f"{health.why}; stage {stage} limits the run, with {least:,.0f} tokens/s to the others' {usual:,.0f}"
    advice = f"start another with `agora-node join RUN --stages {stage}`"
    return replace(health, why=why, advice=health.advice or advice)


def _health_status(health: Health) -> dict[str, Any]:
    return {"state": health.state, "why": health.why, "do": health.advice}


def _expected_path(peer: PeerView) -> str:
    # The path to a peer that is not connected. For "unreachable" it is "direct", too.
    return peer.reachability if peer.reachability in ("punched", "relayed") else "direct"


def _peer_status(peer: PeerView, path: str, now_unix: float) -> dict[str, Any]:
    return {
        "peer": peer.peer,
        "name": peer_name(peer.peer),
        "span": [peer.span.first, peer.span.last],
        "state": "training" if peer.state == "serving" else peer.state,
        "step": peer.step_of(peer.span.first),
        "tokens_per_second": round(peer.tokens_per_second, 1),
        "path": path,
        "seen_seconds": round(max(0.0, now_unix - peer.seen_unix), 1),
        "note": peer.note,
        "waits_for": peer.waits_for,
        "capacity": round(peer.capacity, 3),
        "bandwidth": round(peer.bandwidth),
        "tokens_counted": sum(account.counted for account in peer.accounts),
        "reachability": peer.reachability,
    }


def _device_status(used: DeviceUsed | None) -> dict[str, Any] | None:
    if used is None:
        return None
    shares = {"mfu": used.mfu, "idle_in_jobs": used.idle_in_jobs}
    rounded = {name: round(value, 4) if value is not None else None for name, value in shares.items()}
    memory = {"memory_used": used.memory_used, "memory_total": used.memory_total}
    return {"name": used.name, "precision": used.precision, **memory, **rounded}


def _stage_status(view: View, stage: int, target_tokens: int, usual: float) -> dict[str, Any]:
    replicas = view.replicas(stage)
    count = view.replica_count(stage)
    last = min((p for p in replicas if p.waits_for), key=lambda peer: peer.step_of(stage), default=None)
    waits_for = last.waits_for if last else "" if replicas else "a peer that serves it"
    return {
        "stage": stage,
        "replicas": count,
        "step": max((p.step_of(stage) for p in replicas), default=0),
        "tokens_per_second": round(sum(_counted_rate(p, usual) for p in replicas) * count / max(1, len(replicas)), 1),
        "replicas_known": len(replicas),
        "target_tokens": target_tokens,
        **asdict(sum_accounts([peer.account_of(stage) for peer in replicas])),
        "waits_for": f"{peer_name(last.peer)}: {waits_for}" if last and len(replicas) > 1 else waits_for,
    }


def _mean_metrics(view: View, objective: str, usual: float) -> dict[str, float]:
    found = {}
    for index, name in enumerate(METRIC_NAMES[objective]):
        reporting = [peer for peer in view.peers.values() if index < len(peer.metrics)]
        reported = [(peer.metrics[index], _counted_rate(peer, usual)) for peer in reporting]
        if (value := _mean(reported)) is not None:
            found[name] = value
    return found


def _usual_rate(view: View) -> float:
    rates = [peer.tokens_per_second for peer in view.peers.values() if peer.tokens_per_second > 0]
    return median_low(rates) if rates else 0.0


# Nobody measures what others claim, so a claim counts only near the median.
def _counted_rate(peer: PeerView, usual: float) -> float:
    return min(peer.tokens_per_second, MAX_TIMES_USUAL * usual)


# The outermost quarter of the values at each end counts as much as the nearest of the others.
def _mean(reported: Iterable[tuple[float, float]]) -> float | None:
    known = list(reported)
    if not known:
        return None
    low, high = _spread([value for value, _ in known])
    weights = [max(rate, 1e-3) for _, rate in known]  # not 0, so that a lone peer without any counts
    total = sum(min(max(value, low), high) * weight for (value, _), weight in zip(known, weights, strict=True))
    return round(total / sum(weights), 4)


def _spread(values: Sequence[float]) -> tuple[float, float]:
    ordered = sorted(values)
    outside = (len(ordered) + 1) // 4
    return ordered[outside], ordered[-1 - outside]


# --- tokens: peers may publish wrong numbers, therefore these sums are only shown to people


@dataclass(frozen=True, slots=True)
class StageTokens:
    """How many tokens the present replicas of one stage have computed, and how many went into optimizer steps.

    tokens_computed: by each replica since it loaded the stage. share_counted: of those that no longer wait for a step,
    the fraction that went into one; the rest is lost. staleness: the mean number of steps by which a token's
    weights were behind. The last three are None if not known yet.
    """

    tokens_computed: int
    tokens_counted: int
    share_counted: float | None
    tokens_per_step: float | None
    staleness: float | None


def sum_accounts(accounts: Sequence[StageAccount]) -> StageTokens:
    """Returns the token counts of one stage, from the accounts that its replicas publish.

    In a step with its own gradient a replica counts its own tokens: these are added up, and the steps are those of the
    replica with the most. In a step with the replicas' mean gradient each counts the tokens of all: only the replica
    with the most such steps is used.
    """
    counted = sum(account.counted for account in accounts)
    settled = sum(account.computed - account.waiting for account in accounts)
    of_means = max(accounts, key=lambda account: account.mean_steps, default=StageAccount())
    steps = of_means.mean_steps + max((account.own_steps for account in accounts), default=0)
    held = of_means.in_mean + sum(account.along_own for account in accounts)
    age = sum(account.counted * account.staleness for account in accounts)
    return StageTokens(
        tokens_computed=sum(account.computed for account in accounts),
        tokens_counted=counted,
        share_counted=round(counted / settled, 4) if settled else None,
        tokens_per_step=round(held / steps, 1) if steps else None,
        staleness=round(age / counted, 4) if counted else None,
    )
