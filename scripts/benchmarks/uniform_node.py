"""`agora-node`, but it shares microbatches out evenly among the peers of a stage, however fast they are.

    python -m benchmarks.uniform_node join ...

What routing by measured speeds is compared with.
"""

from __future__ import annotations

from collections import Counter, defaultdict

from agora_protocol.ids import MicrobatchId, PeerId

from agora.cli import main_node
from agora.pipeline import router
from agora.pipeline.load_balancer import Attempt, Choice, LoadBalancer, RouteHint, list_candidates


class EvenBalancer(LoadBalancer):
    """Chooses the peer that was asked least often; waits for that peer while it is busy."""

    def __init__(self, me: PeerId, stage_count: int) -> None:
        super().__init__(me, stage_count)
        self._asked: defaultdict[int, Counter[PeerId]] = defaultdict(Counter)

    def choose(self, now: float, microbatch: MicrobatchId, stage: int, payload_bytes: int, hint: RouteHint) -> Choice:
        candidates = list_candidates(now, self.callees(stage), payload_bytes)
        if not candidates:
            return super().choose(now, microbatch, stage, payload_bytes, hint)
        turn = min(candidates, key=lambda candidate: (self._asked[stage][candidate.peer], candidate.peer))
        if turn.ready_at > now:
            return Choice(None, f"the peer whose turn it is is {turn.obstacle}", turn.ready_at)
        return Choice(turn.peer, "its turn")

    def record_sent(self, now: float, stage: int, peer: PeerId, payload_bytes: int, deadline: float) -> Attempt:
        self._asked[stage][peer] += 1
        return super().record_sent(now, stage, peer, payload_bytes, deadline)

    def record_abandoned(self, attempt: Attempt) -> None:
        self._asked[attempt.stage][attempt.peer] -= 1
        super().record_abandoned(attempt)


if __name__ == "__main__":
    vars(router)["LoadBalancer"] = EvenBalancer
    main_node.main()
