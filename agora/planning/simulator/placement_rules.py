"""Decides which stages simulated machines hold, by the daemon's own placement and rebalancing."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

from agora_protocol.ids import Span

from agora.planning.simulator.scenario import SimulatedModel
from agora.planning.simulator.simulated_peer import Equipment, SimulatedPeer
from agora.swarm.placement import choose_placement
from agora.swarm.rebalancing import judge_interval_s, judge_move
from agora.swarm.stage_capacity import MachineCapacity, StageNeeds
from agora.swarm.view import View

VERDICT_TTL_S = 2.0  # simulated seconds for which a verdict is reused: whether machines of one span and kind may move


class _ZeroDraws(random.Random):
    """A random generator that draws 0 each time: with it, judge_move returns a move if any draw could lead to one."""

    def random(self) -> float:
        return 0.0


class DaemonPlacement:
    """The daemon's own placement and rebalancing for simulated machines: a fleet_simulation.PlacementRules.

    model: the stages' costs. rebalancing: whether machines that serve ever move. Remembers for VERDICT_TTL_S, by span
    and kind of machine, whether any random draw could lead to a move: an approximation, since machines' views differ in
    large runs.
    """

    def __init__(self, model: SimulatedModel, rebalancing: bool, rng: random.Random) -> None:
        self._mean_work = sum(model.work) / model.stages
        work = tuple(amount / self._mean_work for amount in model.work)
        self._needs = StageNeeds(work, max(model.boundary_bytes, model.gradient_bytes), model.state_bytes)
        self._rebalancing = rebalancing
        self._rng = rng
        self._may_move: dict[tuple[Span, str], tuple[float, bool]] = {}

    def choose(self, view: View, peer: SimulatedPeer) -> Span | None:
        """Returns the span that choose_placement gives a machine without one; None: the machine stands by."""
        return choose_placement(view, self._needs, self._machine_capacity(peer.equipment), self._rng).span

    def reconsider(self, now: float, peer: SimulatedPeer, view: Callable[[], View]) -> Span | None:
        """Returns the span to which a serving peer should move; None: it stays, or it holds no span.

        If in the last VERDICT_TTL_S no draw could have moved a machine of this span and kind, returns None without
        calling `view`. view: computes what the peer knows. now: simulated seconds.
        """
        if not self._rebalancing or peer.span is None:
            return None
        span_and_kind = (peer.span, peer.equipment.kind)
        judged_at, may_move = self._may_move.get(span_and_kind, (-math.inf, False))
        if now - judged_at > VERDICT_TTL_S:
            may_move = self._move_target(view(), peer, _ZeroDraws(), math.inf) is not None
            self._may_move[span_and_kind] = now, may_move
        return self._move_target(view(), peer, self._rng, now - peer.serving_since) if may_move else None

    def judge_interval_s(self) -> float | None:
        """Returns the seconds until a peer judges its span again, drawn at random by rebalancing.judge_interval_s."""
        return judge_interval_s(self._rng)

    def _move_target(self, view: View, peer: SimulatedPeer, rng: random.Random, served_s: float) -> Span | None:
        placement = judge_move(view, peer.id, self._needs, self._machine_capacity(peer.equipment), rng, served_s)
        return None if placement is None else placement.span

    def _machine_capacity(self, equipment: Equipment) -> MachineCapacity:
        return MachineCapacity(equipment.speed / self._mean_work, equipment.link.spec.rate, equipment.max_span_lengths)
