"""Members of rounds on the network in memory."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from agora_protocol.errors import AgoraError, PeerFailed, ProtocolError
from agora_protocol.identity import Identity
from agora_protocol.ids import PeerId, RunId
from agora_protocol.messages import Contribute, Recall
from torch import Tensor

from agora.core.calls import Reply
from agora.observe.events import Event
from agora.replica.all_reduce import AllReduce, Round
from agora.replica.rounds import RoundContext, RoundResult
from agora.replica.shard_codec import RoundConfig, RoundKind, Shard, ShardCodec, ShardMean, cut_into_shards
from agora.swarm.peer_score import Violation
from tests.memory_network import MemoryCall, MemoryNetwork, NetworkFaults

RUN = RunId("ab" * 32)


IDENTITIES = {identity.peer: identity for identity in (Identity(bytes([n + 1]) * 32) for n in range(64))}


def identities(count: int) -> list[PeerId]:
    return list(IDENTITIES)[:count]


def signed_by(peer: PeerId, codec: ShardCodec, shard: Shard, mean: ShardMean) -> ShardMean:
    """The mean as if this peer, which may lie, had reduced the shard."""
    named = replace(mean, message=replace(mean.message, reducer=peer, signature=b""))
    signature = IDENTITIES[peer].sign(codec.signed_bytes(shard, named))
    return replace(named, message=replace(named.message, signature=signature))


@dataclass
class World:
    """Members of one run and their network; `strikes` are the protocol errors raised.

    size: elements of a round. gradient_wire, fragment_wire: how members send; slices: how many a stage has.
    """

    size: int
    fragment_wire: str = "float32"
    rule: str = "mean"
    round_s: float = 20.0
    exact: bool = False
    gradient_wire: str = "float32"
    slices: int = 1
    members: dict[PeerId, Member] = field(default_factory=dict)
    network: MemoryNetwork = field(default_factory=lambda: MemoryNetwork(NetworkFaults(latency_s=(0.01, 0.01))))
    strikes: list[tuple[PeerId, ProtocolError]] = field(default_factory=list)

    def add(self, *peers: PeerId, **wires: str) -> list[Member]:
        """wires: formats in which these members send, where they are other than the world's."""
        made = [Member(self, peer, wires) for peer in peers]
        self.members |= {member.peer: member for member in made}
        return made

    def fragments_in(self, kind: RoundKind) -> int:
        """How many slices a stage has in rounds of this kind."""
        return self.slices if kind == "fragment" else 0

    async def close(self) -> None:
        for member in self.members.values():
            await member.all_reduce.close()


class Member:
    """One peer; `sees` is its view of the replicas, `suspects` those that it could not reach lately."""

    def __init__(self, world: World, peer: PeerId, wires: dict[str, str]) -> None:
        self.world, self.peer = world, peer
        self.events: list[Event] = []
        self.violations: list[tuple[PeerId, Violation]] = []
        self.token_bounds: dict[PeerId, float] = {}
        self.may_sign_mean = True
        self.sees: dict[PeerId, float] | None = None
        self.suspects: set[PeerId] = set()
        self.at: dict[str, int] = {}
        self.dies_at: tuple[str, int] | None = None
        settings: dict[str, Any] = {
            "aggregation": world.rule,
            "round_s": world.round_s,
            "synchronous": world.exact,
            "fragment_wire": world.fragment_wire,
            "gradient_wire": world.gradient_wire,
        }
        config = RoundConfig(peer, RUN, max_weight=1e9, **(settings | wires))
        self.port = world.network.join(peer, self._answer)
        self.all_reduce = AllReduce(
            ShardCodec(config),
            self.port,
            self.context_of,
            lambda fragments: fragments,
            IDENTITIES[peer].sign,
            self.events.append,
            lambda peer, violation, text, dedup_key="": self.violations.append((peer, violation)),
            self._fault,
        )

    async def take_part(
        self,
        stage: int,
        kind: RoundKind,
        number: int,
        values: Tensor,
        weight: float,
        members: dict[PeerId, float],
        deadline: float,
    ) -> RoundResult:
        slices = self.world.fragments_in(kind)
        round_ = Round(self.all_reduce, stage, kind, number, weight, members, deadline, slices)
        return await round_.run(values)

    @property
    def view(self) -> dict[PeerId, float]:
        return self.sees if self.sees is not None else dict.fromkeys(self.world.members, 0.0)

    def context_of(self, shard: Shard) -> RoundContext:
        suspects = frozenset(self.suspects & {*self.view})
        live = frozenset({*self.view} - {self.peer})
        view = RoundContext(self.view, live, suspects, self.world.round_s, self.token_bounds, self.may_sign_mean)
        cuts = cut_into_shards(self.world.size)
        if shard.position >= len(cuts):
            return replace(view, refusal=ProtocolError("bad-message", "no such part"))
        return replace(view, numel=len(range(self.world.size)[cuts[shard.position]]))

    async def _fault(self, point: str) -> None:
        self.at[point] = self.at.get(point, 0) + 1
        if self.dies_at is not None and self.dies_at[0] == point and self.at[point] >= self.dies_at[1]:
            self.world.network.dead.add(self.peer)
        if self.peer in self.world.network.dead:
            raise PeerFailed("dead")

    async def _answer(self, call: MemoryCall) -> Reply:
        try:
            if isinstance(call.message, Recall):
                return self.all_reduce.kept_means.answer_recall(call.message)
            assert isinstance(call.message, Contribute)
            return await self.all_reduce.answer_contribution(call.peer, call.message, call.tensors, call.deadline)
        except ProtocolError as error:
            self.world.strikes.append((call.peer, error))
            raise


__all__ = ["RUN", "AgoraError", "Member", "Reply", "World", "identities"]
